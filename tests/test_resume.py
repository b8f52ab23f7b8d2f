"""Training that is stopped and taken up again goes on as if it had not been.

Run as a program, `test_resume.py <directory> <step>`, this file is the process that is killed after
a step, or, without a step, the one that goes on.
"""

import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tfa_stochastic_depth
from helpers import KERAS_3, data
from tfa_stochastic_depth import wrap_residuals

keras = tf.keras
L = keras.layers
STEPS, EPOCHS, BATCH = 5, 4, 8


class Recorded(keras.Model):
    """Reports the loss of each step, where Keras would report a mean since the epoch began."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        gradients = tape.gradient(loss, [w.value if KERAS_3 else w for w in weights])
        self.optimizer.apply_gradients(zip(gradients, weights))
        return {"loss": loss}


def model():
    """Blocks of both modes and both rescalings, with moving statistics in the branches."""
    keras.utils.set_random_seed(4)
    inputs = keras.Input((6,), name="features")
    x = L.Dense(6, name="stem")(inputs)
    for i in range(2):
        y = L.BatchNormalization(name=f"norm{i}")(L.Dense(6, "tanh", name=f"dense{i}")(x))
        x = L.Add(name=f"sum{i}")([x, y])
    plain = Recorded(inputs, L.Dense(2, name="head")(x))
    second = lambda block: block.name == "sum1"  # noqa: E731
    rows = wrap_residuals(plain, [0.7], where=second, mode="row", rescale="training", seed=1)
    wrapped = wrap_residuals(rows, [0.4], seed=2)
    wrapped.compile(keras.optimizers.Adam(0.01))
    return wrapped


def batches(distinct=True):
    x, y = data(STEPS * BATCH, 6), data(STEPS * BATCH, 2, seed=1)
    if not distinct:
        x, y = (np.tile(z[:BATCH], (STEPS, 1)) for z in (x, y))
    return x, y


class Losses(keras.callbacks.Callback):
    def __init__(self, at=lambda step: None):
        super().__init__()
        self.losses, self.at = [], at

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))
        self.at(len(self.losses))


def train(model, epochs=EPOCHS, callbacks=(), recorder=None, distinct=True):
    """Returns the loss of each step."""
    recorder = Losses() if recorder is None else recorder
    x, y = batches(distinct)
    model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        callbacks=[*callbacks, recorder],
        verbose=0,
    )
    return recorder.losses


def variables(model):
    """All that there are: weights, seeds and counters, moving statistics, the optimizer's."""
    optimizer = model.optimizer.variables
    return [*model.variables, *(optimizer() if callable(optimizer) else optimizer)]


def state(model):
    return [np.asarray(v) for v in variables(model)]


def assert_same_state(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The losses of training that nothing stopped, its last state, and files from its middle."""
    folder = tmp_path_factory.mktemp("middle")
    whole = model()
    losses = train(whole, epochs=2)
    middle = state(whole)
    whole.save(folder / "model.keras")
    whole.save_weights(str(folder / "model.weights.h5"))
    checkpoint(whole).save(str(folder / "checkpoint"))
    losses += train(whole, epochs=EPOCHS - 2)
    assert len(set(losses)) == STEPS * EPOCHS
    return losses, state(whole), middle, folder


def checkpoint(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


# ------------------------------------------------------------------ killed and started again


def main(directory, step=None):
    directory = pathlib.Path(directory)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)

    def at(now):
        if now == step:
            print("ready", flush=True)
            sys.stdin.read()  # until it is killed

    backup = keras.callbacks.BackupAndRestore(str(directory / "backup"))
    trained = model()
    losses = train(trained, callbacks=[backup], recorder=Losses(at))
    np.savez(directory / "result.npz", *state(trained), losses=losses)


def start(*arguments):
    root = pathlib.Path(tfa_stochastic_depth.__file__).resolve().parent.parent
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_killed_and_started_again(uninterrupted, tmp_path):
    """The kill comes in the middle of the third epoch; two are in the backup."""
    with start(tmp_path, 2 * STEPS + 3) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "result.npz").exists()
    with start(tmp_path) as process:
        process.communicate(timeout=300)
    assert process.returncode == 0
    losses, last, *_ = uninterrupted
    with np.load(tmp_path / "result.npz") as result:
        assert list(result["losses"]) == losses[2 * STEPS :]
        assert_same_state([result[f"arr_{i}"] for i in range(len(last))], last)


# ------------------------------------------------------------------ stopped between two steps


class Stop(Exception):
    pass


def test_a_backup_in_the_middle_of_an_epoch(tmp_path):
    """With an integer as save_freq the state is that of the last backup, to the bit.

    The data is not: Keras begins the epoch anew. So here every batch is the same.
    """

    def stop(step):
        expected.append(recorded.losses[-1])
        if step == STEPS + 2:
            raise Stop

    def backup():
        return [keras.callbacks.BackupAndRestore(str(tmp_path), save_freq=2)]

    expected, stopped, recorded = [], model(), Losses()
    recorded.at = stop
    with pytest.raises(Stop):
        train(stopped, callbacks=backup(), recorder=recorded, distinct=False)
    expected += train(stopped, distinct=False)  # as if nothing had stopped it
    losses = train(model(), callbacks=backup(), distinct=False)
    saved = expected.index(losses[0])
    assert saved == STEPS + 1  # the last even number of steps before the stop
    assert losses == expected[saved : saved + len(losses)]
    # Keras 3 does the whole epoch again, Keras 2 as many steps as were left of it.
    assert len(losses) == STEPS * EPOCHS - (STEPS if KERAS_3 else saved)


# ------------------------------------------------------------------ saved and loaded


def from_keras(folder):
    return keras.models.load_model(folder / "model.keras", custom_objects={"Recorded": Recorded})


def from_weights(folder):
    again = other_model()
    again.load_weights(str(folder / "model.weights.h5"))
    return again


def from_checkpoint(folder):
    again = other_model()
    checkpoint(again).restore(tf.train.latest_checkpoint(folder)).assert_consumed()
    return again


def other_model():
    """The model with other values in all that is saved."""
    other = model()
    other.optimizer.build(other.trainable_variables)
    for variable in variables(other):
        variable.assign(variable + 1)
    return other


@pytest.mark.parametrize("load", [from_keras, from_weights, from_checkpoint])
def test_saved_and_loaded(load, uninterrupted):
    losses, last, middle, folder = uninterrupted
    again = load(folder)
    assert_same_state(state(again), middle)
    assert train(again, epochs=EPOCHS - 2) == losses[2 * STEPS :]
    assert_same_state(state(again), last)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
