"""Schedules, and the callback that writes what they say, in every way to train."""

import csv
import math
import re

import numpy as np
import pytest
import tensorflow as tf

from helpers import KERAS_3, data, wrappers
from tfa_stochastic_depth import (
    StochasticDepth,
    SurvivalProbSchedule,
    cutoff,
    exponential_warmup,
    get_survival_probs,
    linear_warmup,
    set_survival_probs,
    survival_probs,
)

keras = tf.keras

STEPS = 30
TARGETS = [0.9, 0.2, 0.7]
NO_JIT = {"jit_compile": False} if KERAS_3 else {}


def has(*parts):
    """A pattern for `pytest.raises(match=)`: these texts, in this order, as they stand."""
    return "(?s)" + ".*".join(map(re.escape, parts))


class Probe(keras.layers.Layer):
    """Hands its input on, and writes down in each step what probabilities the step reads."""

    def __init__(self, layers, **kwargs):
        super().__init__(**kwargs)
        self.read = lambda: tf.stack([tf.convert_to_tensor(x._survival_prob) for x in layers])
        self.step = tf.Variable(0, trainable=False)
        self.seen = tf.Variable(tf.fill((STEPS, len(layers)), -1.0), trainable=False)
        self.traces = 0

    def call(self, x):
        self.traces += 1
        seen = tf.tensor_scatter_nd_update(self.seen, [[self.step]], [self.read()])
        self.seen.assign(seen)
        self.step.assign_add(1)
        return x


def build(targets=TARGETS, **kwargs):
    """A model of one block for each target, and its probe."""
    layers = [
        StochasticDepth(keras.layers.Dense(2), p, seed=i, **kwargs) for i, p in enumerate(targets)
    ]
    probe = Probe(layers)
    x = inputs = keras.Input((2,))
    for layer in layers:
        x = layer(x, shortcut=x)
    return keras.Model(inputs, probe(x)), probe


def compiled(mode="graph", targets=TARGETS, optimizer=None, **kwargs):
    model, probe = build(targets, **kwargs)
    options = {
        "graph": NO_JIT,
        "executions": {"steps_per_execution": 5, **NO_JIT},
        "eager": {"run_eagerly": True, **NO_JIT},
        "jit": {"jit_compile": True},
    }
    model.compile(optimizer or keras.optimizers.SGD(0.01), "mse", **options[mode])
    return model, probe


def fit(model, steps, *callbacks, batch_size=4, **kwargs):
    x = data(batch_size * steps, 2)
    return model.fit(x, x, batch_size, callbacks=list(callbacks), verbose=0, **kwargs).history


def formula(schedule, steps=range(STEPS), targets=TARGETS):
    return [[1 - schedule(t) * (1 - p) for p in targets] for t in steps]


def assert_seen(probe, expected):
    np.testing.assert_allclose(probe.seen.numpy()[: len(expected)], expected, rtol=0, atol=1e-7)


def float32(probs):
    return [float(str(np.float32(p))) for p in probs]


# ------------------------------------------------------------------ schedules


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (linear_warmup(10), {0: 0.0, 1: 0.1, 5: 0.5, 9: 0.9, 10: 1.0, 11: 1.0, 10**9: 1.0}),
        (linear_warmup(1), {0: 0.0, 1: 1.0, 2: 1.0}),
        (linear_warmup(0.5), {0: 0.0, 1: 1.0}),
        (exponential_warmup(0.1), {0: 0.0, 1: 0.09516258196404048, 10: 1 - 1 / math.e, 1000: 1.0}),
        (exponential_warmup(1e-12), {0: 0.0, 1: 1e-12}),
        (cutoff(10), {0: 1.0, 9: 1.0, 10: 0.0, 11: 0.0, 10**9: 0.0}),
        (cutoff(1), {0: 1.0, 1: 0.0}),
    ],
)
def test_schedules_at_start_middle_end_and_past_it(schedule, values):
    for step, share in values.items():
        assert schedule(step) == pytest.approx(share, rel=1e-12, abs=0)


def test_exponential_warmup_is_progressive_layer_dropping():
    """theta(t) = (1 - theta_bar) exp(-gamma t) + theta_bar, section 4.2 of arXiv 2010.13369."""
    gamma, theta_bar = 0.03, 0.2
    for t in (0, 1, 40, 500):
        theta = (1 - theta_bar) * math.exp(-gamma * t) + theta_bar
        assert 1 - exponential_warmup(gamma)(t) * (1 - theta_bar) == pytest.approx(theta)


@pytest.mark.parametrize(
    ("make", "argument"),
    [(linear_warmup, "steps"), (exponential_warmup, "gamma"), (cutoff, "steps")],
)
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-3, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        (True, TypeError),
        ("10", TypeError),
        (None, TypeError),
    ],
    ids=repr,
)
def test_a_schedule_names_its_argument(make, argument, value, error):
    with pytest.raises(error, match=has(f"`{argument}` must be a positive number. Received: ")):
        make(value)


# ------------------------------------------------------------------ in every way to train


@pytest.mark.parametrize(
    ("mode", "schedule"),
    [
        ("graph", linear_warmup(20)),
        ("eager", linear_warmup(20)),
        ("jit", linear_warmup(20)),
        ("graph", cutoff(7)),
    ],
    ids=["graph", "eager", "jit", "cutoff"],
)
def test_each_step_reads_the_value_of_the_formula(mode, schedule):
    model, probe = compiled(mode)
    traces = []
    count = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: traces.append(probe.traces)
    )
    history = fit(
        model, STEPS, SurvivalProbSchedule(schedule), count, epochs=STEPS, steps_per_epoch=1
    )
    expected = formula(schedule)
    assert_seen(probe, expected)
    assert history["expected_depth"] == pytest.approx([sum(p) for p in expected])
    assert history["survival_prob"] == pytest.approx([sum(p) / 3 for p in expected])
    if mode != "eager":
        assert traces[-1] == traces[0] > 0
    assert get_survival_probs(model) == float32(formula(schedule, [STEPS])[0])


def test_it_writes_only_what_changes():
    model, _ = compiled()
    schedule = SurvivalProbSchedule(linear_warmup(3))
    schedule.set_model(model)
    write, writes = schedule._write, []
    schedule._write = lambda probs: (writes.append(probs), write(probs))
    fit(model, STEPS, schedule)
    np.testing.assert_allclose(writes[:1], formula(linear_warmup(3), [0]))
    # Once more in a new epoch: something else may have written.
    np.testing.assert_allclose(writes[1:], formula(linear_warmup(3), range(4)))


def test_an_execution_of_several_steps_has_the_value_of_its_first():
    model, probe = compiled("executions")
    fit(model, STEPS, SurvivalProbSchedule(linear_warmup(20)))
    assert_seen(probe, formula(linear_warmup(20), [t - t % 5 for t in range(STEPS)]))


def test_several_fits_are_one_training():
    model, probe = compiled()
    schedule = SurvivalProbSchedule(linear_warmup(20))
    for steps in (7, 13, 10):
        fit(model, steps, schedule)
    assert_seen(probe, formula(linear_warmup(20)))


def test_epochs():
    model, probe = compiled()
    schedule = SurvivalProbSchedule(linear_warmup(4), unit="epoch")
    first = fit(model, 5, schedule, epochs=3)
    assert get_survival_probs(model) == float32(formula(linear_warmup(4), [3])[0])
    second = fit(model, 5, schedule, initial_epoch=3, epochs=6)
    assert_seen(probe, formula(linear_warmup(4), [t // 5 for t in range(STEPS)]))
    depths = first["expected_depth"] + second["expected_depth"]
    assert depths == pytest.approx([sum(p) for p in formula(linear_warmup(4), range(6))])


@pytest.mark.parametrize("jit", [False, True])
def test_a_training_loop_of_ones_own(jit):
    model, probe = build()
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=jit)
    def train(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    schedule = SurvivalProbSchedule(exponential_warmup(0.1))
    schedule.set_model(model)
    x = tf.constant(data(4, 2))
    for step in range(STEPS):
        schedule.update(step)
        train(x)
    assert_seen(probe, formula(exponential_warmup(0.1)))


# ------------------------------------------------------------------ going on where it was


def for_resuming():
    keras.utils.set_random_seed(5)
    x = inputs = keras.Input((2,))
    for i, p in enumerate(TARGETS):
        x = StochasticDepth(keras.layers.Dense(2, name=f"dense{i}"), p, seed=i)(x, shortcut=x)
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", **NO_JIT)
    return model


def fit_in_order(model, x, *callbacks, **kwargs):
    model.fit(x, x, 4, callbacks=list(callbacks), shuffle=False, verbose=0, **kwargs)


def assert_equal_weights(model, other):
    for a, b in zip(model.get_weights(), other.get_weights()):
        np.testing.assert_array_equal(a, b)


def test_resumed_from_a_saved_model_it_is_as_if_never_interrupted(tmp_path):
    x, path = data(100, 2), str(tmp_path / "model.keras")
    model = for_resuming()
    fit_in_order(model, x[:40], SurvivalProbSchedule(linear_warmup(20)))
    assert get_survival_probs(model) == float32(formula(linear_warmup(20), [10])[0])
    model.save(path)
    model = keras.models.load_model(path)
    fit_in_order(model, x[40:], SurvivalProbSchedule(linear_warmup(20), survival_probs=TARGETS))
    straight = for_resuming()
    fit_in_order(straight, x, SurvivalProbSchedule(linear_warmup(20)))
    assert get_survival_probs(model) == get_survival_probs(straight) == TARGETS
    assert_equal_weights(model, straight)


class Interruption(Exception):
    pass


def interrupt(epoch, logs):
    if epoch == 3:
        raise Interruption


@pytest.mark.parametrize(("first", "unit"), [("schedule", "epoch"), ("backup", "step")])
def test_backup_and_restore_in_either_order(first, unit, tmp_path):
    """The layers are given values of the schedule after it has met the model with its targets."""
    x, rule = data(20, 2), linear_warmup(20 if unit == "step" else 5)

    def run(*others, steps=8):
        model = for_resuming()
        schedule = SurvivalProbSchedule(rule, unit=unit)
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
        both = [schedule, backup] if first == "schedule" else [backup, schedule]
        fit_in_order(model, x, *both, *others, epochs=steps)
        return model

    with pytest.raises(Interruption):
        run(keras.callbacks.LambdaCallback(on_epoch_begin=interrupt))
    epochs = []
    model = run(keras.callbacks.LambdaCallback(on_epoch_begin=lambda e, logs: epochs.append(e)))
    assert epochs == [3, 4, 5, 6, 7]
    straight = for_resuming()
    fit_in_order(straight, x, SurvivalProbSchedule(rule, unit=unit), epochs=8)
    assert get_survival_probs(model) == TARGETS
    assert_equal_weights(model, straight)


def interrupted(model, x):
    """A fit that fails in its first step."""

    def fail(batch, logs):
        raise RuntimeError("stopped")

    stop = keras.callbacks.LambdaCallback(on_train_batch_begin=fail)
    with pytest.raises(RuntimeError, match="stopped"):
        fit_in_order(model, x, SurvivalProbSchedule(linear_warmup(10)), stop)
    assert get_survival_probs(model) == [1.0, 1.0, 1.0]


def test_targets_outlive_what_a_schedule_writes(tmp_path):
    """Another schedule, a failed fit, loaded weights and files, another model around the layers."""
    x = data(20, 2)
    model = for_resuming()
    interrupted(model, x)
    fit_in_order(model, x, SurvivalProbSchedule(linear_warmup(10)))  # 5 steps
    half = float32(formula(linear_warmup(10), [5])[0])
    assert get_survival_probs(model) == half
    model.save_weights(tmp_path / "half.weights.h5")
    model.save(tmp_path / "half.keras")

    fresh = for_resuming()
    fresh.load_weights(tmp_path / "half.weights.h5")
    loaded = keras.models.load_model(tmp_path / "half.keras")
    around = keras.Model(model.inputs, model.outputs)
    for one in (fresh, loaded, around, model):
        assert get_survival_probs(one) == half
        one.compile("sgd", "mse", **NO_JIT)
        fit_in_order(one, x, SurvivalProbSchedule(linear_warmup(5)))
        assert get_survival_probs(one) == TARGETS
        for layer, p in zip(wrappers(one), half):
            layer.write_survival_prob(p)


def test_what_is_assigned_is_the_target_from_then_on():
    model = for_resuming()
    schedule = SurvivalProbSchedule(linear_warmup(10))
    fit_in_order(model, data(8, 2), schedule)
    others = [0.5, 0.25, 0.75]
    set_survival_probs(model, others)
    with survival_probs(model, [0, 1, 0]):
        pass
    fit_in_order(model, data(8, 2), schedule)
    assert get_survival_probs(model) == float32(formula(linear_warmup(10), [4], others)[0])


def test_update_writes_over_what_was_loaded(tmp_path):
    model, _ = compiled()
    schedule = SurvivalProbSchedule(linear_warmup(4))
    schedule.set_model(model)
    schedule.update(1)
    model.save_weights(tmp_path / "early.weights.h5")
    for step in (10, model.optimizer.iterations + 11, np.float32(12)):
        schedule.update(step)
        assert get_survival_probs(model) == TARGETS
        model.load_weights(tmp_path / "early.weights.h5")
        assert get_survival_probs(model) != TARGETS


@pytest.mark.parametrize("step, error", [("a", TypeError), (None, TypeError), (-1, ValueError)])
def test_steps_that_are_none(step, error):
    schedule = SurvivalProbSchedule(linear_warmup(4))
    schedule.set_model(compiled()[0])
    with pytest.raises(error, match=has("`step` must be", f"Received: {step!r}")):
        schedule.update(step)


def test_nothing_is_written_while_a_function_is_traced():
    model, _ = compiled()
    schedule = SurvivalProbSchedule(linear_warmup(4))
    schedule.set_model(model)

    def within():
        with survival_probs(model, [0, 0, 0]):
            pass

    for function in (lambda: schedule.update(1), within):
        with pytest.raises(ValueError, match="inside a tf.function"):
            tf.function(function, autograph=False)()
    assert get_survival_probs(model) == TARGETS


def test_compiled_again_it_begins_anew_from_the_same_targets():
    model = for_resuming()
    schedule = SurvivalProbSchedule(linear_warmup(10))
    fit_in_order(model, data(20, 2), schedule)
    model.compile("sgd", "mse", **NO_JIT)
    fit_in_order(model, data(8, 2), schedule)
    assert get_survival_probs(model) == float32(formula(linear_warmup(10), [2])[0])


def test_what_another_callback_changes_is_written_again_in_the_next_epoch(tmp_path):
    model, probe = compiled()
    model.save_weights(tmp_path / "first.weights.h5")
    restore = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: [x.write_survival_prob(1.0) for x in wrappers(model)]
    )
    fit(model, 5, SurvivalProbSchedule(linear_warmup(1)), restore, epochs=3)
    assert_seen(probe, formula(linear_warmup(1), range(15)))


def test_one_callback_for_two_models_takes_the_targets_of_each():
    schedule = SurvivalProbSchedule(linear_warmup(1))
    for targets in (TARGETS, [0.5, 0.4]):
        model, probe = compiled(targets=targets)
        fit(model, 3, schedule)
        assert_seen(probe, formula(linear_warmup(1), range(3), targets))


# ------------------------------------------------------------------ logs


def test_logs_reach_history_csv_and_tensorboard(tmp_path):
    model, _ = compiled()
    callbacks = [
        SurvivalProbSchedule(linear_warmup(10)),
        keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        keras.callbacks.TensorBoard(str(tmp_path), write_graph=False),
    ]
    history = fit(model, 5, *callbacks, epochs=3, validation_data=(data(4, 2), data(4, 2)))
    expected = [sum(p) for p in formula(linear_warmup(10), [4, 9, 14])]
    assert history["expected_depth"] == pytest.approx(expected)
    assert history["survival_prob"] == pytest.approx(np.array(expected) / 3)
    assert len(history["val_loss"]) == 3
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["expected_depth"]) for row in rows] == pytest.approx(expected)
    (events,) = (tmp_path / "train").glob("events*")
    found = {"epoch_expected_depth": [], "epoch_survival_prob": []}
    for record in tf.data.TFRecordDataset(str(events)):
        for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
            if value.tag in found:
                found[value.tag].append(float(tf.make_ndarray(value.tensor)))
    assert found["epoch_expected_depth"] == pytest.approx(expected)
    assert found["epoch_survival_prob"] == pytest.approx(np.array(expected) / 3)


# ------------------------------------------------------------------ what it is given


@pytest.mark.parametrize("p", [0.0, 0.1, 1 / 3, 0.7, 1.0])
def test_the_ends_are_exact(p):
    model, _ = compiled(targets=[p])
    schedule = SurvivalProbSchedule(lambda step: step / 4)
    schedule.set_model(model)
    seen = []
    for step in range(5):
        schedule.update(step)
        seen.append(get_survival_probs(model)[0])
    assert (seen[0], seen[-1]) == (1.0, float32([p])[0])
    assert seen == sorted(seen, reverse=True)


def test_a_schedule_of_keras_will_do():
    model, probe = compiled()
    rule = keras.optimizers.schedules.PolynomialDecay(0.0, 8, 1.0)
    fit(model, 12, SurvivalProbSchedule(rule))
    assert_seen(probe, formula(linear_warmup(8), range(12)))


@pytest.mark.parametrize(
    ("given", "error", "parts"),
    [
        (linear_warmup, TypeError, ["is linear_warmup itself. Call it", "linear_warmup(100)"]),
        (exponential_warmup, TypeError, ["is exponential_warmup itself"]),
        (cutoff, TypeError, ["is cutoff itself"]),
        (0.5, TypeError, ["must be a function from a step", "Received: 0.5 (of type float)."]),
        (None, TypeError, ["must be a function from a step", "Received: None"]),
    ],
)
def test_what_is_no_schedule(given, error, parts):
    with pytest.raises(error, match=has("`schedule`", *parts)):
        SurvivalProbSchedule(given)


def test_a_unit_that_is_none():
    with pytest.raises(ValueError, match=has("`unit`", '"step" or "epoch"', "Received: 'batch'.")):
        SurvivalProbSchedule(cutoff(3), unit="batch")


@pytest.mark.parametrize(
    ("value", "error", "received"),
    [
        (-0.1, ValueError, "Received: -0.1."),
        (1.5, ValueError, "Received: 1.5."),
        (math.nan, ValueError, "Received: nan."),
        (None, TypeError, "Received: None (of type NoneType)."),
        (True, TypeError, "Received: True (of type bool)."),
        ("1", TypeError, "Received: '1' (of type str)."),
        (np.ones(2), TypeError, "(of type ndarray)."),
        (tf.constant(2.0), ValueError, "Received: 2.0."),
    ],
    ids=repr,
)
def test_a_share_that_is_none(value, error, received):
    model, _ = compiled()
    schedule = SurvivalProbSchedule(lambda step: value if step == 2 else 0.5)
    with pytest.raises(error, match=has("`schedule(2)` must be a number in [0, 1]", received)):
        fit(model, 4, schedule)
    assert get_survival_probs(model) == float32(formula(lambda step: 0.5, [0])[0])


@pytest.mark.parametrize(
    ("given", "error", "parts"),
    [
        ([0.5], ValueError, ["one number per layer", "3 layers", "a sequence of 1."]),
        (0.5, TypeError, ["a sequence with one number per layer", "Received: 0.5"]),
        ([0.5, 2, 0.5], ValueError, ["[1]", "Received: 2."]),
    ],
)
def test_targets_that_are_none(given, error, parts):
    model, _ = compiled()
    with pytest.raises(error, match=has("`survival_probs", *parts)):
        fit(model, 1, SurvivalProbSchedule(cutoff(3), survival_probs=given))
    assert get_survival_probs(model) == TARGETS


def test_a_model_without_our_layers():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=has("holds no StochasticDepth layer", "wrap_residuals")):
        fit(model, 1, SurvivalProbSchedule(cutoff(3)))


def test_update_before_set_model():
    with pytest.raises(ValueError, match=has("Call `set_model(model)` before")):
        SurvivalProbSchedule(cutoff(3)).update(0)


class TwoOptimizers(keras.Model):
    """Trains with an optimizer that is not `model.optimizer`."""

    def train_step(self, batch):
        return {"loss": tf.reduce_sum(self(batch[0], training=True))}


def other_training(**kwargs):
    model, probe = build()
    model = TwoOptimizers(model.inputs, model.outputs)
    model.compile(**kwargs, **NO_JIT)
    return model, probe


def test_an_optimizer_that_counts_nothing():
    model, probe = other_training(optimizer="sgd", loss="mse")
    with pytest.warns(UserWarning, match="`model.optimizer` has counted no step in this epoch"):
        fit(model, 3, SurvivalProbSchedule(linear_warmup(2)))
    assert_seen(probe, [[1.0] * 3] * 3)


def test_no_optimizer():
    model, probe = other_training()
    model.optimizer = None
    expected = has("counts the steps of `model.optimizer`", "has none", '`unit="epoch"`')
    with pytest.raises(ValueError, match=expected):
        fit(model, 1, SurvivalProbSchedule(linear_warmup(2)))
    fit(model, 2, SurvivalProbSchedule(linear_warmup(2), unit="epoch"), epochs=3)
    assert_seen(probe, formula(linear_warmup(2), [0, 0, 1, 1, 2, 2]))


# ------------------------------------------------------------------ mode="row"


class Rows(keras.layers.Layer):
    """Hands its input on, and adds up how many rows come by."""

    def __init__(self):
        super().__init__()
        self.count = tf.Variable(0, trainable=False)
        self.traces = 0

    def call(self, x):
        self.traces += 1
        self.count.assign_add(tf.shape(x)[0])
        return x


def row_model(**kwargs):
    rows = Rows()
    x = keras.Input((2,))
    y = StochasticDepth(rows, 0.25, mode="row", seed=1)(x, shortcut=x)
    model = keras.Model(x, keras.layers.Dense(2)(y))
    model.compile("sgd", "mse", **kwargs)
    return model, rows


@pytest.mark.parametrize("options", [NO_JIT, {"run_eagerly": True}], ids=["graph", "eager"])
def test_rows_follow_without_a_new_trace(options):
    model, rows = row_model(**options)
    traces, counts = [], []

    def note(batch, logs):
        traces.append(rows.traces)
        counts.append(int(rows.count.numpy()))

    callbacks = [
        SurvivalProbSchedule(linear_warmup(3)),
        keras.callbacks.LambdaCallback(on_train_batch_end=note),
    ]
    fit(model, 5, *callbacks, batch_size=8)
    assert np.diff([0, *counts]).tolist() == [8, 6, 4, 2, 2]
    if "run_eagerly" not in options:
        assert traces[-1] == traces[0]


def test_rows_compiled_by_xla_are_refused():
    model, _ = row_model(jit_compile=True)
    with pytest.raises(ValueError, match=has('mode="row"', "XLA fixes", "jit_compile=False")):
        fit(model, 1, SurvivalProbSchedule(linear_warmup(3)))
    assert get_survival_probs(model) == [0.25]


def test_rows_compiled_by_xla_in_a_loop_of_ones_own_are_warned_of():
    layer = StochasticDepth(keras.layers.Dense(2), 0.25, mode="row", seed=1)
    x = keras.Input((2,))
    model = keras.Model(x, layer(x, shortcut=x))
    schedule = SurvivalProbSchedule(linear_warmup(2))
    schedule.set_model(model)
    schedule.update(0)
    tf.function(lambda x: model(x, training=True), jit_compile=True)(tf.ones((4, 2)))
    with pytest.warns(UserWarning, match="compiled by XLA with the survival probability 1.0"):
        schedule.update(1)
