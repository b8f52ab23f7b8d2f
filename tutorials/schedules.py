"""Switch branches by hand, turn dropping up in the course of training, and see what was dropped.

    python tutorials/schedules.py

Four cells (`# %%`), to be run one after the other; each takes a second or two.
"""

# %% ---- Switches by hand -------------------------------------------------------------------------
#
# Where users asked TensorFlow for stochastic depth (its issues #1784 and #9001), they switched
# layers on and off and printed the gradient, to see whether a dropped layer is really left alone.
# Here `survival_probs` assigns the switches, for the body of a `with`: 1 is on, 0 is off.
#
# Two things that look alike were tried there:
#
# - "the layer or its input": y = w * x, or x. The layer is a whole block, with the shortcut in it.
# - "the input, plus the layer or nothing": y = x + w * x, or x. The layer is the branch of a block.
#
# At x = 2 both print the same value and the same gradient by w, if w is 2 in the one and 1 in the
# other. The second is the one of the paper (arXiv 1603.09382): the branch is what is dropped, and
# what is scaled at inference. The first is right where the layer adds its shortcut itself, and is
# then the same thing. Around a layer without a shortcut it is no stochastic depth: the next layer
# has to do with its input as well as with its output, which have little in common.

import numpy as np
import tensorflow as tf
from tensorflow import keras

from tfa_stochastic_depth import (
    RealisedDepth,
    StochasticDepth,
    SurvivalProbSchedule,
    find_residuals,
    get_survival_probs,
    linear_warmup,
    survival_probs,
    wrap_residuals,
)

layers = keras.layers


def one_weight(value):
    """The layer x -> w * x."""
    initializer = keras.initializers.Constant(value)
    return layers.Dense(1, use_bias=False, kernel_initializer=initializer)


def layer_or_input():
    """A model of one layer, w = 2, that is replaced by its input when dropped."""
    x = keras.Input((1,))
    return keras.Model(x, StochasticDepth(one_weight(2.0), 0.5, skip="identity")(x))


def input_plus_layer():
    """A model of one residual block, whose branch, w = 1, is left out when dropped."""
    x = keras.Input((1,))
    return keras.Model(x, StochasticDepth(one_weight(1.0), 0.5)(x, shortcut=x))


def value_and_gradient(model, training):
    """The output at x = 2, and its gradient with respect to w."""
    x = tf.constant([[2.0]])
    with tf.GradientTape() as tape:
        y = model(x, training=training)
    (gradient,) = tape.gradient(y, model.trainable_weights)
    return float(y[0, 0]), float(gradient[0, 0])


def switch_by_hand(model):
    """The value and the gradient with the layer on, off, and at inference."""
    with survival_probs(model, [1]):
        on = value_and_gradient(model, training=True)
    with survival_probs(model, [0]):
        off = value_and_gradient(model, training=True)
    return {"on": on, "off": off, "inference": value_and_gradient(model, training=False)}


gradients = {f.__name__: switch_by_hand(f()) for f in (layer_or_input, input_plus_layer)}
for name, found in gradients.items():
    print(name)
    for state, (value, gradient) in found.items():
        print(f"  {state:10} value {value:g}  gradient {gradient:g}")

# %% ---- A warm-up --------------------------------------------------------------------------------
#
# Many deep models go astray when blocks are dropped from the first step on. Here nothing is
# dropped in it, and from step 30 on as much as `wrap_residuals` was told. Put the two callbacks
# before those that write logs.

BLOCKS, WIDTH, STEPS_PER_EPOCH, EPOCHS = 6, 8, 10, 4


def build():
    """A residual network of dense layers."""
    x = inputs = keras.Input((WIDTH,))
    for i in range(BLOCKS):
        branch = layers.Dense(WIDTH, activation="tanh")(x)
        x = layers.Add(name=f"block{i + 1}")([x, branch])
    return keras.Model(inputs, layers.Dense(1)(x))


keras.utils.set_random_seed(0)
images = np.random.default_rng(0).normal(size=(16 * STEPS_PER_EPOCH, WIDTH)).astype("float32")
targets = np.sin(images.sum(axis=1, keepdims=True))
model = build()
expected = find_residuals(model, 0.4).expected_depth
wrapped = wrap_residuals(model, 0.4, seed=0)
wrapped.compile("adam", "mse")
depth = RealisedDepth()
history = wrapped.fit(
    images,
    targets,
    batch_size=16,
    epochs=EPOCHS,
    callbacks=[SurvivalProbSchedule(linear_warmup(30)), depth],
    verbose=0,
).history
print(f"\nexpected depth without a schedule: {expected:g} of {BLOCKS}")
print("epoch  survival_prob  expected_depth  realised_depth")
for epoch in range(EPOCHS):
    keys = ("survival_prob", "expected_depth", "realised_depth")
    print(f"{epoch + 1:5}  {'  '.join(f'{history[key][epoch]:14.3f}' for key in keys)}")
print("afterwards:", get_survival_probs(wrapped))

# %% ---- What was dropped -------------------------------------------------------------------------
#
# `depth.switches` has a row for each step of the last epoch and a column for each block.

print("\nswitches of the last epoch, one line a step:")
for row in depth.switches:
    print("  " + " ".join("#" if switch else "." for switch in row))

# %% ---- A training loop of your own --------------------------------------------------------------
#
# One call before each step. The step may be a compiled function; nothing is traced again.

model = wrap_residuals(build(), 0.4, seed=0)
optimizer = keras.optimizers.SGD(0.01)
optimizer.build(model.trainable_variables)
traces = []


@tf.function
def train(x, y):
    """One step of training."""
    traces.append(1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


schedule = SurvivalProbSchedule(linear_warmup(5))
schedule.set_model(model)
last_block = []
for step in range(8):
    schedule.update(step)
    train(tf.constant(images[:16]), tf.constant(targets[:16], tf.float32))
    last_block.append(get_survival_probs(model)[-1])
print("\nlast block in a loop of one's own:", last_block, f"traced {len(traces)} time(s)")
