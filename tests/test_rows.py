"""The rows of a batch: how many, which, and what is done with them, against NumPy."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from helpers import data, operations_in
from tfa_stochastic_depth.rows import Rows, choose_rows, count_rows, draw_rows

SEED = tf.constant([5, 0], tf.int64)


def eager(f):
    return f


HOW = {"eager": eager, "graph": tf.function, "jit": tf.function(jit_compile=True)}


@pytest.fixture(params=HOW)
def how(request):
    return HOW[request.param]


# ------------------------------------------------------------------ how many


@pytest.mark.parametrize(
    ("p", "size", "count"),
    [
        (0.0, 8, 0),
        (1.0, 8, 8),
        (1.0, 1, 1),
        (0.2, 10, 2),
        (0.7, 10, 7),
        (0.7, 32, 22),  # 22.4
        (0.2, 8, 2),  # 1.6
        (0.5, 3, 2),  # halves go to the even number: 1.5
        (0.5, 5, 2),  # 2.5
        (0.7, 5, 4),  # 3.5
        (0.01, 8, 1),  # never none
        (0.2, 1, 1),
        (0.99, 8, 8),
    ],
)
def test_how_many_rows_are_kept(p, size, count):
    assert count_rows(p, size) == count
    for known in (p, tf.constant(p)):
        assert int(count_rows(known, tf.constant(size))) == count
    assert int(count_rows(tf.constant(p), size)) == count


def test_it_is_known_in_time_if_both_numbers_are():
    assert type(count_rows(0.7, 10)) is int
    assert tf.is_tensor(count_rows(0.7, tf.constant(10)))


def test_the_ways_to_count_agree():
    sizes = np.arange(1, 70)
    for p in np.linspace(0, 1, 101):
        ours = [count_rows(float(p), int(n)) for n in sizes]
        theirs = [
            int(n) for n in count_rows(tf.constant(p, tf.float32), tf.constant(sizes, tf.int32))
        ]
        assert ours == theirs


# ------------------------------------------------------------------ which


def test_rows_are_distinct_and_follow_from_the_seed():
    drawn = draw_rows(SEED, 7, 20).numpy()
    assert len(set(drawn)) == 7 and set(drawn) <= set(range(20))
    assert set(drawn) != set(draw_rows(SEED + [0, 1], 7, 20).numpy())
    assert set(drawn) != set(draw_rows(SEED + [1, 0], 7, 20).numpy())


def test_the_same_rows_however_it_runs(how):
    expected = [2, 1, 7, 16]
    run = how(lambda seed: draw_rows(seed, 4, 20))
    assert run(SEED).numpy().tolist() == expected
    run = how(lambda seed, x: draw_rows(seed, 4, tf.shape(x)[0]))
    assert run(SEED, tf.zeros(20)).numpy().tolist() == expected


@pytest.mark.parametrize("count", [2, 7])
def test_every_pair_of_rows_is_kept_together_equally_often(count):
    """Of 10 rows, 4,000 times: a pair's share is within 5 standard deviations."""
    times, size = 4000, 10
    seeds = tf.stack([tf.fill([times], 3), tf.range(times)], 1)
    drawn = tf.function(lambda: tf.map_fn(lambda s: draw_rows(s, count, size), seeds))().numpy()
    kept = np.zeros((times, size))
    np.put_along_axis(kept, drawn, 1.0, axis=1)
    together = kept.T @ kept / times
    pair, one = count * (count - 1) / (size * (size - 1)), count / size
    expected = np.full((size, size), pair) + np.eye(size) * (one - pair)
    bound = 5 * np.sqrt(expected * (1 - expected) / times)
    assert np.all(np.abs(together - expected) < bound)


# ------------------------------------------------------------------ what is done with them

PLACES = [4, 0, 3]


def rows(known):
    """Three rows of six, or all of them."""
    every, known = known.split()
    count = 6 if every == "all" else 3
    places = tf.constant(list(range(6)) if every == "all" else PLACES)[:, tf.newaxis]
    if known == "known":
        return Rows(count, 6, every == "all", None if every == "all" else places)
    return Rows(tf.constant(count), tf.constant(6), tf.constant(count) == 6, places)


def expected_places(known):
    return list(range(6)) if known.startswith("all") else PLACES


def numpy_do(what, x, y, places):
    z = x.copy()
    if what == "take":
        return x[places]
    if what == "spread":
        z[:] = 0
    if what == "add":
        z[places] += y
    else:
        z[places] = y
    return z


def do(what, rows, x, y):
    if what == "take":
        return rows.take(x)
    return rows.spread(y) if what == "spread" else getattr(rows, what)(x, y)


@pytest.mark.parametrize("what", ["take", "add", "put", "spread"])
@pytest.mark.parametrize(
    ("known", "how"),
    [
        *itertools.product(["some known", "all known"], HOW),
        *itertools.product(["some unknown", "all unknown"], ["eager", "graph"]),
    ],
)
def test_values_and_gradients(what, known, how):
    places = expected_places(known)
    x, y, dz = data(6, 2, seed=1), data(len(places), 2, seed=2), data(6, 2, seed=3)
    dz = dz[: len(places)] if what == "take" else dz

    def run(x, y, dz):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            z = do(what, rows(known), x, y)
        zero = tf.UnconnectedGradients.ZERO
        return z, tape.gradient(z, [x, y], dz, unconnected_gradients=zero)

    if how == "graph":
        run = tf.function(run, input_signature=[tf.TensorSpec((None, 2))] * 3)
    z, (dx, dy) = HOW[how](run)(tf.constant(x), tf.constant(y), tf.constant(dz))
    np.testing.assert_array_equal(z, numpy_do(what, x, y, places))
    nothing = np.zeros_like(x)
    of_x = {
        "take": lambda: numpy_do("put", nothing, dz, places),
        "add": lambda: dz,
        "put": lambda: numpy_do("put", dz, 0, places),
        "spread": lambda: nothing,
    }
    np.testing.assert_array_equal(dx, of_x[what]())
    np.testing.assert_array_equal(dy, np.zeros_like(y) if what == "take" else dz[places])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("what", ["take", "add", "put", "spread"])
def test_floating_dtypes(what, dtype):
    x, y = tf.cast(data(6, 2), dtype), tf.cast(data(3, 2), dtype)
    z = do(what, rows("some known"), x, y)
    assert z.dtype == dtype
    expected = numpy_do(what, x.numpy(), y.numpy(), PLACES)
    np.testing.assert_array_equal(z.numpy(), expected)


@pytest.mark.parametrize("dtype", ["bool", "int32", "int64"])
@pytest.mark.parametrize("what", ["take", "put"])
def test_masks_and_ids(what, dtype):
    x, y = tf.cast(tf.reshape(tf.range(12), (6, 2)) % 5, dtype), tf.cast(tf.ones((3, 2)), dtype)
    z = do(what, rows("some known"), x, y)
    np.testing.assert_array_equal(z.numpy(), numpy_do(what, x.numpy(), y.numpy(), PLACES))


def test_static_shapes_are_kept():
    @tf.function(input_signature=[tf.TensorSpec((None, 7)), tf.TensorSpec((None, 7))])
    def unknown(x, y):
        some = rows("some unknown")
        for z in (some.take(x), some.add(x, y), some.put(x, y), some.spread(y)):
            assert z.shape.as_list() == [None, 7]
        some = rows("some known")
        assert some.take(x).shape == (3, 7)
        for z in (some.add(x, y), some.put(x, y), some.spread(y)):
            assert z.shape == (6, 7)
        return x

    unknown.get_concrete_function()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    ("p", "size", "count", "are_all"),
    [(0.7, 10, 7, False), (0.0, 10, 0, False), (1.0, 10, 10, True), (0.99, 10, 10, True)],
)
def test_choose_rows_with_all_known(p, size, count, are_all, static):
    chosen, some = choose_rows(SEED, p, size, True, static)
    assert chosen.are_all is are_all and some is (count > 0)
    if count:
        x = tf.reshape(tf.range(size), (size, 1))
        assert chosen.take(x).shape == (count, 1)
        assert float(chosen.scale) == pytest.approx(size / count)


@pytest.mark.parametrize(
    ("p", "are_all", "some"), [(0.5, False, True), (1.0, True, True), (0.0, False, False)]
)
def test_with_the_probability_known_there_is_no_conditional(p, are_all, some):
    """As XLA needs it, which does not know the size when a function is traced."""

    @tf.function(input_signature=[tf.TensorSpec((None, 2))])
    def run(x):
        chosen, any_rows = choose_rows(SEED, p, tf.shape(x)[0], True, static=True)
        assert any_rows is some and chosen.are_all is are_all
        return chosen.add(x, chosen.take(x)) if some else x

    function = run.get_concrete_function()
    operations = operations_in(function)
    assert not operations & {"If", "StatelessIf"}
    assert bool(operations & {"GatherNd"}) is (p == 0.5)
    assert np.sum(function(tf.ones((6, 2)))) == 12 * (1 + p)


@pytest.mark.parametrize("training", [True, False])
def test_without_training_they_are_all(training):
    chosen, some = choose_rows(SEED, tf.constant(0.5), 6, tf.constant(training), static=False)
    assert bool(some)
    assert chosen.take(tf.ones((6, 1))).shape[0] == (3 if training else 6)


# ------------------------------------------------------------------ rows that do not fit


def test_another_number_of_rows_is_refused():
    text = "it must have one row for each row that goes in.*Received: the shape .4, 2. for 3 rows"
    with pytest.raises(ValueError, match=text):
        rows("some known").check(tf.ones((4, 2)), "it")
    with pytest.raises(ValueError, match="one row for each"):
        rows("some known").check(tf.ones(()), "it")
    assert rows("some known").check(tf.ones((3, 2)), "it").shape == (3, 2)


def test_where_only_a_run_can_tell_it_says_so():
    run = tf.function(lambda y: rows("some unknown").check(y, "what 'mixer' gives"))
    assert run(tf.ones((3, 2))).shape == (3, 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="gives must have one row"):
        run(tf.ones((4, 2)))
