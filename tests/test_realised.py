"""`RealisedDepth`: the switches drawn once more are those that the steps really took."""

import re

import numpy as np
import pytest
import tensorflow as tf

from helpers import KERAS_3, all_operations, data
from tfa_stochastic_depth import RealisedDepth, StochasticDepth, SurvivalProbSchedule, linear_warmup
from tfa_stochastic_depth.switch import draw_switch, draw_switches

keras = tf.keras

PROBS = [0.9, 0.2, 0.7]
NO_JIT = {"jit_compile": False} if KERAS_3 else {}
MODES = {
    "graph": NO_JIT,
    "eager": {"run_eagerly": True, **NO_JIT},
    "jit": {"jit_compile": True},
    "executions": {"steps_per_execution": 4, **NO_JIT},
}


class Rows(keras.layers.Layer):
    """Hands its input on, and adds up how often it ran and how many rows came by."""

    def __init__(self):
        super().__init__()
        self.total = tf.Variable([0, 0], trainable=False)

    def call(self, x):
        self.total.assign_add([1, tf.shape(x)[0]])
        return x


class Note(keras.callbacks.Callback):
    """Notes after each execution how often branches ran since the one before, and with what."""

    def __init__(self, counters):
        super().__init__()
        self.counters = counters
        self.totals = [self.read()]

    def read(self):
        return [counter.total.numpy() for counter in self.counters]

    def on_train_batch_end(self, batch, logs=None):
        self.totals.append(self.read())

    def taken(self):
        """Array (executions, layers, 2): runs, and rows."""
        return np.diff(self.totals, axis=0)


def train(options, *callbacks, steps=12, epochs=1, probs=PROBS, **kwargs):
    """Trains blocks that count; returns the history and what was noted."""
    counters = [Rows() for _ in probs]
    x = inputs = keras.Input((2,))
    for i, (p, counter) in enumerate(zip(probs, counters)):
        x = StochasticDepth(counter, p, seed=i, **kwargs)(x, shortcut=x)
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    model.compile("sgd", "mse", **options)
    note, x = Note(counters), data(8 * steps, 2)
    history = model.fit(x, x, 8, epochs, callbacks=[*callbacks, note], verbose=0).history
    return history, note.taken()


def test_draw_switches_draws_as_the_layer_does():
    seeds = np.array([[1, 0], [1, 1], [7, 2**40], [-3, 5]])
    probs = np.float32([0.7, 0.7, 0.2, 0.5])
    expected = [bool(draw_switch(seed, p)) for seed, p in zip(seeds, probs)]
    assert draw_switches(seeds, probs).numpy().tolist() == expected


@pytest.mark.parametrize("mode", ["graph", "eager", "jit"])
def test_the_switches_are_those_that_were_taken(mode):
    depth = RealisedDepth()
    history, taken = train(MODES[mode], depth)
    assert depth.switches.tolist() == taken[..., 0].tolist()
    assert set(np.unique(depth.switches)) == {0, 1}
    assert history["realised_depth"] == [pytest.approx(depth.switches.sum(axis=1).mean())]


@pytest.mark.parametrize("steps", [12, 10])
def test_several_steps_in_one_execution(steps):
    """Of 10 steps the third execution has two."""
    depth = RealisedDepth()
    history, taken = train(MODES["executions"], depth, steps=steps)
    lengths = np.array([4, 4, steps - 8])
    np.testing.assert_allclose(depth.switches * lengths[:, np.newaxis], taken[..., 0])
    assert history["realised_depth"] == [pytest.approx(taken[..., 0].sum() / steps)]


@pytest.mark.parametrize("first", ["depth", "schedule"])
def test_under_a_schedule_each_epoch_has_its_own(first):
    depth, schedule = RealisedDepth(), SurvivalProbSchedule(linear_warmup(12))
    callbacks = [depth, schedule] if first == "depth" else [schedule, depth]
    history, taken = train(NO_JIT, *callbacks, epochs=3)
    by_epoch = taken[..., 0].reshape(3, 12, 3).sum(axis=(1, 2)) / 12
    assert history["realised_depth"] == pytest.approx(by_epoch)
    assert depth.switches.tolist() == taken[24:, :, 0].tolist()


@pytest.mark.parametrize("mode", ["graph", "eager", "jit"])
def test_rows_count_as_the_share_that_ran(mode):
    depth = RealisedDepth(batch_size=8)
    history, taken = train(MODES[mode], depth, steps=3, mode="row")
    assert (depth.switches * 8).tolist() == taken[..., 1].tolist() == [[7, 2, 6]] * 3
    assert history["realised_depth"] == [pytest.approx(15 / 8)]


def test_a_layer_that_is_called_twice_counts_twice():
    counter = Rows()
    layer = StochasticDepth(counter, 0.6, seed=1)
    x = keras.Input((2,))
    y = layer(x, shortcut=x)
    model = keras.Model(x, keras.layers.Dense(2)(layer(y, shortcut=y)))
    model.compile("sgd", "mse", **NO_JIT)
    depth, note = RealisedDepth(), Note([counter])
    model.fit(data(96, 2), data(96, 2), 8, callbacks=[depth, note], verbose=0)
    assert depth.switches.tolist() == note.taken()[..., 0].tolist()
    assert set(depth.switches[:, 0]) == {0, 1, 2}


def test_a_layer_inside_a_dropped_one_did_not_run():
    counters = [Rows(), Rows()]
    x = keras.Input((2,))
    y = StochasticDepth(counters[0], 0.6, seed=2)(x, shortcut=x)
    inner = keras.Model(x, counters[1](y))
    model = keras.Sequential(
        [keras.Input((2,)), StochasticDepth(inner, 0.4, seed=1, skip="identity")]
    )
    model.add(keras.layers.Dense(2))
    model.compile("sgd", "mse", **NO_JIT)
    depth, note = RealisedDepth(), Note(counters[::-1])
    model.fit(data(96, 2), data(96, 2), 8, callbacks=[depth, note], verbose=0)
    assert depth.switches.tolist() == note.taken()[..., 0].tolist()
    assert 0 < depth.switches[:, 1].sum() < depth.switches[:, 0].sum() < 12


@pytest.mark.parametrize("mode", ["batch", "row"])
def test_it_adds_nothing_to_the_step(mode):
    """The graph of a step is the same with it and without it."""

    def graph(*callbacks):
        keras.backend.clear_session()
        x = keras.Input((2,))
        y = StochasticDepth(keras.layers.Dense(2), 0.7, mode=mode, seed=1)(x, shortcut=x)
        model = keras.Model(x, y)
        model.compile("sgd", "mse", **NO_JIT)
        model.fit(data(8, 2), data(8, 2), 4, callbacks=list(callbacks), verbose=0)
        layer = model.layers[-1]
        step = tf.function(lambda x: layer(x, shortcut=x, training=True))
        return sorted(all_operations(step.get_concrete_function(tf.TensorSpec((4, 2)))))

    assert graph(RealisedDepth(batch_size=4)) == graph()


def test_before_training_there_are_none():
    depth = RealisedDepth()
    x = keras.Input((2,))
    depth.set_model(keras.Model(x, StochasticDepth(keras.layers.Dense(2))(x)))
    assert depth.switches.shape == (0, 1)


@pytest.mark.parametrize(
    ("value", "error", "received"),
    [
        (0, ValueError, "Received: 0."),
        (-1, ValueError, "Received: -1."),
        (2.0, TypeError, "Received: 2.0."),
        (True, TypeError, "Received: True."),
        ("8", TypeError, "Received: '8'."),
    ],
    ids=repr,
)
def test_a_batch_size_that_is_none(value, error, received):
    with pytest.raises(error, match=f"`batch_size` must be .*{re.escape(received)}"):
        RealisedDepth(batch_size=value)


def test_rows_need_a_batch_size():
    with pytest.raises(ValueError, match="`batch_size` must be given to RealisedDepth"):
        train(NO_JIT, RealisedDepth(), mode="row")


def test_a_model_without_our_layers():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="holds no StochasticDepth layer"):
        model.fit(data(4, 2), data(4, 2), callbacks=[RealisedDepth()], verbose=0)
