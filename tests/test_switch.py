"""The switch: exact at its ends, distributed as it says, and the same wherever it is drawn."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tfa_stochastic_depth import StochasticDepth
from tfa_stochastic_depth.switch import draw_switch

keras = tf.keras

HOW = {
    "eager": lambda function: function,
    "graph": tf.function,
    "jit": lambda function: tf.function(function, jit_compile=True),
}


@pytest.fixture(params=HOW)
def how(request):
    return HOW[request.param]


def make(survival_prob, seed):
    """A layer that gives 1 in a training step where it is kept, and 0 where it is dropped."""
    return StochasticDepth(keras.layers.Activation("linear"), survival_prob, seed=seed)


def record(layer, steps, how=tf.function):
    """The switches of the next steps, each step on its own."""
    run = how(lambda x: layer(x, training=True))
    return [int(run(tf.ones((1, 1)))[0, 0]) for _ in range(steps)]


def record_many(layers, steps):
    """The switches of the next steps of several layers, (steps, layers), in one graph."""

    @tf.function
    def run():
        rows = tf.TensorArray(tf.float32, steps)
        for step in tf.range(steps):
            row = [layer(tf.ones((1, 1)), training=True)[0, 0] for layer in layers]
            rows = rows.write(step, tf.stack(row))
        return rows.stack()

    return run().numpy().astype(int)


def p_value(successes, trials, p):
    """Of the exact two-sided binomial test: the probability of all that is no more likely."""

    def log_probability(k):
        ways = math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        return ways + k * math.log(p) + (trials - k) * math.log1p(-p)

    seen = log_probability(successes) + 1e-7
    logs = map(log_probability, range(trials + 1))
    return math.fsum(math.exp(value) for value in logs if value <= seen)


def test_p_value_on_cases_worked_out_by_hand():
    assert p_value(1, 4, 0.5) == pytest.approx(10 / 16)
    assert p_value(4, 4, 0.5) == pytest.approx(2 / 16)
    assert p_value(2, 2, 0.2) == pytest.approx(0.04)
    assert p_value(0, 2, 0.2) == pytest.approx(1.0)
    assert p_value(2090, 10_000, 0.2) == pytest.approx(0.0247, abs=0.001)


# ------------------------------------------------------------------ support


@pytest.mark.parametrize(("p", "expected"), [(0.0, False), (1.0, True)])
def test_the_ends_are_exact(p, expected):
    for seed in range(200):
        assert bool(draw_switch(tf.constant([seed, 7]), tf.constant(p))) is expected


@pytest.mark.parametrize(("p", "expected"), [(0.0, False), (1.0, True)])
@pytest.mark.parametrize("bits", [0, 1, 255, 2**31, 2**32 - 1])
def test_the_ends_are_exact_whatever_the_bits(p, expected, bits, monkeypatch):
    """u is in [0, 1): it can be 0, where `u <= 0` would keep, and never 1, where `u < 1` drops."""
    drawn = tf.constant(bits, tf.uint32)
    monkeypatch.setattr(tf.random, "stateless_uniform", lambda *args, **kwargs: drawn)
    assert bool(draw_switch(tf.constant([0, 0]), tf.constant(p))) is expected


@pytest.mark.parametrize(
    ("bits", "p", "expected"),
    [
        (2**30, 0.25, False),  # u = 0.25 exactly
        (2**30 - 1, 0.25, True),
        (3 * 2**30, 0.7, False),  # u = 0.75
        (3 * 2**30, 0.8, True),
        (2**32 - 1, 1 - 2.0**-24, False),  # the largest u
        (0, 2.0**-24, True),
    ],
)
def test_the_switch_is_on_below_survival_prob(bits, p, expected, monkeypatch):
    drawn = tf.constant(bits, tf.uint32)
    monkeypatch.setattr(tf.random, "stateless_uniform", lambda *args, **kwargs: drawn)
    assert bool(draw_switch(tf.constant([0, 0]), tf.constant(p))) is expected


# ------------------------------------------------------------------ distribution


@pytest.mark.parametrize("p", [0.2, 0.7])
def test_distribution_of_ten_thousand_switches(p):
    switches = record_many([make(p, seed=11)], 10_000)[:, 0]
    assert p_value(switches.sum(), 10_000, p) > 0.001
    # One step says nothing of the next: the pairs of consecutive steps, without overlap.
    pairs = switches.reshape(-1, 2).prod(axis=1)
    assert p_value(pairs.sum(), 5_000, p**2) > 0.001


def test_switches_are_independent_between_layers():
    """Any two of three layers are both on as often as chance has it, also with seeds in a row."""
    for seeds in [(1, 2, 3), (None, None, None)]:
        keras.utils.set_random_seed(4)
        switches = record_many([make(0.7, seed) for seed in seeds], 3_000)
        for column in switches.T:
            assert p_value(column.sum(), 3_000, 0.7) > 0.001
        for a, b in [(0, 1), (0, 2), (1, 2)]:
            both = (switches[:, a] & switches[:, b]).sum()
            assert p_value(both, 3_000, 0.49) > 0.001


# ------------------------------------------------------------------ reproducible

# Philox is the same everywhere, so these are too: on every device, in every version of Keras. A
# change here changes how every checkpoint goes on.
KNOWN = {
    (1, 0.7): [0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0],
    (2, 0.7): [1, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1, 1],
    (2, 0.2): [0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1],
}


@pytest.mark.parametrize(("seed", "p"), KNOWN)
def test_the_same_seed_gives_the_same_switches_everywhere(seed, p, how):
    assert record(make(p, seed), 12, how) == KNOWN[seed, p]


def test_the_same_seed_gives_the_same_switches_in_fit():
    for eagerly in (True, False):
        x = keras.Input((1,))
        layer = make(0.7, seed=1)
        model = keras.Model(x, layer(x))
        model.compile("sgd", "mse", run_eagerly=eagerly)
        losses = [model.train_on_batch(np.ones((1, 1)), np.zeros((1, 1))) for _ in range(12)]
        assert [round(float(loss)) for loss in losses] == KNOWN[1, 0.7]


def test_what_calls_it_may_change_from_step_to_step():
    layer = make(0.7, seed=1)
    got = []
    for how in (HOW["graph"], HOW["eager"], HOW["jit"], HOW["eager"]):
        got += record(layer, 3, how)
    assert got == KNOWN[1, 0.7]


@pytest.mark.parametrize("seeds", [(1, 2), (0, 1), (5, 5 + 2**20), (None, None)], ids=str)
def test_different_seeds_differ(seeds):
    a, b = (record(make(0.7, seed), 40) for seed in seeds)
    assert a != b


def test_set_random_seed_decides_where_no_seed_is_given():
    def run(seed):
        keras.utils.set_random_seed(seed)
        return record_many([make(0.7, None), make(0.7, None)], 40).tolist()

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_a_draw_of_other_code_changes_nothing():
    expected = record(make(0.7, seed=1), 12, HOW["eager"])
    layer = make(0.7, seed=1)
    got = []
    for _ in range(12):
        tf.random.uniform(())
        keras.layers.Dropout(0.5)(tf.ones((1, 1)), training=True)
        got += record(layer, 1, HOW["eager"])
    assert got == expected


def switches_for_another_process():
    keras.utils.set_random_seed(5)
    return record_many([make(0.7, None), make(0.7, None), make(0.7, 3)], 40)


def test_two_processes_agree():
    """The other one has another hash seed and runs nothing but this."""
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    printed = subprocess.run(
        [sys.executable, __file__],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    rows = switches_for_another_process()
    assert 0 < rows.mean() < 1
    assert printed.split() == ["".join(map(str, row)) for row in rows]


# ------------------------------------------------------------------ state


def two_deep():
    x = keras.Input((1,))
    y = make(0.7, None)(x)
    return keras.Model(x, [y, make(0.6, None)(x)])


def steps_of(model, steps=20):
    return [[int(y[0, 0]) for y in model(tf.ones((1, 1)), training=True)] for _ in range(steps)]


def test_switches_resume_from_a_checkpoint(tmp_path):
    model = two_deep()
    steps_of(model, 7)
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    expected = steps_of(model)
    other = two_deep()
    steps_of(other, 3)
    tf.train.Checkpoint(model=other).restore(path).assert_existing_objects_matched()
    assert steps_of(other) == expected


@pytest.mark.parametrize("file", ["model.keras", "weights"])
def test_switches_resume_from_a_file(file, tmp_path):
    model = two_deep()
    model.layers[-1].survival_prob = 0.5
    steps_of(model, 7)
    if file == "weights":
        model.save_weights(tmp_path / "model.weights.h5")
        other = two_deep()
        other.load_weights(tmp_path / "model.weights.h5")
    else:
        model.save(tmp_path / file)
        other = keras.models.load_model(tmp_path / file)
    expected = steps_of(model)
    assert steps_of(other) == expected
    assert other.layers[-1].survival_prob == 0.5


def test_without_the_state_they_start_again():
    """What the tests above would see if nothing were restored."""
    model = two_deep()
    first = steps_of(model)
    assert steps_of(model) != first
    keras.utils.set_random_seed(1)
    assert steps_of(two_deep()) != steps_of(model)


if __name__ == "__main__":
    for row in switches_for_another_process():
        print("".join(map(str, row)))
