"""Backbones and tasks of KerasHub. It is made for Keras 3 alone."""

import importlib.util

import numpy as np
import pytest
import tensorflow as tf

from helpers import KERAS_3, every_layer, wrappers
from tfa_stochastic_depth import (
    constant,
    copy_weights,
    find_residuals,
    set_survival_probs,
    unwrap_residuals,
    wrap_residuals,
)

keras = tf.keras

if KERAS_3:
    import keras_hub
    from keras_hub.src.models.efficientnet.fusedmbconv import FusedMBConvBlock
    from keras_hub.src.models.efficientnet.mbconv import MBConvBlock
    from keras_hub.src.models.swin_transformer.swin_transformer_layers import SwinTransformerBlock
    from keras_hub.src.models.vit.vit_layers import ViTEncoderBlock

    hub = keras_hub.models
    TransformerDecoder = keras_hub.layers.TransformerDecoder
    TransformerEncoder = keras_hub.layers.TransformerEncoder


# ------------------------------------------------------------------ small models of each family


def resnet(kind, pre_activation=False, filters=(64, 64), repeats=(1, 2), strides=(1, 2)):
    deep_stem = kind.endswith("_vd")
    return hub.ResNetBackbone(
        [8, 8, 64] if deep_stem else [64],
        [3, 3, 3] if deep_stem else [7],
        list(filters),
        list(repeats),
        list(strides),
        kind,
        use_pre_activation=pre_activation,
        image_shape=(32, 32, 3),
    )


def language_model(backbone):
    return backbone(
        vocabulary_size=20,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=16,
    )


def gpt2():
    return language_model(hub.GPT2Backbone)


def bert():
    return language_model(hub.BertBackbone)


def vit():
    return hub.ViTBackbone(
        image_shape=(32, 32, 3),
        patch_size=(8, 8),
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=16,
    )


def swin():
    return hub.SwinTransformerBackbone((32, 32, 3), 8, [1, 2], [2, 2], 4)


def efficientnet():
    """Two stages of two blocks: only the first of the second stage changes the shape."""
    return hub.EfficientNetBackbone(
        stackwise_kernel_sizes=[3, 3],
        stackwise_num_repeats=[2, 2],
        stackwise_input_filters=[8, 8],
        stackwise_output_filters=[8, 16],
        stackwise_expansion_ratios=[1, 4],
        stackwise_squeeze_and_excite_ratios=[0.25, 0.25],
        stackwise_strides=[1, 2],
        stackwise_block_types=["fused", "unfused"],
        width_coefficient=1.0,
        depth_coefficient=1.0,
        input_shape=(32, 32, 3),
    )


def deeplab(plus):
    encoder = resnet("basic_block", False, [64] * 4, [1] * 4, [1, 2, 2, 2])
    low_level = {"low_level_feature_key": "P2", "projection_filters": 8} if plus else {}
    backbone = hub.DeepLabV3Backbone(
        image_encoder=encoder,
        spatial_pyramid_pooling_key="P4" if plus else "P5",
        upsampling_size=4,
        dilation_rates=[1, 2],
        image_shape=(32, 32, 3),
        **low_level,
    )
    return hub.DeepLabV3ImageSegmenter(backbone=backbone, num_classes=3, preprocessor=None)


# model, the layers that are whole blocks, blocks, names of the refusals
MODELS = {}
if KERAS_3:
    MODELS = {
        "ResNet, basic": (lambda: resnet("basic_block"), (), 3, []),
        "ResNet, bottleneck": (lambda: resnet("bottleneck_block"), (), 3, []),
        "ResNetV2": (lambda: resnet("basic_block", True), (), 3, []),
        "ResNetV2, bottleneck": (lambda: resnet("bottleneck_block", True), (), 3, []),
        "ResNet-vd, basic": (lambda: resnet("basic_block_vd"), (), 3, []),
        "ResNet-vd, bottleneck": (lambda: resnet("bottleneck_block_vd"), (), 3, []),
        "EfficientNet": (efficientnet, (MBConvBlock, FusedMBConvBlock), 3, ["block2a_"]),
        "GPT-2": (gpt2, (TransformerDecoder,), 2, ["embeddings_add"]),
        "BERT": (bert, (TransformerEncoder,), 2, ["embeddings_add"]),
        "ViT": (vit, (ViTEncoderBlock,), 2, []),
        "Swin": (swin, (SwinTransformerBlock,), 3, []),
        "DeepLabV3": (lambda: deeplab(False), (), 4, []),
        "DeepLabV3+": (lambda: deeplab(True), (), 4, []),
    }
# Swin's PatchEmbedding has a `get_config` that raises an error, so its layers cannot be copied.
NOT_COPIED = {"Swin"}


def of_keras_3(test):
    """Where there is no KerasHub, the test at the end of this file is all there is."""
    test.__test__ = KERAS_3
    return test


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return request.param


def wrapped_of(name, model, survival_prob=0.5, **options):
    _, block_layers, _, _ = MODELS[name]
    return wrap_residuals(
        model,
        survival_prob,
        rescale="training",
        block_layers=block_layers,
        share_layers=name in NOT_COPIED,
        **options,
    )


@pytest.fixture(scope="module")
def kept(name):
    """A model, and the wrapped one in which no branch is dropped, for tests that change neither."""
    keras.utils.set_random_seed(1)
    model = MODELS[name][0]()
    return model, wrapped_of(name, model, constant(1))


def inputs_of(model, seed=0):
    rng = np.random.default_rng(seed)

    def value(tensor):
        shape = (2, *(8 if size is None else size for size in tensor.shape[1:]))
        if "int" not in str(tensor.dtype):
            return rng.normal(size=shape).astype("float32")
        ids = {"padding_mask": 1, "segment_ids": 0}.get(tensor.name, rng.integers(2, 20, shape))
        return np.broadcast_to(ids, shape).astype("int32")

    values = {tensor.name: value(tensor) for tensor in model.inputs}
    return values if isinstance(model.input, dict) else next(iter(values.values()))


def outputs(model, x, **kwargs):
    """Keras 3 sets training to true after `Resizing`, in DeepLab, unless it is told."""
    return [np.asarray(y) for y in keras.tree.flatten(model(x, **{"training": False, **kwargs}))]


def assert_close(ours, theirs, atol=1e-6):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


# ------------------------------------------------------------------ what holds for all


@of_keras_3
def test_blocks_and_refusals(name, kept):
    _, block_layers, blocks, refusals = MODELS[name]
    found = find_residuals(kept[0], block_layers=block_layers)
    assert len(found.blocks) == blocks
    assert [r.name for r in found.refusals] == refusals
    assert all(b.params > 0 for b in found.blocks)


@of_keras_3
def test_nothing_dropped_is_the_original(kept):
    model, wrapped = kept
    x = inputs_of(model)
    expected = outputs(model, x)
    assert max(np.abs(y).max() for y in expected) > 1e-3
    assert_close(outputs(wrapped, x), expected)


def silence(model, blocks, block_layers, monkeypatch):
    """Makes all residual branches of a model zero, without this package."""
    names = {b.layers[-1] for b in blocks}
    for cls in block_layers:

        def call(self, x, *args, own=cls.call, **kwargs):
            return x if self.name in names else own(self, x, *args, **kwargs)

        monkeypatch.setattr(cls, "call", call)
    for layer in model._flatten_layers():
        if layer.name in names and not isinstance(layer, block_layers):
            weights = layer.get_weights()  # kernel and bias, or scale, offset and statistics
            zeros = [np.zeros_like(w) for w in weights[:2]]
            layer.set_weights(zeros + [np.ones_like(w) for w in weights[2:]])


@of_keras_3
def test_all_dropped_is_the_shortcut_path(name, monkeypatch):
    make, block_layers, blocks, _ = MODELS[name]
    model = make()
    x = inputs_of(model)
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False  # the same statistics in training
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    wrapped = wrapped_of(name, model, constant(0))
    assert len(wrappers(wrapped)) == blocks
    ours = outputs(wrapped, x, training=True)
    assert max(np.abs(a - b).max() for a, b in zip(ours, outputs(model, x))) > 1e-4
    found = find_residuals(model, block_layers=block_layers).blocks
    silence(model, found, block_layers, monkeypatch)
    assert_close(ours, outputs(model, x), atol=1e-5)


@of_keras_3
def test_every_weight_is_found_again(name, kept):
    """And nothing but a probability and a seed for each block has come to them."""
    model, wrapped = kept
    ours = wrapped.get_weights()
    assert len(ours) == len(model.weights) + 2 * MODELS[name][2]
    for weight in model.get_weights():
        assert any(w.shape == weight.shape and np.array_equal(w, weight) for w in ours)


@of_keras_3
def test_unwrapped(name, kept):
    model, wrapped = kept
    x = inputs_of(model)
    if name in NOT_COPIED:
        with pytest.raises(ValueError, match="cannot be copied.*or build the plain model anew"):
            unwrap_residuals(wrapped)
        return
    assert_close(outputs(unwrap_residuals(wrapped), x), outputs(model, x))
    _, block_layers, blocks, _ = MODELS[name]
    wrapped = wrap_residuals(model, constant(0.7), block_layers=block_layers)
    plain = unwrap_residuals(wrapped)
    assert not wrappers(plain)
    assert_close(outputs(plain, x), outputs(wrapped, x), atol=1e-5)
    # Two for each layer that adds its own shortcut, and else none.
    added = [x for x in every_layer(plain) if x.endswith(("_branch_scale", "_skip_scale"))]
    assert len(added) == (2 * blocks if block_layers else 0)
    assert not any("_branch_factor" in x for x in every_layer(plain))


@pytest.mark.slow
@of_keras_3
def test_trained_two_steps_saved_and_reloaded(name, tmp_path):
    model = MODELS[name][0]()
    x = inputs_of(model)
    wrapped = wrapped_of(name, model, constant(0.6), seed=1)
    target = keras.tree.map_structure(lambda y: np.zeros(y.shape, "float32"), wrapped(x))
    loss = keras.tree.map_structure(lambda y: "mse", target)
    before = [np.array(w) for w in wrapped.trainable_weights]
    wrapped.compile(keras.optimizers.SGD(0.1), loss)
    for _ in range(2):
        wrapped.train_on_batch(x, target)
    assert any(np.any(np.array(w) != b) for w, b in zip(wrapped.trainable_weights, before))
    expected = outputs(wrapped, x)
    if name in NOT_COPIED:  # nor saved, for Keras asks for the same configs, but exported
        with pytest.raises(TypeError, match="get_config"):
            wrapped.save(str(tmp_path / "model.keras"))
        path = str(tmp_path / "model.weights.h5")
        wrapped.save_weights(path)
        again = wrapped_of(name, MODELS[name][0](), constant(0.6))
        again.load_weights(path)
        wrapped.export(str(tmp_path / "exported"), verbose=False)
        served = tf.saved_model.load(str(tmp_path / "exported"))
        assert_close([np.asarray(y) for y in tf.nest.flatten(served.serve(x))], expected)
    else:
        path = str(tmp_path / "model.keras")
        wrapped.save(path)
        again = keras.models.load_model(path)
    assert_close(outputs(again, x), expected)
    assert len(wrappers(again)) == MODELS[name][2]


# ------------------------------------------------------------------ particular ones

if KERAS_3:

    def test_efficientnet_names_both_shapes_of_the_block_that_changes_them():
        found = find_residuals(efficientnet(), block_layers=(MBConvBlock, FusedMBConvBlock))
        assert found.refusals[0].reason == (
            "cannot stand aside for its input: it takes (None, 16, 16, 8) and gives "
            "(None, 8, 8, 16)."
        )

    def test_padding_masks_reach_the_blocks():
        model = bert()
        wrapped = wrapped_of("BERT", model, constant(1))
        x = inputs_of(model)
        x["padding_mask"] = np.array([[1] * 5 + [0] * 3, [1] * 8])
        masked = outputs(wrapped, x)
        assert_close(masked, outputs(model, x))
        x["padding_mask"] = np.ones((2, 8), int)
        assert max(np.abs(a - b).max() for a, b in zip(masked, outputs(wrapped, x))) > 1e-4

    def test_deeplab_blocks_are_two_models_deep():
        names = [b.name for b in find_residuals(deeplab(True)).blocks]
        assert all(name.count("/") == 2 for name in names)

    def by_greedy_choice(model, embedding, ids, count):
        """Tokens that a backbone adds to a prompt, one forward pass for each."""
        for _ in range(count):
            x = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
            states = model(x, training=False)
            logits = np.asarray(embedding(states, reverse=True))
            ids = np.concatenate([ids, logits[:, -1:].argmax(-1)], axis=1)
        return ids

    @pytest.mark.parametrize("share_layers", [True, False])
    def test_a_language_model_trained_through_the_wrapped_one_generates(share_layers):
        task = hub.GPT2CausalLM(backbone=gpt2(), preprocessor=None)
        task.compile(sampler="greedy")
        backbone, embedding = task.backbone, task.backbone.token_embedding
        wrapped = wrap_residuals(
            backbone,
            0.5,
            rescale="training",
            block_layers=TransformerDecoder,
            share_layers=share_layers,
        )
        inputs = inputs_of(backbone)
        prompt = {
            "token_ids": np.concatenate([inputs["token_ids"], np.zeros((2, 2), int)], axis=1),
            "padding_mask": np.array([[1] * 8 + [0] * 2] * 2),
        }
        before = task.generate(prompt, stop_token_ids=None)["token_ids"]
        wrapped.compile(keras.optimizers.SGD(1.0), "mse")
        for _ in range(5):
            wrapped.train_on_batch(inputs, np.random.default_rng(1).normal(size=(2, 8, 8)))
        if not share_layers:
            copy_weights(wrapped, backbone)
        after = task.generate(prompt, stop_token_ids=None)["token_ids"]
        assert np.any(after != before)
        expected = by_greedy_choice(wrapped, embedding, inputs["token_ids"], 2)
        np.testing.assert_array_equal(after, expected)

    def test_pre_activation_shortcuts_stay_when_all_is_dropped():
        model = resnet("basic_block", True)
        wrapped = wrapped_of("ResNetV2", model, constant(1))
        x = inputs_of(model)
        set_survival_probs(wrapped, [0] * 3)
        dropped = outputs(wrapped, x, training=True)[0]
        other = outputs(wrapped, inputs_of(model, seed=1), training=True)[0]
        assert np.abs(dropped - other).max() > 1e-3

else:

    def test_keras_hub_is_of_another_keras(leg):
        """It is there for Keras 3 only; beside another Keras its models are refused by name."""
        if leg == "keras2":
            assert importlib.util.find_spec("keras_hub") is None
            return
        import keras_hub

        backbone = keras_hub.models.ViTBackbone(
            image_shape=(16, 16, 3),
            patch_size=(8, 8),
            num_layers=1,
            num_heads=1,
            hidden_dim=4,
            mlp_dim=4,
        )
        with pytest.raises(TypeError, match="`model` belongs to another Keras than the one in use"):
            wrap_residuals(backbone)
