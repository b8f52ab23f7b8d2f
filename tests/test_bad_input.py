"""What `StochasticDepth` refuses, and what it says: the argument, the expected, the way out."""

import math
import re

import numpy as np
import pytest
import tensorflow as tf

from tfa_stochastic_depth import StochasticDepth

keras = tf.keras

HOW = {"eager": lambda function: function, "graph": tf.function}


@pytest.fixture(params=HOW)
def how(request):
    return HOW[request.param]


def has(*parts):
    """A pattern for `pytest.raises(match=)`: these texts, in this order, as they stand."""
    return "(?s)" + ".*".join(map(re.escape, parts))


def dense(units=3, **kwargs):
    return keras.layers.Dense(units, **kwargs)


# ------------------------------------------------------------------ the constructor

PROBS = {
    "negative": (-0.1, ValueError, "Received: -0.1."),
    "above one": (1.01, ValueError, "Received: 1.01."),
    "percent": (80, ValueError, "Received: 80."),
    "nan": (math.nan, ValueError, "Received: nan."),
    "numpy nan": (np.float32("nan"), ValueError, "nan"),
    "infinite": (math.inf, ValueError, "Received: inf."),
    "tensor": (tf.constant(0.5), TypeError, "Received: <tf.Tensor"),
    "variable": (tf.Variable(0.5), TypeError, "Received: <tf.Variable"),
    "array": (np.array(0.5), TypeError, "Received: array(0.5) (of type ndarray)."),
    "string": ("0.5", TypeError, "Received: '0.5' (of type str)."),
    "bool": (True, TypeError, "Received: True (of type bool)."),
    "none": (None, TypeError, "Received: None (of type NoneType)."),
    "list": ([0.5], TypeError, "Received: [0.5] (of type "),
}
probs = pytest.mark.parametrize("case", PROBS)


@probs
def test_survival_prob(case):
    value, error, received = PROBS[case]
    with pytest.raises(error, match=has("`survival_prob` must be ", "in [0, 1]", received)):
        StochasticDepth(dense(), value)


@probs
def test_assigned_survival_prob(case):
    value, error, received = PROBS[case]
    layer = StochasticDepth(dense(), 0.7)
    with pytest.raises(error, match=has("`survival_prob` must be ", "in [0, 1]", received)):
        layer.survival_prob = value
    assert layer.survival_prob == 0.7


@pytest.mark.parametrize(
    ("layer", "received"),
    [
        (keras.layers.Dense, "Dense'> (of type "),
        (tf.nn.relu, "(of type function)."),
        (lambda x: x, "(of type function)."),
        (None, "Received: None (of type NoneType)."),
        ("dense", "Received: 'dense' (of type str)."),
        (0.8, "Received: 0.8 (of type float)."),
        ([], "Received: [] (of type list)."),
        (tf.Module(), "(of type Module)."),
    ],
    ids=["class", "function", "lambda", "None", "string", "number", "list", "module"],
)
def test_layer_that_is_no_layer(layer, received):
    match = has("`layer` must be a keras layer or model (an object, not a class).", received)
    with pytest.raises(TypeError, match=match):
        StochasticDepth(layer)


@pytest.mark.parametrize(
    ("option", "value", "error", "expected"),
    [
        ("mode", "sample", ValueError, "(each sample on its own). Received: 'sample'."),
        (
            "mode",
            None,
            ValueError,
            '`mode` must be "batch" (one switch for the whole batch) or "row"',
        ),
        ("rescale", "train", ValueError, '"inference" or "training". Received: \'train\'.'),
        ("rescale", None, ValueError, '`rescale` must be "inference" or "training". Received: N'),
        ("rescale", True, ValueError, '`rescale` must be "inference" or "training". Received: T'),
        ("skip", "zeros", ValueError, "(the inputs) or a keras layer. Received: 'zeros'."),
        ("skip", 0, ValueError, '`skip` must be None (zeros), "identity"'),
        ("skip", keras.layers.Dense, ValueError, '`skip` must be None (zeros), "identity"'),
        ("skip", tf.identity, ValueError, '`skip` must be None (zeros), "identity"'),
        ("seed", "one", TypeError, "`seed` must be an integer or None. Received: 'one'."),
        ("seed", 1.0, TypeError, "`seed` must be an integer or None. Received: 1.0."),
        ("seed", True, TypeError, "`seed` must be an integer or None. Received: True."),
        ("seed", tf.constant(1), TypeError, "`seed` must be an integer or None. Received: <tf.T"),
    ],
)
def test_options(option, value, error, expected):
    with pytest.raises(error, match=has(expected)):
        StochasticDepth(dense(), **{option: value})


@pytest.mark.parametrize("seed", [0, 2**31, np.int64(7)])
def test_seeds_that_are_fine(seed):
    layer = StochasticDepth(dense(), 0.5, seed=seed)
    assert layer(tf.ones((2, 2)), training=True).shape == (2, 3)


def test_an_unknown_option():
    with pytest.raises((TypeError, ValueError), match="drop_rate"):
        StochasticDepth(dense(), drop_rate=0.5)


def test_options_are_named():
    with pytest.raises(TypeError, match="positional argument"):
        StochasticDepth(dense(), 0.5, "batch")


# ------------------------------------------------------------------ shapes

SHORTCUTS = {
    "wider": ((2, 4), "(2, 4)"),
    "narrower": ((2, 2), "(2, 2)"),
    "broadcast over columns": ((2, 1), "(2, 1)"),
    "broadcast over rows": ((1, 3), "(1, 3)"),
    "of lower rank": ((3,), "(3,)"),
    "of higher rank": ((1, 2, 3), "(1, 2, 3)"),
    "a scalar": ((), "()"),
}


@pytest.mark.parametrize(("p", "training"), [(1.0, True), (0.0, True), (0.7, False)])
@pytest.mark.parametrize("case", SHORTCUTS)
def test_shortcut_of_another_shape(case, p, training, how):
    """Kept, dropped and at inference alike."""
    shape, received = SHORTCUTS[case]
    layer = StochasticDepth(dense(name="inner"), p, name="depth")
    run = how(lambda x, a: layer(x, shortcut=a, training=training))
    expected = "`shortcut` must have the shape of the output of 'inner', (2, 3), in StochasticDept"
    with pytest.raises(ValueError, match=has(expected, "'depth'", f"Received: {received}.")):
        run(tf.ones((2, 2)), tf.ones(shape))


@pytest.mark.parametrize("layer", [dense, lambda: keras.Sequential([keras.Input((4,)), dense()])])
def test_shortcut_of_another_shape_in_a_functional_model(layer):
    x = keras.Input((4,))
    with pytest.raises(ValueError, match=has("`shortcut` must have the shape", "Received: (None")):
        StochasticDepth(layer())(x, shortcut=x)


def test_shortcut_of_another_shape_says_what_to_do():
    with pytest.raises(ValueError, match="project the shortcut, or pass the projection as `skip`"):
        StochasticDepth(dense())(tf.ones((2, 2)), shortcut=tf.ones((2, 2)))


@pytest.mark.parametrize(("p", "training"), [(1.0, True), (0.0, True), (0.7, False)])
@pytest.mark.parametrize("count", [1, 3])
def test_shortcut_of_another_structure(count, p, training):
    two = keras.layers.Lambda(lambda x: (x, x))
    layer = StochasticDepth(two, p)
    shortcut = tuple(tf.ones((2, 2)) for _ in range(count))
    received = f"Received: {((2, 2),) * count}."
    with pytest.raises(ValueError, match=has("`shortcut` must have the shape", received)):
        layer(tf.ones((2, 2)), shortcut=shortcut, training=training)


@pytest.mark.parametrize(("p", "training"), [(1.0, True), (0.0, True), (0.7, False)])
@pytest.mark.parametrize("skip", ["identity", "layer"])
def test_shortcut_with_a_skip(skip, p, training, how):
    layer = StochasticDepth(dense(2), p, skip=dense(2) if skip == "layer" else skip)
    run = how(lambda x: layer(x, shortcut=x, training=training))
    with pytest.raises(
        ValueError, match=has("`shortcut` goes with `skip=None`", "Received: a sho")
    ):
        run(tf.ones((2, 2)))


@pytest.mark.parametrize("skip", ["identity", "layer"])
def test_shortcut_with_a_skip_in_a_functional_model(skip):
    x = keras.Input((2,))
    layer = StochasticDepth(dense(2), skip=dense(2) if skip == "layer" else skip)
    with pytest.raises(ValueError, match="`shortcut` goes with `skip=None`"):
        layer(x, shortcut=x)


@pytest.mark.parametrize("p", [1.0, 0.0])
def test_shortcut_with_a_skip_in_the_first_training_step(p, how):
    """Whether the switch is on or off."""
    layer = StochasticDepth(dense(2), p, skip="identity")
    with pytest.raises(ValueError, match="`shortcut` goes with `skip=None`"):
        how(lambda x: layer(x, shortcut=x, training=True))(tf.ones((2, 2)))


@pytest.mark.parametrize("skip", ["identity", "layer"])
def test_skip_of_another_shape_in_a_graph(skip):
    """A trace has both, so the first one says it, kept or dropped."""
    layer = StochasticDepth(
        dense(3, name="inner"), 1.0, skip=dense(4) if skip == "layer" else skip, name="depth"
    )
    run = tf.function(lambda x: layer(x, training=True))
    expected = "what `skip` gives must have the shape of the output of 'inner', (2, 3)"
    with pytest.raises(ValueError, match=has(expected, "Received: (2, ")):
        run(tf.ones((2, 2)))


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.7, False)])
@pytest.mark.parametrize("skip", ["identity", "layer"])
def test_skip_of_another_shape_in_eager_mode(skip, p, training):
    layer = StochasticDepth(dense(3), p, skip=dense(4) if skip == "layer" else skip)
    with pytest.raises(ValueError, match="what `skip` gives must have the shape of the output"):
        layer(tf.ones((2, 2)), training=training)


# ------------------------------------------------------------------ dtypes


def to_integers(x):
    return tf.cast(x, tf.int32)


@pytest.mark.parametrize(("p", "training"), [(1.0, True), (0.7, False)])
@pytest.mark.parametrize("function", [to_integers, lambda x: x > 0], ids=["int32", "bool"])
def test_layer_with_an_output_that_cannot_be_scaled(function, p, training, how):
    layer = StochasticDepth(keras.layers.Lambda(function, name="inner"), p, name="depth")
    expected = "what 'inner' gives must be floating-point in StochasticDepth 'depth'"
    with pytest.raises(ValueError, match=has(expected, "Received: ")):
        how(lambda x: layer(x, training=training))(tf.ones((2, 2)))


@pytest.mark.parametrize("shortcut", [True, False])
def test_layer_with_an_integer_output_says_so_when_dropped_too(shortcut, how):
    layer = StochasticDepth(keras.layers.Lambda(to_integers), 0.0)
    kwargs = {"shortcut": tf.ones((2, 2))} if shortcut else {}
    with pytest.raises(ValueError, match=has("must be floating-point", "Received: int32")):
        how(lambda x: layer(x, training=True, **kwargs))(tf.ones((2, 2)))


@pytest.mark.parametrize(("p", "training"), [(1.0, True), (0.0, True), (0.7, False)])
def test_an_integer_shortcut(p, training, how):
    layer = StochasticDepth(dense(2), p)
    run = how(lambda x, a: layer(x, shortcut=a, training=training))
    with pytest.raises(ValueError, match=has("must be floating-point", "Received: int32")):
        run(tf.ones((2, 2)), tf.ones((2, 2), tf.int32))


def test_integer_inputs_are_fine_for_a_layer_that_takes_them(how):
    layer = StochasticDepth(keras.layers.Embedding(5, 3), 0.0)
    y = how(lambda x: layer(x, training=True))(tf.constant([[1, 2]]))
    np.testing.assert_array_equal(y, np.zeros((1, 2, 3)))


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.7, False)])
def test_integer_inputs_cannot_stand_in_for_the_layer(p, training, how):
    layer = StochasticDepth(keras.layers.Embedding(5, 3), p, skip="identity")
    with pytest.raises(ValueError, match=has("must be floating-point", "Received: int32")):
        how(lambda x: layer(x, training=training))(tf.constant([[1, 2, 3]]))
