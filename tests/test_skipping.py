"""A dropped layer is not computed, forward or backward, and a kept one is the plain layer."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

from helpers import Counter, functions_of
from tfa_stochastic_depth import StochasticDepth

keras = tf.keras

HOW = {
    "eager": lambda function: function,
    "graph": tf.function,
    "jit": lambda function: tf.function(function, jit_compile=True),
}
COMPILE = {
    "eager": {"run_eagerly": True},
    "graph": {"jit_compile": False},
    "jit": {"jit_compile": True},
}


@pytest.fixture(params=HOW)
def mode(request):
    """How TensorFlow runs a function and Keras a model: a key of `HOW` and `COMPILE`."""
    return request.param


@pytest.fixture
def how(mode):
    return HOW[mode]


def points(rows=4, columns=3):
    return np.random.default_rng(0).normal(size=(rows, columns)).astype("float32")


def arrays(variables):
    return [v.numpy().copy() for v in variables]


def assert_all_equal(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        np.testing.assert_array_equal(a, b)


def assert_all_close(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ side effects


@pytest.mark.parametrize(
    ("skip", "shortcut"), [(None, None), (None, 5.0), ("identity", None), ("layer", None)]
)
def test_a_counter_in_the_layer_moves_exactly_in_the_kept_steps(skip, shortcut, how):
    counter, skip = Counter(), keras.layers.Activation("linear") if skip == "layer" else skip
    layer = StochasticDepth(counter, 0.7, skip=skip, seed=1)
    x = tf.ones((1, 1))
    kwargs = {} if shortcut is None else {"shortcut": shortcut * x}
    run = how(lambda x: layer(x, training=True, **kwargs))
    dropped = 1.0 if skip else shortcut or 0.0
    ran, kept = 0, []
    for _ in range(12):
        kept.append(float(run(x)[0, 0]) != dropped)
        ran += kept[-1]
        assert float(counter.ran) == ran
    assert kept == [False, False, True, True, True, True, True, False, False, True, True, False]


def test_a_skip_layer_runs_exactly_in_the_dropped_steps(how):
    """With rescale="inference" a kept step needs the layer only."""
    layer = StochasticDepth(Counter(), 0.7, skip=Counter(), seed=1)
    run = how(lambda x: layer(x, training=True))
    for _ in range(12):
        run(tf.ones((1, 1)))
    assert (float(layer.layer.ran), float(layer.skip.ran)) == (7.0, 5.0)


@pytest.mark.parametrize("mode", ["eager", "graph"], indirect=True)
def test_python_in_the_layer_runs_exactly_in_the_kept_steps(how):
    ran = []

    def spy(x):
        return tf.ensure_shape(tf.py_function(lambda y: ran.append(1) or y, [x], x.dtype), x.shape)

    layer = StochasticDepth(keras.layers.Lambda(spy), 0.7, seed=1)
    run = how(lambda x: layer(x, training=True))
    kept = sum(int(run(tf.ones((1, 1)))[0, 0]) for _ in range(12))
    assert len(ran) == kept == 7


def test_a_counter_in_a_compiled_model_moves_only_when_kept(mode):
    counter = Counter()
    layer = StochasticDepth(counter, 0.0)
    x = keras.Input((1,))
    model = keras.Model(x, layer(x, shortcut=x))
    model.compile("sgd", "mse", **COMPILE[mode])
    data = np.ones((6, 1), "float32")
    for p, expected in [(0.0, 0.0), (1.0, 3.0), (0.0, 3.0)]:
        layer.survival_prob = p
        model.fit(data, data, batch_size=2, verbose=0)
        assert float(counter.ran) == expected


# ------------------------------------------------------------------ the graph


def by_branch(graph_def):
    """The operation types outside all Ifs, in their kept branches and in their dropped branches."""
    functions = functions_of(graph_def)
    found = {"outside": [], "kept": [], "dropped": []}

    def visit(nodes, place):
        for node in nodes:
            found[place].append(node.op)
            for name, attribute in node.attr.items():
                if attribute.func.name not in functions:
                    continue
                if node.op in ("If", "StatelessIf") and place == "outside":
                    inner = {"then_branch": "kept", "else_branch": "dropped"}[name]
                else:
                    inner = place
                visit(functions[attribute.func.name].node_def, inner)

    visit(graph_def.node, "outside")
    return found


@pytest.mark.parametrize("shortcut", [True, False])
def test_the_operations_of_the_layer_are_only_in_the_kept_branch(shortcut):
    """Forward and backward, in a whole training step."""
    conv = keras.layers.Conv2D(3, 3, padding="same", activation="tanh")
    layer = StochasticDepth(conv, 0.7)
    layer.build((None, 8, 8, 3))
    optimizer = keras.optimizers.SGD()
    optimizer.build(layer.trainable_weights)

    @tf.function(input_signature=[tf.TensorSpec((None, 8, 8, 3))])
    def step(x):
        with tf.GradientTape() as tape:
            y = layer(x, training=True, **({"shortcut": x} if shortcut else {}))
            loss = tf.reduce_mean(y**2)
        grads = tape.gradient(loss, layer.trainable_weights)
        optimizer.apply_gradients(zip(grads, layer.trainable_weights))
        return loss

    found = by_branch(step.get_concrete_function().graph.as_graph_def())
    work = {"Conv2D", "Conv2DBackpropFilter", "Tanh", "TanhGrad", "BiasAdd", "BiasAddGrad"}
    assert work <= set(found["kept"])
    assert found["kept"].count("Conv2D") == 1
    for place in ("outside", "dropped"):
        assert not [op for op in found[place] if "Conv" in op or op in work]
    # And the draw is outside, where all replicas see it.
    assert [op for op in found["outside"] if "StatelessRandom" in op]
    assert not [op for op in found["kept"] + found["dropped"] if "Random" in op]


# ------------------------------------------------------------------ gradients


def two_dense():
    return keras.Sequential([keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)])


CASES = {
    "shortcut": {"shortcut": True},
    "zeros": {},
    "identity": {"skip": "identity"},
    "layer": {"skip": lambda: keras.layers.Dense(3)},
}


@pytest.fixture(params=CASES)
def case(request):
    """A layer, whether it is called with a shortcut, the plain layer and the plain stand-in."""
    options = dict(CASES[request.param])
    shortcut = options.pop("shortcut", False)
    if callable(options.get("skip")):
        options["skip"] = options["skip"]()
    layer = StochasticDepth(two_dense(), 0.7, **options)
    layer(tf.ones((1, 3)))
    f = layer.layer
    s = {None: tf.zeros_like, "identity": tf.identity}.get(options.get("skip"), layer.skip)
    if shortcut:
        return layer, True, lambda x, a: a + f(x), lambda x, a: a
    return layer, False, lambda x, a: f(x), lambda x, a: s(x)


UPSTREAM = np.random.default_rng(1).normal(size=(4, 3)).astype("float32")


def value_and_gradients(function, weights, x, a):
    """y = function(x, a), and what `UPSTREAM` becomes on its way back to x, a and the weights."""
    with tf.GradientTape() as tape:
        tape.watch([x, a])
        y = function(x, a)
    return y, tape.gradient(y, [x, a, *weights], output_gradients=tf.constant(UPSTREAM))


def or_zeros(gradients, sources):
    return [np.zeros(s.shape) if g is None else g for g, s in zip(gradients, sources)]


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_gradients_are_those_of_the_plain_model(case, p, how):
    """Kept, of the plain layer; dropped, of what stands in for it, and zero for its weights."""
    layer, shortcut, kept, dropped = case
    layer.survival_prob = p
    weights, x = list(layer.trainable_weights), tf.constant(points())
    a = tf.constant(points()[::-1].copy())

    def wrapped(x, a):
        return layer(x, training=True, **({"shortcut": a} if shortcut else {}))

    run = how(lambda x, a: value_and_gradients(wrapped, weights, x, a))
    y, gradients = run(x, a)
    plain_y, plain = value_and_gradients(kept if p else dropped, weights, x, a)
    sources = [x, a, *weights]
    assert_all_close([y, *or_zeros(gradients, sources)], [plain_y, *or_zeros(plain, sources)])
    for gradient, weight in zip(gradients[2:6], layer.layer.trainable_weights):
        assert gradient is not None
        assert (np.abs(gradient).max() > 0) == (p == 1.0), weight.name
    if shortcut and not p:
        np.testing.assert_array_equal(gradients[1], UPSTREAM)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_gradients_of_rescale_training(p, how):
    """Kept, f is divided by p; at p = 0 the division by it is never made."""
    layer = StochasticDepth(two_dense(), 0.7, rescale="training", seed=5)
    layer(tf.ones((1, 3)))
    x, weights = tf.constant(points()), layer.trainable_weights
    if not p:
        layer.survival_prob = p

    def wrapped(x, a):
        return layer(x, training=True)

    y, gradients = how(lambda x: value_and_gradients(wrapped, weights, x, x))(x)
    expected_y, expected = value_and_gradients(
        lambda x, a: layer.layer(x) / 0.7 if p else 0.0 * layer.layer(x), weights, x, x
    )
    assert_all_close([y, *gradients[2:]], [expected_y, *expected[2:]])


def test_nothing_of_a_dropped_layer_comes_through_not_even_nan(how):
    layer = StochasticDepth(two_dense(), 0.0)
    layer(tf.ones((1, 3)))
    layer.layer.set_weights([np.full_like(w, np.nan) for w in layer.layer.get_weights()])
    x, weights = tf.constant(points()), layer.trainable_weights

    def wrapped(x, a):
        return layer(x, shortcut=a, training=True)

    y, gradients = how(lambda x, a: value_and_gradients(wrapped, weights, x, a))(x, 2 * x)
    np.testing.assert_array_equal(y, 2 * x)
    assert not np.any(or_zeros(gradients[:1], [x])[0])
    np.testing.assert_array_equal(gradients[1], UPSTREAM)
    assert_all_equal(gradients[2:], [np.zeros(w.shape) for w in weights])


def test_a_tensor_from_outside_the_function_may_be_input_and_shortcut(how):
    layer, x = StochasticDepth(two_dense(), 1.0), tf.constant(points())
    layer(x)

    def run():
        with tf.GradientTape() as tape:
            y = layer(x, shortcut=x, training=True)
        return tape.gradient(y, layer.trainable_weights)

    with tf.GradientTape() as tape:
        y = layer.layer(x)
    assert_all_close(how(run)(), tape.gradient(y, layer.trainable_weights))


def test_a_frozen_layer_hands_gradients_on(how):
    layer = StochasticDepth(two_dense(), 1.0, trainable=False)
    x = tf.constant(points())
    layer(x)
    run = how(lambda x: value_and_gradients(lambda x, a: layer(x, training=True), [], x, x))
    _, expected = value_and_gradients(lambda x, a: layer.layer(x), [], x, x)
    np.testing.assert_allclose(run(x)[1][0], expected[0], atol=1e-5)
    layer.survival_prob = 0.0
    gradient = run(x)[1][0]
    assert gradient is None or not np.any(gradient)


# ------------------------------------------------------------------ Keras's warning


class Unused(keras.layers.Layer):
    """A layer with a weight that its output does not depend on."""

    def build(self, input_shape):
        self.used = self.add_weight(name="used", shape=())
        self.unused = self.add_weight(name="unused", shape=())

    def call(self, x):
        return x * self.used


def complaints(layer, caplog, mode):
    """What Keras warns of (Keras 2 by its logger) in a training step of a model of this layer."""
    x = keras.Input((3,))
    model = keras.Model(x, layer(x))
    model.compile("sgd", "mse", **COMPILE[mode])
    caplog.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.train_on_batch(points(), points())
    texts = [str(w.message) for w in caught] + [record.getMessage() for record in caplog.records]
    return [text for text in texts if "Gradients do not exist" in text]


def test_keras_does_not_warn_of_missing_gradients_in_a_dropped_step(caplog, mode):
    assert complaints(Unused(), caplog, mode)  # it would be seen
    assert not complaints(StochasticDepth(two_dense(), 0.0), caplog, mode)
    assert not complaints(StochasticDepth(two_dense(), 1.0), caplog, mode)


# ------------------------------------------------------------------ state in the layer


def normalized():
    return keras.layers.BatchNormalization(momentum=0.5)


def test_moving_statistics_move_when_kept_and_rest_when_dropped(how):
    layer, plain = StochasticDepth(normalized(), 0.0), normalized()
    x = tf.constant(points())
    layer(x, training=False)
    plain(x, training=True)
    run = how(lambda x: layer(x, shortcut=x, training=True))
    first = arrays(layer.layer.non_trainable_variables)
    assert_all_equal(first, [np.zeros(3), np.ones(3)])
    run(x)
    assert_all_equal(arrays(layer.layer.non_trainable_variables), first)
    layer.survival_prob = 1.0
    run(x)
    moved = arrays(layer.layer.non_trainable_variables)
    assert_all_close(moved, arrays(plain.non_trainable_variables))
    assert np.abs(moved[0]).min() > 0
    layer.survival_prob = 0.0
    run(x)
    assert_all_equal(arrays(layer.layer.non_trainable_variables), moved)


def test_moving_statistics_in_a_compiled_model(mode):
    x = keras.Input((3,))
    layer = StochasticDepth(normalized(), 0.0)
    model = keras.Model(x, layer(x, shortcut=x))
    model.compile("sgd", "mse", **COMPILE[mode])
    model.train_on_batch(points(), points())
    assert_all_equal(arrays(layer.layer.non_trainable_variables), [np.zeros(3), np.ones(3)])
    layer.survival_prob = 1.0
    model.train_on_batch(points(), points())
    expected = [points().mean(axis=0) / 2, (1 + points().var(axis=0)) / 2]
    assert_all_close(arrays(layer.layer.non_trainable_variables), expected)


def test_dropout_in_the_layer_draws_anew_in_each_kept_step(how):
    layer = StochasticDepth(keras.layers.Dropout(0.4), 1.0)
    run = how(lambda x: layer(x, training=True))
    x = tf.ones((2, 50))
    got = [run(x).numpy() for _ in range(3)]
    for y in got:
        np.testing.assert_allclose(np.unique(y), [0.0, 1 / 0.6], rtol=1e-6)
    assert np.any(got[0] != got[1]) and np.any(got[1] != got[2])


def test_no_variable_of_the_layer_moves_in_a_dropped_step(how):
    """Seeds of dropouts and statistics, of layers that are themselves in a model."""
    inner = keras.Sequential([keras.layers.Dropout(0.4), normalized(), Counter()])
    layer = StochasticDepth(inner, 0.0)
    x = tf.constant(points())
    layer(x, training=False)
    before = arrays(inner.variables)
    run = how(lambda x: layer(x, training=True))
    for _ in range(3):
        run(x)
    assert_all_equal(arrays(inner.variables), before)
    layer.survival_prob = 1.0
    run(x)
    assert any(np.any(a != b) for a, b in zip(arrays(inner.variables), before))


# ------------------------------------------------------------------ losses


class AddsLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.3 * tf.reduce_mean(x**2))
        return x


WEIGHT_DECAY = 0.1


def lossy(kind):
    """A branch (batch, 3) -> (batch, 3) that adds losses of this kind."""
    dense = keras.layers.Dense(
        3,
        kernel_regularizer=keras.regularizers.L2(WEIGHT_DECAY) if "weights" in kind else None,
        activity_regularizer=keras.regularizers.L1(0.2) if "activity" in kind else None,
    )
    return keras.Sequential([dense, *([AddsLoss()] if "add_loss" in kind else [])])


LOSSES = ["weights", "activity", "add_loss", "weights, activity, add_loss"]
losses = pytest.mark.parametrize("kind", LOSSES)


def plain_and_wrapped(kind, **kwargs):
    """Models x -> x + branch(x), with the same weights, and the StochasticDepth of the second."""
    x = keras.Input((3,))
    branch, twin = lossy(kind), lossy(kind)
    plain = keras.Model(x, keras.layers.Add()([x, branch(x)]))
    y = keras.Input((3,))
    layer = StochasticDepth(twin, **kwargs)
    wrapped = keras.Model(y, layer(y, shortcut=y))
    twin.set_weights(branch.get_weights())
    return plain, wrapped, layer


def targets():
    return 0.5 * points()[::-1].copy()


def dropped_loss(layer, kind):
    decay = WEIGHT_DECAY * np.sum(layer.layer.get_weights()[0] ** 2) if "weights" in kind else 0.0
    return np.mean((points() - targets()) ** 2) + decay


def epoch_losses(model, epochs=1):
    data = np.tile(points(), (3, 1)), np.tile(targets(), (3, 1))
    return model.fit(*data, batch_size=4, epochs=epochs, shuffle=False, verbose=0).history["loss"]


@losses
def test_the_loss_of_a_compiled_model(kind, mode):
    """Kept, the plain model's; dropped, without the activity's part; the same step after step."""
    plain, wrapped, layer = plain_and_wrapped(kind, survival_prob=1.0)
    for model in (plain, wrapped):
        model.compile(keras.optimizers.SGD(0.0), "mse", **COMPILE[mode])
    expected = epoch_losses(plain)[0]
    assert epoch_losses(wrapped, 3) == pytest.approx([expected] * 3, rel=1e-5)
    layer.survival_prob = 0.0
    less = dropped_loss(layer, kind)
    assert epoch_losses(wrapped, 3) == pytest.approx([less] * 3, rel=1e-5)
    assert abs(expected - less) > 1e-3
    layer.survival_prob = 1.0
    assert epoch_losses(wrapped) == pytest.approx([expected], rel=1e-5)


def test_weights_after_training_on_such_losses_are_the_plain_models(mode):
    plain, wrapped, layer = plain_and_wrapped(LOSSES[-1], survival_prob=1.0)
    for model in (plain, wrapped):
        model.compile(keras.optimizers.SGD(0.1), "mse", **COMPILE[mode])
        epoch_losses(model, 2)
    assert_all_close(layer.layer.get_weights(), plain.get_weights())


@losses
def test_losses_and_their_gradients_in_a_step_of_ones_own(kind, how):
    plain, wrapped, layer = plain_and_wrapped(kind, survival_prob=1.0)
    data = tf.constant(points()), tf.constant(targets())

    def step(model):
        def run(x, target):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - target) ** 2)
                loss += tf.add_n([tf.cast(part, tf.float32) for part in model.losses] or [0.0])
            return loss, tape.gradient(loss, model.trainable_weights)

        return run

    expected, expected_gradients = step(plain)(*data)
    run = how(step(wrapped))
    for p in (1.0, 0.0, 0.0, 1.0):
        layer.survival_prob = p
        loss, gradients = run(*data)
        if p:
            assert float(loss) == pytest.approx(float(expected), rel=1e-5)
            assert_all_close(gradients, expected_gradients)
        else:
            assert float(loss) == pytest.approx(dropped_loss(layer, kind), rel=1e-5)
            decay = 2 * WEIGHT_DECAY * layer.layer.get_weights()[0] if "weights" in kind else 0.0
            assert_all_close(gradients, [decay + np.zeros((3, 3)), np.zeros(3)])


def test_losses_of_a_layer_called_twice_are_all_counted(how):
    layer, plain = StochasticDepth(lossy("add_loss"), 1.0), lossy("add_loss")
    x = tf.constant(points())
    layer(x)
    plain(x)
    plain.set_weights(layer.layer.get_weights())

    class Twice(keras.Model):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def call(self, x, training=None):
            return self.inner(self.inner(x, training=training), training=training)

    totals = []
    for model in (Twice(plain), Twice(layer)):
        model(x)

        def run(x):
            model(x, training=True)  # noqa: B023
            return tf.add_n(model.losses)  # noqa: B023

        totals.append(float(how(run)(x)))
    assert totals[1] == pytest.approx(totals[0], rel=1e-5)


def test_losses_do_not_pile_up_in_eager_mode():
    layer = StochasticDepth(lossy(LOSSES[-1]), 1.0)
    x = tf.constant(points())
    for p, count in [(1.0, 3), (1.0, 3), (0.0, 1), (0.0, 1), (1.0, 3)]:
        layer.survival_prob = p
        layer(x, training=True)
        assert len(layer.losses) == count
    layer(x, training=False)
    assert len(layer.losses) == 3


def test_evaluation_has_the_losses_of_the_plain_model(mode):
    """With rescale="training" inference is the plain model's in all."""
    plain, wrapped, _ = plain_and_wrapped(LOSSES[-1], survival_prob=0.3, rescale="training")
    for model in (plain, wrapped):
        model.compile(keras.optimizers.SGD(0.0), "mse", **COMPILE[mode])
    got = [model.evaluate(points(), targets(), verbose=0) for model in (plain, wrapped, wrapped)]
    assert got[1:] == pytest.approx([got[0]] * 2, rel=1e-5)
    epoch_losses(wrapped)
    assert wrapped.evaluate(points(), targets(), verbose=0) == pytest.approx(got[0], rel=1e-5)
