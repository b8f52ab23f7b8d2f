"""Sums under another name: which there are, what becomes of their factor and of their own drop."""

import numpy as np
import pytest
import tensorflow as tf

from helpers import assert_same_outputs, data, outputs, randomize, wrappers
from tfa_stochastic_depth import (
    constant,
    existing,
    find_residuals,
    set_survival_probs,
    wrap_residuals,
)

keras = tf.keras
L = keras.layers


class ScaledAdd(L.Layer):
    """`x[1] + gain * x[0]`: the branch comes first."""

    def __init__(self, gain=0.5, **kwargs):
        super().__init__(**kwargs)
        self.gain = gain

    def call(self, x):
        return x[1] + self.gain * x[0]

    def get_config(self):
        return {**super().get_config(), "gain": self.gain}


class CustomScaleLayer(L.Layer):
    """A stand-in for the layer of InceptionResNetV2."""

    def __init__(self, scale=0.17, **kwargs):
        super().__init__(**kwargs)
        self.scale = scale

    def call(self, x):
        return x[0] + x[1] * self.scale


def drop_layer(attribute):
    """A stand-in for the `StochasticDepth` of KerasCV ("rate") or tensorflow-addons."""

    class StochasticDepth(L.Layer):
        def __init__(self, value, **kwargs):
            super().__init__(**kwargs)
            setattr(self, attribute, value)
            self.keep = 1 - value if attribute == "rate" else value

        def call(self, x, training=None):
            return x[0] + self.keep * x[1]

    return StochasticDepth


def model_with(merge, shortcut_first=True):
    x = inputs = keras.Input((6,), name="in")
    for i in range(2):
        y = L.Dense(6, name=f"dense{i}")(x)
        x = merge(i)([x, y] if shortcut_first else [y, x])
    return randomize(keras.Model(inputs, L.Dense(2, name="head")(x)))


def by_hand(model, x, factors):
    """The model with `factors` on its branches."""
    for i, factor in enumerate(factors):
        x = x + factor * model.get_layer(f"dense{i}")(x)
    return np.asarray(model.get_layer("head")(x))


RULES = {
    "pair": {ScaledAdd: (0, 0.5)},
    "function": {ScaledAdd: lambda layer: (0, layer.gain)},
    "the first that fits": {ScaledAdd: (0, 0.5), L.Layer: (0, 9.0)},
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("rescale", ["training", "inference"])
def test_a_layer_that_the_user_names(rule, rescale):
    model = model_with(lambda i: ScaledAdd(0.5, name=f"sum{i}"), shortcut_first=False)
    assert not find_residuals(model).blocks
    found = find_residuals(model, merge_layers=rule)
    assert [b.name for b in found.blocks] == ["sum0", "sum1"]
    wrapped = wrap_residuals(model, [0.75, 0.25], rescale=rescale, merge_layers=rule)
    x = data(4, 6)
    factors = [0.5, 0.5] if rescale == "training" else [0.5 * 0.75, 0.5 * 0.25]
    np.testing.assert_allclose(wrapped(x), by_hand(model, x, factors), atol=1e-5)
    for switches in ([0, 1], [1, 0], [0, 0]):
        set_survival_probs(wrapped, switches)
        expected = by_hand(model, x, [0.5 * b for b in switches])
        np.testing.assert_allclose(wrapped(x, training=True), expected, atol=1e-5)
    scale = wrappers(wrapped)[0].layer.layers[-1]
    assert (type(scale).__name__, scale.name) == ("Rescaling", "sum0_branch_scale")


def test_the_branch_on_the_wrong_side_is_refused():
    model = model_with(lambda i: ScaledAdd(0.5, name=f"sum{i}"), shortcut_first=False)
    found = find_residuals(model, merge_layers={ScaledAdd: (1, 0.5)})
    assert not found.blocks
    assert found.refusals[0].reason == (
        "what 'sum0' (ScaledAdd) takes for the branch, the output of an input, is the shortcut by "
        "the paths that lead to it."
    )


def test_a_layer_on_more_than_two_tensors_is_no_sum():
    class Add3(L.Layer):
        def call(self, x):
            return x[0] + x[1] + x[2]

    x = keras.Input((6,))
    y = Add3()([x, L.Dense(6)(x), L.Dense(6)(x)])
    found = find_residuals(keras.Model(x, y), merge_layers={Add3: (1, 1.0)})
    assert found.blocks == found.refusals == ()


def test_the_scale_layer_of_inception_resnet_is_known():
    model = model_with(lambda i: CustomScaleLayer(0.2, name=f"sum{i}"))
    wrapped = wrap_residuals(model, rescale="training")
    x = data(4, 6)
    np.testing.assert_allclose(wrapped(x), by_hand(model, x, [0.2, 0.2]), atol=1e-5)
    set_survival_probs(wrapped, [0, 1])
    np.testing.assert_allclose(wrapped(x, training=True), by_hand(model, x, [0, 0.2]), atol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float64"])
def test_the_factor_in_other_dtypes(policy):
    keras.mixed_precision.set_global_policy(policy)
    model = model_with(lambda i: CustomScaleLayer(0.2, name=f"sum{i}"))
    wrapped = wrap_residuals(model, rescale="training")
    assert {w.compute_dtype for w in wrappers(wrapped)} == {policy.replace("mixed_", "")}
    # Keras's Rescaling rounds its scale to float32 on the way to float64.
    atol = 1e-7 if policy == "float64" else 0.05
    assert_same_outputs(wrapped, model, data(4, 6), atol=atol)


@pytest.mark.parametrize(("attribute", "value"), [("rate", 0.3), ("survival_probability", 0.7)])
def test_sums_that_drop_their_branch_give_way(attribute, value):
    """What was a layer with both tensors is one of ours, of the same inference output."""
    layer = drop_layer(attribute)
    model = model_with(lambda i: layer(value, name=f"sum{i}"))
    found = find_residuals(model, existing())
    assert [b.survival_prob for b in found.blocks] == pytest.approx([0.7, 0.7])
    wrapped = wrap_residuals(model, existing())
    assert_same_outputs(wrapped, model, data(4, 6))
    assert not any(isinstance(x, layer) for x in wrapped.layers)
    x = data(4, 6)
    set_survival_probs(wrapped, [1, 0])
    np.testing.assert_allclose(wrapped(x, training=True), by_hand(model, x, [1.0, 0.0]), atol=1e-5)


def test_a_drop_layer_on_one_tensor_is_no_sum():
    """That of keras.applications' ConvNeXt, by the same name."""

    class StochasticDepth(L.Layer):
        rate = 0.25

        def call(self, x):
            return x

    x = keras.Input((6,))
    y = x + StochasticDepth()(L.Dense(6)(x))
    (block,) = find_residuals(keras.Model(x, y), existing()).blocks
    assert (block.survival_prob, len(block.layers)) == (0.75, 2)


def test_the_layer_of_tensorflow_addons(leg):
    """Where it can be installed. Elsewhere there is none to be imported."""
    if leg != "keras2":
        with pytest.raises(ImportError):
            import tensorflow_addons
        return
    import tensorflow_addons

    model = model_with(lambda i: tensorflow_addons.layers.StochasticDepth(0.8, name=f"sum{i}"))
    wrapped = wrap_residuals(model, existing())
    assert [w.survival_prob for w in wrappers(wrapped)] == [0.8, 0.8]
    assert_same_outputs(wrapped, model, data(4, 6))
    own = tensorflow_addons.layers.StochasticDepth
    assert not any(isinstance(x, own) for x in wrapped.layers)


BAD_RULES = {
    "no dict": [ScaledAdd],
    "an object": {"ScaledAdd": (1, 1.0)},
    "no layer class": {int: (1, 1.0)},
}


@pytest.mark.parametrize("function", [find_residuals, wrap_residuals])
@pytest.mark.parametrize("rules", BAD_RULES.values(), ids=BAD_RULES)
def test_merge_layers_of_another_form(function, rules):
    with pytest.raises(TypeError) as error:
        function(model_with(lambda i: L.Add()), merge_layers=rules)
    text = str(error.value)
    assert text.startswith("`merge_layers` must be a dict from layer classes of this Keras (")
    assert text.endswith(f"such as {{ScaledAdd: (1, 0.5)}}. Received: {rules!r}.")


@pytest.mark.parametrize(
    "value",
    [
        1,
        (2, 1.0),
        (1,),
        (1, "x"),
        (1, None),
        (True, 1.0),
        (1, True),
        (1, float("nan")),
        (1, float("inf")),
    ],
)
@pytest.mark.parametrize("called", [False, True])
def test_a_rule_that_gives_something_else(value, called):
    rule = (lambda layer: value) if called else value
    model = model_with(lambda i: ScaledAdd(0.5, name=f"sum{i}"))
    with pytest.raises(TypeError) as error:
        find_residuals(model, merge_layers={ScaledAdd: rule})
    assert str(error.value) == (
        "`merge_layers[ScaledAdd]` must be (branch, factor), branch being the place of the branch "
        "among the two inputs, 0 or 1, and factor the number it is multiplied with, or a function "
        f"from the layer to that. Received: {value!r}."
    )


def test_a_rule_that_is_wrong_is_told_before_it_is_needed():
    model = model_with(lambda i: L.Add())
    with pytest.raises(TypeError, match=r"`merge_layers\[ScaledAdd\]` must be"):
        find_residuals(model, merge_layers={ScaledAdd: 3})


# ------------------------------------------------------------------ layers tied behind the scenes


def tied():
    x = keras.Input((3, 6))
    shared = L.Dense(6, name="shared")
    y = L.Add(name="sum")([x, L.Dense(6)(x)])
    return randomize(keras.Model(x, shared(L.TimeDistributed(shared, name="each")(y))))


def test_layers_that_share_one_inside_cannot_be_copied():
    with pytest.raises(ValueError) as error:
        wrap_residuals(tied())
    names = ("'each' and 'shared'", "'shared' and 'each'")
    assert any(
        str(error.value)
        == f"The layer 'shared' is used by both {pair}. Copies of them would not share it any "
        "more: pass `share_layers=True`, so that the result uses the model's own layers."
        for pair in names
    )


def test_layers_that_share_one_inside_can_be_shared():
    model = tied()
    wrapped = wrap_residuals(model, rescale="training", share_layers=True)
    assert_same_outputs(wrapped, model, data(2, 3, 6))
    shared = model.get_layer("shared")
    shared.set_weights([np.zeros_like(w) for w in shared.get_weights()])
    assert not np.any(outputs(wrapped, data(2, 3, 6))[0])


# ------------------------------------------------------------------ what calls cost


def macs(make, *shape):
    """Multiply-adds of a branch made of one layer (and back to the shape of the input)."""
    x = keras.Input(shape)
    (block,) = find_residuals(keras.Model(x, L.Add()([x, make(x)]))).blocks
    return block.macs


COSTS = {
    "dense": (lambda x: L.Dense(6)(x), (6,), 6 * 6),
    "dense on a sequence": (lambda x: L.Dense(6)(x), (5, 6), 5 * 6 * 6),
    "conv": (lambda x: L.Conv2D(3, 5, padding="same")(x), (8, 4, 3), 8 * 4 * 25 * 3 * 3),
    "conv of groups": (
        lambda x: L.Conv2D(4, 3, padding="same", groups=2)(x), (8, 8, 4), 64 * 9 * 2 * 4
    ),
    "depthwise": (lambda x: L.DepthwiseConv2D(3, padding="same")(x), (8, 8, 3), 64 * 9 * 3),
    "separable": (
        lambda x: L.SeparableConv2D(3, 3, padding="same")(x), (8, 8, 3), 64 * (9 * 3 + 3 * 3)
    ),
    "down and up": (
        lambda x: L.Conv2DTranspose(3, 2, 2)(L.Conv2D(5, 2, 2)(x)),
        (8, 8, 3),
        16 * 4 * 3 * 5 + 16 * 4 * 5 * 3,
    ),
    "lstm": (lambda x: L.LSTM(6, return_sequences=True)(x), (5, 6), 5 * (6 + 6) * 4 * 6),
    "attention": (
        lambda x: L.MultiHeadAttention(2, 3)(x, x),
        (5, 6),
        5 * 4 * (6 * 2 * 3) + 2 * 5 * 5 * 2 * 3,
    ),
    "no kernel": (lambda x: L.BatchNormalization()(x), (5, 6), 0),
    "size unknown": (lambda x: L.Conv1D(6, 3, padding="same")(x), (None, 6), None),
    "nested": (
        lambda x: keras.Sequential([L.Dense(4), L.LayerNormalization(), L.Dense(6)])(x),
        (6,),
        6 * 4 + 4 * 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "shape", "expected"), COSTS.values(), ids=COSTS)
def test_multiply_adds(make, shape, expected):
    assert macs(make, *shape) == expected


def test_multiply_adds_of_a_published_network():
    """ResNet-50 at 224x224: "3.8 billion" in table 1 of arXiv 1512.03385."""
    model = keras.applications.ResNet50(weights=None)
    assert find_residuals(model).graph.macs == pytest.approx(3.86e9, rel=0.01)


def test_a_factor_of_one_adds_no_layer():
    model = model_with(lambda i: CustomScaleLayer(1.0, name=f"sum{i}"))
    wrapped = wrap_residuals(model, constant(1))
    assert_same_outputs(wrapped, model, data(4, 6))
    assert all(type(w.layer.layers[-1]).__name__ == "Dense" for w in wrappers(wrapped))
