"""The table of real networks: how many blocks each has, and what holds for all of them."""

import numpy as np
import pytest
import tensorflow as tf

from tfa_stochastic_depth import constant, find_residuals, set_survival_probs, wrap_residuals

keras = tf.keras
applications = keras.applications

# name, smallest image it takes, blocks, refusals
ZOO = [
    ("ResNet50", 32, 16, 0),
    ("ResNet50V2", 32, 16, 0),
    ("MobileNetV2", 32, 10, 0),
    ("MobileNetV3Small", 32, 6, 0),
    ("ConvNeXtTiny", 32, 18, 0),
    ("EfficientNetB0", 32, 9, 0),
    ("Xception", 71, 12, 0),
]


def images(size, seed=0):
    return np.random.default_rng(seed).uniform(0, 255, (4, size, size, 3)).astype("float32")


def build(name, size):
    """A network without pretrained weights in which every branch and the image can be seen."""
    model = getattr(applications, name)(
        weights=None, input_shape=(size, size, 3), classes=4, classifier_activation=None
    )
    norms = [x for x in model.layers if isinstance(x, keras.layers.BatchNormalization)]
    for layer in model.layers:
        if "layer_scale" in layer.name:  # 1e-6 at first
            layer.set_weights([np.ones_like(w) for w in layer.get_weights()])
    # As they are at first, the moving statistics let the signal of most networks fade to nothing.
    for layer in norms:
        layer.momentum = 0.0
    model(images(size), training=True)
    for layer in norms:
        layer.momentum = 0.99
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "blocks", "refusals"), ZOO, ids=[row[0] for row in ZOO])
def test_zoo(name, size, blocks, refusals):
    model = build(name, size)
    found = find_residuals(model)
    assert (len(found.blocks), len(found.refusals)) == (blocks, refusals), str(found)

    wrapped = wrap_residuals(model, constant(1))
    x = images(size)
    expected = np.asarray(model(x))
    assert np.abs(expected).max() > 0.1  # there is something to compare
    np.testing.assert_allclose(np.asarray(wrapped(x)), expected, rtol=0, atol=1e-6)

    names = {layer.name for layer in model.layers}
    inside = {layer for block in found.blocks for layer in block.layers}
    # Sums written as x + y are no layers on Keras 3, and have a name all the same.
    sums = {block.name for block in found.blocks}
    assert {layer.name for layer in wrapped.layers} == (names - inside) | sums

    set_survival_probs(wrapped, [0] * blocks)
    dropped = np.asarray(wrapped(x))
    assert np.abs(dropped - expected).max() > 0.01
    # Without any branch the network still sees the image: the identity paths are there.
    assert np.abs(np.asarray(wrapped(images(size, seed=1))) - dropped).max() > 1e-3


def test_efficientnet_keeps_the_identity_path_of_its_reversed_sums():
    """Its sums are [branch, shortcut]; who takes the first for the shortcut drops the path."""
    model = build("EfficientNetB0", 32)
    (block, *_) = find_residuals(model).blocks
    assert (block.name, block.shortcut) == ("block2b_add", "block2a_project_bn")
    wrapped = wrap_residuals(model, constant(0))
    inside = keras.Model(
        wrapped.input,
        [wrapped.get_layer("block2a_project_bn").output, wrapped.get_layer("block2b_add").output],
    )
    shortcut, output = inside(images(32), training=True)
    np.testing.assert_array_equal(np.asarray(output), np.asarray(shortcut))


def test_efficientnet_drops_are_replaced_and_their_rates_known():
    """Its own drops grow linearly to 0.2 over all 16 blocks, 9 of which have a sum."""
    found = find_residuals(build("EfficientNetB0", 32))
    first, last = found.blocks[0], found.blocks[-1]
    assert first.existing == pytest.approx(1 - 0.2 * 2 / 16)
    assert last.existing == pytest.approx(1 - 0.2 * 14 / 16)
    assert all(block.layers[-1].endswith("_drop") for block in found.blocks)


def test_densenet_has_no_residual_block():
    model = build("DenseNet121", 32)
    found = find_residuals(model)
    assert found.blocks == found.refusals == ()
    with pytest.raises(ValueError) as error:
        wrap_residuals(model)
    assert str(error.value) == (
        "`model` 'densenet121' has no residual block that can be wrapped.\n"
        "It holds no sum of two tensors (Add(), x + y)."
    )
