"""What all tests share: the check that the interpreter is the leg asked for, and fresh state."""

import os

import pytest
import tensorflow as tf

keras = tf.keras


def running_leg():
    """The leg of CI that this interpreter is: keras3, keras2 or legacy."""
    if hasattr(keras, "ops"):
        return "keras3"
    return "keras2" if tf.__version__.startswith("2.15.") else "legacy"


def pytest_configure(config):
    asked = os.environ.get("TFSD_LEG")
    if asked and asked != running_leg():
        raise pytest.UsageError(
            f"TFSD_LEG={asked}, and this interpreter is leg {running_leg()!r} "
            f"(TensorFlow {tf.__version__})"
        )
    # Each pytest-xdist worker is a process of its own: threads of all of them on all cores
    # would only get in each other's way.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def pytest_report_header(config):
    return f"leg {running_leg()}: TensorFlow {tf.__version__}, Keras from {keras.Model.__module__}"


@pytest.fixture(scope="session")
def leg():
    return running_leg()


@pytest.fixture(autouse=True)
def fresh_keras():
    """Every test starts from the same seeds, names and dtype policy."""
    # Keras 3 collects garbage here by default, which takes longer than most of the tests.
    keras.backend.clear_session(**({"free_memory": False} if hasattr(keras, "ops") else {}))
    keras.utils.set_random_seed(1)
    yield
    keras.mixed_precision.set_global_policy("float32")
