"""Mixed precision: outputs in the compute dtype, as close to the exact values as it allows."""

import numpy as np
import pytest
import tensorflow as tf

from tfa_stochastic_depth import StochasticDepth

keras = tf.keras

HOW = {
    "eager": lambda function: function,
    "graph": tf.function,
    "jit": lambda function: tf.function(function, jit_compile=True),
}
# Policy: its compute dtype, the dtype of its variables, the distance of 1 to the next number.
POLICIES = {
    "float32": ("float32", "float32", 2.0**-23),
    "float64": ("float64", "float64", 2.0**-52),
    "mixed_float16": ("float16", "float32", 2.0**-10),
    "mixed_bfloat16": ("bfloat16", "float32", 2.0**-7),
}

# At 0.2 and 0.7, neither p nor 1 - p nor 1 / p is a number that float16 or float32 has exactly.
PROBS = [0.2, 0.7]
CASES = {
    "zeros": {},
    "shortcut": {"shortcut": True},
    "identity": {"skip": "identity"},
    "layer": {"skip": "layer"},
}


@pytest.fixture(params=POLICIES)
def policy(request):
    return request.param


@pytest.fixture(params=HOW)
def how(request):
    return HOW[request.param]


def scale(policy):
    """The layer x -> -1.5 * x, exact in every dtype for the inputs used here."""
    return keras.layers.Dense(
        3, kernel_initializer=keras.initializers.Identity(-1.5), use_bias=False, dtype=policy
    )


INPUTS = np.array([[0.5, -1.25, 3.0], [2.0, 0.0, -0.75]])
SHORTCUT = np.array([[10.0, 0.25, -2.0], [-1.0, 5.0, 0.5]])


def reference(p, rescale, case, switch):
    """The formula in float64, with the float32 value of p; `switch` is None at inference."""
    p = np.float64(np.float32(p))
    f = -1.5 * INPUTS
    s = {"identity": INPUTS, "layer": 0.25 * INPUTS}.get(case, np.zeros_like(INPUTS))
    a = SHORTCUT if case == "shortcut" else 0.0
    if rescale == "inference":
        y = p * f + (1 - p) * s if switch is None else f if switch else s
    else:
        y = f if switch is None else s + (f - s) / p if switch else s
    return a + y, np.abs(a) + np.abs(f) / (p if rescale == "training" else 1.0) + np.abs(s)


def make(p, rescale, case, policy):
    options = dict(CASES[case])
    shortcut = options.pop("shortcut", False)
    if options.get("skip") == "layer":
        options["skip"] = keras.layers.Dense(
            3, kernel_initializer=keras.initializers.Identity(0.25), use_bias=False, dtype=policy
        )
    layer = StochasticDepth(scale(policy), p, rescale=rescale, **options)
    kwargs = {"shortcut": tf.constant(SHORTCUT, POLICIES[policy][0])} if shortcut else {}
    return layer, kwargs


def assert_close(got, expected, sizes, policy):
    """Within four roundings, each relative to the largest of the numbers that are added."""
    dtype, _, epsilon = POLICIES[policy]
    assert got.dtype == dtype
    got = tf.cast(got, tf.float64).numpy()
    assert np.all(np.abs(got - expected) <= 4 * epsilon * sizes), (got - expected) / sizes / epsilon


@pytest.mark.parametrize("rescale", ["inference", "training"])
@pytest.mark.parametrize("case", CASES)
def test_values_are_exact_to_the_precision_of_the_compute_dtype(policy, case, rescale):
    """At inference, and in training steps of both kinds."""
    x = tf.constant(INPUTS, POLICIES[policy][0])
    for p in PROBS:
        layer, kwargs = make(p, rescale, case, policy)
        y = layer(x, training=False, **kwargs)
        assert_close(y, *reference(p, rescale, case, None), policy)
        train = tf.function(lambda x: layer(x, training=True, **kwargs))  # noqa: B023
        seen = set()
        for _ in range(40):
            y = train(x)
            kept = kept_in(y, p, rescale, case)
            assert_close(y, *reference(p, rescale, case, kept), policy)
            seen.add(kept)
        assert seen == {True, False}


def kept_in(y, p, rescale, case):
    """Whether an output is nearer to a kept one than to a dropped one."""
    y = tf.cast(y, tf.float64).numpy()
    kept, dropped = (np.abs(y - reference(p, rescale, case, b)[0]).max() for b in (True, False))
    return bool(kept < dropped)


@pytest.mark.parametrize("case", CASES)
def test_outputs_have_the_compute_dtype(policy, case, how):
    """Dropped, at inference, kept, at inference."""
    dtype = POLICIES[policy][0]
    layers = [make(p, "training", case, policy) for p in (0.0, 1.0)]

    @how
    def run(x):
        return [layer(x, training=t, **kw) for layer, kw in layers for t in (True, False)]

    for y, (expected, sizes) in zip(
        run(tf.constant(INPUTS, dtype)),
        [
            reference(1.0, "training", case, False),
            reference(1.0, "training", case, None),
            reference(1.0, "training", case, True),
            reference(1.0, "training", case, None),
        ],
    ):
        assert_close(y, expected, sizes, policy)


def test_variables(policy):
    """survival_prob is a float32 in every policy: no dtype but its own sees it."""
    compute, variable, _ = POLICIES[policy]
    layer, _ = make(0.7, "inference", "zeros", policy)
    layer(tf.constant(INPUTS, compute), training=True)
    (prob,) = [w for w in layer.non_trainable_variables if tuple(w.shape) == ()]
    assert tf.as_dtype(prob.dtype).name == "float32"
    assert {tf.as_dtype(w.dtype).name for w in layer.trainable_weights} == {variable}
    assert layer.survival_prob == 0.7
    assert layer.compute_dtype == layer.layer.compute_dtype == compute


@pytest.mark.parametrize("p", [0.123, 0.999])
def test_a_probability_is_not_rounded_to_the_compute_dtype(policy, p):
    layer, _ = make(p, "inference", "zeros", policy)
    layer(tf.constant(INPUTS, POLICIES[policy][0]), training=True)
    assert layer.survival_prob == p
    layer.survival_prob = p / 2
    assert layer.survival_prob == p / 2


def test_a_switch_is_the_same_in_every_policy(policy):
    """0.6969 is drawn first for seed 2: bfloat16 has no number between it and 0.6953 or 0.6992."""
    for p, expected in [(0.6968, 0.0), (0.697, 1.0)]:
        layer = StochasticDepth(keras.layers.Activation("linear", dtype=policy), p, seed=2)
        y = layer(tf.ones((1, 1), POLICIES[policy][0]), training=True)
        assert float(y[0, 0]) == expected


# ------------------------------------------------------------------ policies of the model


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"], indirect=True)
def test_under_a_global_policy(policy, how):
    """Layers made under it need say nothing, and float32 inputs are cast as by any layer."""
    dtype = POLICIES[policy][0]
    keras.mixed_precision.set_global_policy(policy)
    layer = StochasticDepth(scale(None), 0.7, seed=5)
    x, a = tf.constant(INPUTS, tf.float32), tf.constant(SHORTCUT, tf.float32)
    y = how(lambda x, a: layer(x, shortcut=a, training=True))(x, a)
    assert_close(y, *reference(0.7, "inference", "shortcut", True), policy)
    assert y.dtype == dtype
    assert {tf.as_dtype(w.dtype).name for w in layer.trainable_weights} == {"float32"}


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_a_float32_layer_in_a_mixed_model_stays_float32(p, how):
    """The policy is the wrapped layer's own; its input is not rounded on the way through."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    layer = StochasticDepth(scale("float32"), p)
    assert layer.compute_dtype == "float32"
    x = tf.constant([[1.0001, 0.1, 3.0]], tf.float32)
    for training, factor in [(True, p), (False, p)]:
        y = how(lambda x: layer(x, shortcut=x, training=training))(x)  # noqa: B023
        assert y.dtype == "float32"
        np.testing.assert_allclose(y, x - factor * 1.5 * x, rtol=1e-6)


def test_inputs_are_rounded_once_only_by_the_layer_that_takes_them():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    x = tf.constant([[1.0001, 0.1, 3.0]], tf.float32)
    layer = StochasticDepth(scale("float32"), 1.0, dtype="mixed_bfloat16")
    assert layer.compute_dtype == "bfloat16"
    y = layer(x)
    assert y.dtype == "bfloat16"
    np.testing.assert_array_equal(y, tf.cast(-1.5 * x, tf.bfloat16))


def test_the_dtype_argument_is_the_dtype_of_the_output(how):
    layers = [StochasticDepth(scale("float32"), p, dtype="float64") for p in (0.0, 1.0)]
    x = tf.constant(INPUTS, tf.float32)
    for y in how(lambda x: [layer(x, training=True) for layer in layers])(x):
        assert y.dtype == "float64"


@pytest.mark.parametrize("skip", ["identity", "layer"])
def test_a_skip_of_another_dtype_is_cast(skip, how):
    """Both branches of the cond must give one dtype."""
    skip = scale("float32") if skip == "layer" else skip
    layers = [StochasticDepth(scale("mixed_float16"), p, skip=skip) for p in (0.0, 1.0)]
    x = tf.constant(INPUTS, tf.float32)
    for y in how(lambda x: [layer(x, training=True) for layer in layers])(x):
        assert y.dtype == "float16"


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"], indirect=True)
@pytest.mark.parametrize("compile_options", [{"run_eagerly": True}, {}, {"jit_compile": True}])
def test_a_mixed_model_trains(policy, compile_options):
    keras.mixed_precision.set_global_policy(policy)
    x = keras.Input((3,))
    y = StochasticDepth(keras.layers.Dense(3), 0.5, seed=1)(x, shortcut=x)
    y = StochasticDepth(keras.layers.BatchNormalization(), 0.5, seed=2)(y, shortcut=y)
    assert tf.as_dtype(y.dtype).name == POLICIES[policy][0]
    model = keras.Model(x, keras.layers.Dense(1, dtype="float32")(y))
    model.compile(keras.optimizers.SGD(0.05), "mse", **compile_options)
    data = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
    history = model.fit(data, data.sum(axis=1), batch_size=8, epochs=6, verbose=0).history["loss"]
    assert np.all(np.isfinite(history))
    assert history[-1] < history[0]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float64"], indirect=True)
def test_losses_of_a_dropped_layer_have_the_dtype_of_the_kept(policy, how):
    """Or else the cond of a layer with an activity regulariser could not be built."""
    dense = keras.layers.Dense(3, activity_regularizer=keras.regularizers.L2(0.1), dtype=policy)
    layer = StochasticDepth(dense, 0.0)
    x = tf.constant(INPUTS, POLICIES[policy][0])

    def run(x):
        y = layer(x, training=True)
        return y, [tf.cast(loss, tf.float32) for loss in layer.losses]

    step = how(run)
    assert sum(map(float, step(x)[1])) == 0.0
    layer.survival_prob = 1.0
    y, losses = step(x)
    assert sum(map(float, losses)) > 0.0
    assert np.any(tf.cast(y, tf.float32))
