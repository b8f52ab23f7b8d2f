"""What `StochasticDepth` computes and how it behaves as a layer, on values worked out by hand."""

import json

import numpy as np
import pytest
import tensorflow as tf

from helpers import operations_in
from tfa_stochastic_depth import (
    StochasticDepth,
    get_survival_probs,
    set_survival_probs,
    survival_probs,
)

keras = tf.keras

# The first number these seeds draw is 0.57 and 0.72: at survival_prob=0.7 the layer is kept in the
# first training step, or dropped.
KEPT, DROPPED = 5, 3

HOW = {
    "eager": lambda function: function,
    "graph": tf.function,
    "jit": lambda function: tf.function(function, jit_compile=True),
}


@pytest.fixture(params=HOW)
def how(request):
    """Runs a function eagerly, as a graph, or compiled by XLA."""
    return HOW[request.param]


def affine(kernel, bias=0.0):
    """The layer x -> kernel * x + bias on tensors (batch, 1)."""
    return keras.layers.Dense(
        1,
        kernel_initializer=keras.initializers.Constant(kernel),
        bias_initializer=keras.initializers.Constant(bias),
    )


def value(tensors):
    return tf.nest.map_structure(lambda t: t.numpy(), tensors)


def mask_of(tensor):
    return getattr(tensor, "_keras_mask", None)


# ------------------------------------------------------------------ the formula

# For f = 2 x + 2 at x = 4 (so f = 10), a shortcut of 100 and survival_prob 0.7:
# kept in training, dropped in training, inference.
FORMULA = [
    ("inference", "zeros", False, 10.0, 0.0, 7.0),
    ("inference", "zeros", True, 110.0, 100.0, 107.0),
    ("inference", "identity", False, 10.0, 4.0, 8.2),
    ("inference", "layer", False, 10.0, -4.0, 5.8),
    ("training", "zeros", False, 10 / 0.7, 0.0, 10.0),
    ("training", "zeros", True, 100 + 10 / 0.7, 100.0, 110.0),
    ("training", "identity", False, 4 + 6 / 0.7, 4.0, 10.0),
    ("training", "layer", False, 16.0, -4.0, 10.0),
]
formula = pytest.mark.parametrize(
    ("rescale", "skip", "shortcut", "kept", "dropped", "inference"), FORMULA
)


def formula_layer(survival_prob, rescale, skip, seed=None):
    skips = {"zeros": None, "identity": "identity", "layer": affine(-1.0)}
    return StochasticDepth(
        affine(2.0, 2.0), survival_prob, rescale=rescale, skip=skips[skip], seed=seed
    )


def formula_values(cases, rescale, skip, shortcut, how):
    """What fresh layers give, by (seed, survival_prob, training)."""
    layers = [formula_layer(p, rescale, skip, seed) for seed, p, _ in cases]
    kwargs = {"shortcut": tf.constant([[100.0]])} if shortcut else {}

    @how
    def run(x):
        return [layer(x, training=t, **kwargs) for layer, (_, _, t) in zip(layers, cases)]

    return [float(y[0, 0]) for y in run(tf.constant([[4.0]]))]


@formula
def test_formula(rescale, skip, shortcut, kept, dropped, inference, how):
    cases = [(KEPT, 0.7, True), (DROPPED, 0.7, True), (DROPPED, 0.7, False)]
    got = formula_values(cases, rescale, skip, shortcut, how)
    assert got == pytest.approx([kept, dropped, inference], rel=1e-6)
    # What the next layer is trained on has the mean of what it gets at inference.
    assert 0.7 * got[0] + 0.3 * got[1] == pytest.approx(got[2], rel=1e-6)


@formula
def test_formula_at_the_ends_and_by_default(rescale, skip, shortcut, kept, dropped, inference):
    """At 1 it is the layer, at 0 its stand-in: no 0 * f, no f / 0. Training is off by default."""
    plain = 110.0 if shortcut else 10.0
    cases = {
        (DROPPED, 1.0, True): plain,
        (DROPPED, 1.0, False): plain,
        (KEPT, 0.0, True): dropped,
        (KEPT, 0.0, False): plain if rescale == "training" else dropped,
        (DROPPED, 0.7, None): inference,
    }
    got = formula_values(list(cases), rescale, skip, shortcut, tf.function)
    assert got == pytest.approx(list(cases.values()), rel=1e-6)


@formula
def test_training_may_be_a_tensor_whose_value_is_known_only_when_it_runs(
    rescale, skip, shortcut, kept, dropped, inference
):
    cases = [
        (KEPT, True, kept),
        (DROPPED, True, dropped),
        (KEPT, False, inference),
        (DROPPED, False, inference),
    ]
    layers = [formula_layer(0.7, rescale, skip, seed) for seed, _, _ in cases]
    kwargs = {"shortcut": tf.constant([[100.0]])} if shortcut else {}

    @tf.function
    def run(x, flags):
        return [layer(x, training=flag, **kwargs) for layer, flag in zip(layers, flags)]

    got = run(tf.constant([[4.0]]), [tf.constant(case[1]) for case in cases])
    assert [float(y[0, 0]) for y in got] == pytest.approx([case[2] for case in cases], rel=1e-6)


def test_one_switch_for_the_whole_batch(how):
    layer = StochasticDepth(affine(1.0), 0.7, seed=1)
    run = how(lambda x: layer(x, training=True))
    switches = []
    for _ in range(20):
        rows = set(run(tf.ones((5, 1))).numpy().ravel())
        assert len(rows) == 1
        switches.append(rows.pop())
    assert set(switches) == {0.0, 1.0}


def test_a_dropped_row_is_the_shortcut_bit_by_bit(how):
    shortcut = tf.random.normal((4, 3), stddev=1e3)
    layer = StochasticDepth(keras.layers.Dense(3), 0.7, seed=DROPPED)
    got = how(lambda x: layer(x, shortcut=shortcut, training=True))(tf.ones((4, 2)))
    np.testing.assert_array_equal(got.numpy(), shortcut.numpy())


def test_dropped_zeros_are_zeros_where_the_layer_gives_nan(how):
    layer = StochasticDepth(keras.layers.Activation(lambda x: x * np.nan), 0.7, seed=DROPPED)
    got = how(lambda x: layer(x, training=True))(tf.ones((2, 2)))
    np.testing.assert_array_equal(got.numpy(), np.zeros((2, 2)))


# ------------------------------------------------------------------ arguments and structures


@keras.utils.register_keras_serializable("test_layer")
class SumAndDifference(keras.layers.Layer):
    """{"a": (b, n), "b": (b, n)} -> ((b, n), {"difference": (b, n)})."""

    def call(self, inputs):
        return inputs["a"] + inputs["b"], {"difference": inputs["a"] - inputs["b"]}

    def compute_output_shape(self, input_shape):
        return input_shape["a"], {"difference": input_shape["a"]}


PAIR = {"a": np.array([[5.0, 6.0]], "float32"), "b": np.array([[1.0, 10.0]], "float32")}


def kept_dropped_inference(layer):
    """Calls with `layer` kept, dropped and at inference, each beside the factor it comes out at."""
    kept = StochasticDepth(layer, 0.7, seed=KEPT)
    dropped = StochasticDepth(layer, 0.7, seed=DROPPED)
    return [
        (lambda *args, **kwargs: kept(*args, training=True, **kwargs), 1.0),
        (lambda *args, **kwargs: dropped(*args, training=True, **kwargs), 0.0),
        (lambda *args, **kwargs: kept(*args, training=False, **kwargs), 0.7),
    ]


def test_nested_inputs_and_outputs(how):
    calls = kept_dropped_inference(SumAndDifference())
    pair = tf.nest.map_structure(tf.constant, PAIR)
    got = value(how(lambda x: [call(x) for call, _ in calls])(pair))
    for (total, rest), (_, factor) in zip(got, calls):
        np.testing.assert_allclose(total, factor * np.array([[6.0, 16.0]]), rtol=1e-6)
        np.testing.assert_allclose(rest["difference"], factor * np.array([[4.0, -4.0]]), rtol=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_nested_shortcut(training):
    layer = StochasticDepth(SumAndDifference(), 0.0)
    shortcut = (tf.constant([[1.0, 2.0]]), {"difference": tf.constant([[3.0, 4.0]])})
    pair = tf.nest.map_structure(tf.constant, PAIR)
    total, rest = value(layer(pair, shortcut=shortcut, training=training))
    np.testing.assert_array_equal(total, [[1.0, 2.0]])
    np.testing.assert_array_equal(rest["difference"], [[3.0, 4.0]])


@pytest.mark.parametrize(
    ("seed", "training", "weight"), [(KEPT, True, 1.0), (DROPPED, True, 0.0), (KEPT, False, 0.7)]
)
def test_skip_identity_with_nested_inputs(seed, training, weight):
    double = keras.layers.Lambda(lambda x: {"a": 2 * x["a"], "b": 4 * x["b"]})
    layer = StochasticDepth(double, 0.7, skip="identity", seed=seed)
    got = value(layer(tf.nest.map_structure(tf.constant, PAIR), training=training))
    np.testing.assert_allclose(got["a"], (1 + weight) * PAIR["a"], rtol=1e-6)
    np.testing.assert_allclose(got["b"], (1 + 3 * weight) * PAIR["b"], rtol=1e-6)


def test_nested_inputs_in_a_functional_model():
    inputs = {name: keras.Input((2,), name=name) for name in "ab"}
    total, rest = StochasticDepth(SumAndDifference(), 0.5)(inputs)
    model = keras.Model(inputs, [total, rest["difference"]])
    got = model(tf.nest.map_structure(tf.constant, PAIR))
    np.testing.assert_allclose(got[0], [[3.0, 8.0]])
    np.testing.assert_allclose(got[1], [[2.0, -2.0]])


ATTENTION = {"attention_mask": np.tril(np.ones((1, 4, 4), bool), 1), "use_causal_mask": True}


def queries(batch=2):
    return np.random.default_rng(0).normal(size=(batch, 4, 3)).astype("float32")


@pytest.mark.parametrize("arguments", [{}, ATTENTION], ids=["plain", "masked"])
def test_attention_with_more_arguments(arguments, how):
    attention = keras.layers.MultiHeadAttention(2, 3)
    calls = kept_dropped_inference(attention)
    q, v = tf.constant(queries()), tf.constant(queries()[::-1].copy())
    arguments = tf.nest.map_structure(lambda x: x if x is True else tf.constant(x), arguments)
    got = how(lambda q, v: [call(q, v, shortcut=q, **arguments) for call, _ in calls])(q, v)
    branch = attention(q, v, **arguments)
    for y, (_, factor) in zip(got, calls):
        np.testing.assert_allclose(y, q + factor * branch, atol=1e-6)


def test_the_masks_of_attention_have_an_effect():
    attention = keras.layers.MultiHeadAttention(2, 3)
    layer = StochasticDepth(attention, 1.0)
    q = tf.constant(queries())
    mask = tf.constant(ATTENTION["attention_mask"])
    outputs = [
        layer(q, q, **kwargs).numpy()
        for kwargs in ({}, {"attention_mask": mask}, {"use_causal_mask": True})
    ]
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3
    assert np.abs(outputs[0] - outputs[2]).max() > 1e-3
    assert np.abs(outputs[1] - outputs[2]).max() > 1e-3


def test_attention_in_a_functional_model_takes_tensors_and_flags_by_name():
    q = keras.Input((4, 3), name="q")
    mask = keras.Input((4, 4), dtype="bool", name="mask")
    attention = keras.layers.MultiHeadAttention(2, 3)
    y = StochasticDepth(attention, 0.7)(
        q, value=q, shortcut=q, attention_mask=mask, use_causal_mask=True
    )
    model = keras.Model([q, mask], y)
    x, allowed = queries(1), ATTENTION["attention_mask"]
    expected = x + 0.7 * attention(x, x, attention_mask=allowed, use_causal_mask=True).numpy()
    np.testing.assert_allclose(model([x, allowed]), expected, atol=1e-6)


def test_attention_scores_are_a_second_output():
    attention = keras.layers.MultiHeadAttention(2, 3)
    q = tf.constant(queries())
    for p, training, factor in [(1.0, True, 1.0), (0.0, True, 0.0), (0.7, False, 0.7)]:
        layer = StochasticDepth(attention, p)
        got = layer(q, q, return_attention_scores=True, training=training)
        expected = attention(q, q, return_attention_scores=True)
        assert len(got) == 2
        for a, b in zip(got, expected):
            np.testing.assert_allclose(a, factor * b.numpy(), atol=1e-6)


class TrainingRecorder(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.seen = []

    def call(self, x, training=None):
        self.seen.append(training)
        return x


@pytest.mark.parametrize("training", [True, False])
def test_the_layer_and_the_skip_are_told_whether_this_is_training(training):
    layer = StochasticDepth(TrainingRecorder(), 1.0, skip=TrainingRecorder())
    layer(tf.ones((1, 1)), training=True)  # build
    del layer.layer.seen[:], layer.skip.seen[:]
    layer.survival_prob = 1.0
    layer(tf.ones((1, 1)), training=training)
    layer.survival_prob = 0.0
    layer(tf.ones((1, 1)), training=training)
    assert training in layer.layer.seen
    assert set(layer.skip.seen) == {training}


# ------------------------------------------------------------------ masks


class MaskRecorder(keras.layers.Layer):
    """Passes its input on and keeps the mask it came with."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True
        self.seen = []

    def call(self, x, mask=None):
        self.seen.append(mask)
        return x


TOKENS = np.array([[3, 4, 0, 0], [5, 1, 2, 0]])
MASKED_BRANCHES = {
    "lstm": lambda: keras.layers.LSTM(3, return_sequences=True),
    "dense": lambda: keras.layers.Dense(3),
    "conv": lambda: keras.layers.Conv1D(3, 1),
    "sequential": lambda: keras.Sequential([keras.layers.Dense(3), keras.layers.Dropout(0.0)]),
}


@pytest.fixture(params=MASKED_BRANCHES)
def branch(request):
    return MASKED_BRANCHES[request.param]()


def test_the_mask_of_the_sum_is_that_of_the_add_layer(branch):
    x = keras.layers.Embedding(6, 3, mask_zero=True)(TOKENS)
    expected = mask_of(keras.layers.Add()([x, branch(x)]))
    for call, _ in kept_dropped_inference(branch):
        got = mask_of(call(x, shortcut=x))
        assert (got is None) == (expected is None)
        if expected is not None:
            np.testing.assert_array_equal(got, expected)


def test_masks_reach_the_layer_and_what_follows_as_with_add(branch):
    """A functional model with padded sequences: all of it equals the model made with `Add`."""
    tokens = keras.Input((None,), dtype="int32")
    embedding, last = keras.layers.Embedding(6, 3, mask_zero=True), keras.layers.LSTM(2)
    x = embedding(tokens)
    plain = keras.Model(tokens, last(keras.layers.Add()([x, branch(x)])))
    y = StochasticDepth(branch, 0.7, rescale="training")(x, shortcut=x)
    model = keras.Model(tokens, last(y))
    np.testing.assert_allclose(model(TOKENS), plain(TOKENS), atol=1e-6)
    layer = model.layers[2]
    assert isinstance(layer, StochasticDepth)
    layer.survival_prob = 1.0
    np.testing.assert_allclose(model(TOKENS, training=True), plain(TOKENS), atol=1e-6)


def test_the_padding_matters_to_that_comparison():
    x = keras.layers.Embedding(6, 3, mask_zero=True)(TOKENS)
    lstm = keras.layers.LSTM(3, return_sequences=True)
    unmasked = tf.constant(x.numpy())
    layer = StochasticDepth(lstm, 1.0)
    assert np.abs(layer(x) - layer(unmasked)).max() > 1e-3


@pytest.mark.parametrize("training", [True, False])
def test_without_a_shortcut_the_mask_is_that_of_the_layer(training):
    x = keras.layers.Embedding(6, 3, mask_zero=True)(TOKENS)
    recorder = MaskRecorder()
    for inner in (keras.layers.Dense(3), keras.layers.LSTM(3, return_sequences=True)):
        recorder(StochasticDepth(inner, 0.0)(x, training=training))
        np.testing.assert_array_equal(recorder.seen[-1], TOKENS != 0)


def test_a_mask_may_be_given_by_hand():
    lstm = keras.layers.LSTM(3, return_sequences=True)
    x = tf.constant(queries())
    mask = tf.constant([[True, True, False, False], [True, True, True, True]])
    got = StochasticDepth(lstm, 0.7)(x, mask=mask)
    np.testing.assert_allclose(got, 0.7 * lstm(x, mask=mask).numpy(), atol=1e-6)
    assert np.abs(got - 0.7 * lstm(x)).max() > 1e-3


def test_a_branch_of_one_mask_and_a_shortcut_of_another_as_with_add():
    """Keras 3's `Add` joins masks by "or", Keras 2's by "and"."""
    a = keras.layers.Embedding(6, 3, mask_zero=True)(np.array([[1, 0, 2, 0]]))
    b = keras.layers.Embedding(6, 3, mask_zero=True)(np.array([[1, 2, 0, 0]]))
    dense = keras.layers.Dense(3)
    got = mask_of(StochasticDepth(dense, 1.0)(a, shortcut=b, training=True))
    np.testing.assert_array_equal(got, mask_of(keras.layers.Add()([b, dense(a)])))
    assert got.numpy().sum() == (3 if hasattr(keras, "ops") else 1)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("masked", [False, True], ids=["shortcut without", "shortcut with a mask"])
def test_a_mask_made_inside_the_layer_comes_out(graph, masked):
    """Kept: as with `Add`. Dropped: that of the shortcut, for nothing else is left."""
    values = np.ones((1, 4, 3), "float32")
    values[:, 2:] = 0
    inner = keras.Sequential(
        [keras.layers.Masking(), keras.layers.SimpleRNN(3, return_sequences=True)]
    )
    layer = StochasticDepth(inner, 1.0)

    def mask(training):
        x = tf.constant(values)
        shortcut = tf.identity(x)
        if masked:
            shortcut._keras_mask = tf.constant([[False, True, True, True]])
        y = layer(x, shortcut=shortcut, training=training)
        summed = mask_of(keras.layers.Add()([shortcut, inner(x)]))
        return mask_of(y), summed, mask_of(shortcut)

    run = tf.function(mask) if graph else mask
    for training in (True, False):
        got, summed, _ = run(training)
        assert (got is None) == (summed is None)
        if got is not None:
            np.testing.assert_array_equal(got, summed)
    assert (got is None) == (hasattr(keras, "ops") and not masked)
    layer.survival_prob = 0.0
    got, _, own = run(True)
    if got is not None:
        np.testing.assert_array_equal(got, own if masked else np.ones((1, 4), bool))


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_mask_made_inside_a_layer_without_shortcut(graph):
    values = np.ones((1, 4, 3), "float32")
    values[:, 2:] = 0

    def mask(layer, training):
        return mask_of(layer(tf.constant(values), training=training))

    for skip, expected in ((None, [1, 1, 1, 1]), (keras.layers.Masking(), [1, 1, 0, 0])):
        for p, training in ((1.0, True), (0.0, False), (0.0, True)):
            layer = StochasticDepth(keras.layers.Masking(), p, skip=skip)
            run = tf.function(mask) if graph else mask
            kept = p or not training
            np.testing.assert_array_equal(
                run(layer, training), [[1, 1, 0, 0] if kept else expected]
            )


def test_a_layer_that_loses_the_mask_gives_none():
    x = keras.layers.Embedding(6, 3, mask_zero=True)(TOKENS)
    for inner in (
        keras.layers.Conv1D(3, 1),
        keras.Sequential([keras.layers.Dense(3), keras.layers.Conv1D(3, 1)]),
    ):
        for call, _ in kept_dropped_inference(inner):
            assert mask_of(call(x)) is None
        assert StochasticDepth(inner, 0.5).compute_mask(x, mask_of(x)) is None
    inner = keras.layers.LSTM(3, return_sequences=True)
    assert StochasticDepth(inner, 0.5).compute_mask(x, mask_of(x)) is mask_of(x)


@pytest.mark.parametrize("with_shortcut", [False, True])
def test_supports_masking_false_stops_the_mask(with_shortcut):
    x = keras.layers.Embedding(6, 3, mask_zero=True)(TOKENS)
    layer = StochasticDepth(keras.layers.Dense(3), 0.5, rescale="training", supports_masking=False)
    for training in (False, True):
        y = layer(x, training=training, **({"shortcut": x} if with_shortcut else {}))
        recorder = MaskRecorder()
        recorder(y)
        assert recorder.seen == [None]
    assert layer.compute_mask(x, mask_of(x)) is None
    assert mask_of(x) is not None


# ------------------------------------------------------------------ shapes

SHAPED = {
    "dense": (lambda: keras.layers.Dense(5), (None, 3), (None, 5)),
    "conv": (lambda: keras.layers.Conv2D(4, 3, padding="same"), (2, None, 8, 3), (2, None, 8, 4)),
    "strided": (lambda: keras.layers.Conv2D(4, 3, strides=2), (None, 9, 9, 3), (None, 4, 4, 4)),
    "flatten": (lambda: keras.layers.Flatten(), (None, 2, 3), (None, 6)),
}


@pytest.mark.parametrize("case", SHAPED)
def test_compute_output_shape(case):
    make, shape, expected = SHAPED[case]
    assert tuple(StochasticDepth(make()).compute_output_shape(shape)) == expected


def test_compute_output_shape_of_nested_structures():
    shapes = {"a": (None, 2), "b": (None, 2)}
    total, rest = StochasticDepth(SumAndDifference()).compute_output_shape(shapes)
    assert tuple(total) == (None, 2)
    assert tuple(rest["difference"]) == (None, 2)


@pytest.mark.parametrize("case", SHAPED)
def test_symbolic_output_has_the_shape_of_the_layers(case):
    make, shape, expected = SHAPED[case]
    x = keras.Input(batch_size=shape[0], shape=shape[1:])
    assert tuple(StochasticDepth(make())(x).shape) == expected


@pytest.mark.parametrize("training", [True, False])
def test_static_shape_survives_in_a_graph(training):
    layer = StochasticDepth(keras.layers.Conv2D(3, 3, padding="same"), 0.7)
    seen = []

    @tf.function(input_signature=[tf.TensorSpec((None, 8, 8, 3))])
    def run(x):
        seen.append(layer(x, shortcut=x, training=training).shape.as_list())
        seen.append(layer(x, training=training).shape.as_list())

    run.get_concrete_function()
    assert seen[-2:] == [[None, 8, 8, 3]] * 2


UNKNOWN = [tf.TensorSpec((None, None, None, 3))]


def images(height, width, batch=2):
    return tf.random.normal((batch, height, width, 3))


@pytest.mark.parametrize("jit", [False, True])
def test_unknown_image_sizes(jit):
    """One trace for images of all sizes: dropped they are the shortcut, or zeros of its shape."""
    conv = keras.layers.Conv2D(3, 3, padding="same", bias_initializer="ones")
    kept, dropped = StochasticDepth(conv, 1.0), StochasticDepth(conv, 0.0)

    @tf.function(input_signature=UNKNOWN, jit_compile=jit)
    def run(x):
        return (
            dropped(x, shortcut=x, training=True),
            dropped(x, training=True),
            kept(x, shortcut=x, training=True),
            kept(x, training=True),
        )

    for x in (images(5, 7), images(8, 4, batch=3)):
        got = value(run(x))
        np.testing.assert_array_equal(got[0], x)
        np.testing.assert_array_equal(got[1], np.zeros(x.shape))
        np.testing.assert_allclose(got[2], x + conv(x), atol=1e-5)
        np.testing.assert_allclose(got[3], conv(x), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: keras.layers.Permute((2, 1, 3)), (2, 7, 5, 3)),
        (lambda: keras.layers.GlobalAveragePooling2D(), (2, 3)),
        (lambda: keras.layers.Lambda(lambda x: x[:, :, 0]), (2, 5, 3)),
        (lambda: keras.layers.Lambda(lambda x: x[:, 0, :, :1]), (2, 7, 1)),
    ],
    ids=["swapped", "pooled", "first axis", "second axis"],
)
def test_zeros_follow_the_axis_of_the_input_that_the_layer_follows(make, expected):
    layer = StochasticDepth(make(), 0.0)
    run = tf.function(lambda x: layer(x, training=True), input_signature=UNKNOWN)
    np.testing.assert_array_equal(run(images(5, 7)), np.zeros(expected))


UNFORESEEABLE = {
    "strided": lambda: keras.layers.Conv2D(3, 3, strides=2, padding="same"),
    "valid": lambda: keras.layers.Conv2D(3, 3),
    "upsampled": lambda: keras.layers.UpSampling2D(),
    "flattened": lambda: keras.layers.Reshape((-1, 3)),
}


@pytest.mark.parametrize("case", UNFORESEEABLE)
def test_zeros_of_a_size_nobody_knows_are_a_clear_error(case):
    layer = StochasticDepth(UNFORESEEABLE[case](), 0.5, name="depth")
    run = tf.function(lambda x: layer(x, training=True), input_signature=UNKNOWN)
    with pytest.raises(ValueError, match="is not known before it runs, .* Pass `shortcut=`"):
        run(images(8, 8))


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_a_shortcut_or_a_skip_or_a_known_size_is_the_way_out(p):
    conv, side = (keras.layers.Conv2D(3, 3, strides=2, padding="same") for _ in range(2))
    summed, skipped, plain = (StochasticDepth(conv, p, skip=skip) for skip in (None, side, None))

    @tf.function(input_signature=UNKNOWN)
    def unknown(x):
        return summed(x, shortcut=side(x), training=True), skipped(x, training=True)

    x = images(8, 8)
    got = [*unknown(x), tf.function(lambda x: plain(x, training=True))(x), plain(x, training=True)]
    f, s = conv(x), side(x)
    expected = [s + f, f, f, f] if p else [s, s, 0 * f, 0 * f]
    for a, b in zip(got, expected):
        np.testing.assert_allclose(a, b, atol=1e-5)


# ------------------------------------------------------------------ in models and around them


def branch_model(kind):
    """A branch (batch, 2) -> (batch, 2) of two layers, as a model of this kind."""
    first, second = keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(2)
    if kind == "sequential":
        return keras.Sequential([first, second])
    if kind == "functional":
        x = keras.Input((2,))
        return keras.Model(x, second(first(x)))

    class Branch(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = first, second

        def call(self, x):
            return self.second(self.first(x))

    return Branch()


KINDS = ["sequential", "functional", "subclassed"]
POINTS = np.array([[1.0, -2.0], [0.5, 3.0], [2.0, 2.0]], "float32")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_as_the_layer(kind, how):
    inner = branch_model(kind)
    kept, dropped = StochasticDepth(inner, 0.7, seed=KEPT), StochasticDepth(inner, 0.0)
    x = tf.constant(POINTS)
    got = how(lambda x: (kept(x, training=True), dropped(x, training=True), kept(x)))(x)
    expected = inner(x).numpy()
    np.testing.assert_allclose(got[0], expected, atol=1e-6)
    np.testing.assert_array_equal(got[1], np.zeros((3, 2)))
    np.testing.assert_allclose(got[2], 0.7 * expected, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_as_the_layer_trains_within_a_functional_model(kind):
    x = keras.Input((2,))
    inner = branch_model(kind)
    model = keras.Model(x, StochasticDepth(inner, 0.7, seed=DROPPED)(x, shortcut=x))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    before = [w.copy() for w in inner.get_weights()]
    assert len(before) == 4
    losses = [model.train_on_batch(POINTS, 2 * POINTS) for _ in range(2)]  # dropped, then kept
    assert losses[0] == pytest.approx(np.mean(POINTS**2), rel=1e-5)
    assert any(np.abs(a - b).max() > 0 for a, b in zip(before, inner.get_weights()))


def test_in_a_sequential_model():
    dense = affine(2.0, 2.0)
    model = keras.Sequential([keras.Input((1,)), StochasticDepth(dense, 0.7), affine(10.0)])
    x = tf.constant([[4.0]])
    assert float(model(x)[0, 0]) == pytest.approx(70.0)
    model.layers[0].survival_prob = 1.0
    assert float(model(x, training=True)[0, 0]) == pytest.approx(100.0)
    model.layers[0].survival_prob = 0.0
    assert float(model(x, training=True)[0, 0]) == 0.0


def test_in_a_sequential_model_without_an_input():
    model = keras.Sequential([StochasticDepth(affine(2.0), 0.0), affine(10.0)])
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)
    assert len(model.layers[0].layer.weights) == 2


class Residual(keras.Model):
    def __init__(self, survival_prob, seed=None):
        super().__init__()
        self.depth = StochasticDepth(keras.layers.Dense(2), survival_prob, seed=seed)
        self.head = keras.layers.Dense(1)

    def call(self, x, training=None):
        return self.head(self.depth(x, shortcut=x, training=training))


@pytest.mark.parametrize("eagerly", [True, False])
@pytest.mark.parametrize("p", [0.0, 1.0])
def test_in_a_subclassed_model(eagerly, p):
    model = Residual(p)
    model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=eagerly)
    model.fit(POINTS, POINTS[:, :1], batch_size=1, epochs=1, verbose=0, shuffle=False)
    before = model.depth.layer.get_weights()
    model.fit(POINTS, POINTS[:, :1], batch_size=1, epochs=1, verbose=0, shuffle=False)
    moved = any(np.abs(a - b).max() > 0 for a, b in zip(before, model.depth.layer.get_weights()))
    assert moved == (p == 1.0)
    assert get_survival_probs(model) == [p]
    predicted = model.predict(POINTS, verbose=0)
    x = POINTS + p * model.depth.layer(POINTS).numpy()
    np.testing.assert_allclose(predicted, model.head(x), atol=1e-5)


def test_inference_paths_of_a_model_do_not_drop():
    """`predict`, `evaluate` and a plain call give shortcut + p * branch, step after step."""
    x = keras.Input((1,))
    model = keras.Model(x, StochasticDepth(affine(2.0, 2.0), 0.2, seed=1)(x, shortcut=x))
    model.compile("sgd", "mse")
    data = np.full((10, 1), 4.0, "float32")
    np.testing.assert_allclose(model.predict(data, batch_size=1, verbose=0), 6.0, rtol=1e-6)
    np.testing.assert_allclose(model(data), 6.0, rtol=1e-6)
    loss = model.evaluate(data, np.zeros((10, 1)), batch_size=1, verbose=0)
    assert loss == pytest.approx(36.0, rel=1e-5)


def test_one_layer_called_twice_draws_twice():
    layer = StochasticDepth(affine(1.0), 0.7, seed=1)
    x = tf.ones((1, 1))
    run = tf.function(lambda: (layer(x, training=True), layer(x, training=True)))
    pairs = [tuple(float(y[0, 0]) for y in run()) for _ in range(20)]
    assert set(pairs) == {(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)}


# ------------------------------------------------------------------ deferred build


def test_the_first_call_makes_all_weights_even_if_dropped(how):
    for p, training in [(0.0, True), (1.0, True), (0.0, False), (1.0, False)]:
        layer = StochasticDepth(keras.layers.Dense(3), p, skip=keras.layers.Dense(3))
        how(lambda x: layer(x, training=training))(tf.ones((2, 2)))  # noqa: B023
        assert [tuple(w.shape) for w in layer.layer.weights] == [(2, 3), (3,)]
        assert [tuple(w.shape) for w in layer.skip.weights] == [(2, 3), (3,)]
        assert len(layer.trainable_weights) == 4
        assert np.abs(layer.layer.get_weights()[0]).max() > 0


@pytest.mark.parametrize("kind", ["sequential", "subclassed"])
def test_the_first_call_makes_the_weights_of_a_model_even_if_dropped(kind):
    layer = StochasticDepth(branch_model(kind), 0.0)
    layer(tf.ones((2, 2)), training=True)
    assert [tuple(w.shape) for w in layer.trainable_weights] == [(2, 3), (3,), (3, 2), (2,)]


def test_the_first_call_makes_the_weights_of_attention_even_if_dropped():
    layer = StochasticDepth(keras.layers.MultiHeadAttention(2, 3), 0.0)
    q = tf.constant(queries())
    got = layer(q, q, shortcut=q, training=True)
    np.testing.assert_array_equal(got, q)
    assert len(layer.trainable_weights) == 8


def test_a_first_dropped_call_does_not_run_the_layer():
    ran = []

    def spy(x):
        return tf.ensure_shape(tf.py_function(lambda y: ran.append(1) or y, [x], x.dtype), x.shape)

    x = tf.ones((1, 1))
    StochasticDepth(keras.layers.Lambda(spy), 0.0)(x, training=True)
    assert ran == []
    StochasticDepth(keras.layers.Lambda(spy), 1.0)(x, training=True)
    assert ran == [1]


def test_build_makes_the_weights_too():
    layer = StochasticDepth(keras.layers.Dense(3), skip=keras.layers.Dense(3))
    layer.build((None, 2))
    assert layer.built
    assert [tuple(w.shape) for w in layer.layer.weights] == [(2, 3), (3,)]
    assert [tuple(w.shape) for w in layer.skip.weights] == [(2, 3), (3,)]


# ------------------------------------------------------------------ survival_prob


def test_survival_prob_reads_as_it_was_given():
    for p in (0.7, 0.1, 1 / 3, 0, 1, np.float32(0.3), np.float64(0.3)):
        got = StochasticDepth(affine(1.0), p).survival_prob
        assert type(got) is float
        assert got == pytest.approx(float(p), rel=1e-7)
    assert StochasticDepth(affine(1.0), 0.7).survival_prob == 0.7


def test_survival_prob_is_a_half_by_default():
    assert StochasticDepth(affine(1.0)).survival_prob == 0.5


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_assigning_survival_prob_acts_without_a_new_trace(jit, training):
    layer = StochasticDepth(affine(2.0, 2.0), 0.7)
    traces = []

    @tf.function(jit_compile=jit)
    def run(x):
        traces.append(1)
        return layer(x, training=training)

    got = []
    for p in (0.0, 1.0, 0.0, 1.0):
        layer.survival_prob = p
        assert layer.survival_prob == p
        got.append(float(run(tf.constant([[4.0]]))[0, 0]))
    assert got == [0.0, 10.0, 0.0, 10.0]
    traced_by_now = len(traces)
    layer.survival_prob = 1.0
    run(tf.constant([[4.0]]))
    assert len(traces) == traced_by_now <= 2  # tf.function may trace a first time to make variables


def test_assigning_survival_prob_acts_in_a_compiled_model_without_a_new_trace():
    traces = []

    class Counted(keras.layers.Layer):
        def call(self, x):
            traces.append(1)
            return 2.0 * x

    x = keras.Input((1,))
    layer = StochasticDepth(Counted(), 0.0)
    model = keras.Model(x, layer(x, shortcut=x))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    data, zeros = np.ones((2, 1)), np.zeros((2, 1))
    model.fit(data, zeros, verbose=0)
    traced = len(traces)
    losses = []
    for p in (0.0, 1.0, 0.0):
        layer.survival_prob = p
        losses.append(model.fit(data, zeros, verbose=0).history["loss"][0])
    assert losses == pytest.approx([1.0, 9.0, 1.0])
    assert len(traces) == traced


def test_0_and_1_force_the_switch_at_every_step(how):
    never, always = StochasticDepth(affine(1.0), 0.0), StochasticDepth(affine(1.0), 1.0)
    run = how(lambda x: (never(x, training=True), always(x, training=True)))
    got = {tuple(float(y[0, 0]) for y in run(tf.ones((1, 1)))) for _ in range(50)}
    assert got == {(0.0, 1.0)}


def test_a_refused_value_leaves_the_old_one():
    layer = StochasticDepth(affine(1.0), 0.7)
    with pytest.raises(ValueError, match="`survival_prob` must be in"):
        layer.survival_prob = 1.5
    assert layer.survival_prob == 0.7


# ------------------------------------------------------------------ the inference graph


UNWANTED = ("If", "Case", "While", "Random", "Assign", "Switch")


@formula
def test_the_inference_graph_has_no_if_and_no_randomness(
    rescale, skip, shortcut, kept, dropped, inference
):
    layer = formula_layer(0.7, rescale, skip)
    kwargs = {"shortcut": tf.constant([[100.0]])} if shortcut else {}

    @tf.function(input_signature=[tf.TensorSpec((None, 1))])
    def run(x):
        return [layer(x, training=t, **kwargs) for t in (False, None, tf.constant(False))]

    operations = operations_in(run.get_concrete_function())
    assert "MatMul" in operations
    assert not [op for op in operations if any(s in op for s in UNWANTED)], operations


def test_a_training_graph_has_them():
    layer = StochasticDepth(affine(1.0))
    function = tf.function(lambda x: layer(x, training=True))
    operations = operations_in(function.get_concrete_function(tf.TensorSpec((None, 1))))
    assert [op for op in operations if "If" in op]
    assert [op for op in operations if "Random" in op]
    assert [op for op in operations if "Assign" in op]


def test_the_inference_graph_of_a_model_has_none():
    x = keras.Input((None, None, 3))
    y = StochasticDepth(keras.layers.Conv2D(3, 3, padding="same"))(x, shortcut=x)
    y = StochasticDepth(keras.layers.Dropout(0.5), skip="identity")(y)
    model = keras.Model(x, y)
    function = tf.function(lambda x: model(x)).get_concrete_function(*UNKNOWN)
    operations = operations_in(function)
    assert "Conv2D" in operations
    assert not [op for op in operations if any(s in op for s in UNWANTED)], operations


def test_inference_does_not_use_up_switches():
    kwargs = {"survival_prob": 0.7, "seed": 1}
    layers = [StochasticDepth(affine(1.0), **kwargs) for _ in range(2)]
    x = tf.ones((1, 1))
    layers[0](x, training=False)
    switches = [[float(layer(x, training=True)[0, 0]) for _ in range(20)] for layer in layers]
    assert switches[0] == switches[1]


# ------------------------------------------------------------------ config


def configured():
    x = keras.Input((2,))
    return {
        "defaults": StochasticDepth(keras.layers.Dense(2, name="inner")),
        "all": StochasticDepth(
            keras.layers.Dense(2, name="inner"),
            0.3,
            mode="batch",
            rescale="training",
            skip="identity",
            seed=17,
            name="depth",
            trainable=False,
            dtype="mixed_bfloat16",
            supports_masking=False,
        ),
        "skip layer": StochasticDepth(
            keras.layers.Dense(3), 0.3, skip=keras.layers.Dense(3, use_bias=False, name="side")
        ),
        "model": StochasticDepth(
            keras.Model(x, keras.layers.Dense(2)(x), name="inner"), skip=branch_model("sequential")
        ),
    }


@pytest.mark.parametrize("case", ["defaults", "all", "skip layer", "model"])
def test_config_round_trip(case):
    layer = configured()[case]
    config = json.dumps(layer.get_config())
    copy = StochasticDepth.from_config(json.loads(config))
    assert json.dumps(copy.get_config()) == config
    assert type(copy.layer) is type(layer.layer)
    assert copy.layer.name == layer.layer.name
    assert type(copy.skip) is type(layer.skip)


def test_config_holds_every_argument():
    layer = configured()["all"]
    config = layer.get_config()
    expected = {
        "survival_prob": 0.3,
        "mode": "batch",
        "rescale": "training",
        "skip": "identity",
        "seed": 17,
        "name": "depth",
        "trainable": False,
        "supports_masking": False,
    }
    assert {key: config[key] for key in expected} == expected
    copy = StochasticDepth.from_config(config)
    assert copy.survival_prob == 0.3
    assert (copy.mode, copy.rescale, copy.skip, copy.seed) == ("batch", "training", "identity", 17)
    assert (copy.name, copy.trainable) == ("depth", False)
    assert copy.get_config()["supports_masking"] is False
    assert copy.compute_dtype == "bfloat16"


def test_config_holds_the_survival_prob_of_now():
    layer = StochasticDepth(affine(1.0), 0.3)
    layer.survival_prob = 0.6
    assert StochasticDepth.from_config(layer.get_config()).survival_prob == 0.6


def test_from_config_leaves_the_config_alone():
    config = configured()["skip layer"].get_config()
    before = json.dumps(config)
    StochasticDepth.from_config(config)
    assert json.dumps(config) == before


def test_it_is_registered_under_its_own_name():
    name = keras.utils.get_registered_name(StochasticDepth)
    assert name == "tfa_stochastic_depth>StochasticDepth"
    assert keras.utils.get_registered_object(name) is StochasticDepth


def test_serialize_and_deserialize_without_custom_objects():
    layer = configured()["skip layer"]
    copy = keras.layers.deserialize(keras.layers.serialize(layer))
    assert type(copy) is StochasticDepth
    assert copy.get_config() == layer.get_config()


class Unregistered(keras.layers.Layer):
    def call(self, x):
        return 3.0 * x


def test_from_config_takes_the_custom_objects_of_the_layers_inside():
    config = StochasticDepth(Unregistered(), skip=Unregistered()).get_config()
    copy = StochasticDepth.from_config(config, custom_objects={"Unregistered": Unregistered})
    assert type(copy.layer) is type(copy.skip) is Unregistered


def test_a_saved_model_loads_without_custom_objects_and_computes_the_same(tmp_path):
    x = keras.Input((2,))
    y = StochasticDepth(keras.layers.Dense(2), 0.7)(x, shortcut=x)
    y = StochasticDepth(keras.layers.Dense(3), 0.7, skip=keras.layers.Dense(3))(y)
    model = keras.Model(x, y)
    model.layers[1].survival_prob = 0.25
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(POINTS), model(POINTS), atol=1e-6)
    assert get_survival_probs(loaded) == [0.25, 0.7]


# ------------------------------------------------------------------ trainable


def test_the_trainable_weights_are_those_of_the_layer_and_the_skip():
    layer = StochasticDepth(keras.layers.Dense(2), skip=keras.layers.Dense(2))
    layer.build((None, 2))
    own = [*layer.layer.trainable_weights, *layer.skip.trainable_weights]
    assert {id(w) for w in layer.trainable_weights} == {id(w) for w in own}
    assert len(layer.trainable_weights) == 4


def test_survival_prob_and_the_seed_are_non_trainable_weights():
    layer = StochasticDepth(keras.layers.Dense(2))
    layer.build((None, 2))
    assert len(layer.non_trainable_variables) == 2
    assert not any("survival" in w.name for w in layer.trainable_weights)


def test_trainable_reaches_the_layer_inside():
    layer = StochasticDepth(keras.layers.Dense(2), skip=keras.layers.Dense(2))
    layer.build((None, 2))
    layer.trainable = False
    assert not layer.layer.trainable and not layer.skip.trainable
    assert layer.trainable_weights == []
    layer.trainable = True
    assert len(layer.trainable_weights) == 4


def test_trainable_false_from_the_start_and_inside_only():
    outer = StochasticDepth(keras.layers.Dense(2), trainable=False)
    inner = StochasticDepth(keras.layers.Dense(2, trainable=False))
    for layer in (outer, inner):
        layer.build((None, 2))
        assert layer.trainable_weights == []
        assert len(layer.layer.weights) == 2


def test_a_frozen_layer_still_drops():
    layer = StochasticDepth(affine(1.0), 0.0, trainable=False)
    assert float(layer(tf.ones((1, 1)), training=True)[0, 0]) == 0.0


# ------------------------------------------------------------------ all layers of a model


def three_deep():
    """A model whose three layers are in order of running, the middle one in a nested model."""
    x = keras.Input((1,))
    inner = keras.Model(x, StochasticDepth(affine(1.0), 0.8, name="middle")(x, shortcut=x))
    y = keras.Input((1,))
    z = StochasticDepth(affine(1.0), 0.9, name="first")(y, shortcut=y)
    z = StochasticDepth(affine(1.0), 0.7, name="last")(inner(z))
    return keras.Model(y, z)


def test_get_survival_probs_in_the_order_of_the_model():
    assert get_survival_probs(three_deep()) == [0.9, 0.8, 0.7]


def test_set_survival_probs_in_the_order_of_the_model():
    model = three_deep()
    set_survival_probs(model, [0.1, 0.2, 0.3])
    assert get_survival_probs(model) == [0.1, 0.2, 0.3]
    assert model.get_layer("first").survival_prob == 0.1
    assert model.get_layer("last").survival_prob == 0.3


@pytest.mark.parametrize("make", [tuple, np.array, iter], ids=lambda f: f.__name__)
def test_set_survival_probs_takes_any_sequence(make):
    model = three_deep()
    set_survival_probs(model, make([0.0, 1.0, 0.5]))
    assert get_survival_probs(model) == [0.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("probs", "error", "match"),
    [
        ([0.1, 0.2], ValueError, "`probs` .* there are 3 layers. Received: a sequence of 2."),
        ([0.1] * 4, ValueError, "`probs` .* there are 3 layers. Received: a sequence of 4."),
        ([0.1, 0.2, 1.2], ValueError, r"`probs\[2\]` must be in \[0, 1\].*Received: 1.2."),
        ([0.1, "x", 0.2], TypeError, r"`probs\[1\]` must be a number .*Received: 'x'"),
        (0.5, TypeError, "`probs` must be .* one number per layer.*Received: 0.5"),
        ("0.5", TypeError, "`probs` must be .*Received: '0.5'"),
    ],
    ids=repr,
)
def test_set_survival_probs_refuses_and_assigns_nothing(probs, error, match):
    model = three_deep()
    with pytest.raises(error, match=match):
        set_survival_probs(model, probs)
    assert get_survival_probs(model) == [0.9, 0.8, 0.7]


def test_survival_probs_holds_for_the_body_of_a_with():
    model = three_deep()
    before = get_survival_probs(model)
    with survival_probs(model, [0, 1, 0]):
        assert get_survival_probs(model) == [0.0, 1.0, 0.0]
        with survival_probs(model, [0.1, 0.2, 0.3]):
            assert get_survival_probs(model) == [0.1, 0.2, 0.3]
        assert get_survival_probs(model) == [0.0, 1.0, 0.0]
    assert get_survival_probs(model) == before


def test_survival_probs_gives_them_back_after_an_error():
    model = three_deep()
    with pytest.raises(ZeroDivisionError):
        with survival_probs(model, [0, 1, 0]):
            raise ZeroDivisionError
    assert get_survival_probs(model) == [0.9, 0.8, 0.7]


def test_survival_probs_gives_back_every_bit():
    model = three_deep()
    values = [1 / 3, np.float32(0.1), 1e-7]
    set_survival_probs(model, values)
    with survival_probs(model, [0, 0, 0]):
        pass
    assert np.float32(get_survival_probs(model)).tolist() == np.float32(values).tolist()


@pytest.mark.parametrize("probs", [[0, 1], [0, 1, 2], 0.5], ids=repr)
def test_survival_probs_refuses_and_changes_nothing(probs):
    model = three_deep()
    with pytest.raises((TypeError, ValueError), match="`probs"):
        with survival_probs(model, probs):
            raise AssertionError("the body ran")
    assert get_survival_probs(model) == [0.9, 0.8, 0.7]


def test_survival_probs_acts_in_a_compiled_model_without_a_new_trace():
    model = three_deep()
    traces = []

    @tf.function
    def run(x):
        traces.append(1)
        return model(x, training=True)

    x = tf.ones((1, 1))
    with survival_probs(model, [1, 0, 1]):
        assert run(x).numpy() == 2.0  # 1 + 1, and then the last one on its own
    with survival_probs(model, [0, 0, 0]):
        assert run(x).numpy() == 0.0
    with survival_probs(model, [1, 1, 1]):
        assert run(x).numpy() == 4.0
    assert len(traces) == 1


def test_models_without_such_layers():
    model = keras.Sequential([keras.Input((1,)), affine(1.0)], name="plain")
    enter = lambda m: survival_probs(m, []).__enter__()  # noqa: E731
    for call in (get_survival_probs, lambda m: set_survival_probs(m, []), enter):
        with pytest.raises(ValueError, match="'plain' holds no StochasticDepth .*wrap_residuals"):
            call(model)
        with pytest.raises(TypeError, match="`model` must be a keras.Model. Received: 3"):
            call(3)
