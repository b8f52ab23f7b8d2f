"""`load_legacy_model`: files of tensorflow-addons and KerasCV, of Keras 2 on Keras 3, bad files."""

import json
import os
import pathlib
import shutil
import zipfile

import h5py
import numpy as np
import pytest
import tensorflow as tf

from fixtures.make_fixtures import addons_model
from helpers import KERAS_3, assert_same_outputs, data, outputs, randomize, wrappers
from tfa_stochastic_depth import (
    existing,
    find_residuals,
    get_survival_probs,
    load_legacy_model,
    set_survival_probs,
    wrap_residuals,
)
from tfa_stochastic_depth.legacy import (
    AddonsStochasticDepth,
    KerasCVDropPath,
    KerasCVStochasticDepth,
)

keras = tf.keras
L = keras.layers
FIXTURES = pathlib.Path(__file__).parent / "fixtures"
ENDINGS = [".keras", ".h5"]
FOREIGN = [(name, ending) for name in ("addons", "keras_cv") for ending in ENDINGS]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The folder with the files of a fixture."""

    def unpack(name):
        folder = folders / name
        if not folder.exists():
            with zipfile.ZipFile(FIXTURES / f"{name}.zip") as file:
                file.extractall(folder)
        return folder

    folders = tmp_path_factory.mktemp("fixtures")
    return unpack


@pytest.fixture(autouse=True)
def without_addons():
    """Forgets what tensorflow-addons registered if another test has imported it."""
    registered = keras.utils.get_custom_objects()
    theirs = registered.pop("Addons>StochasticDepth", None)
    yield
    registered.pop("Addons>StochasticDepth", None)
    if theirs is not None:
        registered["Addons>StochasticDepth"] = theirs


# ------------------------------------------------------------------ the stand-ins


def stand_in_sums(p):
    return [AddonsStochasticDepth(p), KerasCVStochasticDepth(1 - p)]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("p", [0.0, 0.2, 0.7, 1.0])
def test_a_sum_draws_one_switch_for_the_batch(which, p):
    layer = stand_in_sums(p)[which]
    shortcut, branch = data(5, 3), data(5, 3, seed=1)
    step = tf.function(lambda: layer([shortcut, branch], training=True))
    kept, n = 0, 250
    for _ in range(n):
        y = step().numpy()
        whole = np.allclose(y, shortcut + branch, atol=1e-6)
        assert whole or np.array_equal(y, shortcut)
        kept += whole
    # Five standard deviations: wrong once in two million runs. Seeds are fixed.
    assert abs(kept - n * p) <= 5 * np.sqrt(n * p * (1 - p))
    for training in (False, None):
        y = layer([shortcut, branch], training=training)
        np.testing.assert_allclose(y, shortcut + np.float32(p) * branch, atol=1e-6)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_drop_path_draws_a_switch_for_each_sample(rate):
    layer, x, p = KerasCVDropPath(rate), 1 + data(50, 2, 3) ** 2, 1 - rate
    step = tf.function(lambda: layer(x, training=True))
    kept = np.zeros((20, 50), bool)
    for row in kept:
        y = step().numpy()
        row[:] = np.any(y, axis=(1, 2))
        np.testing.assert_allclose(y[row], x[row] / p if p else x[row], rtol=1e-5)
        assert not np.any(y[~row])
    assert abs(kept.sum() - kept.size * p) <= 5 * np.sqrt(kept.size * p * (1 - p))
    if 0 < rate < 1:
        assert len({row.tobytes() for row in kept}) == len(kept)
        assert all(0 < row.sum() < 50 for row in kept)
    for training in (False, None):
        np.testing.assert_array_equal(layer(x, training=training), x)


def test_sums_are_those_of_tensorflow_addons(leg):
    """Where that can be imported: in training what can come out, and at inference what does."""
    if leg != "keras2":
        with pytest.raises(ImportError):
            import tensorflow_addons
        return
    import tensorflow_addons

    x, p = [data(4, 3), data(4, 3, seed=1)], 0.3
    ours, theirs = AddonsStochasticDepth(p), tensorflow_addons.layers.StochasticDepth(p)
    for training in (False, None):
        np.testing.assert_array_equal(ours(x, training=training), theirs(x, training=training))
    seen = [
        {np.asarray(layer(x, training=True)).tobytes() for _ in range(60)}
        for layer in (ours, theirs)
    ]
    assert seen[0] == seen[1]
    assert len(seen[0]) == 2


@pytest.mark.parametrize("make", [lambda: AddonsStochasticDepth(0.5), lambda: KerasCVDropPath(0.5)])
def test_the_seed_of_keras_decides(make):
    layer, x = make(), data(4, 3)
    x = [x, x] if isinstance(layer, AddonsStochasticDepth) else x

    def draws():
        keras.utils.set_random_seed(3)
        return [np.asarray(layer(x, training=True)) for _ in range(12)]

    first, second = draws(), draws()
    np.testing.assert_array_equal(first, second)
    assert len({y.tobytes() for y in first}) > 1


@pytest.mark.parametrize("training", [True, False])
def test_training_may_be_a_tensor(training):
    """In a graph, where its value is not known before it runs."""
    x = [data(4, 3), data(4, 3, seed=1)]
    step = tf.function(lambda training: AddonsStochasticDepth(0.0).call(x, training=training))
    np.testing.assert_array_equal(step(tf.constant(training)), x[0])
    step = tf.function(lambda training: KerasCVDropPath(1.0).call(x[0], training=training))
    np.testing.assert_array_equal(step(tf.constant(training)), 0 * x[0] if training else x[0])


@pytest.mark.parametrize(("policy", "dtype"), [("mixed_float16", "float16"), ("float64",) * 2])
def test_other_dtypes(policy, dtype):
    x = data(4, 3).astype("float64")
    for layer in (*stand_in_sums(0.7), KerasCVDropPath(0.3)):
        layer = type(layer).from_config({**layer.get_config(), "dtype": policy})
        one = isinstance(layer, KerasCVDropPath)
        for training in (True, False):
            y = layer(x if one else [x, x], training=training)
            assert y.dtype == dtype
        exact = x if one else x + 0.7 * x
        np.testing.assert_allclose(y, exact, rtol=1e-2 if dtype == "float16" else 1e-15)


@pytest.mark.parametrize("x", [data(2, 3), [data(2, 3)], [data(2, 3)] * 3])
def test_a_sum_takes_two_tensors(x):
    with pytest.raises(ValueError) as error:
        AddonsStochasticDepth(name="sum").call(x)
    assert "'sum' (AddonsStochasticDepth) must be called with a list of two tensors" in str(
        error.value
    )


def test_inference_holds_nothing_random():
    x = [data(4, 3), data(4, 3)]
    for layer in stand_in_sums(0.7):
        graph = tf.function(lambda: layer(x, training=False)).get_concrete_function().graph  # noqa: B023
        assert not [op.type for op in graph.get_operations() if "Random" in op.type]


# ------------------------------------------------------------------ files of others


@pytest.mark.parametrize(("name", "ending"), FOREIGN)
def test_a_foreign_file_becomes_one_of_ours(unpacked, name, ending, tmp_path):
    """The file that tensorflow-addons or KerasCV wrote on Keras 2, loaded on every Keras."""
    expected = np.load(unpacked(name) / "expected.npz")
    model = load_legacy_model(unpacked(name) / f"model{ending}")
    check_foreign(model, name, expected, tmp_path)


def test_a_file_of_keras_cv_on_keras_3(unpacked, tmp_path):
    path = unpacked("keras_cv_keras3") / "model.keras"
    if not KERAS_3:
        with pytest.raises(ValueError, match=r"Keras 3\.\d+\.\d+ saved it: load it with Keras 3\."):
            load_legacy_model(path)
        return
    expected = np.load(unpacked("keras_cv_keras3") / "expected.npz")
    check_foreign(load_legacy_model(path), "keras_cv", expected, tmp_path)


def check_foreign(model, name, expected, tmp_path):
    x, y = expected["x"], expected["y"]
    np.testing.assert_allclose(outputs(model, x, training=False)[0], y, atol=1e-6)
    assert getattr(model, "optimizer", None) is None
    # It can be saved, and loaded without the function.
    model.save(tmp_path / "again.keras")
    again = keras.models.load_model(tmp_path / "again.keras")
    assert_same_outputs(again, model, x, atol=0, training=False)
    kinds = [type(layer) for layer in again.layers]
    assert kinds == [type(layer) for layer in model.layers]
    # It trains.
    again.compile("sgd", "mse")
    assert np.isfinite(again.fit(x, y, verbose=0).history["loss"][0])
    # It becomes one of ours.
    probs = [0.8, 0.3] if name == "addons" else [0.8, 0.7]
    found = find_residuals(model, existing())
    assert [b.survival_prob for b in found.blocks] == pytest.approx(probs)
    assert [b.kind for b in found.blocks] == ["identity", "projection"]
    if name == "addons":
        wrapped = wrap_residuals(model, existing())
    else:  # the one block keeps its scaling, and the other its own
        drop = lambda block: block.name == "sum1"  # noqa: E731
        wrapped = wrap_residuals(
            model, existing(), where=drop, mode="row", rescale="training", seed=1
        )
        wrapped = wrap_residuals(wrapped, existing(), seed=2)
        assert [w.mode for w in wrappers(wrapped)] == ["batch", "row"]
    assert get_survival_probs(wrapped) == pytest.approx(probs)
    np.testing.assert_allclose(outputs(wrapped, x, training=False)[0], y, atol=1e-6)
    stand_ins = AddonsStochasticDepth, KerasCVStochasticDepth, KerasCVDropPath
    assert not [x for x in wrapped._flatten_layers() if isinstance(x, stand_ins)]
    set_survival_probs(wrapped, [0.0, 0.0])
    rest = model.get_layer("short")(model.get_layer("stem")(x))
    rest = model.get_layer("pool")(rest + np.tanh(rest) * 0.5)
    dropped = model.get_layer("head")(rest)
    np.testing.assert_allclose(wrapped(x, training=True), dropped, atol=1e-6)


def test_a_class_of_the_callers_own_comes_first(unpacked):
    class Mine(AddonsStochasticDepth):
        pass

    path = unpacked("addons") / "model.keras"
    model = load_legacy_model(path, custom_objects={"Addons>StochasticDepth": Mine})
    assert type(model.get_layer("sum0")) is Mine


@pytest.mark.parametrize("ending", ENDINGS)
def test_where_addons_is_imported_its_own_layers_are_used(unpacked, ending, leg):
    """As Keras does with what is registered; it does the same, and becomes ours as well."""
    layer = AddonsStochasticDepth
    if leg == "keras2":
        from tensorflow_addons.layers import StochasticDepth as layer

        keras.utils.get_custom_objects()["Addons>StochasticDepth"] = layer
    model = load_legacy_model(unpacked("addons") / f"model{ending}")
    assert type(model.get_layer("sum0")) is layer
    assert get_survival_probs(wrap_residuals(model, existing())) == pytest.approx([0.8, 0.3])


# ------------------------------------------------------------------ files of Keras 2 on Keras 3

if KERAS_3:
    import tf_keras as keras2  # what wrote the files, in the same environment
else:
    keras2 = keras
L2 = keras2.layers


def layers_of_images():
    """Layers whose entries changed, operators of every kind, models in models, shared ones."""
    inputs = keras2.Input((8, 8, 3), name="image")
    regularizer = keras2.regularizers.L2(1e-3)
    x = L2.RandomFlip(name="flip")(inputs)
    x = L2.Conv2D(4, 3, padding="same", name="stem", kernel_regularizer=regularizer)(x)
    x = L2.SpatialDropout2D(0.1, name="channels")(x)
    y = L2.DepthwiseConv2D(3, padding="same", name="deep/wise")(x)
    y = L2.BatchNormalization(name="norm")(y)
    x = L2.LeakyReLU(0.2, name="leaky")(L2.Add(name="sum1")([x, y]))
    y = L2.Dropout(0.2, name="drop")(L2.SeparableConv2D(4, 3, padding="same", name="sep")(x))
    x = x + y
    x = x * 0.5 + L2.Conv2DTranspose(4, 3, padding="same", name="transposed")(x)
    x = 1.0 - (2.0 * x - 1.0) / 3.0
    x = x / tf.add(2.0, x * x)
    inner = [keras2.Input((8, 8, 4)), L2.Conv2D(4, 1, name="c1"), L2.BatchNormalization(name="n1")]
    x = x - keras2.Sequential(inner, name="sequential")(x)
    pixels = keras2.Input((8, 8, 4), name="pixels")
    nested = keras2.Model(pixels, L2.ReLU(6.0)(L2.Conv2D(4, 1, name="c2")(pixels)) + pixels)
    x = L2.GlobalAveragePooling2D(name="pool")(nested(nested(x)))
    ends = [L2.Dense(3, "softmax", name="a")(x), L2.Dense(2, name="b/c")(x)]
    ends.append(keras2.Sequential([keras2.Input((4,)), L2.Dense(2)], name="end")(x))
    features = keras2.Input((4,))
    ends.append(keras2.Model(features, L2.Dense(2)(features), name="last")(x))
    model = keras2.Model(inputs, ends)
    model.get_layer("norm").trainable = False
    model.get_layer("sequential").trainable = False
    return model, data(3, 8, 8, 3)


def layers_of_sequences():
    """Masks: the operator hands none on, the layer does."""
    ids = keras2.Input((6,), dtype="int32", name="ids")
    x = L2.Embedding(10, 8, mask_zero=True, name="embed")(ids)
    x = L2.Add(name="sum")([x, L2.LSTM(8, return_sequences=True, name="lstm1")(x)])
    ends = [L2.LSTM(3, name="masked")(x)]
    x = x + L2.Dense(8, name="dense")(x)
    x = L2.Bidirectional(L2.GRU(4, return_sequences=True, name="gru"), name="both")(x)
    x = L2.TimeDistributed(L2.Dense(8, name="inner"), name="each")(x)
    x = L2.LayerNormalization(name="norm")(x)
    ends.append(L2.SimpleRNN(3, name="unmasked")(x))
    return keras2.Model(ids, ends), np.array([[1, 2, 3, 0, 0, 0], [4, 5, 0, 0, 0, 0]], "int32")


def attention():
    """Tensors as keywords, inputs and outputs in dicts."""
    inputs = {
        "x": keras2.Input((6, 8), name="x"),
        "context": keras2.Input((5, 8), name="context"),
        "mask": keras2.Input((6, 6), dtype="bool", name="mask"),
    }
    y = L2.MultiHeadAttention(2, 4, name="own")(
        inputs["x"], inputs["x"], attention_mask=inputs["mask"]
    )
    x = L2.Add(name="sum1")([inputs["x"], y])
    x = L2.Add(name="sum2")([L2.MultiHeadAttention(2, 4, name="cross")(x, inputs["context"]), x])
    mask = np.random.default_rng(1).random((3, 6, 6)) > 0.4
    x_in = {"x": data(3, 6, 8), "context": data(3, 5, 8, seed=1), "mask": mask}
    return keras2.Model(inputs, {"y": L2.Dense(2, name="y")(x)}), x_in


def half_precision():
    keras2.mixed_precision.set_global_policy("mixed_float16")
    try:
        inputs = keras2.Input((4,), name="features")
        x = L2.Add(name="sum")([inputs, L2.Dense(4, name="dense")(inputs)])
        x = L2.Activation("tanh", dtype="float32", name="tanh")(x)
        return keras2.Model(inputs, x), data(3, 4)
    finally:
        keras2.mixed_precision.set_global_policy("float32")


def layers_of_graphs():
    """Models in a model, and a sum that is an operator."""
    inputs = keras2.Input((4,), name="features")
    nested = keras2.Model(inputs, L2.Dense(4, "relu", name="dense")(inputs), name="nested")
    block = keras2.Sequential([L2.Dense(4, input_shape=(4,), name="first")], name="block")
    features = keras2.Input((4,), name="others")
    return keras2.Model(features, block(nested(features)) + features), data(3, 4)


def sequential():
    model = keras2.Sequential([L2.Dense(5, "swish", input_shape=(4,)), L2.Dense(3)])
    return model, data(3, 4)


KERAS_2 = [layers_of_images, layers_of_sequences, attention, half_precision, sequential]
if not KERAS_3:  # its own loader does all the work
    KERAS_2 = KERAS_2[2:]


def randomize2(model):
    """`randomize` for the models of `keras2`."""
    rng = np.random.default_rng(0)
    for weight in model.weights:
        value = rng.normal(size=weight.shape) * 0.3
        weight.assign(np.abs(value) + 0.5 if "variance" in weight.name else value)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("make", KERAS_2)
def test_a_model_of_keras_2(make, ending, tmp_path, recwarn):
    model, x = make()
    randomize2(model)
    model.save(tmp_path / f"model{ending}")
    recwarn.clear()
    loaded = load_legacy_model(tmp_path / f"model{ending}")
    assert not [w for w in recwarn if "deprecated" in str(w.message)]
    assert isinstance(loaded, keras.Model)
    atol = 2e-3 if make is half_precision else 1e-6
    assert_same_outputs(loaded, model, x, atol=atol, training=False)
    assert len(loaded.weights) == len(model.weights)
    assert len(loaded.trainable_weights) == len(model.trainable_weights)
    if make is half_precision:
        assert loaded.get_layer("sum").compute_dtype == "float16"
    if make is layers_of_images:
        found = {b.kind: b for b in find_residuals(loaded, nested="outer").blocks}
        assert "identity" in found


OPERATIONS = {"tf.nn.relu": tf.nn.relu, "tf.math.multiply": lambda x: x * [1.0, 2.0, 3.0, 4.0]}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(("name", "operation"), OPERATIONS.items(), ids=OPERATIONS)
def test_other_operations_of_tensorflow(name, operation, ending, tmp_path):
    """Another than arithmetic, and arithmetic with an array."""
    keras2.backend.clear_session()
    inputs = keras2.Input((4,), name="features")
    keras2.Model(inputs, operation(L2.Dense(4)(inputs))).save(tmp_path / f"model{ending}")
    path = str(tmp_path / f"model{ending}")
    if not KERAS_3:
        assert load_legacy_model(path)
        return
    with pytest.raises(ValueError) as error:
        load_legacy_model(path)
    assert (
        f"`path` holds a model that cannot be loaded here (Keras {keras.__version__}): the model "
        f"calls TensorFlow itself in {name!r} ({name}), which Keras 2 saves as a layer that "
        "Keras 3 does not have. Only +, -, * and / of tensors and numbers can be taken over."
    ) in str(error.value)


OTHER_MEANINGS = {
    "hard_sigmoid": lambda x: L2.Activation("hard_sigmoid")(x),
    "gate": lambda x: L2.LSTM(2, recurrent_activation="hard_sigmoid")(L2.Reshape((2, 2))(x)),
    "training=True": lambda x: L2.Dropout(0.5)(x, training=True),
}


@pytest.mark.parametrize("ending", [".h5", ".keras"])
@pytest.mark.parametrize("what", OTHER_MEANINGS)
def test_what_means_something_else_on_keras_3(what, ending, tmp_path):
    keras2.backend.clear_session()
    inputs = keras2.Input((4,), name="features")
    model = keras2.Model(inputs, OTHER_MEANINGS[what](L2.Dense(4)(inputs)))
    model.save(tmp_path / f"model{ending}")
    if not KERAS_3:
        assert load_legacy_model(tmp_path / f"model{ending}").count_params() > 0
        return
    with pytest.raises(ValueError, match=f"{what.split('=')[0]}|hard_sigmoid") as error:
        load_legacy_model(tmp_path / f"model{ending}")
    assert "Load it on Keras 2 (TF_USE_LEGACY_KERAS=1)" in str(error.value)


@pytest.mark.parametrize("make", [sequential, layers_of_graphs])
def test_an_early_file(make, tmp_path):
    """As before Keras 2.13: no places of classes, Sequential models without their input."""
    model, x = make()
    randomize2(model)
    path = tmp_path / "model.h5"
    model.save(path)

    def early(saved):
        if isinstance(saved, dict):
            kept = {k: early(v) for k, v in saved.items() if k not in ("module", "registered_name")}
            if kept.get("class_name") == "Functional":
                kept["class_name"] = "Model"
            if kept.get("class_name") == "Sequential":
                layers = kept["config"]["layers"]
                kept["config"]["layers"] = [x for x in layers if x["class_name"] != "InputLayer"]
            return kept
        return [early(x) for x in saved] if isinstance(saved, list) else saved

    change_config(path, early)
    assert_same_outputs(load_legacy_model(path), model, x, training=False)


def change_config(path, change):
    """Rewrites the config in a saved model."""
    if path.suffix == ".h5":
        with h5py.File(path, "r+") as file:
            config = change(json.loads(file.attrs["model_config"]))
            file.attrs["model_config"] = json.dumps(config)
        return
    with zipfile.ZipFile(path) as file:
        content = {name: file.read(name) for name in file.namelist()}
    content["config.json"] = json.dumps(change(json.loads(content["config.json"])))
    with zipfile.ZipFile(path, "w") as file:
        for name, value in content.items():
            file.writestr(name, value)


@pytest.mark.parametrize("ending", ENDINGS)
def test_layers_in_another_order(unpacked, ending, tmp_path):
    """Weights are found by the order of layers, so that has to be the one that Keras makes."""
    path = pathlib.Path(shutil.copy(unpacked("addons") / f"model{ending}", tmp_path))

    def reverse(config):
        config["config"]["layers"].reverse()
        return config

    change_config(path, reverse)
    if not KERAS_3:
        assert load_legacy_model(path)
        return
    with pytest.raises(ValueError, match="the layers are in another order than Keras gives them"):
        load_legacy_model(path)


# ------------------------------------------------------------------ what is no model


def fails(path, *parts, error=ValueError, **kwargs):
    with pytest.raises(error) as caught:
        load_legacy_model(path, **kwargs)
    text = str(caught.value)
    for part in parts:
        assert part in text, text
    assert "\n" not in text
    return text


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
def test_a_truncated_file(unpacked, ending, share, tmp_path):
    whole = (unpacked("addons") / f"model{ending}").read_bytes()
    path = str(tmp_path / f"model{ending}")
    pathlib.Path(path).write_bytes(whole[: int(share * len(whole))])
    text = fails(path, "`path` ", f"Received: {path!r}.")
    assert "this is none, or only weights, or not all of one" in text or "cannot be loaded" in text


@pytest.mark.parametrize("name", ["text.keras", "text.h5", "text.hdf5", "text.txt", "text"])
def test_a_foreign_file(name, tmp_path):
    path = str(tmp_path / name)
    pathlib.Path(path).write_text("no model")
    fails(
        path,
        "`path` must be a model that Keras saved, as .keras or .h5, and this is none, or only "
        "weights, or not all of one (",
        f"Received: {path!r}.",
    )


def test_files_that_hold_something_else(tmp_path):
    with zipfile.ZipFile(tmp_path / "zip.keras", "w") as file:
        file.writestr("config.json", "{}")
    fails(str(tmp_path / "zip.keras"), "this is none")
    keras.Sequential([keras.Input((2,)), L.Dense(2)]).save(tmp_path / "whole.keras")
    with zipfile.ZipFile(tmp_path / "whole.keras") as whole:
        with zipfile.ZipFile(tmp_path / "part.keras", "w") as file:
            for name in ("config.json", "metadata.json"):
                file.writestr(name, whole.read(name))
    fails(str(tmp_path / "part.keras"), "or not all of one")
    keras.Sequential([keras.Input((2,)), L.Dense(2)]).save_weights(tmp_path / "only.weights.h5")
    fails(str(tmp_path / "only.weights.h5"), "or only weights")


def test_nothing_at_the_path(tmp_path):
    for name in ("model.keras", "model.h5", "model"):
        path = str(tmp_path / name)
        fails(
            path,
            f"`path` must be a saved model, and there is nothing. Received: {path!r}.",
            error=FileNotFoundError,
        )


def test_a_directory_without_a_model(tmp_path):
    fails(
        tmp_path,
        "`path` must be a .keras or .h5 file or a SavedModel, and the directory holds no "
        f"saved_model.pb. Received: {str(tmp_path)!r}.",
    )


@pytest.mark.parametrize("path", [None, 3, [b"model.h5"]])
def test_what_is_no_path(path):
    expected = f"`path` must be a path to a saved model. Received: {path!r}."
    assert fails(path, error=TypeError) == expected


def test_custom_objects_of_another_form(unpacked):
    fails(
        unpacked("addons") / "model.h5",
        "`custom_objects` must be a dict from names to classes or functions, or None. Received: [",
        custom_objects=[AddonsStochasticDepth],
        error=TypeError,
    )


class Double(keras2.layers.Layer):
    """A layer of one of the callers, on Keras 2."""

    def call(self, x):
        return 2.0 * x


class Double3(L.Layer):
    """The same on the Keras that loads."""

    def call(self, x):
        return 2.0 * x


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_class_that_is_not_known(ending, tmp_path):
    inputs = keras2.Input((4,), name="features")
    path = str(tmp_path / f"model{ending}")
    keras2.Model(inputs, Double(name="double")(inputs)).save(path)
    text = fails(path, "`path` holds a model that cannot be loaded here (", "`custom_objects`")
    assert "Double" in text or not (KERAS_3 or ending == ".h5")  # Keras 2 does not say which
    model = load_legacy_model(path, custom_objects={"Double": Double3})
    np.testing.assert_array_equal(model(np.ones((1, 4))), 2 * np.ones((1, 4)))


class Rescaling(keras2.layers.Layer):
    """One that has the name of a layer of Keras."""

    def call(self, x):
        return 3.0 * x


class Rescaling3(L.Layer):
    def call(self, x):
        return 3.0 * x


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_class_of_the_name_of_one_of_keras(ending, tmp_path):
    inputs = keras2.Input((4,), name="features")
    path = str(tmp_path / f"model{ending}")
    keras2.Model(inputs, Rescaling(name="triple")(inputs)).save(path)
    model = load_legacy_model(path, custom_objects={"Rescaling": Rescaling3})
    np.testing.assert_array_equal(model(np.ones((1, 4))), 3 * np.ones((1, 4)))


# ------------------------------------------------------------------ code in files


def lambda_model(keras):
    """A model whose file holds code, which would leave a trace if it were run."""
    x = keras.Input((4,), name="features")
    code = lambda x: (x, __import__("os").environ.update(RAN="yes"))[0]  # noqa: E731
    return keras.Model(x, keras.layers.Lambda(code, name="code")(x))


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("written_by", [keras, keras2], ids=["this Keras", "Keras 2"])
def test_code_in_a_file_is_not_run(ending, written_by, tmp_path, monkeypatch):
    path = str(tmp_path / f"model{ending}")
    lambda_model(written_by).save(path)
    monkeypatch.setenv("RAN", "no")
    text = fails(path, "code in the file (Lambda layers) is not run.", f"Received: {path!r}.")
    assert "lambda" in text.split("Classes and functions")[0].lower()
    assert os.environ["RAN"] == "no"


# ------------------------------------------------------------------ SavedModel directories


def test_a_saved_model_of_keras_2(unpacked, tmp_path, leg):
    """Keras 3 says what to do; Keras 2 loads it, and code in it stays out."""
    path = str(unpacked("ours_keras2") / "saved_model")
    if KERAS_3:
        fails(path, "`path` is a SavedModel", "TF_USE_LEGACY_KERAS=1", f"Received: {path!r}.")
        return
    expected = np.load(unpacked("ours_keras2") / "expected.npz")
    model = load_legacy_model(path)
    assert get_survival_probs(model) == pytest.approx(list(expected["survival_probs"]))
    np.testing.assert_allclose(model(expected["x"], training=False), expected["y"], atol=1e-6)


def test_a_saved_model_of_addons(tmp_path, leg):
    """Made here by the real layer where there is one, and by the stand-in elsewhere."""
    if KERAS_3:
        return
    layer = AddonsStochasticDepth
    if leg == "keras2":
        from tensorflow_addons.layers import StochasticDepth as layer
    model = randomize(addons_model(layer))
    model.save(tmp_path / "model", save_format="tf")
    keras.utils.get_custom_objects().pop("Addons>StochasticDepth", None)
    loaded = load_legacy_model(tmp_path / "model")
    assert type(loaded.get_layer("sum0")) is AddonsStochasticDepth
    x = data(2, 6, 6, 3)
    assert_same_outputs(loaded, model, x, training=False)
    wrapped = wrap_residuals(loaded, existing())
    assert get_survival_probs(wrapped) == pytest.approx([0.8, 0.3])
    assert_same_outputs(wrapped, model, x, training=False)


def test_a_saved_model_without_layers(unpacked):
    path = str(unpacked("ours_keras3") / "saved_model")
    wanted = "`path` is a SavedModel" if KERAS_3 else "`path` must hold a keras.Model"
    fails(path, wanted, f"Received: {path!r}.")


def test_code_in_a_saved_model_is_not_run(tmp_path, monkeypatch):
    if KERAS_3:
        return
    lambda_model(keras).save(tmp_path / "model", save_format="tf")
    monkeypatch.setenv("RAN", "no")
    model = load_legacy_model(tmp_path / "model")  # runs the graph that was saved with the code
    np.testing.assert_array_equal(model(np.ones((1, 4))), np.ones((1, 4)))
    assert os.environ["RAN"] == "no"
