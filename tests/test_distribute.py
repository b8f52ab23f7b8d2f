"""Under tf.distribute: replicas agree on every switch, and branches train.

A process has the devices it started with, so the cases with two replicas run in one of their own:
this file as a script. It prints what each of them found, and the tests judge that.
"""

import functools
import json
import os
import subprocess
import sys
import traceback

import numpy as np
import pytest
import tensorflow as tf

from tfa_stochastic_depth import (
    RealisedDepth,
    StochasticDepth,
    SurvivalProbSchedule,
    linear_warmup,
)

keras = tf.keras

STEPS = 12
# The switches of seed 1 at survival_prob 0.7, on one device (tests/test_switch.py).
KNOWN = [0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0]


# ------------------------------------------------------------------ on two replicas: the script


class Recorder(keras.layers.Layer):
    """Writes down, on each replica for itself, whether its input was 0 or 1, as binary digits."""

    def __init__(self):
        super().__init__()
        self.history = tf.Variable(
            1.0,
            dtype=tf.float64,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def call(self, x):
        self.history.assign(2.0 * self.history + tf.cast(x[0, 0], tf.float64))
        return x


@functools.cache
def replicas():
    """One strategy for all: the collective operations of two would get in each other's way."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def one_or_zero(seed, survival_prob=0.7):
    """A layer that gives ones where it is kept and zeros where it is dropped."""
    return StochasticDepth(keras.layers.Activation("linear"), survival_prob, seed=seed)


def digits(strategy, recorder):
    histories = strategy.experimental_local_results(recorder.history)
    return [bin(int(h.numpy()))[3:] for h in histories]


def data(rows=8 * STEPS):
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype("float32")
    return x, x @ np.array([[1.0], [-2.0], [0.5]], "float32")


def switches(seed, function):
    """What two replicas draw in a step of one's own, step by step."""
    strategy = replicas()
    with strategy.scope():
        layer = one_or_zero(seed)
        layer.build((None, 1))

    @function
    def step():
        return strategy.run(lambda: layer(tf.ones((1, 1)), training=True))

    outputs = [strategy.experimental_local_results(step()) for _ in range(STEPS)]
    return [[int(y[0, 0]) for y in row] for row in outputs]


def switches_in_fit():
    strategy = replicas()
    with strategy.scope():
        recorder = Recorder()
        x = keras.Input((3,))
        y = one_or_zero(1)(keras.layers.Lambda(lambda x: 0.0 * x + 1.0)(x))
        model = keras.Model(x, keras.layers.Dense(1)(recorder(y)))
        model.compile("sgd", "mse")
    model.fit(*data(), batch_size=8, verbose=0)
    return digits(strategy, recorder)


def schedule_in_fit():
    """What the replicas hold in each step, what they draw, and what the callbacks say of it."""
    strategy = replicas()
    with strategy.scope():
        recorder = Recorder()
        x = keras.Input((3,))
        layer = one_or_zero(1, 0.4)
        y = layer(keras.layers.Lambda(lambda x: 0.0 * x + 1.0)(x))
        model = keras.Model(x, keras.layers.Dense(1)(recorder(y)))
        model.compile("sgd", "mse")
    held = []

    def note(batch, logs=None):
        variable = layer._survival_prob
        copies = strategy.experimental_local_results(getattr(variable, "_value", variable))
        held.append([float(copy.numpy()) for copy in copies])

    depth = RealisedDepth()
    callbacks = [
        SurvivalProbSchedule(linear_warmup(STEPS // 2)),
        depth,
        keras.callbacks.LambdaCallback(on_train_batch_begin=note),
    ]
    model.fit(*data(), batch_size=8, callbacks=callbacks, verbose=0)
    realised = "".join(str(int(switch)) for switch in depth.switches[:, 0])
    return {"held": held, "realised": realised, "drawn": digits(strategy, recorder)}


BRANCHES = {
    "dense": lambda: keras.layers.Dense(3, activation="tanh"),
    "normalized": lambda: keras.Sequential(
        [keras.layers.Dense(3, use_bias=False), keras.layers.BatchNormalization(momentum=0.5)]
    ),
    "dropout": lambda: keras.Sequential([keras.layers.Dense(3), keras.layers.Dropout(0.2)]),
    "losses": lambda: keras.layers.Dense(
        3, kernel_regularizer="l2", activity_regularizer=keras.regularizers.L2(0.01)
    ),
}


def residual_model(branch, survival_prob, seed=1, mode="batch"):
    keras.utils.set_random_seed(3)
    x = keras.Input((3,))
    y = StochasticDepth(branch(), survival_prob, seed=seed, mode=mode)(x, shortcut=x)
    model = keras.Model(x, keras.layers.Dense(1)(y))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def trained(branch, strategy, survival_prob=0.7, mode="batch"):
    """The losses of a fit, and the branch's weights before and after."""
    with strategy.scope():
        model = residual_model(BRANCHES[branch], survival_prob, mode=mode)
    inner = model.layers[1].layer
    before = [w.tolist() for w in inner.get_weights()]
    history = model.fit(*data(), batch_size=8, epochs=4, shuffle=False, verbose=0).history
    after = [w.tolist() for w in inner.get_weights()]
    return {"loss": [float(x) for x in history["loss"]], "before": before, "after": after}


def synchronized():
    return keras.layers.BatchNormalization(name="norm", synchronized=True)


def training_error(branch, strategy):
    """The error of a training step, or an empty string."""
    with strategy.scope():
        model = residual_model(branch, 0.7)
    try:
        model.fit(*data(16), batch_size=8, verbose=0)
    except ValueError as error:
        return str(error)
    return ""


def synchronized_in_a_model():
    return keras.Sequential([keras.layers.Dense(3), synchronized()])


def inference_with_synchronized():
    with replicas().scope():
        model = residual_model(synchronized, 0.7)
    x, y = data(16)
    return [model.predict(x, verbose=0).tolist(), model.evaluate(x, y, verbose=0)]


def on_two(branch, survival_prob=0.7, mode="batch"):
    return trained(branch, replicas(), survival_prob, mode)


SCRIPT = {
    "graph": functools.partial(switches, 1, tf.function),
    "eager": functools.partial(switches, 1, lambda f: f),
    "no seed": functools.partial(switches, None, tf.function),
    "fit": switches_in_fit,
    "schedule": schedule_in_fit,
    **{f"train {name}": functools.partial(on_two, name) for name in BRANCHES},
    "never": functools.partial(on_two, "normalized", 0.0),
    "always": functools.partial(on_two, "normalized", 1.0),
    "rows": functools.partial(on_two, "dropout", 0.7, "row"),
    "rows, never": functools.partial(on_two, "normalized", 0.0, "row"),
    "rows, always": functools.partial(on_two, "normalized", 1.0, "row"),
    "synchronized": lambda: training_error(synchronized, replicas()),
    "synchronized inside": lambda: training_error(synchronized_in_a_model, replicas()),
    "unsynchronized": lambda: training_error(keras.layers.BatchNormalization, replicas()),
    "inference": inference_with_synchronized,
}


def main():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    found = {"replicas": replicas().num_replicas_in_sync}
    for name, case in SCRIPT.items():
        try:
            found[name] = case()
        except Exception:  # one case that fails shall not hide the others
            found[name] = {"failed": traceback.format_exc()[-3000:]}
    print("\n" + json.dumps(found))


# ------------------------------------------------------------------ the tests


@pytest.fixture(scope="module")
def found():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["TF_NUM_INTRAOP_THREADS"] = "1"
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture
def of(found):
    """What a case found; the test fails with its traceback if it failed."""

    def get(name):
        value = found[name]
        assert not (isinstance(value, dict) and "failed" in value), value["failed"]
        return value

    return get


def test_there_are_two_replicas(found):
    assert found["replicas"] == 2


@pytest.mark.parametrize("case", ["graph", "eager"])
def test_replicas_agree_on_every_switch_and_draw_what_one_device_draws(of, case):
    assert of(case) == [[switch, switch] for switch in KNOWN]


def test_replicas_agree_where_no_seed_is_given(of):
    assert all(a == b for a, b in of("no seed"))
    assert {a for a, _ in of("no seed")} == {0, 1}


def test_replicas_agree_on_every_switch_of_fit(of):
    assert of("fit") == ["".join(map(str, KNOWN))] * 2


def test_a_schedule_writes_to_all_replicas(of):
    expected = [1 - min(step / (STEPS // 2), 1) * 0.6 for step in range(STEPS)]
    np.testing.assert_allclose(of("schedule")["held"], np.transpose([expected] * 2), atol=1e-6)


def test_realised_switches_are_those_of_the_replicas(of):
    found = of("schedule")
    assert found["drawn"] == [found["realised"]] * 2
    assert set(found["realised"]) == {"0", "1"}


@pytest.mark.parametrize("branch", BRANCHES)
def test_branches_train(of, branch):
    run = of(f"train {branch}")
    assert np.all(np.isfinite(run["loss"]))
    assert run["loss"][-1] < run["loss"][0]
    moved = [np.abs(np.subtract(a, b)).max() for a, b in zip(run["before"], run["after"])]
    assert len(moved) >= 2 and min(moved) > 1e-6


@pytest.mark.parametrize("branch", ["dense", "losses"])
def test_two_replicas_learn_what_one_learns(of, branch):
    """The same switches and the same data: the same weights after all steps."""
    two, one = of(f"train {branch}"), trained(branch, tf.distribute.get_strategy())
    for name in ("before", "after"):
        for a, b in zip(two[name], one[name]):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_moving_statistics_rest_when_dropped_on_all_replicas(of):
    assert of("never")["after"] == of("never")["before"]
    for before, after in zip(of("always")["before"][-2:], of("always")["after"][-2:]):
        assert np.abs(np.subtract(before, after)).min() > 1e-3


def test_rows_train_on_replicas(of):
    run = of("rows")
    assert np.all(np.isfinite(run["loss"])) and run["loss"][-1] < run["loss"][0]
    assert of("rows, never")["after"] == of("rows, never")["before"]
    for ours, theirs in zip(of("rows, always")["after"], of("always")["after"]):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["synchronized", "synchronized inside"])
def test_a_synchronized_batch_normalization_is_a_clear_error(of, case):
    text = of(case)
    assert "holds 'norm', a synchronized BatchNormalization" in text
    assert "replicas cannot exchange statistics inside a tf.cond" in text
    assert "synchronized=False" in text


def test_an_unsynchronized_one_is_not(of):
    assert of("unsynchronized") == ""


def test_inference_is_fine_with_a_synchronized_one(of):
    predicted, loss = of("inference")
    assert np.shape(predicted) == (16, 1)
    model = residual_model(synchronized, 0.7)
    x, y = data(16)
    np.testing.assert_allclose(predicted, model.predict(x, verbose=0), rtol=1e-4, atol=1e-5)
    assert loss == pytest.approx(model.evaluate(x, y, verbose=0), rel=1e-4)


STRATEGIES_OF_ONE = {
    "default": tf.distribute.get_strategy,
    "one device": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
    "mirrored": lambda: tf.distribute.MirroredStrategy(["CPU:0"]),
}


@pytest.mark.parametrize("name", STRATEGIES_OF_ONE)
def test_with_one_replica_a_synchronized_one_trains(name):
    strategy = STRATEGIES_OF_ONE[name]()
    assert strategy.num_replicas_in_sync == 1
    with strategy.scope():
        model = residual_model(synchronized, 1.0)
    if name == "mirrored":  # Keras asks the other replicas even where there are none
        with pytest.raises(Exception, match="trained on several replicas"):
            model.fit(*data(16), batch_size=8, verbose=0)
        return
    branch = model.layers[1].layer
    before = [w.copy() for w in branch.get_weights()]
    model.fit(*data(16), batch_size=8, verbose=0)
    assert all(np.abs(a - b).max() > 1e-4 for a, b in zip(before, branch.get_weights()))


if __name__ == "__main__":
    main()
