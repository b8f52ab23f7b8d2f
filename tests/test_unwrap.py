"""`unwrap_residuals`: plain models that predict what the wrapped ones do."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from helpers import (
    KERAS_3,
    assert_same_outputs,
    assert_same_weights,
    data,
    every_layer,
    operation_counts,
    outputs,
    randomize,
    weights_by_layer,
)
from tfa_stochastic_depth import (
    StochasticDepth,
    constant,
    copy_weights,
    existing,
    set_survival_probs,
    unwrap_residuals,
    wrap_residuals,
)

keras = tf.keras
L = keras.layers


def residual(*branch, shape=(8,), name="model", shortcut=None):
    """x + branch(x), with a layer before and after it."""
    inputs = keras.Input(shape)
    x = y = L.Dense(shape[-1], name="before")(inputs)
    for layer in branch:
        y = layer(y)
    x = x if shortcut is None else shortcut(x)
    y = L.Add(name="sum")([x, y])
    return randomize(keras.Model(inputs, L.Dense(3, name="after")(L.Flatten()(y)), name=name))


def rescalings(model):
    return [x.name for x in every_layer(model).values() if isinstance(x, L.Rescaling)]


def assert_close(model, other, x):
    """Relative to the largest output."""
    for ours, theirs in zip(outputs(model, x), outputs(other, x)):
        assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()


class LayerScale(L.Layer):
    def build(self, shape):
        self.gamma = self.add_weight(name="gamma", shape=shape[-1:], initializer="ones")

    def call(self, x):
        return x * self.gamma


class Squared(L.Dense):
    """A subclass whose kernel is not linear."""

    def call(self, x):
        return super().call(x) ** 2


def attention(**kwargs):
    layer = L.MultiHeadAttention(2, 4, name="attention", **kwargs)
    return lambda x: layer(x, x)


def sums(x):
    return L.Add()([L.Dense(8)(x), L.Dense(8, activation="relu")(x)])


def joined(x):
    return L.Concatenate()([L.Dense(3)(x), L.Dense(5)(x)])


def gated(x):
    """The first factor can take the number, the second cannot."""
    return L.Multiply()([L.Dense(8)(x), L.Dense(8, activation="sigmoid")(x)])


def twice_used(x):
    x = L.Dense(8)(x)
    return L.Multiply()([x, L.Dense(8, activation="sigmoid")(x)])


SIGNAL, IMAGE = (6, 8), (4, 4, 8)
# What the branch ends in, and the shape of its input.
FOLDED = {
    "dense": ([L.Dense, 8], (8,)),
    "dense_relu": ([functools.partial(L.Dense, activation="relu"), 8], (8,)),
    "einsum": (
        [functools.partial(L.EinsumDense, output_shape=8, bias_axes="c"), "ab,bc->ac"],
        (8,),
    ),
    "conv1d": ([functools.partial(L.Conv1D, padding="same"), 8, 3], SIGNAL),
    "conv2d": ([functools.partial(L.Conv2D, padding="same", use_bias=False), 8, 3], IMAGE),
    "conv3d": ([functools.partial(L.Conv3D, padding="same"), 8, 3], (2, 2, 2, 8)),
    "transposed": ([functools.partial(L.Conv2DTranspose, padding="same"), 8, 3], IMAGE),
    "depthwise": ([functools.partial(L.DepthwiseConv2D, padding="same"), 3], IMAGE),
    "separable": ([functools.partial(L.SeparableConv2D, padding="same"), 8, 3], IMAGE),
    "batchnorm": ([L.BatchNormalization], IMAGE),
    "batchnorm_only_gamma": ([functools.partial(L.BatchNormalization, center=False)], IMAGE),
    "layernorm": ([L.LayerNormalization], (8,)),
    "groupnorm": ([L.GroupNormalization, 2], IMAGE),
    "layerscale": ([LayerScale], (8,)),
    "distributed": ([lambda: L.TimeDistributed(L.Dense(8))], SIGNAL),
    "attention": ([attention], SIGNAL),
    "sum": ([lambda: sums], (8,)),
    "concatenate": ([lambda: joined], (8,)),
    "product": ([lambda: gated], (8,)),
}
if KERAS_3:
    FOLDED["rmsnorm"] = [L.RMSNormalization], (8,)
    FOLDED["grouped"] = [lambda: lambda x: L.GroupQueryAttention(4, 4, 2)(x, x)], SIGNAL
PASSED = {
    "relu": lambda: L.ReLU(),
    "relu_activation": lambda: L.Activation("relu"),
    "leaky": lambda: L.LeakyReLU(),
    "prelu": lambda: L.PReLU(),
    "linear": lambda: L.Activation("linear"),
    "dropout": lambda: L.Dropout(0.3),
    "spatial_dropout": lambda: L.SpatialDropout2D(0.3),
    "padding": lambda: lambda x: L.Cropping2D(1)(L.ZeroPadding2D(1)(x)),
    "max": lambda: L.MaxPooling2D(3, 1, padding="same"),
    "average": lambda: L.AveragePooling2D(3, 1, padding="same"),
    "sizes": lambda: lambda x: L.MaxPooling2D(2)(L.UpSampling2D(2)(x)),
    "reshape": lambda: lambda x: L.Reshape(IMAGE)(L.Flatten()(x)),
    "permute": lambda: lambda x: L.Permute((2, 1, 3))(x),
    "rescaling": lambda: L.Rescaling(-2.0),
    "operators": lambda: lambda x: -0.5 * x,
    "nested": lambda: keras.Sequential([keras.Input(IMAGE), L.ReLU()], name="nested"),
}
NOT_FOLDED = {
    "sigmoid": lambda: L.Dense(8, activation="sigmoid"),
    "gelu": lambda: lambda x: L.Activation("gelu")(L.Dense(8)(x)),
    "relu6": lambda: lambda x: L.ReLU(6.0)(L.Dense(8)(x)),
    "threshold": lambda: lambda x: L.ReLU(threshold=0.5)(L.Dense(8)(x)),
    "offset": lambda: lambda x: L.Rescaling(2.0, offset=1.0)(L.Dense(8)(x)),
    "softmax": lambda: lambda x: L.Softmax()(L.Dense(8)(x)),
    "lambda": lambda: lambda x: L.Lambda(lambda t: tf.sin(t))(L.Dense(8)(x)),
    "subclass": lambda: Squared(8),
    "norm_without_gamma": lambda: lambda x: L.BatchNormalization(scale=False)(L.Dense(8)(x)),
    "twice_used": lambda: twice_used,
    "plus_constant": lambda: lambda x: L.Dense(8)(x) + 1.0,
    "half": lambda: lambda x: L.Concatenate()([L.Dense(4)(x), L.Dense(4, activation="tanh")(x)]),
    "inner_sum": lambda: lambda x: L.Add()([x, L.Dense(8)(x)]),
}
if not KERAS_3:
    del NOT_FOLDED["lambda"]


@pytest.mark.parametrize("end", FOLDED)
def test_last_weights_take_the_factor(end):
    (make, *args), shape = FOLDED[end]
    first = () if end in ("attention", "grouped") else (L.Dense(8),)
    model = residual(*first, make(*args), shape=shape)
    wrapped = wrap_residuals(model, [0.7], nested="outer")
    plain = unwrap_residuals(wrapped)
    assert rescalings(plain) == []
    x = data(5, *shape)
    assert_close(plain, wrapped, x)
    assert_close(unwrap_residuals(wrapped, fold=False), model, x)
    assert np.abs(outputs(wrapped, x)[0] - outputs(model, x)[0]).max() > 1e-2


@pytest.mark.parametrize("end", PASSED)
def test_the_factor_goes_through_what_passes_it_on(end):
    wrapped = wrap_residuals(residual(L.Conv2D(8, 1), PASSED[end](), shape=IMAGE), [0.7])
    plain = unwrap_residuals(wrapped)
    assert rescalings(plain) == (["rescaling"] if end == "rescaling" else [])
    assert_close(plain, wrapped, data(5, *IMAGE))


@pytest.mark.parametrize("end", NOT_FOLDED)
def test_a_rescaling_does_it_elsewhere(end):
    model = residual(NOT_FOLDED[end]())
    wrapped = wrap_residuals(model, [0.7], nested="outer")
    plain = unwrap_residuals(wrapped)
    assert rescalings(plain)[-1:] == ["sum_branch_factor"]
    x = data(5, 8)
    assert_close(plain, wrapped, x)
    assert_same_weights(weights_by_layer(plain), weights_by_layer(model))
    assert "sum_branch_factor" not in every_layer(unwrap_residuals(wrapped, fold=False))


@pytest.mark.parametrize("p", [0, 0.2, 0.7, 1])
@pytest.mark.parametrize("mode", ["batch", "row"])
@pytest.mark.parametrize("rescale", ["inference", "training"])
def test_the_same_inference_output(p, mode, rescale):
    model = residual(L.Dense(8), L.BatchNormalization(), L.ReLU(), L.Dense(8, name="last"))
    wrapped = wrap_residuals(model, [p], mode=mode, rescale=rescale)
    plain, unscaled = unwrap_residuals(wrapped), unwrap_residuals(wrapped, fold=False)
    x = data(5, 8)
    assert_close(plain, wrapped, x)
    assert_same_weights(weights_by_layer(unscaled), weights_by_layer(model))
    factor = p if rescale == "inference" else 1
    for ours, theirs in zip(
        plain.get_layer("last").get_weights(), model.get_layer("last").get_weights()
    ):
        np.testing.assert_allclose(ours, factor * theirs, rtol=1e-6)
    assert operation_counts(plain, x) == operation_counts(model, x)


def network(named=True):
    """Sums as layers and operators, both orders, a projection, nested and shared layers."""
    inputs = keras.Input((8, 8, 3), name="image")
    relu = L.ReLU(name="relu")
    x = relu(L.Conv2D(4, 3, padding="same", name="stem")(inputs))
    for i, order in enumerate([1, -1, 1]):
        y = L.Conv2D(8 if i == 1 else 4, 3, padding="same", name=f"conv{i}a")(x)
        y = L.BatchNormalization(name=f"norm{i}")(relu(y))
        if i == 1:
            x = L.Conv2D(8, 1, name="projection")(x)
        if i == 2:
            x = L.Conv2D(4, 1, name="down")(x)
        x = relu(L.Add(name=f"add{i}")([x, y][::order]))
        if i == 1:
            x = L.Conv2D(4, 1, name="between")(x)
    y = keras.Sequential([keras.Input((8, 8, 4)), L.Conv2D(4, 1, name="inner")], name="sequential")
    x = y(x) + x
    part = keras.Input((8, 8, 4))
    z = L.Add(name="nested_add")([L.Conv2D(4, 3, padding="same", name="nested_conv")(part), part])
    nested = keras.Model(part, z, name="nested")
    x = L.GlobalAveragePooling2D(name="pool")(nested(nested(x)))
    outputs = {"logits": L.Dense(3, name="logits")(x), "pooled": x}
    return keras.Model(inputs, outputs, name="network")


def structure(model):
    kinds = [(type(x), x.name) for x in getattr(model, "operations", model.layers)]
    nested = [structure(x) for x in model.layers if isinstance(x, keras.Model)]
    return model.name, kinds, nested


def test_the_original_is_there_again():
    """Layers, names and the order of weights, and so lists and files of weights pass."""
    model = randomize(network())
    wrapped = wrap_residuals(model, 0.5)
    plain, unscaled = unwrap_residuals(wrapped), unwrap_residuals(wrapped, fold=False)
    x = data(2, 8, 8, 3)
    for one in (plain, unscaled):
        assert structure(one) == structure(model)
        assert one.input_shape == model.input_shape
        assert [w.shape for w in one.get_weights()] == [w.shape for w in model.get_weights()]
        assert operation_counts(one, x) == operation_counts(model, x)
    for ours, theirs in zip(unscaled.get_weights(), model.get_weights()):
        np.testing.assert_array_equal(ours, theirs)
    assert_close(plain, wrapped, x)
    assert_same_outputs(unscaled, model, x, training=True)


FORMATS = ["list", ".weights.h5", ".keras", "checkpoint"]


@pytest.mark.parametrize("how", FORMATS)
def test_trained_weights_pass_into_the_original_architecture(how, tmp_path):
    wrapped = wrap_residuals(network(), 0.5, seed=3)
    wrapped.compile("sgd", loss={"logits": "mse", "pooled": None} if KERAS_3 else {"logits": "mse"})
    x, y = data(40, 8, 8, 3), data(40, 3)
    wrapped.fit(x, {"logits": y}, batch_size=8, epochs=4, verbose=0)  # 20 steps
    plain = unwrap_residuals(wrapped)
    keras.backend.clear_session()
    original, path = network(), str(tmp_path / f"file{how}")
    if how == "list":
        original.set_weights(plain.get_weights())
    elif how == ".weights.h5":
        plain.save_weights(path)
        original.load_weights(path)
    elif how == ".keras":
        plain.save(path)
        original = keras.models.load_model(path)
        assert structure(original) == structure(plain)
    else:
        tf.train.Checkpoint(plain).write(path)
        tf.train.Checkpoint(original).read(path).assert_existing_objects_matched()
    assert_same_outputs(original, plain, x)
    assert_close(original, wrapped, x)


def test_copies_share_nothing():
    wrapped = wrap_residuals(randomize(network()), 0.5)
    before = wrapped.get_weights()
    plain = unwrap_residuals(wrapped)
    for weight in plain.weights:
        weight.assign(weight + 1.0)
    for a, b in zip(before, wrapped.get_weights()):
        np.testing.assert_array_equal(a, b)


def test_flags_and_the_dtype_policy_come_along():
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = network()
    model.get_layer("conv0a").trainable = False
    wrapped = wrap_residuals(model, 0.5)
    wrapped.get_layer("add2").trainable = False
    keras.mixed_precision.set_global_policy("float32")
    plain = unwrap_residuals(wrapped)
    assert not plain.get_layer("conv0a").trainable
    assert not plain.get_layer("conv2a").trainable
    assert plain.get_layer("norm0").trainable
    assert plain.get_layer("add0").compute_dtype == "float16"
    assert all(w.dtype == tf.float32 for w in map(tf.convert_to_tensor, plain.weights))
    ours, theirs = (outputs(m, data(2, 8, 8, 3)) for m in (plain, wrapped))
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, rtol=0.01, atol=0.01)


def test_a_saved_and_loaded_wrapped_model(tmp_path):
    model = randomize(network())
    wrapped = wrap_residuals(model, 0.5)
    wrapped.save(tmp_path / "wrapped.keras")
    keras.backend.clear_session()
    loaded = keras.models.load_model(tmp_path / "wrapped.keras")
    plain = unwrap_residuals(loaded)
    assert structure(plain) == structure(model)
    assert_close(plain, wrapped, data(2, 8, 8, 3))


def test_drops_that_were_replaced_are_there_again():
    drop = L.Dropout(0.2, noise_shape=(None, 1), name="own_drop")
    model = residual(L.Dense(8, name="last"), drop)
    wrapped = wrap_residuals(model, existing())
    assert "own_drop" not in every_layer(wrapped)
    plain = unwrap_residuals(wrapped)
    assert structure(plain) == structure(model)
    assert plain.get_layer("own_drop").get_config() == drop.get_config()
    assert_close(plain, wrapped, data(5, 8))
    kept = unwrap_residuals(wrap_residuals(model, [0.8], replace_existing=False))
    assert structure(kept) == structure(model)


@keras.utils.register_keras_serializable(package="test_unwrap")
class ScaledAdd(L.Layer):
    def __init__(self, factor=0.3, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x):
        return x[0] + self.factor * x[1]

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


class Unregistered(ScaledAdd):
    pass


@pytest.mark.parametrize("cls", [ScaledAdd, Unregistered])
@pytest.mark.parametrize("loaded", [False, True])
def test_sums_by_another_name(cls, loaded, tmp_path):
    """They come back; where their class is not known any more, other layers do the same."""
    x = keras.Input((8,))
    model = randomize(keras.Model(x, cls(name="sum")([x, L.Dense(8, name="last")(x)])))
    wrapped = wrap_residuals(model, [0.7], merge_layers={cls: (1, 0.3)})
    if loaded:
        wrapped.save(tmp_path / "wrapped.keras")
        wrapped = keras.models.load_model(tmp_path / "wrapped.keras")
    plain = unwrap_residuals(wrapped)
    if cls is ScaledAdd:
        assert structure(plain) == structure(model)
    assert_close(plain, wrapped, data(5, 8))
    assert_close(unwrap_residuals(wrapped, fold=False), model, data(5, 8))


class OwnBlock(L.Layer):
    """A whole residual block, not looked into."""

    def __init__(self, units=8, **kwargs):
        super().__init__(**kwargs)
        self.dense = L.Dense(units)

    def call(self, x):
        return x + self.dense(x)


def test_whole_blocks():
    x = keras.Input((8,))
    model = randomize(keras.Model(x, OwnBlock(name="block")(x)))
    wrapped = wrap_residuals(model, [0.7], block_layers=OwnBlock)
    x = data(5, 8)
    plain = unwrap_residuals(wrapped)
    assert_close(plain, wrapped, x)
    assert not any(isinstance(layer, StochasticDepth) for layer in plain.layers)
    for original, ours in zip(model.get_weights(), plain.get_weights()):
        np.testing.assert_array_equal(ours, original)
    unscaled = unwrap_residuals(wrapped, fold=False)
    assert [layer.name for layer in unscaled.layers[1:]] == ["block"]
    assert_close(unscaled, model, x)


@pytest.mark.parametrize("rescale", ["inference", "training"])
@pytest.mark.parametrize("skip", [None, "identity", "layer"])
def test_layers_wrapped_by_hand(skip, rescale):
    inputs = keras.Input((8,))
    branch = keras.Sequential([L.Dense(8, activation="tanh"), L.Dense(8)], name="branch")
    other = L.Dense(8, name="other") if skip == "layer" else skip
    y = StochasticDepth(branch, 0.7, rescale=rescale, skip=other, name="wrapper")(inputs)
    model = randomize(keras.Model(inputs, L.Dense(2)(y + inputs if skip is None else y)))
    x = data(5, 8)
    plain = unwrap_residuals(model)
    assert_close(plain, model, x)
    assert "branch" in every_layer(plain) and isinstance(
        plain.get_layer("branch"), keras.Sequential
    )
    by_rescaling = skip is not None and rescale == "inference"
    assert len(rescalings(plain)) == (2 if by_rescaling else 0)
    assert rescalings(unwrap_residuals(model, fold=False)) == []


def test_one_layer_in_several_places_is_not_multiplied():
    """Its other uses would be multiplied as well."""
    dense = L.Dense(8, name="shared")
    inputs = keras.Input((8,))
    x = StochasticDepth(dense, 0.7)(inputs, shortcut=inputs)
    x = StochasticDepth(dense, 0.4)(x, shortcut=x)
    model = randomize(keras.Model(inputs, x))
    plain = unwrap_residuals(model)
    assert len(rescalings(plain)) == 2
    assert len(plain.get_weights()) == 2
    assert_close(plain, model, data(5, 8))


def test_one_wrapper_in_several_places_is_multiplied_once():
    wrapper = StochasticDepth(L.Dense(8), 0.7)
    inputs = x = keras.Input((8,))
    for _ in range(3):
        x = wrapper(x, shortcut=x)
    model = randomize(keras.Model(inputs, x))
    plain = unwrap_residuals(model)
    assert rescalings(plain) == []
    assert_close(plain, model, data(5, 8))


def test_a_layer_that_is_part_of_another_one_as_well_cannot_be_copied():
    dense = L.Dense(8)
    inputs = keras.Input((8,))
    x = StochasticDepth(dense, 0.7)(inputs, shortcut=inputs)
    x = L.TimeDistributed(dense)(L.Reshape((1, 8))(x))
    model = randomize(keras.Model(inputs, x))
    with pytest.raises(ValueError, match="is used by both"):
        unwrap_residuals(model)


def test_structures_of_outputs():
    inputs = keras.Input((8,))
    pair = keras.Model(inputs, {"a": L.Dense(4)(inputs), "b": L.Dense(2)(inputs)}, name="pair")
    y = StochasticDepth(pair, 0.7, name="wrapper")(inputs)
    model = randomize(keras.Model(inputs, y))
    plain = unwrap_residuals(model)
    assert len(rescalings(plain)) == 2
    assert_close(plain, model, data(5, 8))


def test_masks_reach_what_follows():
    ids = keras.Input((6,), dtype="int32")
    x = L.Embedding(9, 8, mask_zero=True)(ids)
    x = L.Add(name="sum")([x, L.Dense(8)(x)])
    model = randomize(keras.Model(ids, L.LSTM(4)(x)))
    wrapped = wrap_residuals(model, [0.7])
    plain = unwrap_residuals(wrapped)
    x = np.array([[1, 2, 0, 0, 0, 0], [3, 4, 5, 6, 7, 8]])
    assert_close(plain, wrapped, x)
    assert_same_outputs(unwrap_residuals(wrapped, fold=False), model, x)


def test_a_schedule_s_last_probabilities_count():
    wrapped = wrap_residuals(residual(L.Dense(8)), [0.7])
    before = unwrap_residuals(wrapped)
    set_survival_probs(wrapped, [0.2])
    after = unwrap_residuals(wrapped)
    x = data(5, 8)
    assert_close(after, wrapped, x)
    assert np.abs(outputs(before, x)[0] - outputs(after, x)[0]).max() > 1e-2


def test_training_goes_on_and_wrapping_again_works():
    wrapped = wrap_residuals(network(), 0.5)
    plain = unwrap_residuals(wrapped, fold=False)
    again = wrap_residuals(plain, 0.5)
    copy_weights(wrapped, again)
    assert_same_outputs(again, wrapped, data(2, 8, 8, 3))
    plain.compile("sgd", loss={"logits": "mse", "pooled": None} if KERAS_3 else {"logits": "mse"})
    plain.fit(data(8, 8, 8, 3), {"logits": data(8, 3)}, verbose=0)


def test_models_without_our_layers():
    with pytest.raises(ValueError) as error:
        unwrap_residuals(network())
    assert str(error.value) == (
        "`model` 'network' holds no StochasticDepth layer: wrap it with `wrap_residuals(model)` "
        "and use the model that this returns."
    )


class Holder(L.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inside = StochasticDepth(L.Dense(8), 0.7, name="inside")

    def call(self, x):
        return self.inside(x, shortcut=x)


def test_a_layer_inside_one_of_another_kind():
    inputs = keras.Input((8,))
    model = keras.Model(inputs, Holder(name="holder")(inputs), name="model")
    with pytest.raises(ValueError) as error:
        unwrap_residuals(model)
    assert str(error.value) == (
        "`model` 'model' must hold its StochasticDepth layers in functional models, which can be "
        "built without them. Received: 'inside', inside a layer of another kind. Build the plain "
        "model anew and use `copy_weights(model, plain)`."
    )


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.inside = StochasticDepth(L.Dense(8), 0.7)

    def call(self, x):
        return self.inside(x, shortcut=x)


@pytest.mark.parametrize(
    "arguments, options, error, words",
    [
        ([None], {}, TypeError, "`model`"),
        (["model.keras"], {}, TypeError, "Received: 'model.keras'"),
        ([wrap_residuals], {}, TypeError, "`model`"),
        (None, {}, TypeError, "subclassed"),
        ([], {"fold": "yes"}, TypeError, "`fold` must be True or False. Received: 'yes'"),
        ([], {"fold": None}, TypeError, "`fold`"),
    ],
)
def test_wrong_arguments(arguments, options, error, words):
    if arguments is None:
        arguments = [Subclassed()]
        arguments[0](data(2, 8))
    elif not arguments:
        arguments = [wrap_residuals(residual(L.Dense(8)), [0.7])]
    with pytest.raises(error) as caught:
        unwrap_residuals(*arguments, **options)
    assert words in str(caught.value)


def test_seeds_of_constant_rule_do_not_matter():
    """Two wrapped versions of one model unwrap to the same."""
    model = randomize(network())
    first, second = (unwrap_residuals(wrap_residuals(model, constant(0.7), seed=s)) for s in (1, 2))
    for a, b in zip(first.get_weights(), second.get_weights()):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("passes", [True, False])
@pytest.mark.parametrize("skip", [None, "identity"])
@pytest.mark.parametrize("layer", [L.Dense, functools.partial(L.LSTM, return_sequences=True)])
def test_masks_of_layers_wrapped_by_hand(layer, skip, passes):
    """They are what the wrapper gave, whether that is one or none."""
    ids = keras.Input((6,), dtype="int32")
    x = L.Embedding(9, 8, mask_zero=True)(ids)
    options = {} if passes else {"supports_masking": False}
    x = StochasticDepth(layer(8), 0.7, skip=skip, **options)(x)
    model = randomize(keras.Model(ids, L.GlobalAveragePooling1D()(x)))
    x = np.array([[1, 2, 0, 0, 0, 0], [3, 4, 5, 6, 7, 8]])
    if passes and not KERAS_3 and (skip, layer) != (None, L.Dense):
        with pytest.raises(ValueError, match="hands no mask on in this Keras"):
            unwrap_residuals(model)
    else:
        assert_close(unwrap_residuals(model), model, x)


def test_layers_of_the_same_name():
    inputs = x = keras.Input((8,))
    for _ in range(2):
        x = StochasticDepth(L.Dense(8, name="same"), 0.7)(x, shortcut=x)
    with pytest.raises(ValueError, match="several layers named 'same', in StochasticDepth layers"):
        unwrap_residuals(keras.Model(inputs, x))
