"""Batch mode under XLA: the gradient computes the chosen side again, and changes nothing again."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

from helpers import KERAS_3, Counter, data, nodes_of, randomize, trainable_variables
from tfa_stochastic_depth import StochasticDepth, _keras, constant, wrap_residuals
from tfa_stochastic_depth import layer as layer_module

keras = tf.keras
L = keras.layers


class Noise(L.Layer):
    """Draws numbers that nobody can draw again."""

    def call(self, x):
        return x * tf.random.uniform(tf.shape(x))


def jit(f):
    return tf.function(f, jit_compile=True)


# ------------------------------------------------------------------ what the graph holds


def conditionals(layer, x, compiled):
    """The number of tensors that each conditional of a training step gives, and its operation."""
    layer(x)

    @tf.function(jit_compile=compiled)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, shortcut=x, training=True))
        return tape.gradient(loss, [x, *trainable_variables(layer)])

    nodes = nodes_of(step.get_concrete_function(x).graph.as_graph_def())
    return [len(n.attr["Tout"].list.type) for n in nodes if n.op in ("If", "StatelessIf")]


def mlp():
    return keras.Sequential([L.LayerNormalization(), L.Dense(8, activation="gelu"), L.Dense(2)])


def test_only_what_is_dear_is_handed_from_the_forward_to_the_backward_conditional():
    """The sum, what is dear, and the gradients of one input and six weights."""
    x = tf.constant(data(4, 2))
    layer = StochasticDepth(mlp(), 0.5)
    norm = 2 if KERAS_3 else 0  # two means, for which Keras 2 has one operation
    assert conditionals(layer, x, compiled=True) == [1 + norm + 3, 7]
    assert conditionals(StochasticDepth(L.ReLU(), 0.5), x, compiled=True) == [1, 1]
    handed_on = conditionals(layer, x, compiled=False)
    assert max(handed_on) > 8


def test_other_branches_fall_back_on_the_gradient_of_tensorflow():
    forward, backward = conditionals(StochasticDepth(Noise(), 0.5), tf.ones((4, 2)), compiled=True)
    assert forward > 1 and backward == 1


@pytest.mark.parametrize("size", [64, None])
def test_a_training_step_does_not_multiply_again(size):
    """Of two products of matrices, with two more for the gradient of each, XLA computes six."""
    layer = StochasticDepth(keras.Sequential([L.Dense(128, "gelu"), L.Dense(64)]), 0.5)
    x = tf.constant(data(64, 64))
    layer(x)

    @tf.function(jit_compile=True, input_signature=[tf.TensorSpec((size, 64))])
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.square(layer(x, shortcut=x, training=True)))
        return tape.gradient(loss, [x, *trainable_variables(layer)])

    program = step.experimental_get_compiler_ir(x)(stage="optimized_hlo")
    assert program.count(" dot(") == 6


# ------------------------------------------------------------------ state and random numbers


def test_a_random_branch_has_the_gradient_of_what_it_gave():
    """d (x u) / d x = u for the very numbers u of the forward pass."""

    for noise in (Noise(), L.Dropout(0.5), L.GaussianDropout(0.5)):
        layer = StochasticDepth(noise, 1.0)

        def step(x, f=layer):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = f(x, training=True)
            return y, tape.gradient(y, x)

        for _ in range(3):
            y, dx = jit(step)(tf.fill((8, 8), 3.0))
            np.testing.assert_allclose(dx, y / 3.0, rtol=1e-5)
            assert np.ptp(y) > 0


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_moving_statistics_move_once(p):
    norm = L.BatchNormalization(momentum=0.5)
    layer = StochasticDepth(norm, p)
    layer(tf.ones((1, 2)))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer(x, shortcut=x, training=True)))
        return tape.gradient(loss, trainable_variables(layer))

    x = data(6, 2)
    jit(step)(tf.constant(x))
    np.testing.assert_allclose(norm.moving_mean, 0.5 * p * x.mean(0), rtol=1e-5)


def counting(scope):
    class Counter(L.Layer):
        def build(self, shape):
            self.ran = self.add_weight(
                name="ran", shape=(), initializer="zeros", trainable=False, dtype="float32"
            )

        def call(self, x):
            self.ran.assign(self.ran + 1.0)
            return x * (
                tf.stop_gradient(tf.convert_to_tensor(self.ran)) if scope == "read" else 1.0
            )

    return Counter()


@pytest.mark.parametrize("scope", ["read", "not read"])
def test_a_counter_in_the_layer_counts_once_a_step(scope):
    counter = counting(scope)
    layer = StochasticDepth(counter, 0.7, seed=1)
    layer.build((4, 2))
    layer(tf.ones((4, 2)))
    ran = float(counter.ran)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return y, tape.gradient(y, x)

    step, kept = jit(step), 0
    for _ in range(12):
        y, dx = step(tf.ones((4, 2)))
        kept += float(y[0, 0]) != 0
        np.testing.assert_array_equal(y, dx)  # the gradient saw the same count
        assert float(counter.ran) == ran + kept
    assert kept == 7


def test_a_variable_of_tensorflows_own_is_not_counted_twice():
    layer = StochasticDepth(Counter(), 1.0)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return tape.gradient(y, x)

    np.testing.assert_array_equal(jit(step)(tf.ones((2, 2))), 2.0 * np.ones((2, 2)))
    assert float(layer.layer.ran) == 1.0


# ------------------------------------------------------------------ trained as the plain model


def transformer(dropout, norm=True):
    x = inputs = keras.Input((5, 6))
    for i in range(2):
        y = L.LayerNormalization()(x)
        y = L.MultiHeadAttention(2, 3)(y, y)
        x = L.Add()([x, y])
        y = L.LayerNormalization()(x)
        y = L.Dense(12, activation="gelu")(y)
        if dropout:
            y = L.Dropout(0.3, seed=i)(y)
        y = L.Dense(6)(y)
        x = L.Add()([x, L.BatchNormalization()(y) if norm else y])
    return keras.Model(inputs, L.Dense(1)(L.GlobalAveragePooling1D()(x)))


def test_ten_steps_at_1_give_the_weights_of_the_plain_model():
    """With Dropout in the branch too, where Keras can repeat its numbers under XLA."""
    plain = randomize(transformer(dropout=KERAS_3))
    wrapped = wrap_residuals(plain, constant(1.0))
    x, y = data(8, 5, 6), data(8, 1)
    outputs = []
    for model in (plain, wrapped):
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
        losses = [model.train_on_batch(x, y) for _ in range(10)]
        outputs.append((losses, model.predict(x, verbose=0)))
    np.testing.assert_allclose(outputs[0][0], outputs[1][0], rtol=1e-5)
    np.testing.assert_allclose(outputs[0][1], outputs[1][1], atol=1e-5)


def test_so_does_a_fit_with_a_short_last_batch():
    """There no size of a batch is known when the step is traced.

    With BatchNormalization in the branch too, where Keras can repeat it under XLA.
    """
    plain = randomize(transformer(dropout=KERAS_3, norm=KERAS_3))
    wrapped = wrap_residuals(plain, constant(1.0))
    x, y = data(20, 5, 6), data(20, 1)
    outputs = []
    for model in (plain, wrapped):
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        outputs.append(model.predict(x, verbose=0))
    np.testing.assert_allclose(*outputs, atol=1e-5)


def test_a_layer_that_computes_by_other_operations_each_time():
    """What is kept of one call has no place in the other."""
    first, second = (tf.constant(data(2, 2, seed=seed)) for seed in (1, 2))

    class Fickle(L.Layer):
        calls = 0

        def call(self, x):
            self.calls += 1
            if self.calls % 2:
                return tf.matmul(x, first @ second)
            return tf.matmul(tf.matmul(x, first), second)

    layer = StochasticDepth(Fickle(), 1.0)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.square(layer(x, training=True))
        return tape.gradient(y, x)

    x = data(3, 2)
    layer(tf.constant(x))
    product = first.numpy() @ second.numpy()
    for _ in range(2):
        gradient = jit(step)(tf.constant(x))
        np.testing.assert_allclose(gradient, 2.0 * x @ product @ product.T, rtol=1e-4, atol=1e-5)
        layer.layer.calls += 1


def test_the_gradient_of_a_gradient():
    """What is kept of the forward pass is a function of the inputs too."""
    layer = StochasticDepth(
        keras.Sequential([L.LayerNormalization(), L.Dense(8, activation="gelu"), L.Dense(3)]), 0.7
    )
    x = tf.constant(data(4, 3))
    layer(x)
    found = []
    for compiled in (False, True):
        layer._seed_state.assign([1, 0])

        @tf.function(jit_compile=compiled)
        def step(x):
            weights = trainable_variables(layer)
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = tf.reduce_sum(tf.square(layer(x, shortcut=x, training=True)))
                penalty = tf.reduce_sum(tf.square(inner.gradient(y, x)))
            zero = tf.UnconnectedGradients.ZERO
            return penalty, outer.gradient(penalty, [x, *weights], unconnected_gradients=zero)

        found.append([tf.nest.flatten(step(x)) for _ in range(6)])
    for ours, theirs in zip(*found):
        for a, b in zip(ours, theirs):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4)
    assert len({float(step[0]) for step in found[0]}) == 2


@pytest.mark.parametrize("p", [0.0, 0.6])
@pytest.mark.parametrize("rescale", ["inference", "training"])
@pytest.mark.parametrize("skip", ["shortcut", "identity", "layer"])
def test_gradients_are_those_of_a_plain_graph(skip, rescale, p):
    """Of inputs, a side input, the layer, a `skip` layer and an activity loss."""

    class Mix(L.Layer):
        def __init__(self):
            super().__init__()
            self.dense = L.Dense(3, activity_regularizer=keras.regularizers.L2(0.1))

        def build(self, shape):
            self.dense.build(shape)
            super().build(shape)

        def call(self, x, side=None):
            return self.dense(x) * side

    x, side = tf.constant(data(4, 3)), tf.constant(data(4, 3, seed=1))
    found = []
    for compiled in (False, True):
        keras.utils.set_random_seed(1)
        skipped = {"identity": "identity", "layer": L.Dense(3)}.get(skip)
        layer = StochasticDepth(Mix(), p, rescale=rescale, skip=skipped, seed=1)
        layer(x, side=side)
        if skip == "layer":
            skipped.build((4, 3)) if not skipped.built else None

        @tf.function(jit_compile=compiled)
        def step(x, side, layer=layer):
            with tf.GradientTape() as tape:
                tape.watch([x, side])
                extra = {"shortcut": x} if skip == "shortcut" else {}
                y = layer(x, side=side, training=True, **extra)
                loss = tf.reduce_sum(tf.square(y)) + tf.add_n(layer.losses)
            sources = [x, side, *trainable_variables(layer)]
            zero = tf.UnconnectedGradients.ZERO
            return loss, tape.gradient(loss, sources, unconnected_gradients=zero)

        found.append([tf.nest.flatten(step(x, side)) for _ in range(6)])
    for ours, theirs in zip(*found):
        for a, b in zip(ours, theirs):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert len({float(step[0]) for step in found[0]}) == (1 if p == 0 else 2)


def test_attention_sees_its_masks_again():
    """Keras 3's attention takes the mask away from its query: the second run must have it too."""
    found = []
    for compiled in (False, True):
        keras.utils.set_random_seed(1)
        ids = keras.Input((5,), dtype="int32")
        x = L.Embedding(4, 6, mask_zero=True)(ids)
        y = L.MultiHeadAttention(2, 3)(x, x)
        model = keras.Model(ids, L.Dense(1)(L.Add()([x, y])[:, 0]))
        wrapped = wrap_residuals(model, constant(1.0))
        wrapped.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=compiled)
        batch = np.array([[1, 2, 3, 0, 0], [2, 3, 0, 0, 0]]), np.ones((2, 1))
        found.append([wrapped.train_on_batch(*batch) for _ in range(4)])
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_gradients_have_the_dtype_of_the_weights(policy):
    layer = StochasticDepth(L.Dense(2, dtype=policy), 1.0)
    x = tf.cast(data(4, 2), layer.compute_dtype)
    layer(x)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(layer(x, shortcut=x, training=True), "float64"))
        return tape.gradient(loss, trainable_variables(layer))

    for ours, plain in zip(jit(step)(x), tf.function(step)(x)):
        assert ours.dtype == plain.dtype == ("float64" if policy == "float64" else "float32")
        np.testing.assert_allclose(ours, plain, rtol=1e-2)


def test_a_conditional_in_the_branch_that_reads_weights():
    class Either(L.Layer):
        def build(self, shape):
            self.w = self.add_weight(name="w", shape=(2, 2), initializer="ones")
            super().build(shape)

        def call(self, x):
            w = lambda: tf.convert_to_tensor(self.w)  # noqa: E731
            some = tf.reduce_sum(x) > 0.0
            return tf.cond(some, lambda: tf.matmul(x, w()), lambda: tf.matmul(-x, w()))

    layer = StochasticDepth(Either(), 1.0)
    x = tf.constant(data(3, 2))
    layer(x)

    def step(x):
        with tf.GradientTape() as tape:
            y = layer(x, shortcut=x, training=True)
        return tape.gradient(y, trainable_variables(layer))

    for sign in (1.0, -1.0):
        (gradient,) = jit(step)(sign * x)
        expected = np.sign(x.numpy().sum()) * x.numpy().sum(0)
        np.testing.assert_allclose(gradient, np.repeat(expected[:, np.newaxis], 2, 1), rtol=1e-5)


def test_blocks_inside_blocks():
    inner = StochasticDepth(L.Dense(2), 0.7, seed=1, skip="identity")
    layer = StochasticDepth(keras.Sequential([inner, L.Dense(2)]), 0.7, seed=2)
    found = []
    for compiled in (False, True):
        layer(tf.ones((1, 2)))
        for part in (inner, layer):
            part._seed_state.assign([part.seed, 0])

        @tf.function(jit_compile=compiled)
        def step(x):
            with tf.GradientTape() as tape:
                y = layer(x, shortcut=x, training=True)
            zero = tf.UnconnectedGradients.ZERO
            return y, tape.gradient(y, trainable_variables(layer), unconnected_gradients=zero)

        found.append([tf.nest.flatten(step(tf.constant(data(3, 2)))) for _ in range(12)])
    for ours, theirs in zip(*found):
        for a, b in zip(ours, theirs):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_block_inside_one_that_falls_back_does_so_too():
    """The gradient of the outer conditional is TensorFlow's, on any Keras."""

    class Noise(L.Layer):
        def call(self, x):
            return x + 0.0 * tf.random.uniform(tf.shape(x))

    inner = StochasticDepth(L.Dense(2), 1.0, skip="identity")
    layer = StochasticDepth(keras.Sequential([inner, Noise()]), 1.0)
    x = tf.constant(data(3, 2))
    layer(x)

    def step(x):
        with tf.GradientTape() as tape:
            y = layer(x, training=True)
        return tape.gradient(y, trainable_variables(layer))

    kernel, bias = jit(step)(x)
    np.testing.assert_allclose(kernel, np.repeat(x.numpy().sum(0)[:, np.newaxis], 2, 1), rtol=1e-5)
    np.testing.assert_allclose(bias, [3.0, 3.0])


# ------------------------------------------------------------------ the warning


@pytest.fixture
def not_warned(monkeypatch):
    monkeypatch.setattr(layer_module, "_warned_of_convolutions", False)


def train(layer, x, compiled):
    return tf.function(lambda x: layer(x, training=True), jit_compile=compiled)(x)


def test_convolutions_for_xla_on_a_cpu_are_warned_of_once(not_warned):
    x = tf.ones((1, 4, 4, 1))
    branch = keras.Sequential([L.ReLU(), L.Conv2D(1, 3, padding="same", name="kernel")])
    with pytest.warns(
        UserWarning, match="'kernel' is a convolution .* jit_compile=False, or with mode="
    ):
        train(StochasticDepth(branch, 0.5), x, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train(StochasticDepth(L.Conv2D(1, 3), 0.5), x, True)


@pytest.mark.parametrize("case", ["no convolution", "graph", "row", "accelerator"])
def test_nothing_is_warned_of_elsewhere(case, not_warned, monkeypatch):
    if case == "accelerator":
        monkeypatch.setattr(_keras, "has_accelerator", lambda: True)
    layer = L.Dense(1) if case == "no convolution" else L.Conv2D(1, 3)
    wrapper = StochasticDepth(layer, 0.5, mode="row" if case == "row" else "batch")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train(wrapper, tf.ones((2, 4, 4, 1)), case != "graph")


# ------------------------------------------------------------------ where the switch is drawn


class Tanh(L.Layer):
    """Not known to be like any other layer: its conditional stands in the graph itself."""

    def call(self, x):
        return tf.tanh(x)


@pytest.mark.parametrize("mode", ["batch", "row"])
def test_switches_are_drawn_on_the_host(mode):
    """A conditional needs its predicate there; under XLA devices are not ours to choose."""
    layer = StochasticDepth(Tanh(), 0.5, mode=mode)
    devices = {}
    for compiled in (False, True):
        run = tf.function(lambda x: layer(x, shortcut=x, training=True), jit_compile=compiled)
        graph = run.get_concrete_function(tf.ones((4, 2))).graph
        predicates = [
            op.inputs[0].op
            for op in graph.get_operations()
            if op.type == "StatelessIf" or op.type == "If"
        ]
        assert bool(predicates) is (mode == "batch" or not compiled)
        devices[compiled] = {op.device for op in predicates}
        assert not any("CPU" in op.device for op in graph.get_operations() if op.type == "Tanh")
    assert devices[False] == {"/device:CPU:0"}
    assert devices[True] <= {""}


@pytest.mark.parametrize("mode", ["batch", "row"])
def test_so_are_those_that_are_handed_to_a_function(mode):
    layer = StochasticDepth(L.Activation("tanh"), 0.5, mode=mode)
    run = tf.function(lambda x: layer(x, shortcut=x, training=True))
    graph = run.get_concrete_function(tf.ones((4, 2))).graph
    switches = [
        op.inputs[0].op
        for op in graph.get_operations()
        if op.type.endswith(("PartitionedCall", "If")) and op.inputs[0].dtype == tf.bool
    ]
    assert {op.device for op in switches} == {"/device:CPU:0"}
