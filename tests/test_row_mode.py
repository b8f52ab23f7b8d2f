"""`mode="row"`: each sample on its own, and what is dropped is not computed."""

import types
import warnings

import numpy as np
import pytest
import tensorflow as tf

from helpers import (
    KERAS_3,
    assert_same_outputs,
    data,
    functions_of,
    nodes_of,
    operations_in,
    trainable_variables,
)
from tfa_stochastic_depth import (
    StochasticDepth,
    constant,
    existing,
    get_survival_probs,
    set_survival_probs,
    wrap_residuals,
)
from tfa_stochastic_depth.rows import count_rows, draw_rows

keras = tf.keras
L = keras.layers

HOW = {
    "eager": lambda f: f,
    "graph": lambda f: tf.function(f),
    "any batch": lambda f: tf.function(f, input_signature=[tf.TensorSpec((None, 2))]),
    "jit": lambda f: tf.function(f, jit_compile=True),
    "jit, any batch": lambda f: tf.function(
        f, jit_compile=True, input_signature=[tf.TensorSpec((None, 2))]
    ),
}


@pytest.fixture(params=["eager", "any batch", "jit, any batch"])
def how(request):
    return HOW[request.param]


@pytest.fixture(params=HOW)
def any_how(request):
    return HOW[request.param]


def kept_rows(seed, step, p, size):
    """Which rows a layer with this seed keeps in a step, as a bool array."""
    kept = np.zeros(size, bool)
    count = count_rows(p, size)
    if count:
        kept[draw_rows(tf.constant([seed, step], tf.int64), count, size).numpy()] = True
    return kept


class Counter(L.Layer):
    """10 x. Counts the rows that it is run on, and how often it is run, whoever runs it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        # Nothing that Keras knows of, or it would be set back with the state of the layer.
        self._hidden = types.SimpleNamespace(
            ran=tf.Variable(0.0, trainable=False), rows=tf.Variable(0, trainable=False)
        )

    @property
    def ran(self):
        return self._hidden.ran

    @property
    def rows(self):
        return self._hidden.rows

    def call(self, x):
        self.ran.assign_add(1.0)
        self.rows.assign_add(tf.shape(x)[0])
        return 10.0 * x


# ------------------------------------------------------------------ the formula

SKIPS = {
    "zeros": lambda: None,
    "shortcut": lambda: None,
    "identity": lambda: "identity",
    "layer": lambda: L.Rescaling(-3.0),
}


@pytest.mark.parametrize("p", [0.0, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("rescale", ["inference", "training"])
@pytest.mark.parametrize("skip", SKIPS)
def test_formula(skip, rescale, p, how):
    """Each row is b ? f : s, or s + (b B / k) (f - s), with exactly k rows kept."""
    layer = StochasticDepth(
        L.Rescaling(10.0), p, mode="row", rescale=rescale, skip=SKIPS[skip](), seed=4
    )
    x = data(10, 2)
    run = how(
        lambda x: layer(x, training=True, **({"shortcut": 5.0 * x} if skip == "shortcut" else {}))
    )
    s, f = {"zeros": 0.0, "shortcut": 0.0, "identity": 1.0, "layer": -3.0}[skip], 10.0
    for step in range(3):
        b = kept_rows(4, step, p, 10).astype(float)[:, np.newaxis]
        assert b.sum() == round(10 * p)
        if rescale == "training" and p:
            b *= 10 / b.sum()
        y = x * (s + b * (f - s) + (5.0 if skip == "shortcut" else 0.0))
        np.testing.assert_allclose(run(tf.constant(x)), y, rtol=1e-5)


@pytest.mark.parametrize("rescale", ["inference", "training"])
def test_inference_is_that_of_batch_mode_and_gathers_nothing(rescale):
    x = tf.constant(data(4, 2))
    outputs = []
    for mode in ("row", "batch"):
        layer = StochasticDepth(L.Rescaling(10.0), 0.3, mode=mode, rescale=rescale)
        outputs.append(layer(x, shortcut=x, training=False))
        function = tf.function(lambda x, f=layer: f(x, shortcut=x, training=False))
        operations = operations_in(function.get_concrete_function(x))
        assert not {op for op in operations if "Gather" in op or "Scatter" in op or "If" in op}
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("mode", ["eager", "jit", "jit, any batch"])
def test_survival_prob_1_gathers_nothing(mode):
    layer = StochasticDepth(L.Rescaling(10.0), 1.0, mode="row")
    run = HOW[mode](lambda x: layer(x, shortcut=x, training=True))
    x = tf.constant(data(4, 2))
    np.testing.assert_array_equal(run(x), x + 10.0 * x)
    if mode != "eager":
        operations = operations_in(run.get_concrete_function(x))
        assert not {op for op in operations if "Gather" in op or "Scatter" in op or "If" in op}


def test_in_a_graph_rows_are_gathered_in_a_conditional_only():
    """Where the probability may change, a run at 1 goes around it."""
    layer = StochasticDepth(L.Rescaling(10.0), 1.0, mode="row")
    run = tf.function(lambda x: layer(x, shortcut=x, training=True))
    function = run.get_concrete_function(tf.TensorSpec((None, 2)))
    graph = function.graph.as_graph_def()
    functions = {name: inner.node_def for name, inner in functions_of(graph).items()}
    functions["whole"] = graph.node
    sides = {
        node.attr[side].func.name
        for nodes in functions.values()
        for node in nodes
        if node.op in ("If", "StatelessIf")
        for side in ("then_branch", "else_branch")
    }
    gathering = {
        name
        for name, nodes in functions.items()
        if any("Gather" in node.op or "Scatter" in node.op for node in nodes)
    }
    assert gathering and gathering <= sides


# ------------------------------------------------------------------ what is computed


@pytest.mark.parametrize(("p", "rows"), [(0.0, 0), (0.01, 1), (0.2, 2), (0.7, 7), (1.0, 10)])
def test_only_kept_rows_are_computed(p, rows, any_how):
    counter = Counter()
    layer = StochasticDepth(counter, p, mode="row")
    run = any_how(lambda x: layer(x, shortcut=x, training=True))
    for step in (1, 2):
        run(tf.ones((10, 2)))
        if p or any_how not in (HOW["graph"], HOW["any batch"]):
            assert int(counter.rows) == step * rows
            assert float(counter.ran) == step * bool(rows)
        else:  # one, whose result is thrown away
            assert (int(counter.rows), float(counter.ran)) == (step, step)


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_batches_of_any_size_in_fit(mode):
    """4 + 4 + 3 samples: of each batch round(0.6 B), and of a batch of one, one."""
    counter = Counter()
    x = keras.Input((2,))
    model = keras.Model(x, StochasticDepth(counter, 0.6, mode="row")(x, shortcut=x))
    model.compile(
        "sgd", "mse", run_eagerly=mode == "eager", **({"jit_compile": False} if KERAS_3 else {})
    )
    for samples, batch_size, rows in [(11, 4, 2 + 2 + 2), (3, 1, 3)]:
        before = int(counter.rows)
        model.fit(data(samples, 2), data(samples, 2), batch_size=batch_size, verbose=0)
        assert int(counter.rows) - before == rows


def test_assigning_survival_prob_acts_in_a_compiled_model_without_a_new_trace():
    counter, traces = Counter(), []
    x = keras.Input((2,))
    y = L.Lambda(lambda x: traces.append(1) or x, output_shape=(2,))(x)
    model = keras.Model(x, StochasticDepth(counter, 0.5, mode="row")(y, shortcut=y))
    model.compile("sgd", "mse", **({"jit_compile": False} if KERAS_3 else {}))
    batch = data(10, 2), data(10, 2)
    model.train_on_batch(*batch)
    traced = len(traces)
    for p, rows in [(0.0, 1), (0.7, 7), (1.0, 10), (0.2, 2)]:
        before = int(counter.rows)
        set_survival_probs(model, [p])
        model.train_on_batch(*batch)
        assert int(counter.rows) - before == rows
    assert len(traces) == traced


def test_under_xla_the_number_of_rows_is_fixed_and_a_change_is_told():
    layer = StochasticDepth(L.Rescaling(10.0), 0.5, mode="row")
    run = tf.function(lambda x: layer(x, training=True), jit_compile=True)
    layer.survival_prob = 0.3  # before it is traced
    assert np.count_nonzero(run(tf.ones((10, 1)))) == 3
    with pytest.warns(
        UserWarning, match="compiled by XLA with the survival probability 0.3, which"
    ):
        layer.survival_prob = 0.7
    again = tf.function(lambda x: layer(x, training=True), jit_compile=True)
    assert np.count_nonzero(again(tf.ones((10, 1)))) == 7
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        layer.survival_prob = 0.7


def test_rows_of_layers_are_independent():
    """Of 2 x 400 draws of 3 of 10 rows: the number of rows that both keep, within 5 deviations."""
    layers = [StochasticDepth(L.Rescaling(10.0), 0.3, mode="row", seed=s) for s in (1, 2)]
    run = tf.function(lambda x: tf.stack([f(x, training=True)[:, 0] for f in layers]))
    kept = np.stack([run(tf.ones((10, 1))) for _ in range(400)]) > 0
    common = kept.all(1).sum(1)  # hypergeometric: mean 0.9, variance 0.49
    assert abs(common.mean() - 0.9) < 5 * np.sqrt(0.49 / 400)


# ------------------------------------------------------------------ gradients and state


@pytest.mark.parametrize("rescale", ["inference", "training"])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_gradients(p, rescale, how):
    """Of the sum of squares of x + w x in kept rows, and of x in the others."""
    dense = L.Dense(2, use_bias=False)
    layer = StochasticDepth(dense, p, mode="row", rescale=rescale, seed=4)
    x = data(10, 2)
    layer(tf.constant(x))
    (kernel,) = dense.trainable_weights
    variable = kernel.value if KERAS_3 else kernel

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.square(layer(x, shortcut=x, training=True)))
        return tape.gradient(loss, [x, variable])

    dx, dw = how(step)(tf.constant(x))
    b = kept_rows(4, 0, p, 10).astype(float)[:, np.newaxis]
    if rescale == "training" and p:
        b *= 10 / b.sum()
    w = dense.get_weights()[0]
    dy = 2 * (x + b * (x @ w))
    np.testing.assert_allclose(dx, dy + (b * dy) @ w.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dw, x.T @ (b * dy), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shortcut", ["the input", "another tensor"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_the_gradient_of_a_gradient(p, shortcut, how):
    dense = L.Dense(2, activation="tanh")
    layer = StochasticDepth(dense, p, mode="row", seed=4)
    x = tf.constant(data(10, 2))
    layer(x)
    b = tf.constant(kept_rows(4, 0, p, 10)[:, np.newaxis], tf.float32)

    def penalty(x, f):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                s = x if shortcut == "the input" else tf.sin(x)
                loss = tf.reduce_sum(tf.square(f(x, s)))
            result = tf.reduce_sum(tf.square(inner.gradient(loss, x)))
        return result, outer.gradient(result, x)

    ours = how(lambda x: penalty(x, lambda x, s: layer(x, shortcut=s, training=True)))(x)
    plain = penalty(x, lambda x, s: s + b * dense(x))
    for a, b in zip(ours, plain):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("skip", ["identity", "another tensor"])
@pytest.mark.parametrize("batch_size", [6, None])
def test_a_persistent_tape(skip, batch_size):
    """TensorFlow takes gradients for it by other ways, also those of conditionals."""
    inputs = keras.Input((8,), batch_size=batch_size)
    x, shortcut = L.Dense(8)(inputs), L.Dense(8)(inputs)
    dense = L.Dense(8, activation="relu")
    skips = skip == "identity"
    layer = StochasticDepth(dense, 0.5, mode="row", seed=4, skip=skip if skips else None)
    model = keras.Model(inputs, layer(x, **({} if skips else {"shortcut": shortcut})))

    def step(x, persistent):
        with tf.GradientTape(persistent=persistent) as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True)))
        return tape.gradient(loss, trainable_variables(model))

    found = []
    for persistent in (False, True):
        layer._seed_state.assign([4, 0])
        run = tf.function(lambda x, persistent=persistent: step(x, persistent))
        found.append(run(tf.constant(data(6, 8))))
    for ours, other in zip(*found):
        np.testing.assert_allclose(ours, other, rtol=1e-5, atol=1e-6)
        assert np.any(ours)


@pytest.mark.parametrize("jit", [False, True])
def test_the_gradient_of_rows_is_added_to_that_of_the_shortcut_in_place(jit):
    """And not put into a tensor of zeros, which is added."""
    layer = StochasticDepth(L.Dense(2), 0.3, mode="row")
    x = tf.constant(data(10, 2))
    layer(x)

    def operations(shortcut):
        @tf.function(jit_compile=jit)
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, shortcut=shortcut(x), training=True)
            return tape.gradient(y, x)

        return {n.op for n in nodes_of(step.get_concrete_function(x).graph.as_graph_def())}

    assert "ScatterNd" not in operations(lambda x: x)
    assert "ScatterNd" in operations(tf.sin)


def test_batch_normalization_sees_the_kept_rows(how):
    norm = L.BatchNormalization(momentum=0.0)
    layer = StochasticDepth(norm, 0.3, mode="row", seed=4)
    x = data(10, 2)
    how(lambda x: layer(x, training=True))(tf.constant(x))
    rows = x[kept_rows(4, 0, 0.3, 10)]
    np.testing.assert_allclose(norm.moving_mean, rows.mean(0), atol=1e-6)


def test_nothing_moves_without_a_row(any_how):
    """Statistics, the state of random numbers, losses and weights, and no NaN comes of it."""
    norm = L.BatchNormalization(momentum=0.0, activity_regularizer="l2")
    branch = keras.Sequential([norm, L.Dropout(0.5, seed=1), L.Dense(2)])
    layer = StochasticDepth(branch, 0.0, mode="row")
    layer(tf.ones((1, 2)))
    before = branch.get_weights()
    state = [np.array(v) for v in branch.variables]

    def step(x):
        with tf.GradientTape() as tape:
            y = layer(x, shortcut=x, training=True)
            loss = tf.reduce_sum(y) + sum(layer.losses, 0.0)
        sources = trainable_variables(branch)
        return y, loss, tape.gradient(loss, sources)

    x = tf.ones((10, 2))
    y, loss, gradients = any_how(step)(x)
    np.testing.assert_array_equal(y, x)
    assert float(loss) == 20.0
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, np.zeros(gradient.shape))
    for a, b in zip(before, branch.get_weights()):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(state, branch.variables):
        np.testing.assert_array_equal(a, np.array(b))


def test_state_is_set_back_in_full_precision():
    """Where a policy casts weights when they are read, the value that is written back is whole."""

    class Holds(L.Layer):
        def build(self, shape):
            self.state = self.add_weight(
                name="state",
                shape=(),
                initializer=keras.initializers.Constant(1.001),
                trainable=False,
            )

        def call(self, x):
            return x * tf.cast(tf.convert_to_tensor(self.state), x.dtype)

    inner = Holds(dtype="mixed_bfloat16")
    layer = StochasticDepth(inner, 0.0, mode="row")
    run = tf.function(lambda x: layer(x, training=True))
    for p in (0.0, 0.5):
        layer.survival_prob = p
        run(tf.ones((4, 2), "bfloat16"))
        assert float(np.array(inner.state)) == np.float32(1.001)


@pytest.mark.parametrize("jit", [False, True])
def test_survival_prob_1_trains_as_the_plain_model_does(jit):
    x = keras.Input((2,))
    y = L.Dense(8, activation="relu")(x)
    if KERAS_3 or not jit:  # the random numbers of Keras 2 are not repeatable under XLA
        y = L.Dropout(0.5, seed=3)(y)
    y = L.Dense(2)(y)
    plain = keras.Model(x, L.Dense(1)(L.Add()([x, y])))
    wrapped = wrap_residuals(plain, constant(1.0), mode="row")
    for model in (plain, wrapped):
        keras.utils.set_random_seed(0)
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=jit)
        model.fit(data(24, 2), data(24, 1), batch_size=5, epochs=2, shuffle=False, verbose=0)
    assert_same_outputs(plain, wrapped, data(4, 2))


def test_losses_of_kept_rows_count(how):
    dense = L.Dense(2, activity_regularizer=keras.regularizers.L2(1.0), kernel_initializer="ones")
    layer = StochasticDepth(dense, 0.3, mode="row", seed=4)
    layer(tf.ones((1, 2)))

    def run(x):
        layer(x, training=True)
        return layer.losses[-1]

    # Keras divides by the number of rows that the layer sees: 3 rows of twice 2 squared.
    assert float(how(run)(tf.ones((10, 2)))) == pytest.approx(8.0)


# ------------------------------------------------------------------ masks and side inputs


class Check(L.Layer):
    """Adds a side input of its own rows, and one without rows."""

    def call(self, x, side=None, whole=None, flags=None):
        assert flags == "text"
        return x + side + whole


def test_side_inputs_are_gathered_where_they_have_the_batch_axis(how):
    layer = StochasticDepth(Check(), 0.3, mode="row", seed=4)
    x, whole = data(10, 2), tf.constant(data(2))
    run = how(lambda x: layer(x, side=10.0 * x, whole=whole, flags="text", training=True))
    b = kept_rows(4, 0, 0.3, 10)[:, np.newaxis]
    np.testing.assert_allclose(run(tf.constant(x)), b * (11.0 * x + whole), rtol=1e-5)


@pytest.mark.parametrize("jit", [False, True])
def test_structures(jit):
    class Swap(L.Layer):
        def call(self, x):
            return {"a": x["b"][0], "b": [x["a"]]}

    x = {"a": tf.constant(data(10, 2)), "b": [tf.constant(data(10, 2, seed=1))]}
    for skip in (None, "identity"):
        layer = StochasticDepth(Swap(), 0.3, mode="row", skip=skip, seed=4)
        y = tf.function(lambda x, f=layer: f(x, training=True), jit_compile=jit)(x)
        b = kept_rows(4, 0, 0.3, 10)[:, np.newaxis]
        other = 0.0 if skip is None else 1.0
        np.testing.assert_array_equal(y["a"], np.where(b, x["b"][0], other * x["a"]))
        np.testing.assert_array_equal(y["b"][0], np.where(b, x["a"], other * x["b"][0]))


def attention_model(batched_mask):
    x = keras.Input((4, 6))
    mask = keras.Input((4, 4), dtype="bool")
    where = mask if batched_mask else tf.constant(np.tril(np.ones((1, 4, 4), bool)))
    y = L.MultiHeadAttention(2, 3)(x, x, attention_mask=where)
    return keras.Model([x, mask], L.Add()([x, y]))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("batched_mask", [True, False])
def test_attention_masks(batched_mask, jit):
    """Of 4 samples of 4 steps, so that sizes alone do not tell the axes apart."""
    plain = attention_model(batched_mask)
    wrapped = wrap_residuals(plain, constant(0.5), mode="row", seed=1)
    inputs = [data(4, 4, 6), np.random.default_rng(0).random((4, 4, 4)) < 0.7]
    full = plain(inputs).numpy()
    y = tf.function(lambda x: wrapped(x, training=True), jit_compile=jit)(inputs).numpy()
    kept = [not np.array_equal(a, b) for a, b in zip(y, inputs[0])]
    assert sum(kept) == 2
    np.testing.assert_allclose(y[kept], full[kept], atol=1e-5)


@pytest.mark.parametrize("jit", [False, True])
def test_masks_go_in_and_come_out(jit):
    """A mask of the inputs reaches the layer row by row, and the sum has the mask of all rows."""

    class Ones(L.Layer):
        """1 where the mask it is given is true, which it hands on."""

        def __init__(self):
            super().__init__()
            self.supports_masking = True

        def call(self, x, mask=None):
            return tf.cast(mask, x.dtype)[:, :, tf.newaxis] * tf.ones_like(x)

    ids = np.random.default_rng(0).integers(0, 2, (10, 3))
    embedded = L.Embedding(2, 2, mask_zero=True, embeddings_initializer="zeros")
    layer = StochasticDepth(Ones(), 0.3, mode="row", seed=4)

    def run(ids):
        x = embedded(ids)
        y = layer(x, shortcut=x, training=True)
        return y, y._keras_mask

    embedded(ids)
    y, mask = tf.function(run, jit_compile=jit)(tf.constant(ids))
    np.testing.assert_array_equal(mask, ids > 0)
    kept = kept_rows(4, 0, 0.3, 10)[:, np.newaxis]
    np.testing.assert_array_equal(y[:, :, 0], kept * (ids > 0))


# ------------------------------------------------------------------ models


def small_model(batch_size=None):
    x = keras.Input((8, 8, 3), batch_size=batch_size)
    y = h = L.Conv2D(4, 3, padding="same")(x)
    for _ in range(2):
        z = L.Conv2D(4, 3, padding="same", use_bias=False)(y)
        y = L.Add()([y, L.BatchNormalization()(z)])
    return keras.Model(x, L.Dense(1)(L.GlobalAveragePooling2D()(L.Add()([y, h]))))


@pytest.mark.parametrize("batch_size", [None, 8])
@pytest.mark.parametrize("jit", [False, True])
def test_a_model_trains_saves_and_loads(batch_size, jit, tmp_path):
    wrapped = wrap_residuals(small_model(batch_size), 0.5, mode="row", rescale="training", seed=1)
    wrapped.compile("adam", "mse", jit_compile=jit)
    x, y = data(8, 8, 8, 3), data(8, 1)
    losses = [wrapped.train_on_batch(x, y) for _ in range(8)]
    assert losses[-1] < losses[0]
    wrapped.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert [f.mode for f in again.layers if isinstance(f, StochasticDepth)] == ["row"] * 2
    assert_same_outputs(wrapped, again, x)
    assert again.train_on_batch(x, y) == pytest.approx(wrapped.train_on_batch(x, y), rel=1e-4)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float16", "float64"])
@pytest.mark.parametrize("jit", [False, True])
def test_dtypes(policy, jit):
    dense = L.Dense(2, dtype=policy)
    layer = StochasticDepth(dense, 0.3, mode="row", rescale="training", seed=4)
    x = tf.cast(data(10, 2), layer.compute_dtype)
    full = layer(x)
    y = tf.function(lambda x: layer(x, training=True), jit_compile=jit)(x)
    assert y.dtype == layer.compute_dtype
    b = kept_rows(4, 0, 0.3, 10)[:, np.newaxis] * (10 / 3)
    tolerance = 1e-2 if "16" in policy else 1e-6
    np.testing.assert_allclose(
        tf.cast(y, "float64"), b * tf.cast(full, "float64"), rtol=tolerance, atol=tolerance
    )


def test_the_rates_that_a_model_had():
    """EfficientNet's own drop is per sample and divides in training: rows and "training"."""
    x = keras.Input((2,))
    y = L.Dropout(0.25, noise_shape=(None, 1))(L.Dense(2)(x))
    plain = keras.Model(x, L.Add()([y, x]))
    wrapped = wrap_residuals(plain, existing(), mode="row", rescale="training")
    assert get_survival_probs(wrapped) == [0.75]
    x = data(8, 2)
    y, full = wrapped(x, training=True).numpy(), plain(x).numpy()
    kept = np.abs(y - x).sum(1) > 0
    assert kept.sum() == 6
    np.testing.assert_allclose(y[kept], (x + (full - x) * 8 / 6)[kept], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(y[~kept], x[~kept])


# ------------------------------------------------------------------ what cannot be


class Pairs(L.Layer):
    """Puts two rows into one: a reshape across the batch."""

    def call(self, x):
        return tf.reshape(x, (-1, 4))


@pytest.mark.parametrize("batch", [4, None])
def test_a_reshape_across_the_batch_is_refused(batch):
    layer = StochasticDepth(Pairs(), 0.5, mode="row")
    run = tf.function(lambda x: layer(x, training=True))
    with pytest.raises(
        ValueError, match="must give one row for each row.*Received: the shape .*Use"
    ):
        run.get_concrete_function(tf.TensorSpec((batch, 2)))


def test_a_reshape_that_only_a_run_shows():
    class Some(L.Layer):
        def call(self, x):
            return x[: tf.cast(tf.reduce_max(x), tf.int32)]

    layer = StochasticDepth(Some(), 0.5, mode="row")
    run = tf.function(lambda x: layer(x, shortcut=x, training=True))
    assert run(6.0 * tf.ones((10, 2))).shape == (10, 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="gives must have one row for each"):
        run(3.0 * tf.ones((10, 2)))


def test_ragged_tensors_are_refused():
    layer = StochasticDepth(L.Lambda(lambda x, side: x), 0.5, mode="row")
    ragged = tf.ragged.constant([[1.0], [1.0, 2.0]])

    class Takes(L.Layer):
        def call(self, x, side=None):
            return x

    layer = StochasticDepth(Takes(), 0.5, mode="row")
    with pytest.raises(ValueError, match='takes rows of ordinary tensors. Use mode="batch"'):
        tf.function(lambda x: layer(x, side=ragged, training=True))(tf.ones((2, 1)))


def test_training_must_be_known_under_xla():
    layer = StochasticDepth(L.Rescaling(10.0), 0.5, mode="row")
    run = tf.function(lambda x, training: layer(x, training=training), jit_compile=True)
    with pytest.raises(
        ValueError, match="`training` must be a Python bool.*mode=.row. and compiled"
    ):
        run(tf.ones((4, 1)), tf.constant(True))


# ------------------------------------------------------------------ sizes that agree by chance


@pytest.mark.parametrize("p", [0.2, 0.4])
def test_an_attention_mask_for_all_samples_of_the_size_of_the_batch(p, any_how):
    """(steps, steps) with as many samples as steps: it is not the samples' own."""
    attention = L.MultiHeadAttention(2, 3)
    layer = StochasticDepth(attention, p, mode="row", seed=1)
    x, mask = tf.constant(data(5, 5, 2)), tf.constant(np.tril(np.ones((5, 5), bool)))
    full = x + attention(x, x, attention_mask=mask)
    run = lambda x: layer(x, x, attention_mask=mask, shortcut=x, training=True)  # noqa: E731
    if any_how in (HOW["any batch"], HOW["jit, any batch"]):
        run = tf.function(run, input_signature=[tf.TensorSpec((None, 5, 2))])
    else:
        run = any_how(run)
    kept = kept_rows(1, 0, p, 5)
    y = run(x).numpy()
    np.testing.assert_allclose(y[kept], full.numpy()[kept], atol=1e-5)
    np.testing.assert_array_equal(y[~kept], x.numpy()[~kept])


@pytest.mark.parametrize("mode", ["eager", "graph", "jit"])
def test_positions_and_samples_of_one_size(mode):
    class Add(L.Layer):
        def call(self, x, positions, samples):
            return x + positions + samples[:, tf.newaxis]

    layer = StochasticDepth(Add(), 0.25, mode="row", seed=4)
    x, positions, samples = data(4, 4, 4), data(4, 4, seed=1), data(4, 4, seed=2)
    run = HOW[mode](lambda *args: layer(*args, training=True))
    y = run(*map(tf.constant, (x, positions, samples)))
    kept = kept_rows(4, 0, 0.25, 4)[:, np.newaxis, np.newaxis]
    np.testing.assert_allclose(y, kept * (x + positions + samples[:, np.newaxis]), atol=1e-6)


@pytest.mark.parametrize("outer", ["batch", "row"])
@pytest.mark.parametrize("mode", ["graph", "any batch", "jit", "jit, any batch"])
def test_rows_inside_a_block(outer, mode):
    inner = StochasticDepth(L.Dense(2), 0.3, mode="row", seed=1)
    layer = StochasticDepth(keras.Sequential([inner, L.Dense(2)]), 1.0, mode=outer, seed=2)
    x = tf.constant(data(10, 2))
    layer(x)
    first, second = inner.layer, layer.layer.layers[-1]
    sources = trainable_variables(layer)

    def step(x):
        with tf.GradientTape() as tape:
            y = layer(x, training=True)
        return y, tape.gradient(y, sources)

    if not KERAS_3 and (outer, mode) == ("batch", "jit, any batch"):
        # The gradient of a conditional, in which XLA does not see what sizes are.
        with pytest.raises(tf.errors.InvalidArgumentError, match="compile-time constant"):
            HOW[mode](step)(x)
        return
    y, gradients = HOW[mode](step)(x)
    kept = kept_rows(1, 0, 0.3, 10).astype("float32")[:, np.newaxis]
    expected = second(kept * first(x))
    np.testing.assert_allclose(y, expected, atol=1e-5)
    w = second.get_weights()[0]
    np.testing.assert_allclose(gradients[0], x.numpy().T @ (kept * w.sum(1)), atol=1e-4)


@pytest.mark.parametrize("mode", ["eager", "graph", "jit"])
def test_weights_of_a_skip_layer_that_no_row_needs_get_zeros(mode):
    layer = StochasticDepth(L.Dense(2), 1.0, mode="row", skip=L.Dense(2))
    x = tf.ones((4, 2))

    def step(x):
        with tf.GradientTape() as tape:
            y = layer(x, training=True)
        return tape.gradient(y, trainable_variables(layer.skip))

    layer(x, training=True)
    for gradient in HOW[mode](step)(x):
        np.testing.assert_array_equal(gradient, np.zeros(gradient.shape))


def test_a_scalar_has_no_rows():
    layer = StochasticDepth(L.Rescaling(2.0), 0.5, mode="row")
    with pytest.raises(
        ValueError, match="needs inputs with a batch axis, .batch, ....*Received: the"
    ):
        layer(tf.constant(1.0), training=True)
