"""Files that earlier versions of this package wrote load, and the models go on as they would have.

`tests/fixtures/make_fixtures.py` made them. A test that fails here breaks a promise of the README.
"""

import pathlib
import zipfile

import numpy as np
import pytest
import tensorflow as tf

from fixtures.make_fixtures import own_model, training_outputs
from helpers import KERAS_3
from tfa_stochastic_depth import get_survival_probs, load_legacy_model, set_survival_probs

keras = tf.keras
FIXTURES = pathlib.Path(__file__).parent / "fixtures"
OF_KERAS_2 = [] if KERAS_3 else ["model.h5", "saved_model"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Generation of Keras -> the folder with its files."""
    folders = {}
    for name in ("keras2", "keras3"):
        folders[name] = tmp_path_factory.mktemp(name)
        with zipfile.ZipFile(FIXTURES / f"ours_{name}.zip") as file:
            file.extractall(folders[name])
    return folders


@pytest.fixture
def mine(folders):
    """The files that were written on the Keras in use."""
    return folders["keras3" if KERAS_3 else "keras2"]


def check(model, folder):
    """Compares outputs, survival probabilities and the switches that come next."""
    expected = np.load(folder / "expected.npz")
    x = expected["x"]
    assert get_survival_probs(model) == pytest.approx(list(expected["survival_probs"]))
    np.testing.assert_allclose(model(x, training=False), expected["y"], atol=1e-5)
    training = training_outputs(model, x)
    np.testing.assert_allclose(training, expected["training"], atol=1e-5)


@pytest.mark.parametrize("name", ["model.keras", *OF_KERAS_2])
def test_a_model(mine, name):
    model = keras.models.load_model(mine / name)
    check(model, mine)
    if name != "saved_model":  # Keras 2 does not find the state of its optimizer again
        assert int(model.optimizer.iterations) == 6


def another_model():
    """Of the same layers, with other values in all that is saved."""
    model = own_model()
    set_survival_probs(model, [0.1, 0.2, 0.3, 0.4])
    model(np.ones((8, 4)), training=True)
    return model


def test_weights(mine):
    model = another_model()
    model.load_weights(str(mine / "model.weights.h5"))
    check(model, mine)


def test_a_checkpoint_of_tensorflow(mine):
    model = another_model()
    status = tf.train.Checkpoint(model=model).read(str(mine / "checkpoint"))
    status.assert_existing_objects_matched()
    check(model, mine)


def test_an_exported_graph(folders):
    """Of either Keras, on either TensorFlow: it needs nothing of this package."""
    for folder in folders.values():
        expected = np.load(folder / "expected.npz")
        serve = tf.saved_model.load(str(folder / "saved_model")).signatures["serving_default"]
        ((name, _),) = serve.structured_input_signature[1].items()
        (y,) = serve(**{name: tf.constant(expected["x"])}).values()
        np.testing.assert_allclose(y, expected["y"], atol=1e-5)


@pytest.mark.parametrize("name", ["model.keras", "model.h5"])
def test_a_model_of_keras_2_on_keras_3_too(folders, name):
    check(load_legacy_model(folders["keras2"] / name), folders["keras2"])


def test_weights_of_keras_2_on_keras_3_too(folders):
    model = another_model()
    model.load_weights(str(folders["keras2"] / "model.weights.h5"))
    check(model, folders["keras2"])
