"""Blocks that are alike share one traced function, and do what they would do alone."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from helpers import KERAS_3, data, functions_of, randomize, trainable_variables, wrappers
from tfa_stochastic_depth import StochasticDepth, _keras, alike, set_survival_probs, wrap_residuals

keras = tf.keras
L = keras.layers


def scaled_by(factor):
    def act(x):
        return x * factor

    return act


class Own(L.Layer):
    def call(self, x):
        return 2.0 * x


class OwnDense(L.Dense):
    pass


def built(layer, *shape):
    layer(tf.ones((2, *(shape or (4,)))))
    return layer


def changed(layer, **attributes):
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def graph(order=1, twice=False, constant=2.0, mean=False):
    x = keras.Input((4,))
    dense = L.Dense(4)
    a, b = dense(x), (dense if twice else L.Dense(4))(x)
    y = L.Subtract()([L.Add()([a, b]), x][::order]) * constant
    return keras.Model(x, L.Activation("relu")(y) if not mean else [y, a])


ALIKE = {
    "names": lambda: (L.Dense(4, name="a"), L.Dense(4, name="b")),
    "weights": lambda: (
        built(L.Dense(4)),
        randomize(keras.Sequential([built(L.Dense(4))])).layers[0],
    ),
    "initializers": lambda: (L.Dense(4), L.Dense(4, kernel_initializer="zeros")),
    "regularizers": lambda: (L.Dense(4), L.Dense(4, kernel_regularizer="l2")),
    "graphs": lambda: (graph(), graph()),
    "sequences": lambda: tuple(keras.Sequential([keras.Input((4,)), L.Dense(2)]) for _ in "ab"),
}
UNLIKE = {
    "class": lambda: (L.Dense(4), L.EinsumDense("ab,bc->ac", 4)),
    "array": lambda: (L.Rescaling(np.ones(4)), L.Rescaling(2.0 * np.ones(4))),
    "size": lambda: (L.Dense(4), L.Dense(5)),
    "type": lambda: (L.Rescaling(1), L.Rescaling(1.0, offset=1)),
    "activation": lambda: (L.Dense(4, "relu"), L.Dense(4, "gelu")),
    "trainable": lambda: (L.BatchNormalization(), changed(L.BatchNormalization(), trainable=False)),
    "momentum": lambda: (L.BatchNormalization(), changed(L.BatchNormalization(), momentum=0.5)),
    "rate": lambda: (L.Dropout(0.5), changed(L.Dropout(0.5), rate=0.2)),
    "activity": lambda: (L.Dense(4), L.Dense(4, activity_regularizer="l2")),
    "attribute": lambda: (L.Conv1D(4, 1), changed(L.Conv1D(4, 1), supports_masking=True)),
    "dtype": lambda: (L.Dense(4), L.Dense(4, dtype="mixed_bfloat16")),
    "order": lambda: (graph(), graph(order=-1)),
    "shared": lambda: (graph(), graph(twice=True)),
    "constant": lambda: (graph(), graph(constant=3.0)),
    "outputs": lambda: (graph(), graph(mean=True)),
    "input": lambda: tuple(
        keras.Sequential([keras.Input(shape), L.Flatten()]) for shape in [(2, 3), (3, 2)]
    ),
    "inside": lambda: (L.TimeDistributed(L.Dense(4)), L.TimeDistributed(L.Dense(4, "relu"))),
}
UNKNOWN = {
    "own": Own,
    "subclass": lambda: OwnDense(4),
    "lambda": lambda: L.Lambda(scaled_by(2.0)),
    "activation": lambda: L.Dense(4, activation=scaled_by(2.0)),
    "cell": lambda: L.RNN(changed(L.LSTMCell(3), call=scaled_by(1.0))),
    "call": lambda: changed(L.Dense(4), call=scaled_by(2.0)),
    "inside": lambda: L.TimeDistributed(Own()),
    "graph": lambda: keras.Sequential([keras.Input((4,)), L.Dense(2), Own()]),
    "wrapper": lambda: StochasticDepth(L.Dense(4)),
}


def of_keras_3(test):
    """Keras 2 cannot run a layer on values other than those of its variables."""
    test.__test__ = KERAS_3
    return test


@of_keras_3
@pytest.mark.parametrize("case", ALIKE)
def test_alike(case):
    first, second = map(_keras.likeness, ALIKE[case]())
    assert first is not None and hash(first) == hash(second) and first == second


@of_keras_3
@pytest.mark.parametrize("case", UNLIKE)
def test_unlike(case):
    first, second = map(_keras.likeness, UNLIKE[case]())
    assert first is not None and second is not None and first != second


@of_keras_3
@pytest.mark.parametrize("case", UNKNOWN)
def test_not_known_to_be_alike(case):
    assert _keras.likeness(UNKNOWN[case]()) is None


def test_nothing_is_alike_on_keras_2():
    assert (_keras.likeness(L.Dense(4)) is not None) == KERAS_3


# ------------------------------------------------------------------ models


def network(depth=4, momentum=0.9):
    inputs = x = keras.Input((6, 4))
    for i in range(depth):
        y = L.BatchNormalization(momentum=momentum if i == 1 else 0.9)(x)
        y = L.Dense(4, activation="relu", activity_regularizer=keras.regularizers.L2(0.01))(y)
        y = L.Dropout(0.3, seed=5)(y)
        x = L.Add()([x, L.Dense(4)(y)])
    return keras.Model(inputs, L.Dense(2)(x))


def projecting(**options):
    inputs = x = keras.Input((4,))
    for _ in range(3):
        skip = keras.Sequential([L.Dense(4), L.BatchNormalization()])
        layer = keras.Sequential([L.Dense(4, activation="tanh"), L.Dropout(0.3, seed=5)])
        x = StochasticDepth(layer, 0.7, skip=skip, **options)(x)
    return keras.Model(inputs, x)


def masked(**options):
    ids = keras.Input((6,), dtype="int32")
    x = L.Embedding(9, 4, mask_zero=True)(ids)
    for _ in range(2):
        x = L.Add()([x, L.MultiHeadAttention(1, 4)(x, x)])
    x = L.Add()([x, L.LSTM(4, return_sequences=True)(x)])
    return wrap_residuals(keras.Model(ids, L.GlobalAveragePooling1D()(x)), 0.6, **options)


def partly_frozen():
    model = wrap_residuals(network(), 0.5, seed=1)
    for layer in wrappers(model)[1].layer.layers:
        if isinstance(layer, L.BatchNormalization):
            layer.gamma.trainable = False
    return model


def mixed():
    """Layers that are alike in wrappers that are not."""
    options = [
        {"mode": mode, "rescale": rescale, "skip": skip}
        for mode in ("batch", "row")
        for rescale in ("inference", "training")
        for skip in (None, "identity")
    ]
    x = inputs = keras.Input((4,))
    for i, o in enumerate(options):
        x = StochasticDepth(L.Dense(4), 0.6, seed=i, **o)(x) + 0.5 * x
    return keras.Model(inputs, x)


MODELS = {
    "mixed": mixed,
    "batch": lambda: wrap_residuals(network(), 0.5, seed=1),
    "row": lambda: wrap_residuals(network(), 0.5, seed=1, mode="row", rescale="training"),
    "no_row": lambda: wrap_residuals(network(), [0.0, 0.5, 0.0, 1.0], seed=1, mode="row"),
    "partly_frozen": partly_frozen,
    "one_differs": lambda: wrap_residuals(network(momentum=0.5), 0.5, seed=1),
    "projection": lambda: projecting(rescale="training", seed=3),
    "projection_rows": lambda: projecting(mode="row", seed=3),
    "identity": lambda: keras.Sequential(
        [keras.Input((4,))] + [StochasticDepth(L.Dense(4), 0.6, skip="identity") for _ in range(3)]
    ),
    "zeros": lambda: keras.Sequential(
        [keras.Input((4,))] + [StochasticDepth(L.Dense(4), 0.8, seed=i) for i in range(3)]
    ),
    "masks": lambda: masked(seed=2),
    "masks_rows": lambda: masked(seed=2, mode="row"),
}


def trained(make, x, policy="float32", steps=6):
    """The losses of some steps, and the weights after them."""
    keras.backend.clear_session(**({"free_memory": False} if KERAS_3 else {}))
    keras.utils.set_random_seed(1)
    keras.mixed_precision.set_global_policy(policy)
    model = make()
    optimizer = keras.optimizers.SGD(0.05)
    weights = model.trainable_variables
    optimizer.build(weights)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            y = tf.cast(model(x, training=True), tf.float32)
            loss = tf.reduce_mean(tf.square(y)) + sum(tf.cast(x, tf.float32) for x in model.losses)
        gradients = tape.gradient(loss, trainable_variables(model))
        optimizer.apply_gradients(zip(gradients, weights))
        return loss

    losses = [float(step(x)) for _ in range(steps)]
    return losses, model.get_weights(), [v.numpy() for v in getattr(model, "variables", [])], step


CASES = [(name, "float32") for name in MODELS]
CASES += [(name, "mixed_bfloat16") for name in ("batch", "row", "projection")]


@of_keras_3
@pytest.mark.parametrize("name, policy", CASES)
def test_training_is_what_it_is_for_blocks_alone(name, policy, monkeypatch):
    sequences = name in ("batch", "row", "no_row", "partly_frozen", "one_differs")
    x = tf.constant(data(5, 6, 4) if sequences else data(5, 4))
    if "masks" in name:
        x = tf.constant([[1, 2, 0, 0, 0, 0], [3, 4, 5, 6, 7, 8], [1, 1, 1, 0, 0, 0]])
    together = trained(MODELS[name], x, policy)
    monkeypatch.setattr(_keras, "likeness", lambda layer: None)
    alone = trained(MODELS[name], x, policy)
    assert len(set(alone[0])) > 1
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-6} if policy == "float32" else {"rtol": 0.05, "atol": 0.01}
    )
    np.testing.assert_allclose(together[0], alone[0], **tolerance)
    for kind in (1, 2):
        for a, b in zip(together[kind], alone[kind]):
            np.testing.assert_allclose(a, b, **tolerance)


@of_keras_3
@pytest.mark.parametrize("mode", ["batch", "row"])
@pytest.mark.parametrize("different", [0, 1])
def test_one_function_for_all_that_are_alike(mode, different):
    model = wrap_residuals(network(6, momentum=0.9 - 0.4 * different), 0.5, mode=mode)
    kinds = []

    @tf.function
    def step(x):
        y = model(x, training=True)
        kinds.append(len(_keras.kept_here("functions")))
        return y

    graph = step.get_concrete_function(tf.ones((5, 6, 4))).graph.as_graph_def()
    assert kinds == [1 + different]
    products = [
        sum(node.op in ("MatMul", "BatchMatMulV2") for node in inner.node_def)
        for inner in functions_of(graph).values()
    ]
    assert sum(products) == 2 * (1 + different)  # two in each branch
    assert not any(node.op == "If" for node in graph.node)


def gradients_of(model, x):
    """The GraphDef of a function that takes the gradients of the weights."""

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    return step.get_concrete_function(x).graph.as_graph_def()


def called_of(graph, kind):
    """Of functions of a kind, whether they are called by the runtime, not copied."""
    functions = functions_of(graph).items()
    return [inner.attr["_noinline"].b for name, inner in functions if f"__{kind}_traced" in name]


@of_keras_3
@pytest.mark.parametrize("mode", ["batch", "row"])
@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("depth", [24, 25])
def test_the_forward_passes_of_many_blocks_are_called(mode, accelerator, depth, monkeypatch):
    monkeypatch.setattr(_keras, "has_accelerator", lambda: accelerator)
    inputs = keras.Input((4,))
    x = L.Dense(4)(inputs)
    for i in range(depth):  # two kinds, counted together
        layer = StochasticDepth(L.Activation(["tanh", "relu"][i % 2]), 0.5, mode=mode)
        x = layer(x, shortcut=x)
    graph = gradients_of(keras.Model(inputs, x), tf.ones((2, 4)))
    called = depth == 25 and mode == "batch" and not accelerator
    assert called_of(graph, "forward") == [called] * 2
    assert called_of(graph, "backward") == [False] * 2


@of_keras_3
@pytest.mark.parametrize("name", ["batch", "masks", "projection", "partly_frozen", "mixed"])
def test_training_is_the_same_where_blocks_are_called(name, monkeypatch):
    x = tf.constant(data(5, 6, 4) if name in ("batch", "partly_frozen") else data(5, 4))
    if name == "masks":
        x = tf.constant([[1, 2, 0, 0, 0, 0], [3, 4, 5, 6, 7, 8], [1, 1, 1, 0, 0, 0]])
    copied = trained(MODELS[name], x)
    monkeypatch.setattr(alike, "COPIES", 0)
    called = trained(MODELS[name], x)
    graph = called[3].get_concrete_function(x).graph.as_graph_def()
    assert any(called_of(graph, "forward"))
    assert len(set(called[0])) > 1
    for kind in range(3):
        for a, b in zip(called[kind], copied[kind]):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@of_keras_3
@pytest.mark.parametrize("skip", ["identity", None])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("copies", [24, 0])
def test_gradients_of_gradients_are_those_of_blocks_alone(skip, persistent, copies, monkeypatch):
    monkeypatch.setattr(alike, "COPIES", copies)

    def gradients():
        keras.utils.set_random_seed(3)
        x = inputs = keras.Input((4,))
        for i in range(4):
            layer = StochasticDepth(L.Dense(4, activation="tanh"), 0.6, skip=skip, seed=i)
            x = layer(x, shortcut=x) if skip is None else layer(x)
        model = keras.Model(inputs, x)

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                with tf.GradientTape(persistent=persistent) as inner:
                    inner.watch(x)
                    loss = tf.reduce_sum(tf.square(model(x, training=True)))
                steepness = tf.reduce_sum(inner.gradient(loss, x) ** 2)
            return tape.gradient(steepness, model.trainable_variables)

        return [step(tf.constant(data(3, 4))) for _ in range(5)]

    together = gradients()
    monkeypatch.setattr(_keras, "likeness", lambda layer: None)
    alone = gradients()
    assert any(np.any(g) for step in together for g in step)
    for a, b in zip(together, alone):
        for x, y in zip(a, b):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@of_keras_3
def test_blocks_of_other_sizes_have_a_function_each(monkeypatch):
    """Two signatures of what is otherwise one function."""
    monkeypatch.setattr(alike, "COPIES", 3)
    x = inputs = keras.Input((8, 8, 2))
    for i in range(4):
        x = StochasticDepth(L.Conv2D(2, 3, padding="same"), 0.5)(x, shortcut=x)
        x = L.MaxPooling2D()(x) if i == 1 else x
    model = keras.Model(inputs, x)
    graph = gradients_of(model, tf.ones((1, 8, 8, 2)))
    assert called_of(graph, "forward") == [True, True]
    assert called_of(graph, "backward") == [False, False]


def test_a_tensorflow_that_makes_gradients_otherwise_is_left_to_it():
    class Function:
        def get_concrete_function(self, x):
            assert x == 2
            return object()

    assert _keras.call_forward_pass(Function(), [2], lambda: True) is None


@of_keras_3
def test_each_block_keeps_its_own_switch_and_probability():
    model = keras.Sequential(
        [keras.Input((1,))]
        + [StochasticDepth(L.Dense(1, use_bias=False), 0.5, skip="identity") for _ in range(4)]
    )
    for factor, layer in zip((2.0, 3.0, 5.0, 7.0), wrappers(model)):
        layer.layer.set_weights([np.array([[factor]])])
    step = tf.function(functools.partial(model, training=True))
    for switches in ([1, 0, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]):
        set_survival_probs(model, switches)
        expected = np.prod([f for f, b in zip((2.0, 3.0, 5.0, 7.0), switches) if b])
        assert float(step(tf.ones((1, 1)))[0, 0]) == expected


@of_keras_3
@pytest.mark.parametrize("how", ["batch", "row", "batch, xla"])
def test_a_layer_that_assigns_what_is_trained_is_run_as_it_is(how):
    """Its gradient is that for the value it assigned."""
    mode, xla = how[:5].strip(", "), "xla" in how
    x = data(8, 4)

    def make():
        inputs = keras.Input((4,))
        y = L.SpectralNormalization(L.Dense(4))(inputs)
        return randomize(keras.Model(inputs, L.Add()([inputs, y])))

    losses = []
    for model in (make(), wrap_residuals(make(), [1], mode=mode)):
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=xla)
        losses.append(model.fit(x, x * 0, epochs=4, shuffle=False, verbose=0).history["loss"])
    assert losses[0][0] > losses[0][-1]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@of_keras_3
@pytest.mark.parametrize("rescale", ["inference", "training"])
def test_no_gradients_but_those_of_what_is_trained(rescale):
    """What a block assigns, and its probability, cost nothing in the backward pass."""
    x = keras.Input((4,))
    block = keras.Sequential([keras.Input((4,)), L.Dense(4), L.BatchNormalization()])
    model = keras.Model(x, StochasticDepth(block, rescale=rescale)(x, shortcut=x))
    graph = gradients_of(model, tf.ones((3, 4)))
    backward = [f for name, f in functions_of(graph).items() if "backward" in name]
    conditionals = [n for f in backward for n in f.node_def if n.op == "StatelessIf"]
    assert len(conditionals) == 1
    # Those of kernel, bias, gamma and beta, of the input and of the shortcut, which are the same.
    assert len(conditionals[0].attr["Tout"].list.type) == 4 + 1
