"""`copy_weights`, from a model to its wrapped version and back."""

import numpy as np
import pytest
import tensorflow as tf

from helpers import assert_same_outputs, data, randomize
from tfa_stochastic_depth import (
    StochasticDepth,
    constant,
    copy_weights,
    get_survival_probs,
    wrap_residuals,
)

keras = tf.keras
L = keras.layers


@keras.utils.register_keras_serializable(package="transfer")
class Gated(L.Layer):
    """A layer with a weight of its own and layers inside, of one name both."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.one, self.two = L.Dense(6, name="dense"), L.Dense(6, name="dense")

    def build(self, shape):
        self.one.build(shape)
        self.two.build(shape)
        self.gate = self.add_weight(name="gate", shape=(6,), initializer="ones")
        super().build(shape)

    def call(self, x):
        return self.two(self.one(x)) * tf.cast(self.gate, x.dtype)


def model():
    """Shared, nested and opaque layers, statistics, integers, several branches."""
    inputs = keras.Input((6,), name="in")
    shared = L.Dense(6, name="shared")
    x = shared(L.BatchNormalization(name="norm")(inputs))
    x = L.Add(name="sum1")([x, L.BatchNormalization(name="norm1")(L.Dense(6, name="a")(x))])
    x = shared(x)
    x = L.Add(name="sum2")([Gated(name="gated")(x), x])
    u = keras.Input((6,), name="u")
    v = L.Add(name="sum")([u, L.Dense(6, name="a")(u)])  # the name is used outside as well
    x = keras.Model(u, L.Dense(6, name="last")(v), name="inner")(x)
    return keras.Model(inputs, L.Dense(2, name="head")(x), name="outer")


@pytest.mark.parametrize("share_layers", [False, True])
def test_back_to_the_original(share_layers):
    original = randomize(model())
    wrapped = wrap_residuals(original, 0.5, rescale="training", share_layers=share_layers)
    assert len(get_survival_probs(wrapped)) == 3
    wrapped.compile(keras.optimizers.SGD(0.1), "mse")
    wrapped.fit(data(8, 6), data(8, 2), verbose=0, epochs=2)
    x = data(4, 6)
    changed = np.abs(np.asarray(wrapped(x)) - np.asarray(original(x))).max() > 1e-3
    assert changed != share_layers
    copy_weights(wrapped, original)
    assert_same_outputs(wrapped, original, x)


def test_from_the_original():
    wrapped = wrap_residuals(model(), [0.2, 0.4, 0.6], rescale="training", seed=3)
    original = randomize(keras.models.clone_model(model()), seed=1)
    seeds = [np.asarray(w) for w in wrapped.weights if "seed_state" in w.name]
    assert len(seeds) == 3
    copy_weights(original, wrapped)
    assert_same_outputs(wrapped, original, data(4, 6))
    assert get_survival_probs(wrapped) == pytest.approx([0.2, 0.4, 0.6])
    again = [np.asarray(w) for w in wrapped.weights if "seed_state" in w.name]
    np.testing.assert_array_equal(again, seeds)


def test_after_saving(tmp_path):
    original = randomize(model())
    wrapped = wrap_residuals(original, constant(0.5), rescale="training")
    randomize(wrapped, seed=2)
    path = str(tmp_path / "wrapped.keras")
    wrapped.save(path)
    copy_weights(keras.models.load_model(path), original)
    copy_weights(original, wrapped)
    assert_same_outputs(keras.models.load_model(path), wrapped, data(4, 6))


def test_adapted_state_goes_along():
    inputs = keras.Input((6,), name="in")
    norm = L.Normalization(name="normalize")
    norm.adapt(5 + 3 * data(64, 6))
    x = norm(inputs)
    adapted = keras.Model(inputs, L.Add(name="sum")([x, L.Dense(6, name="d")(x)]))
    fresh = keras.models.clone_model(adapted)
    copy_weights(wrap_residuals(adapted, constant(1), rescale="training"), fresh)
    assert_same_outputs(fresh, adapted, data(4, 6))


def test_a_wrapper_made_by_hand():
    x = keras.Input((6,))
    dense = keras.Sequential([L.Dense(6, name="d")], name="branch")
    by_hand = randomize(keras.Model(x, StochasticDepth(dense, 1.0, name="sum")(x, shortcut=x)))
    y = keras.Sequential([L.Dense(6, name="d")], name="branch")(x)
    plain = keras.Model(x, L.Add(name="sum")([x, y]))
    copy_weights(by_hand, plain)
    assert_same_outputs(plain, by_hand, data(3, 6))


class AutoNamed(L.Layer):
    """Its layers get new names in each copy."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.one, self.two = L.Dense(6), L.Dense(6)

    def build(self, shape):
        self.one.build(shape)
        self.two.build(shape)
        super().build(shape)

    def call(self, x):
        return self.two(tf.nn.relu(self.one(x)))


@pytest.mark.parametrize("frozen", ["", "one", "two"])
def test_layers_whose_parts_are_named_anew(frozen):
    x = inputs = keras.Input((6,))
    layer = AutoNamed()
    x = layer(x)
    for name in frozen.split():
        getattr(layer, name).trainable = False
    original = randomize(keras.Model(inputs, L.Add()([x, L.Dense(6)(x)])))
    wrapped = wrap_residuals(original, rescale="training")
    x = data(3, 6)
    assert_same_outputs(wrapped, original, x)
    randomize(wrapped, seed=2)
    copy_weights(wrapped, original)
    assert_same_outputs(wrapped, original, x)


def test_a_regularizer_of_activities_goes_along():
    """Keras 2 leaves it out of the configs of custom layers."""
    x = keras.Input((6,))
    y = AutoNamed(activity_regularizer="l2")(x)
    original = randomize(keras.Model(x, L.Add()([y, L.Dense(6)(y)])))
    wrapped = wrap_residuals(original)
    for model in (original, wrapped):
        model(data(3, 6))
    assert float(wrapped.losses[0]) == pytest.approx(float(original.losses[0])) != 0


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize("argument", ["source", "target"])
def test_no_model(argument):
    arguments = {"source": model(), "target": model(), argument: [1]}
    with pytest.raises(TypeError) as error:
        copy_weights(**arguments)
    assert str(error.value) == (
        f"`{argument}` must be a keras.Model. Received: [1] (of type list)."
    )


def test_another_model():
    original = randomize(model())
    before = original.get_weights()
    x = keras.Input((6,))
    other = keras.Model(original.input, L.Dense(2, name="new")(original.output))
    with pytest.raises(ValueError) as error:
        copy_weights(other, original)
    assert str(error.value) == (
        "`source` and `target` must be a model and its wrapped version, with the same layers. "
        "Received: models of which 'new' are only in `source`. Nothing was copied."
    )
    with pytest.raises(ValueError) as error:
        copy_weights(keras.Model(x, L.Dense(2, name="head")(x)), original)
    assert "'norm', 'shared', 'a', 'norm1', 'gated' and 1 more are only in `target`" in str(
        error.value
    )
    for ours, theirs in zip(original.get_weights(), before):
        np.testing.assert_array_equal(ours, theirs)


def test_other_shapes():
    def chain(width):
        x = keras.Input((6,))
        return keras.Model(x, L.Dense(width, name="b")(L.Dense(6, name="a")(x)))

    source, target = randomize(chain(2)), randomize(chain(3), seed=1)
    before = target.get_weights()
    with pytest.raises(ValueError) as error:
        copy_weights(source, target)
    assert str(error.value) == (
        "The weights of the layer 'b' have other shapes in `target`, [(6, 3), (3,)], than in "
        "`source`, [(6, 2), (2,)]. Nothing was copied."
    )
    for ours, theirs in zip(target.get_weights(), before):
        np.testing.assert_array_equal(ours, theirs)
