"""What optimizers do to the weights of a dropped block: the table in the README, line by line."""

import numpy as np
import pytest
import tensorflow as tf

from helpers import KERAS_3, data
from tfa_stochastic_depth import StochasticDepth, survival_probs

keras = tf.keras
optimizers = keras.optimizers

RATE = 0.1
MODES = {
    "graph": {"jit_compile": False} if KERAS_3 else {},
    "eager": {"run_eagerly": True},
}


def weights_by_step(optimizer, mode, switches, regularizer=None):
    """Trains a block, one step for each switch; returns its kernel, before and after each."""
    keras.utils.set_random_seed(1)
    branch = keras.layers.Dense(3, use_bias=False, kernel_regularizer=regularizer)
    x = keras.Input((3,))
    y = StochasticDepth(branch, 0.5, seed=1)(x, shortcut=x)
    model = keras.Model(x, keras.layers.Dense(2)(y))
    model.compile(optimizer, "mse", **MODES[mode])
    found = [branch.get_weights()[0]]
    for switch in switches:
        with survival_probs(model, [switch]):
            model.train_on_batch(data(4, 3), np.ones((4, 2)))
        found.append(branch.get_weights()[0])
    return found


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adagrad"])
def test_without_momentum_they_stay(name, mode):
    before, kept, dropped, again = weights_by_step(getattr(optimizers, name)(RATE), mode, [1, 0, 0])
    assert np.abs(kept - before).min() > 0
    np.testing.assert_array_equal(dropped, kept)
    np.testing.assert_array_equal(again, kept)


def test_momentum_moves_them_on_by_its_share_of_the_last_update(mode):
    before, kept, dropped, again = weights_by_step(
        optimizers.SGD(RATE, momentum=0.9), mode, [1, 0, 0]
    )
    np.testing.assert_allclose(dropped - kept, 0.9 * (kept - before), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(again - dropped, 0.81 * (kept - before), rtol=1e-4, atol=1e-7)


def test_adam_moves_them_on_though_less_and_less(mode):
    """After one kept step the bias-corrected means leave m / sqrt(v) of known size."""
    before, kept, dropped, again = weights_by_step(optimizers.Adam(RATE), mode, [1, 0, 0])
    first = kept - before
    for update, step in ((dropped - kept, 2), (again - dropped, 3)):
        m = 0.9 ** (step - 1) * 0.1 / (1 - 0.9**step)
        v = 0.999 ** (step - 1) * 0.001 / (1 - 0.999**step)
        np.testing.assert_allclose(update / first, m / np.sqrt(v), rtol=1e-3)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_weight_decay_shrinks_them(name, mode):
    """Here the block has never been kept, so that there is nothing else to move it."""
    optimizer = getattr(optimizers, name)(RATE, weight_decay=0.2)
    before, dropped = weights_by_step(optimizer, mode, [0])
    np.testing.assert_allclose(dropped, (1 - RATE * 0.2) * before, rtol=1e-5)


def test_a_weight_penalty_shrinks_them(mode):
    before, dropped = weights_by_step(optimizers.SGD(RATE), mode, [0], keras.regularizers.L2(0.1))
    np.testing.assert_allclose(dropped, (1 - RATE * 2 * 0.1) * before, rtol=1e-5)


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adagrad", "Adam"])
def test_a_block_that_was_never_kept_stays_as_it_was_made(name):
    kwargs = {"momentum": 0.9} if name == "SGD" else {}
    before, *after = weights_by_step(getattr(optimizers, name)(RATE, **kwargs), "graph", [0, 0])
    for dropped in after:
        np.testing.assert_array_equal(dropped, before)


def test_keras_cannot_update_weights_in_a_conditional_on_replicas():
    """Why no option leaves the weights of dropped blocks alone. Goes red when Keras can."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        weight = tf.Variable(1.0)
        optimizer = optimizers.SGD(RATE)
        optimizer.build([weight])

    def update(switch):
        def apply():
            optimizer.apply_gradients([(tf.ones(()), weight)])
            return 0

        return tf.cond(switch, apply, lambda: 0)

    with pytest.raises(RuntimeError, match="merge_call"):
        strategy.run(tf.function(update), (tf.constant(True),))
