"""The table of real networks: how many blocks each has, and what holds for all of them.

Every network of `keras.applications` has a row. The numbers in it follow from the table of blocks
in the paper that published the network, never from what the package finds.
"""

import collections
import dataclasses
import gc
import math
import os
import re

import numpy as np
import pytest
import tensorflow as tf

from helpers import (
    KERAS_3,
    assert_same_outputs,
    assert_same_weights,
    every_layer,
    outputs,
    weights_by_layer,
)
from tfa_stochastic_depth import (
    constant,
    existing,
    find_residuals,
    get_survival_probs,
    set_survival_probs,
    unwrap_residuals,
    wrap_residuals,
)

keras = tf.keras
applications = keras.applications

# Why sums of NASNet are no blocks: what the reasons say.
APART = "do not start from a common tensor"
EQUAL = "hold equal work"
USED = "is also used by"


@dataclasses.dataclass(frozen=True)
class Row:
    """What is to be found in a network.

    Attributes:
        blocks: The number of residual blocks.
        projections: How many of them have a shortcut with a layer on it.
        refusals: Part of the reason -> the number of sums that are no blocks for that reason.
        size: The smallest image that the network takes.
        rescalings: How many branches end in layers of which no weights can take a factor.
    """

    blocks: int
    projections: int = 0
    refusals: dict = dataclasses.field(default_factory=dict)
    size: int = 32
    rescalings: int = 0


def stages(*repeats, projections=None):
    """Stages of blocks that all have a shortcut; the first of each stage changes the size."""
    return Row(sum(repeats), len(repeats) if projections is None else projections)


def resnet_v2(*repeats):
    """The last block of all stages but the last halves the image, and pools its shortcut."""
    return stages(*repeats, projections=len(repeats) + len(repeats) - 1)


def convnext(*depths):
    """The image is halved by layers between the stages: every shortcut is an identity."""
    return stages(*depths, projections=0)


def inverted(stem, table, width=1.0, depth=1.0):
    """Inverted residuals: a block has a sum if it keeps both the image's size and the channels.

    Args:
        stem: Channels of the first convolution.
        table: (channels, repeats, stride of the first) of each stage.
        width: What the channels are multiplied with.
        depth: What the repeats are multiplied with.
    """
    blocks, channels = 0, eights(stem * width)
    for out, repeats, stride in table:
        out = eights(out * width)
        blocks += stride == 1 and out == channels  # the first of the stage
        blocks += math.ceil(repeats * depth) - 1
        channels = out
    return Row(blocks)


def eights(channels):
    """Rounded to a multiple of 8, and not down by more than a tenth."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8


def efficientnet_v2(stem, table, *scale):
    """The blocks of the first stage do not expand, and end in an activation."""
    rescalings = inverted(stem, table[:1], *scale).blocks
    return dataclasses.replace(inverted(stem, table, *scale), rescalings=rescalings)


def resnet_rs(*repeats):
    """Every block ends in a gate: a product of which both factors depend on the last weights."""
    return dataclasses.replace(stages(*repeats), rescalings=sum(repeats))


def nasnet(repeats):
    """NASNet-A (N = repeats): 3 N normal cells and 4 reduction cells, of 5 sums each.

    A cell takes two tensors: h, from the cell before, and p, from the one before that.

    Normal cell: sep(h) + h is a residual block. sep(h) + sep(p) has no common start;
    sep(p) + sep(p) and pool(p) + pool(p) are equals; pool(h) + p has no weights on one side, and
    the other is used by other sums.

    Reduction cell: three sums of something of h and something of p, and one of something of h and
    something of such a sum, have no common start; the addend of the fifth is an output of the cell
    as well.
    """
    normal, reduction = 3 * repeats, 4
    refusals = {
        APART: normal + 4 * reduction,
        EQUAL: 2 * normal,
        USED: normal + reduction,
    }
    return Row(normal, refusals=refusals)


# arXiv 1801.04381, table 2
MOBILENET_V2 = [
    (16, 1, 1),
    (24, 2, 2),
    (32, 3, 2),
    (64, 4, 2),
    (96, 3, 1),
    (160, 3, 2),
    (320, 1, 1),
]
# arXiv 1905.02244, tables 1 and 2, where each block has a line
MOBILENET_V3_LARGE = [
    *[(16, 1, 1), (24, 1, 2), (24, 1, 1), (40, 1, 2), (40, 1, 1), (40, 1, 1), (80, 1, 2)],
    *[(80, 1, 1), (80, 1, 1), (80, 1, 1), (112, 1, 1), (112, 1, 1), (160, 1, 2), (160, 1, 1)],
    *[(160, 1, 1)],
]
MOBILENET_V3_SMALL = [
    *[(16, 1, 2), (24, 1, 2), (24, 1, 1), (40, 1, 2), (40, 1, 1), (40, 1, 1), (48, 1, 1)],
    *[(48, 1, 1), (96, 1, 2), (96, 1, 1), (96, 1, 1)],
]
# arXiv 1905.11946, table 1, in which the sizes of the images tell the strides
EFFICIENTNET = [
    (16, 1, 1),
    (24, 2, 2),
    (40, 2, 2),
    (80, 3, 2),
    (112, 3, 1),
    (192, 4, 2),
    (320, 1, 1),
]
# arXiv 2104.00298, table 4, for S. It has no table of the others: their numbers are those of
# DEFAULT_BLOCKS_ARGS of `keras.applications`.
EFFICIENTNET_V2_B = [(16, 1, 1), (32, 2, 2), (48, 2, 2), (96, 3, 2), (112, 5, 1), (192, 8, 2)]
EFFICIENTNET_V2_S = [(24, 2, 1), (48, 4, 2), (64, 4, 2), (128, 6, 2), (160, 9, 1), (256, 15, 2)]
EFFICIENTNET_V2_M = [
    *[(24, 3, 1), (48, 5, 2), (80, 5, 2), (160, 7, 2), (176, 14, 1), (304, 18, 2), (512, 5, 1)],
]
EFFICIENTNET_V2_L = [
    *[(32, 4, 1), (64, 7, 2), (96, 7, 2), (192, 10, 2), (224, 19, 1), (384, 25, 2), (640, 7, 1)],
]

ZOO = {
    "VGG16": Row(0),
    "VGG19": Row(0),
    "InceptionV3": Row(0, size=75),
    "MobileNet": Row(0),
    "DenseNet121": Row(0),
    "DenseNet169": Row(0),
    "DenseNet201": Row(0),
    "ResNet50": stages(3, 4, 6, 3),
    "ResNet101": stages(3, 4, 23, 3),
    "ResNet152": stages(3, 8, 36, 3),
    "ResNet50V2": resnet_v2(3, 4, 6, 3),
    "ResNet101V2": resnet_v2(3, 4, 23, 3),
    "ResNet152V2": resnet_v2(3, 8, 36, 3),
    # Entry, middle and exit flow; those of entry and exit have a convolution as shortcut.
    "Xception": Row(3 + 8 + 1, projections=3 + 1, size=71),
    "InceptionResNetV2": Row(10 + 20 + 10, size=75),  # blocks 35, 17 and 8
    "NASNetMobile": nasnet(4),
    "NASNetLarge": nasnet(6),
    "MobileNetV2": inverted(32, MOBILENET_V2),
    "MobileNetV3Small": inverted(16, MOBILENET_V3_SMALL),
    "MobileNetV3Large": inverted(16, MOBILENET_V3_LARGE),
    "EfficientNetB0": inverted(32, EFFICIENTNET, 1.0, 1.0),
    "EfficientNetB1": inverted(32, EFFICIENTNET, 1.0, 1.1),
    "EfficientNetB2": inverted(32, EFFICIENTNET, 1.1, 1.2),
    "EfficientNetB3": inverted(32, EFFICIENTNET, 1.2, 1.4),
    "EfficientNetB4": inverted(32, EFFICIENTNET, 1.4, 1.8),
    "EfficientNetB5": inverted(32, EFFICIENTNET, 1.6, 2.2),
    "EfficientNetB6": inverted(32, EFFICIENTNET, 1.8, 2.6),
    "EfficientNetB7": inverted(32, EFFICIENTNET, 2.0, 3.1),
    "EfficientNetV2B0": efficientnet_v2(32, EFFICIENTNET_V2_B, 1.0, 1.0),
    "EfficientNetV2B1": efficientnet_v2(32, EFFICIENTNET_V2_B, 1.0, 1.1),
    "EfficientNetV2B2": efficientnet_v2(32, EFFICIENTNET_V2_B, 1.1, 1.2),
    "EfficientNetV2B3": efficientnet_v2(32, EFFICIENTNET_V2_B, 1.2, 1.4),
    "EfficientNetV2S": efficientnet_v2(24, EFFICIENTNET_V2_S),
    "EfficientNetV2M": efficientnet_v2(24, EFFICIENTNET_V2_M),
    "EfficientNetV2L": efficientnet_v2(32, EFFICIENTNET_V2_L),
    "ConvNeXtTiny": convnext(3, 3, 9, 3),
    "ConvNeXtSmall": convnext(3, 3, 27, 3),
    "ConvNeXtBase": convnext(3, 3, 27, 3),
    "ConvNeXtLarge": convnext(3, 3, 27, 3),
    "ConvNeXtXLarge": convnext(3, 3, 27, 3),
}
if not KERAS_3:
    ZOO |= {
        # arXiv 2003.13678, the diagrams in figures 15 (X) and 16 (Y); the same as MODEL_CONFIGS of
        # `keras.applications`
        "RegNetX002": stages(1, 1, 4, 7),
        "RegNetX004": stages(1, 2, 7, 12),
        "RegNetX006": stages(1, 3, 5, 7),
        "RegNetX008": stages(1, 3, 7, 5),
        "RegNetX016": stages(2, 4, 10, 2),
        "RegNetX032": stages(2, 6, 15, 2),
        "RegNetX040": stages(2, 5, 14, 2),
        "RegNetX064": stages(2, 4, 10, 1),
        "RegNetX080": stages(2, 5, 15, 1),
        "RegNetX120": stages(2, 5, 11, 1),
        "RegNetX160": stages(2, 6, 13, 1),
        "RegNetX320": stages(2, 7, 13, 1),
        "RegNetY002": stages(1, 1, 4, 7),
        "RegNetY004": stages(1, 3, 6, 6),
        "RegNetY006": stages(1, 3, 7, 4),
        "RegNetY008": stages(1, 3, 8, 2),
        "RegNetY016": stages(2, 6, 17, 2),
        "RegNetY032": stages(2, 5, 13, 1),
        "RegNetY040": stages(2, 6, 12, 2),
        "RegNetY064": stages(2, 7, 14, 2),
        "RegNetY080": stages(2, 4, 10, 1),
        "RegNetY120": stages(2, 5, 11, 1),
        "RegNetY160": stages(2, 4, 11, 1),
        "RegNetY320": stages(2, 5, 12, 1),
        # arXiv 2103.07579; the numbers are those of BLOCK_ARGS of `keras.applications`
        "ResNetRS50": resnet_rs(3, 4, 6, 3),
        "ResNetRS101": resnet_rs(3, 4, 23, 3),
        "ResNetRS152": resnet_rs(3, 8, 36, 3),
        "ResNetRS200": resnet_rs(3, 24, 36, 3),
        "ResNetRS270": resnet_rs(4, 29, 53, 4),
        "ResNetRS350": resnet_rs(4, 36, 72, 4),
        "ResNetRS420": resnet_rs(4, 44, 87, 4),
    }


@dataclasses.dataclass(frozen=True)
class Family:
    """Networks made by the same code: how `keras.applications` writes their residual sums.

    Attributes:
        networks: What the names of the networks look like.
        sums: What the names of the sums look like.
        shortcut: Which of the two inputs of a sum is the shortcut.
        always: Whether the first of them is wrapped and run every time, and not just by `make zoo`.
    """

    networks: str
    sums: str
    shortcut: int
    always: bool = True


UNNAMED = r"(tf\.__operators__\.)?add(_\d+)?"
FAMILIES = [
    Family(r"ResNet\d+", r"conv\d_block\d+_add", 0),
    Family(r"ResNet\d+V2", r"conv\d_block\d+_out", 0),
    Family(r"Xception", UNNAMED, 1),
    Family(r"InceptionResNetV2", r"custom_scale_layer(_\d+)?", 0),
    Family(r"NASNet\w+", r"normal_add_5_\d+", 1, always=False),
    Family(r"MobileNetV2", r"block_\d+_add", 0),
    Family(r"MobileNetV3\w+", r"expanded_conv(_\d+)?[_/][Aa]dd", 0),
    Family(r"EfficientNetB\d", r"block\d[a-z]_add", 1),
    Family(r"EfficientNetV2\w+", r"block\d[a-z]_add", 1),
    Family(r"ConvNeXt\w+", UNNAMED, 0),
    Family(r"RegNetX\d+", UNNAMED, 1),
    Family(r"RegNetY\d+", UNNAMED, 1),
    Family(r"ResNetRS\d+", UNNAMED, 1),
]


def family_of(name):
    (family,) = [family for family in FAMILIES if re.fullmatch(family.networks, name)]
    return family


def to_wrap():
    """The networks that are wrapped and run, which takes long: the first of each family, or all."""
    with_blocks = [name for name, row in ZOO.items() if row.blocks]
    if os.environ.get("TFSD_ZOO") == "all":
        return with_blocks
    first = {}
    for name in with_blocks:
        first.setdefault(family_of(name), name)
    return [name for family, name in first.items() if family.always]


WRAPPED = to_wrap()


def images(size):
    return np.random.default_rng(0).uniform(0, 255, (4, size, size, 3)).astype("float32")


def empty(name):
    """A network without pretrained weights."""
    size = ZOO[name].size
    return getattr(applications, name)(
        weights=None, input_shape=(size, size, 3), classes=4, classifier_activation=None
    )


def build(name):
    """A network in which every branch and the image can be seen, and weights can be told apart."""
    model = empty(name)
    rng = np.random.default_rng(0)
    for layer in model.layers:
        if "layer_scale" in layer.name:  # 1e-6 at first
            layer.set_weights([np.ones_like(w) for w in layer.get_weights()])
        if isinstance(layer, keras.layers.Dropout) and not layer.name.endswith("_drop"):
            layer.rate = 0  # the one before the classifier, which is in no branch
        if not isinstance(layer, keras.layers.Normalization):  # its numbers are fixed when built
            # Biases and scales are all the same at first.
            values = layer.get_weights()
            layer.set_weights(
                [w + rng.uniform(-0.1, 0.1, w.shape) if w.ndim == 1 else w for w in values]
            )
    norms = [x for x in model.layers if isinstance(x, keras.layers.BatchNormalization)]
    # As they are at first, the moving statistics let the signal of most networks fade to nothing.
    for layer in norms:
        layer.momentum = 0.0
    model(images(ZOO[name].size), training=True)
    for layer in norms:
        layer.momentum = 0.99
    return model


@pytest.fixture(scope="module", autouse=True)
def frozen_garbage():
    """What is there before is never looked at again, so that collecting garbage is quick here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def free_memory():
    yield
    gc.collect()


@pytest.fixture
def quick(monkeypatch):
    """Networks that are only looked at: kernels of zeros, in half precision."""
    monkeypatch.setattr(
        keras.initializers.VarianceScaling,
        "__call__",
        lambda self, shape, dtype=None, **kwargs: tf.zeros(shape, dtype or "float32"),
    )
    keras.mixed_precision.set_global_policy("float16")
    if not KERAS_3:
        monkeypatch.setattr(keras.layers.Layer, "_keras_tensor_symbolic_call", symbolic_call())


def symbolic_call():
    """Keras 2: layers that can tell the shape of their output are asked for it, as on Keras 3.

    It makes a graph of TensorFlow for each call otherwise, which takes three times as long.
    """
    layer, symbolic = keras.layers.Layer, type(keras.Input((1,)))
    plain = layer._keras_tensor_symbolic_call

    def call(self, inputs, *args):
        cannot_tell = type(self).compute_output_shape is layer.compute_output_shape
        if cannot_tell or isinstance(self, (keras.Model, keras.layers.Lambda)):
            return plain(self, inputs, *args)
        self._maybe_build(inputs)
        specs = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), inputs)
        return tf.nest.map_structure(symbolic, self.compute_output_signature(specs))

    return call


def check_row(name, found):
    row = ZOO[name]
    projections = [block for block in found.blocks if block.kind == "projection"]
    assert (len(found.blocks), len(projections)) == (row.blocks, row.projections), str(found)
    reasons = collections.Counter(
        next((part for part in row.refusals if part in refusal.reason), refusal.reason)
        for refusal in found.refusals
    )
    assert reasons == row.refusals, str(found)


def test_every_network_of_keras_has_a_row():
    there = {name for name in vars(applications) if name[0].isupper()}
    assert there == ZOO.keys()


def test_resnets_are_named_after_their_layers():
    """3 in each block, and 2 more; the names of two of the large ResNet-RS are off by 1 and 2."""
    off = {"ResNetRS270": 2, "ResNetRS420": -1}
    for name, row in ZOO.items():
        if name.startswith("ResNet"):
            depth = int(re.search(r"\d+", name).group())
            assert (name, 3 * row.blocks + 2) == (name, depth + off.get(name, 0))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if name not in WRAPPED])
def test_blocks(name, quick):
    model = empty(name)
    check_row(name, find_residuals(model))
    if not ZOO[name].blocks:
        with pytest.raises(ValueError) as error:
            wrap_residuals(model)
        assert str(error.value) == (
            f"`model` {model.name!r} has no residual block that can be wrapped.\n"
            "It holds no sum of two tensors (Add(), x + y)."
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
def test_zoo(name):
    model = build(name)
    found = find_residuals(model)
    check_row(name, found)

    wrapped = wrap_residuals(model, constant(1))
    assert_same_weights(weights_by_layer(wrapped), weights_by_layer(model))

    names = {layer.name for layer in model.layers}
    inside = {layer for block in found.blocks for layer in block.layers}
    # Sums written as x + y are no layers on Keras 3, and have a name all the same.
    sums = {block.name for block in found.blocks}
    assert {layer.name for layer in wrapped.layers} == (names - inside) | sums

    x = images(ZOO[name].size)
    (expected,) = outputs(model, x)
    assert np.abs(expected).max() > 0.1  # there is something to compare
    (kept,) = outputs(wrapped, x)
    np.testing.assert_allclose(kept, expected, rtol=0, atol=1e-6)

    check_unwrapping(name, model, wrapped, x)

    for layer in model.layers:
        if layer.name.endswith("_drop"):
            layer.rate = 0  # at the end of a branch: the wrapped model has none
    assert_same_outputs(wrapped, model, x, training=True)
    # Moving statistics too, which that call updated.
    assert_same_weights(weights_by_layer(wrapped), weights_by_layer(model))

    set_survival_probs(wrapped, [0] * ZOO[name].blocks)
    assert without_branches(model, family_of(name)) == ZOO[name].blocks
    for mode in ({"training": False}, {"training": True}):
        (dropped,) = outputs(wrapped, x, **mode)
        (by_hand,) = outputs(model, x, **mode)
        np.testing.assert_allclose(dropped, by_hand, rtol=0, atol=1e-6)
        assert np.abs(dropped - expected).max() > 0.01
        # Without any branch the network still tells the images apart: the shortcuts are there.
        assert np.abs(dropped - dropped[0]).max() > 1e-3


def check_unwrapping(name, model, wrapped, x):
    """The plain model is the original one, but for the factor in its weights."""
    # A power of two is exact in all products. What other factors are rounded to would show here,
    # since these weights make differences grow: `benchmarks/folding.py` has those.
    set_survival_probs(wrapped, [0.25] * ZOO[name].blocks)
    plain = unwrap_residuals(wrapped)
    (ours,), (theirs,) = outputs(plain, x), outputs(wrapped, x)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * np.abs(theirs).max())
    called = calls_of(plain)
    added = [call for call in called if call[1].endswith("_branch_factor")]
    assert len(added) == ZOO[name].rescalings
    # Keras sorts layers by their distance from the end, which a layer more changes.
    in_order = sorted if added else list
    called = [call for call in called if call not in added]
    assert in_order(called) == in_order(calls_of(model))
    shapes, expected = ([tuple(w.shape) for w in m.weights] for m in (plain, model))
    assert in_order(shapes) == in_order(expected)
    set_survival_probs(wrapped, [1] * ZOO[name].blocks)


def calls_of(model):
    """The class and name of each layer and operation of a model, and how often it is called."""
    graph = getattr(model, "operations", model.layers)
    return [(type(op).__name__, op.name, len(op._inbound_nodes)) for op in graph]


def without_branches(model, family):
    """Makes the residual sums of a network return their shortcut, and says how many there are."""
    sums = [
        op
        for op in getattr(model, "operations", model.layers)
        if re.fullmatch(family.sums, op.name)
    ]
    for op in sums:  # a layer takes a list of two, an operator takes two
        op.call = lambda *inputs, **kwargs: tf.nest.flatten(inputs)[family.shortcut]
    return len(sums)


def test_efficientnet_keeps_the_identity_path_of_its_reversed_sums():
    """Its sums are [branch, shortcut]; who takes the first for the shortcut drops the path."""
    model = empty("EfficientNetB0")
    model = keras.Model(model.input, model.get_layer("block2b_add").output)
    (block,) = find_residuals(model).blocks
    assert (block.name, block.shortcut) == ("block2b_add", "block2a_project_bn")
    wrapped = wrap_residuals(model, constant(0))
    inside = keras.Model(
        wrapped.input, [wrapped.get_layer("block2a_project_bn").output, wrapped.output]
    )
    shortcut, output = inside(images(32), training=True)
    np.testing.assert_array_equal(np.asarray(output), np.asarray(shortcut))
    assert np.abs(output).max() > 0.1


def test_efficientnet_drops_are_replaced_and_their_rates_known(quick):
    """Its own drops grow linearly to 0.2 over all 16 blocks, 9 of which have a sum."""
    found_in = empty("EfficientNetB0")
    found = find_residuals(found_in)
    first, last = found.blocks[0], found.blocks[-1]
    assert first.existing == pytest.approx(1 - 0.2 * 2 / 16)
    assert last.existing == pytest.approx(1 - 0.2 * 14 / 16)
    assert all(block.layers[-1].endswith("_drop") for block in found.blocks)
    wrapped = wrap_residuals(found_in, existing(), mode="row", rescale="training")
    assert get_survival_probs(wrapped) == pytest.approx([b.existing for b in found.blocks])
    assert not any("_drop" in name for name in every_layer(wrapped) if name != "top_dropout")
