"""Models are saved here, and loaded and compared in new processes.

Run as a program, `test_saving.py <directory>`, this file is the process that loads with Keras.
"""

import functools
import os
import pathlib
import pickle
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tfa_stochastic_depth
from helpers import KERAS_3, data, operations_in, randomize
from tfa_stochastic_depth import (
    StochasticDepth,
    constant,
    get_survival_probs,
    set_survival_probs,
    wrap_residuals,
)

keras = tf.keras
L = keras.layers


# ------------------------------------------------------------------ what is saved


def image_model(dropout=0.2):
    """Identity and projection shortcuts, sums as layers and operators, a nested model."""
    inputs = keras.Input((8, 8, 3), name="image")
    x = L.Conv2D(4, 3, padding="same", name="stem")(inputs)
    y = L.BatchNormalization(name="norm1")(L.Conv2D(4, 3, padding="same", name="conv1")(x))
    x = L.ReLU(name="relu1")(L.Add(name="sum1")([x, y]))
    y = L.ReLU(name="relu2")(L.Conv2D(6, 3, 2, padding="same", name="conv2")(x))
    y = L.Dropout(dropout, name="drop")(L.Conv2D(6, 3, padding="same", name="conv3")(y))
    x = L.Add(name="sum2")([y, L.Conv2D(6, 1, 2, name="short")(x)])
    x = L.GlobalAveragePooling2D(name="pool")(x)
    mlp = keras.Sequential(
        [keras.Input((6,)), L.Dense(5, "relu", name="up"), L.Dense(6, name="down")], name="mlp"
    )
    x = x + mlp(x)
    return keras.Model(inputs, L.Dense(3, name="head")(x), name="images")


def wrapped_images(**options):
    return wrap_residuals(randomize(image_model()), 0.4, **options), data(3, 8, 8, 3)


def trained_images():
    """Without dropout, whose random state Keras does not save."""
    model, x = wrap_residuals(randomize(image_model(0.0)), constant(0.5)), data(3, 8, 8, 3)
    model.compile(keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError())
    model.fit(x, data(3, 3), verbose=0)
    return model, x


def shared_and_original():
    model = randomize(image_model())
    wrap_residuals(model, share_layers=True)
    return model, data(3, 8, 8, 3)


def sequence_model():
    """Embeddings with a mask, an LSTM after the blocks, and ids as input."""
    ids = keras.Input((6,), dtype="int32", name="ids")
    x = L.Embedding(10, 8, mask_zero=True, name="embed")(ids)
    for i in (1, 2):
        y = L.SimpleRNN(8, return_sequences=True, name=f"rnn{i}")(x)
        x = L.Add(name=f"sum{i}")([x, y])
    model = randomize(keras.Model(ids, L.LSTM(3, name="lstm")(x)))
    return wrap_residuals(model, 0.4), np.array([[1, 2, 3, 0, 0, 0], [4, 5, 0, 0, 0, 0]])


def sequence_by_operator():
    """A sum that does not hand the mask on: what follows sees every step."""
    ids = keras.Input((6,), dtype="int32", name="ids")
    x = L.Embedding(10, 8, mask_zero=True, name="embed")(ids)
    x = x + L.Dense(8, name="dense")(x)
    model = randomize(keras.Model(ids, L.LSTM(3, name="lstm")(x)))
    return wrap_residuals(model, 0.4), np.array([[1, 2, 3, 0, 0, 0], [4, 5, 0, 0, 0, 0]])


def attention_model():
    """A branch with three inputs, one of them bool, in a dict."""
    inputs = {
        "x": keras.Input((6, 8), name="x"),
        "mask": keras.Input((6, 6), dtype="bool", name="mask"),
        "context": keras.Input((5, 8), name="context"),
    }
    attend, cross = (L.MultiHeadAttention(2, 4, name=name) for name in ("attend", "cross"))
    x = attend(inputs["x"], inputs["x"], attention_mask=inputs["mask"])
    x = L.Add(name="sum1")([inputs["x"], x])
    x = L.Add(name="sum2")([cross(x, inputs["context"]), x])
    model = randomize(keras.Model(inputs, {"y": L.Dense(2, name="y")(x)}))
    mask = np.random.default_rng(1).random((3, 6, 6)) > 0.4
    x = {"x": data(3, 6, 8), "mask": mask, "context": data(3, 5, 8, seed=1)}
    return wrap_residuals(model, 0.4), x


def shared_without_weights():
    """One layer and one nested model without weights, inside branches and outside them."""
    relu = L.ReLU(name="relu")
    soft = keras.Sequential([keras.Input((8,)), L.Activation("tanh", name="tanh")], name="soft")
    inputs = keras.Input((8,), name="features")
    x = soft(relu(inputs))
    for i in (1, 2):
        x = L.Add(name=f"sum{i}")([x, soft(relu(L.Dense(8, name=f"dense{i}")(x)))])
    model = randomize(keras.Model(inputs, soft(relu(x))))
    return wrap_residuals(model, 0.4), data(3, 8)


def every_skip():
    """The layer by itself, with each kind of stand-in."""
    inputs = keras.Input((8,), name="features")
    x = StochasticDepth(L.Dense(8, name="zeros"), 0.3, name="sd1")(inputs)
    x = StochasticDepth(L.Dense(8, name="same"), 0.4, skip="identity", name="sd2")(x)
    skip = L.Dense(4, name="skip")
    x = StochasticDepth(L.Dense(4, name="proj"), 0.6, skip=skip, rescale="training", name="sd3")(x)
    return randomize(keras.Model(inputs, x)), data(3, 8)


@keras.utils.register_keras_serializable(package="test_saving")
class Residual(keras.Model):
    """A subclassed model that uses the layer in its `call`."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.stem = L.Dense(units, name="stem")
        self.block = StochasticDepth(L.Dense(units, "relu", name="dense"), 0.4, name="block")

    def call(self, x, training=None):
        x = self.stem(x)
        return self.block(x, shortcut=x, training=training)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def subclassed():
    model, x = Residual(8, name="residual"), data(3, 4)
    model(x)
    return randomize(model), x


def probs_assigned():
    model, x = wrapped_images()
    set_survival_probs(model, [0.1, 0.25, 1 / 3])
    return model, x


def all_mixed():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        return wrapped_images()
    finally:
        keras.mixed_precision.set_global_policy("float32")


MODELS = {
    "wrapped_images": wrapped_images,
    "trained_images": trained_images,
    "shared_and_original": shared_and_original,
    "sharing_layers": functools.partial(wrapped_images, share_layers=True),
    "sequence_model": sequence_model,
    "sequence_by_operator": sequence_by_operator,
    "attention_model": attention_model,
    "shared_without_weights": shared_without_weights,
    "every_skip": every_skip,
    "subclassed": subclassed,
    "probs_assigned": probs_assigned,
    "all_mixed": all_mixed,
}

# An .h5 file has no place for subclassed models, and Keras 3 cannot load one in which an operation
# is called outside of layers: the sum of the original, and what makes the mask of the sequences.
NOT_H5 = {"subclassed", *(("shared_and_original", "sequence_model") if KERAS_3 else ())}
FORMATS = [(name, ".keras") for name in MODELS]
FORMATS += [(name, ".h5") for name in MODELS if name not in NOT_H5]
WEIGHTS = [".weights.h5"] if KERAS_3 else [".weights.h5", ".h5", ""]
SERVED = ["wrapped_images", "sequence_model", "attention_model", "every_skip"]
SERVED = [(name, how) for name in SERVED for how in ("export", "saved_model")]


def predict(model, x):
    return [np.asarray(y) for y in tf.nest.flatten(model(x, training=False))]


# ------------------------------------------------------------------ the switches of a model


def switch_model():
    """Four blocks that add 1000, 100, 10 and 1."""
    inputs = x = keras.Input((1,), name="features")
    for value in (1000, 100, 10, 1):
        bias = keras.initializers.Constant(value)
        dense = L.Dense(1, kernel_initializer="zeros", bias_initializer=bias, name=f"d{value}")
        x = L.Add(name=f"sum{value}")([x, dense(x)])
    return keras.Model(inputs, x)


def draw(model, steps):
    return [round(float(np.squeeze(model(tf.zeros((1, 1)), training=True)))) for _ in range(steps)]


# ------------------------------------------------------------------ the other processes


def attempt(results, key, function):
    """Files a result, or the error, so that one failure leaves the other results alone."""
    try:
        results[key] = function()
    except Exception as error:  # whatever saving or loading may raise
        results[key] = f"{type(error).__name__}: {error}"


def reload(directory):
    """What the process that loads with Keras does."""
    directory = pathlib.Path(directory)
    inputs = pickle.loads((directory / "inputs").read_bytes())
    results = {}

    def load(name, extension):
        model = keras.models.load_model(directory / f"{name}{extension}")
        results[name, extension, "probs"] = get_survival_probs(model) if wrapped(name) else []
        return predict(model, inputs[name])

    def fit():
        model = keras.models.load_model(directory / "trained_images.keras")
        x = inputs["trained_images"]
        model.fit(x, data(3, 3), epochs=5, verbose=0)
        return [int(model.optimizer.iterations), predict(model, x)]

    def load_weights(extension):
        model, x = wrapped_images()
        for weight in model.weights:
            weight.assign(tf.zeros_like(weight))
        model.load_weights(str(directory / f"weights{extension}"))
        return predict(model, x)

    def switches():
        return draw(keras.models.load_model(directory / "switches.keras"), 20)

    for name, extension in FORMATS:
        attempt(results, (name, extension), lambda: load(name, extension))  # noqa: B023
    for extension in WEIGHTS:
        attempt(results, ("weights", extension), lambda: load_weights(extension))  # noqa: B023
    attempt(results, "fit", fit)
    attempt(results, "switches", switches)
    (directory / "results").write_bytes(pickle.dumps(results))


def wrapped(name):
    return name != "shared_and_original"


SERVE = """
import pathlib, pickle, sys
import numpy as np, tensorflow as tf
directory = pathlib.Path(sys.argv[1])
inputs = pickle.loads((directory / "inputs").read_bytes())
results = {}
for name, how in pickle.loads((directory / "served").read_bytes()):
    try:
        loaded = tf.saved_model.load(str(directory / f"{name}_{how}"))
        serve = loaded.signatures["serving_default"]
        values = inputs[name].values() if isinstance(inputs[name], dict) else [inputs[name]]
        # The names that inputs get depend on the Keras, so the shapes say which is which.
        names = {spec.shape[1:]: k for k, spec in serve.structured_input_signature[1].items()}
        x = {names[tf.TensorShape(v.shape[1:])]: v for v in values}
        for batch in (len(list(values)[0]), 1, 5):
            some = {k: np.resize(v, (batch, *v.shape[1:])) for k, v in x.items()}
            some = {k: tf.constant(v, serve.structured_input_signature[1][k].dtype)
                    for k, v in some.items()}
            results[name, how, batch] = [y.numpy() for y in serve(**some).values()]
        graph = serve.graph.as_graph_def()  # its `library` is that of TensorFlow's GraphDef
        nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
        results[name, how, "ops"] = sorted({n.op for n in nodes})
    except Exception as error:
        results[name, how, "error"] = f"{type(error).__name__}: {error}"
results["modules"] = [m for m in ("tfa_stochastic_depth", "keras", "tf_keras") if m in sys.modules]
(directory / "served_results").write_bytes(pickle.dumps(results))
"""


def run(*arguments):
    root = pathlib.Path(tfa_stochastic_depth.__file__).resolve().parent.parent
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves all models in all formats, and loads each in a new process."""
    directory = tmp_path_factory.mktemp("saved")
    inputs, expected, saving = {}, {}, {}
    for name, make in MODELS.items():
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        model, inputs[name] = make()
        expected[name] = predict(model, inputs[name])
        expected[name, "probs"] = get_survival_probs(model) if wrapped(name) else []
        for extension in (e for n, e in FORMATS if n == name):
            path = str(directory / f"{name}{extension}")
            attempt(saving, (name, extension), lambda: model.save(path))  # noqa: B023
        for how in (h for n, h in SERVED if n == name):
            save = (
                model.export if how == "export" else functools.partial(tf.saved_model.save, model)
            )
            path = str(directory / f"{name}_{how}")
            attempt(saving, (name, how), lambda: save(path))  # noqa: B023
        if name == "wrapped_images":
            for extension in WEIGHTS:
                path = str(directory / f"weights{extension}")
                attempt(saving, ("weights", extension), lambda: model.save_weights(path))  # noqa: B023
        if name == "trained_images":
            model.fit(inputs[name], data(3, 3), epochs=5, verbose=0)
            expected["fit"] = [int(model.optimizer.iterations), predict(model, inputs[name])]
    model = wrap_residuals(switch_model(), constant(0.7), seed=5)
    set_survival_probs(model, [0.3, 0.6, 0.4, 0.8])
    expected["before"] = draw(model, 10)
    model.save(directory / "switches.keras")
    expected["switches"] = draw(model, 20)
    (directory / "inputs").write_bytes(pickle.dumps(inputs))
    (directory / "served").write_bytes(pickle.dumps(SERVED))
    run(__file__, str(directory))
    run("-c", SERVE, str(directory))
    results = pickle.loads((directory / "results").read_bytes())
    results.update(pickle.loads((directory / "served_results").read_bytes()))
    failed = {key: error for key, error in saving.items() if isinstance(error, str)}
    return expected, results, failed


def assert_close(ours, theirs):
    assert not isinstance(ours, str), ours
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-3 if a.dtype == np.float16 else 1e-5)


# ------------------------------------------------------------------ tests


@pytest.mark.slow
@pytest.mark.parametrize(("name", "extension"), FORMATS)
def test_saved_and_loaded_in_a_new_process(saved, name, extension):
    expected, results, failed = saved
    assert (name, extension) not in failed, failed[name, extension]
    assert_close(results[name, extension], expected[name])
    assert results[name, extension, "probs"] == expected[name, "probs"]


@pytest.mark.slow
@pytest.mark.parametrize("extension", WEIGHTS)
def test_weights_saved_and_loaded_into_a_model_wrapped_anew(saved, extension):
    expected, results, failed = saved
    assert ("weights", extension) not in failed, failed["weights", extension]
    assert_close(results["weights", extension], expected["wrapped_images"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), SERVED)
def test_served_by_a_process_that_knows_only_tensorflow(saved, name, how):
    expected, results, failed = saved
    assert "tfa_stochastic_depth" not in results["modules"]
    assert (name, how) not in failed, failed[name, how]
    assert (name, how, "error") not in results, results[name, how, "error"]
    whole = len(expected[name][0])
    assert_close(results[name, how, whole], expected[name])
    for batch in (1, 5):  # rows of the same data again
        repeated = [np.resize(y, (batch, *y.shape[1:])) for y in expected[name]]
        assert_close(results[name, how, batch], repeated)


def is_random_or_conditional(op):
    return op.endswith(("If", "Case")) or "Random" in op or "Bernoulli" in op


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), SERVED)
def test_what_is_served_holds_no_condition_and_nothing_random(saved, name, how):
    _, results, _ = saved
    ops = results[name, how, "ops"]
    assert "MatMul" in ops or "Conv2D" in ops or "BatchMatMulV2" in ops or "Einsum" in ops
    assert not [op for op in ops if is_random_or_conditional(op)]


def test_what_is_trained_holds_both():
    """So that the test above would see them."""
    model, x = wrapped_images()
    step = tf.function(lambda x: model(x, training=True)).get_concrete_function(x)
    ops = operations_in(step)
    assert any(op.endswith("If") for op in ops) and any("Random" in op for op in ops)
    assert {op for op in ops if is_random_or_conditional(op)} & {"If", "StatelessIf"}


@pytest.mark.slow
def test_training_goes_on_where_it_was(saved):
    expected, results, _ = saved
    assert not isinstance(results["fit"], str), results["fit"]
    assert results["fit"][0] == expected["fit"][0] == 6
    assert_close(results["fit"][1], expected["fit"][1])


@pytest.mark.slow
def test_switches_go_on_where_they_were(saved):
    expected, results, _ = saved
    assert results["switches"] == expected["switches"]
    assert results["switches"][:10] != expected["before"]  # not from the start again


def test_a_cloned_model_has_the_same_layers_and_probabilities():
    model, x = probs_assigned()
    clone = keras.models.clone_model(model)
    assert get_survival_probs(clone) == get_survival_probs(model)
    clone.set_weights(model.get_weights())
    assert_close(predict(clone, x), predict(model, x))


if __name__ == "__main__":
    reload(sys.argv[1])
