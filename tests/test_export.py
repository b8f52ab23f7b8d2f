"""Models are exported here, and run by a process that cannot import this package."""

import os
import pathlib
import pickle
import subprocess
import sys
from collections import Counter

import numpy as np
import onnxruntime
import pytest
import tensorflow as tf
import tf2onnx

from helpers import KERAS_3, data, operations_in, randomize
from tfa_stochastic_depth import StochasticDepth, unwrap_residuals, wrap_residuals

keras = tf.keras
L = keras.layers


# ------------------------------------------------------------------ what is exported


def images():
    """A small ResNet; its convolutions are large enough for quantization (1,024 weights)."""
    inputs = keras.Input((8, 8, 3), name="image")
    x = L.Conv2D(12, 3, padding="same", name="stem")(inputs)
    y = L.BatchNormalization(name="norm1")(L.Conv2D(12, 3, padding="same", name="conv1")(x))
    x = L.ReLU(name="relu1")(L.Add(name="sum1")([x, L.Dropout(0.2, name="drop")(y)]))
    y = L.ReLU(name="relu2")(L.Conv2D(16, 3, 2, padding="same", name="conv2")(x))
    y = L.BatchNormalization(name="norm2")(L.Conv2D(16, 3, padding="same", name="conv3")(y))
    x = L.ReLU(name="relu3")(L.Add(name="sum2")([y, L.Conv2D(16, 1, 2, name="short")(x)]))
    x = L.GlobalAveragePooling2D(name="pool")(x)
    return randomize(keras.Model(inputs, L.Dense(3, name="head")(x), name="images"))


def tokens():
    """A small transformer."""
    inputs = keras.Input((6, 32), name="tokens")
    y = L.LayerNormalization(name="norm1")(inputs)
    y = L.MultiHeadAttention(2, 16, dropout=0.1, name="attend")(y, y)
    x = L.Add(name="sum1")([inputs, y])
    y = L.Dense(48, "relu", name="up")(L.LayerNormalization(name="norm2")(x))
    y = L.Dropout(0.1, name="drop")(L.Dense(32, name="down")(y))
    x = L.Add(name="sum2")([x, y])
    return randomize(keras.Model(inputs, L.Dense(3, name="head")(x), name="tokens"))


def skips():
    """The layer by itself, around whole blocks: the input or a projection stands in."""
    inputs = keras.Input((8, 8, 12), name="features")
    block = keras.Input((8, 8, 12))
    y = L.BatchNormalization(name="norm")(L.Conv2D(12, 3, padding="same", name="conv1")(block))
    block = keras.Model(block, L.ReLU(name="relu")(L.Add(name="sum")([block, y])), name="block")
    x = StochasticDepth(block, 0.7, skip="identity", name="same")(inputs)
    x = StochasticDepth(
        L.Conv2D(16, 3, 2, padding="same", name="conv2"),
        0.4,
        skip=L.Conv2D(16, 1, 2, name="short"),
        name="project",
    )(x)
    x = StochasticDepth(
        L.Conv2D(16, 3, padding="same", name="conv3"),
        0.4,
        skip=L.Conv2D(16, 1, name="other"),
        rescale="training",
        name="replace",
    )(x)
    return randomize(keras.Model(inputs, x, name="skips"))


def versions(name):
    """The plain, wrapped and unwrapped model of a name, as far as there is one."""
    if name == "skips":
        made = {"wrapped": skips()}
    elif name == "images":
        plain = images()
        made = {"plain": plain, "wrapped": wrap_residuals(plain, 0.4)}
    else:
        plain = tokens()
        made = {
            "plain": plain,
            "wrapped": wrap_residuals(plain, 0.4, mode="row", rescale="training"),
        }
    made["unwrapped"] = unwrap_residuals(made["wrapped"])
    return made


INPUTS = {"images": (5, 8, 8, 3), "tokens": (5, 6, 32), "skips": (5, 8, 8, 12)}
# The wrapped blocks whose scale there is at inference.
SCALED = {"images": ["sum1", "sum2"], "tokens": [], "skips": ["same", "project"]}
BLOCKS = {"images": 2, "tokens": 2, "skips": 3}


# ------------------------------------------------------------------ how


def quietly(model, path, **options):
    model.export(path, **options, **({"verbose": False} if KERAS_3 else {}))


def to_tflite(model, path, **options):
    converter = tf.lite.TFLiteConverter.from_saved_model(path.rpartition("-")[0] + ".export")
    for option, value in options.items():
        setattr(converter, option, value)
    pathlib.Path(path).write_bytes(converter.convert())


FORMATS = {
    ".keras": lambda model, path: model.save(path),
    ".export": quietly,
    ".save": lambda model, path: tf.saved_model.save(model, path),
    "-float.tflite": to_tflite,
    "-quantized.tflite": lambda model, path: to_tflite(
        model, path, optimizations=[tf.lite.Optimize.DEFAULT]
    ),
    "-tf2onnx.onnx": lambda model, path: tf2onnx.convert.from_keras(model, output_path=path),
}
KERAS_3_FORMATS = {
    "-keras.tflite": lambda model, path: quietly(model, path, format="litert"),
    "-keras.onnx": lambda model, path: quietly(model, path, format="onnx"),
}
SAVED_MODELS = (".export", ".save")
COMPARED = (".export", "-float.tflite", "-tf2onnx.onnx")


def formats(name, version):
    """What a model is exported by. A `.keras` file of a wrapped model does need this package."""
    if version == "plain":
        more = [".save"] if name == "images" else []
        return {ending: FORMATS[ending] for ending in [*COMPARED, *more]}
    own = KERAS_3_FORMATS if KERAS_3 and name == "images" else {}
    every = {**FORMATS, **own}
    return {e: save for e, save in every.items() if (version, e) != ("wrapped", ".keras")}


FILES = [
    f"{name}-{version}{ending}"
    for name in INPUTS
    for version in ("wrapped", "unwrapped")
    for ending in formats(name, version)
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Exports all models in all formats, and reads them in a new process.

    Returns what the plain and wrapped models predict, and what that process found in each file.
    """
    directory = tmp_path_factory.mktemp("exported")
    expected, failed = {}, {}
    for name, shape in INPUTS.items():
        keras.utils.set_random_seed(1)
        x = data(*shape)
        np.savez(directory / f"{name}.npz", x=x)
        for version, model in versions(name).items():
            if version != "unwrapped":  # which gives what the wrapped one does
                expected[f"{name}-{version}"] = model.predict(x, verbose=0)
            for ending, save in formats(name, version).items():
                path = directory / f"{name}-{version}{ending}"
                try:
                    save(model, str(path))
                except Exception as error:  # whatever an exporter may raise
                    failed[path.name] = f"{type(error).__name__}: {error}"
    program = pathlib.Path(__file__).with_name("read_exports.py")
    done = subprocess.run(
        [sys.executable, "-I", str(program), str(directory)],
        cwd=directory,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = pickle.loads((directory / "found").read_bytes())
    return expected, {**found, **failed}


def what_is_in(exported, file):
    found = exported[1][file]
    assert not isinstance(found, str), found
    return found


def assert_predicts(found, expected, tolerance):
    assert not isinstance(found, str), found
    for batch, outputs in found.items():
        assert outputs.shape == expected[:batch].shape
        error = np.abs(outputs - expected[:batch]).max() / np.abs(expected).max()
        assert error < tolerance, error


# ------------------------------------------------------------------ tests


@pytest.mark.slow
def test_the_process_that_reads_cannot_import_this_package(exported):
    _, found = exported
    assert found["import"] == "tfa_stochastic_depth is blocked"
    assert found["modules"] == []


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_predicts_what_the_model_does(exported, file):
    """In float32, in batches of 5 and of 1; with weights of 8 bits to their precision."""
    found = what_is_in(exported, file)
    name = file.partition("-")[0]
    tolerance = 0.03 if "quantized" in file else 1e-5
    assert_predicts(found["predict"], exported[0][f"{name}-wrapped"], tolerance)
    if "shape" in found:
        assert found["shape"] == [None, *INPUTS[name][1:]]
    if "quantized" in file:
        assert "int8" in found["dtypes"]
    elif "dtypes" in found:
        assert "int8" not in found["dtypes"]


@pytest.mark.slow
@pytest.mark.parametrize("file", [f for f in FILES if f.endswith(SAVED_MODELS)])
def test_predicts_the_same_by_the_command_line(exported, file):
    """By `saved_model_cli run`, which loads a SavedModel as TensorFlow Serving does."""
    found = what_is_in(exported, file)["predict by command"]
    if KERAS_3 and file.endswith(".save"):
        assert_variables_are_missing(found)
    else:
        assert_predicts(found, exported[0][f"{file.partition('-')[0]}-wrapped"], 1e-5)


def assert_variables_are_missing(error):
    assert error.startswith("FailedPreconditionError"), error
    assert "Could not find variable" in error


@pytest.mark.slow
def test_no_keras_3_model_is_served_from_what_tensorflow_saved(exported):
    """The plain one is not either (keras-team/keras#19274), so there is nothing to mend here."""
    plain = what_is_in(exported, "images-plain.save")
    assert_predicts(plain["predict"], exported[0]["images-plain"], 1e-5)
    if KERAS_3:
        assert_variables_are_missing(plain["predict by command"])
    else:
        assert_predicts(plain["predict by command"], exported[0]["images-plain"], 1e-5)


def decides_or_draws(operations):
    """The operations that run one thing or another, and the random ones, by any format's names."""
    decides = {"if", "statelessif", "case", "statelesscase", "while", "statelesswhile", "loop"}
    draws = ("random", "bernoulli", "multinomial", "rng")
    return [op for op in operations if op.lower() in decides or any(x in op.lower() for x in draws)]


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_no_condition_and_nothing_random_is_left(exported, file):
    operations = what_is_in(exported, file)["operations"]
    assert sum(operations.values()) > 5
    assert not decides_or_draws(operations)


def test_a_training_step_has_both():
    """So that the test above would see them."""
    model = versions("images")["wrapped"]
    step = tf.function(lambda x: model(x, training=True))
    operations = operations_in(step.get_concrete_function(data(*INPUTS["images"])))
    found = set(decides_or_draws(operations))
    assert len(found) > 1 and found & {"If", "StatelessIf"}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["wrapped", "unwrapped"])
@pytest.mark.parametrize("name", INPUTS)
def test_only_keras_2s_saved_models_keep_how_a_wrapped_model_trains(exported, name, version):
    """In functions beside the one that is served. What `export` writes holds that one alone."""
    files = {ending: what_is_in(exported, f"{name}-{version}{ending}") for ending in SAVED_MODELS}
    left = {ending: decides_or_draws(f["operations in file"]) for ending, f in files.items()}
    assert not left[".export"]
    dropout = name != "skips" and not KERAS_3
    assert bool(left[".save"]) == ((version == "wrapped" or dropout) and not KERAS_3)
    assert ("If" in str(left[".save"])) == (version == "wrapped" and not KERAS_3)


@pytest.mark.slow
@pytest.mark.parametrize("ending", COMPARED)
@pytest.mark.parametrize("name", ["images", "tokens"])
def test_unwrapped_costs_what_the_original_does(exported, name, ending):
    """The same operations, as often, and in a SavedModel the same variables."""
    plain, unwrapped = (
        what_is_in(exported, f"{name}-{version}{ending}") for version in ("plain", "unwrapped")
    )
    assert unwrapped["operations"] == plain["operations"]
    if ending in SAVED_MODELS:
        assert sorted(unwrapped["variables"]) == sorted(plain["variables"])
        assert unwrapped["shapes in file"] == plain["shapes in file"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["images", "tokens"])
def test_wrapped_costs_one_multiplication_a_block(exported, name):
    """With its factor, a variable. With `rescale="training"` there is none."""
    plain, wrapped = (
        what_is_in(exported, f"{name}-{version}.export") for version in ("plain", "wrapped")
    )
    more = Counter(wrapped["operations"])
    more.subtract(plain["operations"])
    count = len(SCALED[name])
    # A variable is handed through a placeholder to the function that reads it.
    added = {"Mul": count, "ReadVariableOp": count, "Placeholder": count} if count else {}
    assert {op: n for op, n in more.items() if n} == added


def ours(variables):
    return [name for name in variables if "survival_prob" in name or "seed_state" in name]


@pytest.mark.slow
@pytest.mark.parametrize("ending", SAVED_MODELS)
@pytest.mark.parametrize("name", INPUTS)
def test_which_variables_of_ours_are_left(exported, name, ending):
    """Wrapped, its scales are used; the file holds the seeds too, which nothing reads."""
    wrapped, unwrapped = (
        what_is_in(exported, f"{name}-{version}{ending}") for version in ("wrapped", "unwrapped")
    )
    used = ours(wrapped["variables"])
    assert len(used) == len(SCALED[name])
    assert all("survival_prob" in variable for variable in used)
    if KERAS_3:  # where names of variables tell the layers
        assert sorted(used) == sorted(f"{block}/survival_prob:0" for block in SCALED[name])
    assert not ours(unwrapped["variables"]) and not ours(unwrapped["variables in file"])
    seeds = wrapped["shapes in file"]["[2]"], unwrapped["shapes in file"]["[2]"]
    assert seeds[0] - seeds[1] == BLOCKS[name]
    if ending == ".save":  # where names in the file tell the variables
        assert len(ours(wrapped["variables in file"])) == 2 * BLOCKS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", INPUTS)
def test_an_unwrapped_keras_file_holds_no_variable_of_ours(exported, name):
    assert not ours(what_is_in(exported, f"{name}-unwrapped.keras")["variables"])


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["-float.tflite", "-tf2onnx.onnx"])
def test_the_scale_is_a_constant_or_gone_where_variables_are(exported, ending):
    """Converters fold it into the convolution, if that stands next to it."""
    plain, wrapped = (
        what_is_in(exported, f"images-{version}{ending}") for version in ("plain", "wrapped")
    )
    more = Counter(wrapped["operations"])
    more.subtract(plain["operations"])
    assert set(op.upper() for op, n in more.items() if n) <= {"MUL"}
    assert sum(more.values()) <= len(SCALED["images"])


def test_exact_gelu_in_onnx(tmp_path, leg):
    """Newer TensorFlow computes it by an operation that ONNX lacks, as the README says."""
    x, results = data(3, 4), {}
    for approximate in (True, False):
        inputs = keras.Input((4,))
        act = L.Activation(lambda x: tf.nn.gelu(x, approximate=approximate))  # noqa: B023
        model = keras.Model(inputs, act(L.Dense(4)(inputs)))
        path = str(tmp_path / f"{approximate}.onnx")
        tf2onnx.convert.from_keras(model, output_path=path)
        try:
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            (results[approximate],) = session.run(None, {session.get_inputs()[0].name: x})
            np.testing.assert_allclose(results[approximate], model(x), atol=1e-5)
        except Exception as error:  # onnxruntime has classes of its own
            results[approximate] = str(error)
    assert not isinstance(results[True], str)
    assert isinstance(results[False], str) == (leg != "keras2")
    if leg != "keras2":
        assert "Erfc" in results[False]
