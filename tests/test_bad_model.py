"""Models and arguments that cannot be used: the type of the error, and its text."""

import numpy as np
import pytest
import tensorflow as tf

from tfa_stochastic_depth import _keras, constant, find_residuals, wrap_residuals

keras = tf.keras
L = keras.layers
KERAS_3 = hasattr(keras, "ops")

both = pytest.mark.parametrize("function", [find_residuals, wrap_residuals])


def model(blocks=3):
    inputs = x = keras.Input((4,))
    for i in range(1, blocks + 1):
        x = L.Add(name=f"sum{i}")([x, L.Dense(4)(x)])
    return keras.Model(inputs, x, name="small")


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = L.Dense(4)

    def call(self, x):
        return x + self.dense(x)


class Overridden(keras.Model):
    """Functional by its constructor, and not by what it does."""

    def call(self, x):
        return super().call(x) * 2


class OverriddenSequential(keras.Sequential):
    def call(self, x):
        return super().call(x) * 2


# ------------------------------------------------------------------ the model


@both
@pytest.mark.parametrize("value", [None, 3, "model", [1], L.Dense(4), keras.Model])
def test_no_model(function, value):
    with pytest.raises(TypeError) as error:
        function(value)
    if isinstance(value, L.Layer):
        assert str(error.value).endswith("(of type Dense).")
    else:
        assert str(error.value) == (
            "`model` must be a functional or Sequential keras.Model. "
            f"Received: {value!r} (of type {type(value).__name__})."
        )


def stand_in():
    """An object whose class is named as the model class of another Keras."""
    cls = type("Model", (), {"__module__": "keras.src.models.model"})
    return type("Functional", (cls,), {"__module__": "keras.src.models.functional"})()


def model_of_the_other_keras():
    """A model of the Keras that `tf.keras` is not, where two are installed."""
    if KERAS_3:
        import tf_keras as other
    elif tf.__version__.startswith("2.15."):
        return stand_in()
    else:
        import keras as other
    assert other.Model is not keras.Model
    x = other.Input((4,))
    return other.Model(x, other.layers.Add()([x, other.layers.Dense(4)(x)]))


@both
@pytest.mark.parametrize("make", [stand_in, model_of_the_other_keras])
def test_a_model_of_another_keras(function, make):
    other = make()
    with pytest.raises(TypeError) as error:
        function(other)
    cls = type(other)
    assert str(error.value) == (
        f"`model` belongs to another Keras than the one in use here ({_keras.NAME}). Build it "
        "with `tf.keras`, and set TF_USE_LEGACY_KERAS=1 before TensorFlow is imported if it must "
        f"be a `tf_keras` model. Received: {cls.__module__}.{cls.__name__}."
    )


def test_the_name_of_this_keras(leg):
    if leg == "keras3":
        assert _keras.NAME == f"Keras {keras.__version__}"
    elif leg == "keras2":
        assert _keras.NAME == "the Keras 2 of keras.src.engine.training"
    else:
        assert _keras.NAME == "the Keras 2 of tf_keras.src.engine.training"


def subclassed(built):
    it = Subclassed(name="odd")
    if built:
        it(np.ones((1, 4), "float32"))
    return it


def overridden():
    inputs = keras.Input((4,))
    return Overridden(inputs, inputs + L.Dense(4)(inputs), name="odd")


def overridden_sequential(built):
    layers = [keras.Input((4,)), L.Dense(4)] if built else [L.Dense(4)]
    return OverriddenSequential(layers, name="odd")


@both
@pytest.mark.parametrize(
    "make",
    [
        lambda: subclassed(built=True),
        lambda: subclassed(built=False),
        overridden,
        lambda: overridden_sequential(built=True),
        lambda: overridden_sequential(built=False),
    ],
    ids=["subclassed", "unbuilt", "own call", "Sequential, own call", "the same, unbuilt"],
)
def test_a_subclassed_model(function, make):
    odd = make()
    with pytest.raises(TypeError) as error:
        function(odd)
    assert str(error.value) == (
        "`model` must be a functional or Sequential model: the code of a subclassed model cannot "
        "be searched for residual sums. Put `StochasticDepth(layer, survival_prob)` around the "
        "residual branches where the class makes them, or build the model with "
        f"keras.Model(inputs, outputs). Received: 'odd' (of type {type(odd).__name__}, which has "
        "a `call` of its own)."
    )


@both
@pytest.mark.parametrize("layers", [[], [L.Dense]], ids=["empty", "of layers"])
def test_an_unbuilt_sequential_model(function, layers):
    with pytest.raises(ValueError) as error:
        function(keras.Sequential([layer(4) for layer in layers], name="late"))
    assert str(error.value) == (
        "`model` must be built, and the Sequential model 'late' is not: start it with a "
        "keras.Input, or call `model.build(input_shape)` first."
    )


def test_a_sequential_model_without_residuals():
    plain = keras.Sequential([keras.Input((4,)), L.Dense(4), L.ReLU()], name="plain")
    assert find_residuals(plain).blocks == ()
    with pytest.raises(ValueError) as error:
        wrap_residuals(plain)
    assert str(error.value) == (
        "`model` 'plain' has no residual block that can be wrapped.\n"
        "It holds no sum of two tensors (Add(), x + y)."
    )


def test_where_that_leaves_nothing():
    with pytest.raises(ValueError) as error:
        wrap_residuals(model(2), where=lambda block: False)
    assert str(error.value) == (
        "`model` 'small' has no residual block that can be wrapped.\n"
        "Sums that were found, and why they are none:\n"
        "  sum1: left out by `where`.\n"
        "  sum2: left out by `where`."
    )


def test_an_opaque_model_inside_a_functional_one_is_a_layer_like_others():
    inputs = keras.Input((4,))
    outer = keras.Model(inputs, Subclassed(name="odd")(inputs))
    assert find_residuals(outer).blocks == find_residuals(outer).refusals == ()


def with_side_loss(kind, nested):
    small = model()
    mean = keras.ops.mean if KERAS_3 else tf.reduce_mean
    if kind == "loss":
        small.add_loss(mean(small.output))
    else:
        small.add_metric(mean(small.output), name="mean")
    if not nested:
        return small
    inputs = keras.Input((4,))
    return keras.Model(inputs, small(inputs))


@both
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["loss", "metric"])
def test_losses_and_metrics_of_tensors(function, kind, nested):
    if KERAS_3:  # it has none, and this is how it says so
        with pytest.raises(NotImplementedError):
            with_side_loss(kind, nested)
        return
    with pytest.raises(ValueError) as error:
        function(with_side_loss(kind, nested))
    assert str(error.value) == (
        "`model` 'small' has losses or metrics added with `model.add_loss(tensor)` or "
        "`model.add_metric(tensor)`, which a rebuilt model would lose. Add them inside a layer's "
        "`call`, or compute them from the model's outputs."
    )


# ------------------------------------------------------------------ survival_prob


@both
@pytest.mark.parametrize("length", [0, 1, 2, 4])
def test_a_sequence_of_the_wrong_length_says_how_many_blocks_there_are(function, length):
    with pytest.raises(ValueError) as error:
        function(model(), [0.5] * length)
    assert str(error.value) == (
        "`survival_prob` must have one number per block, and there are 3 blocks. "
        f"Received: a sequence of {length}."
    )


@both
@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), float("inf")])
def test_probabilities_outside_0_and_1(function, value):
    for survival_prob, argument in (
        (value, "survival_prob"),
        ([0.5, value, 0.5], "survival_prob[1]"),
        (lambda block: value, "survival_prob(<block 'sum1'>)"),
    ):
        with pytest.raises(ValueError) as error:
            function(model(), survival_prob)
        assert str(error.value) == (
            f"`{argument}` must be in [0, 1]: it is the probability that a branch is kept, not "
            f"that it is dropped. Received: {value!r}."
        )


@both
@pytest.mark.parametrize("value", ["0.5", None, b"0.5", object, True])
def test_probabilities_that_are_no_numbers(function, value):
    with pytest.raises(TypeError) as error:
        function(model(), [0.5, 0.5, value])
    assert str(error.value) == (
        f"`survival_prob[2]` must be a number in [0, 1]. Received: {value!r} "
        f"(of type {type(value).__name__}). Convert arrays and tensors with float()."
    )


@both
@pytest.mark.parametrize("value", ["0.5", None, b"0.5", np.array(0.5), tf.constant(0.5)])
def test_a_survival_prob_that_is_none_of_the_three(function, value):
    with pytest.raises(TypeError) as error:
        function(model(), value)
    text = str(error.value)
    assert text.startswith("`survival_prob` must be a number in [0, 1]")
    assert f"(of type {type(value).__name__})" in text


# ------------------------------------------------------------------ the other arguments


@both
@pytest.mark.parametrize("where", [True, [0, 1], "sum1"])
def test_where_that_is_no_function(function, where):
    with pytest.raises(TypeError) as error:
        function(model(), where=where)
    assert str(error.value) == (
        "`where` must be a function from a block to a bool, or None for all blocks. "
        f"Received: {where!r} (of type {type(where).__name__})."
    )


@both
@pytest.mark.parametrize("answer", [None, 1, "no", 0.0])
def test_where_that_returns_no_bool(function, answer):
    with pytest.raises(TypeError) as error:
        function(model(), where=lambda block: answer if block.index == 2 else True)
    assert str(error.value) == (
        "`where` must return a bool for each block. "
        f"Received: {answer!r} (of type {type(answer).__name__}) for block 'sum2'."
    )


@both
@pytest.mark.parametrize("nested", [None, "both", True, "Outer"])
def test_nested_that_is_neither_inner_nor_outer(function, nested):
    with pytest.raises(ValueError) as error:
        function(model(), nested=nested)
    assert str(error.value) == f'`nested` must be "inner" or "outer". Received: {nested!r}.'


@both
@pytest.mark.parametrize(
    ("block_layers", "received"),
    [
        ((int,), int),
        (("Dense",), "Dense"),
        ([L.Dense, None], None),
        ("TransformerEncoder", "TransformerEncoder"),
        (None, None),
    ],
)
def test_block_layers_that_are_no_layer_classes(function, block_layers, received):
    with pytest.raises(TypeError) as error:
        function(model(), block_layers=block_layers)
    assert str(error.value) == (
        f"`block_layers` must be a tuple of layer classes of this Keras ({_keras.NAME}), such as "
        f"(MyTransformerBlock,). Received: {received!r}."
    )


def test_block_layers_that_is_a_layer_instead_of_its_class():
    layer = L.Dense(4)
    with pytest.raises(TypeError) as error:
        wrap_residuals(model(), block_layers=(layer,))
    assert str(error.value).endswith(f"such as (MyTransformerBlock,). Received: {layer!r}.")


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (
            {"mode": "sample"},
            ValueError,
            '`mode` must be "batch" (one switch for the whole batch) or "row" (each sample on its '
            "own). Received: 'sample'.",
        ),
        (
            {"rescale": "both"},
            ValueError,
            '`rescale` must be "inference" or "training". Received: \'both\'.',
        ),
        ({"seed": 0.5}, TypeError, "`seed` must be an integer or None. Received: 0.5."),
        ({"seed": True}, TypeError, "`seed` must be an integer or None. Received: True."),
    ],
    ids=lambda value: next(iter(value.items())) if isinstance(value, dict) else None,
)
def test_options_of_the_layer(options, kind, text):
    with pytest.raises(kind) as error:
        wrap_residuals(model(), **options)
    assert str(error.value) == text


def test_a_bad_argument_leaves_the_model_alone():
    small = model()
    config = small.to_json()
    for bad in ({"survival_prob": [0.5]}, {"where": 3}, {"nested": None}, {"mode": "rows"}):
        with pytest.raises((TypeError, ValueError)):
            wrap_residuals(small, **bad)
    assert small.to_json() == config
    assert [len(layer._inbound_nodes) for layer in small.layers] == [1] * len(small.layers)
    assert wrap_residuals(small, constant(0.5)).name == "small"
