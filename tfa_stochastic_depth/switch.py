"""The switch of a block, and what runs by it: the layer or what stands in for it."""

from __future__ import annotations

import tensorflow as tf


def random_bits(shape, seed):
    """uint32 random numbers that follow from the seed alone, in eager mode, graphs and XLA.

    Philox is named because the default generator depends on the device.
    """
    return tf.random.stateless_uniform(
        shape, seed, minval=None, maxval=None, dtype=tf.uint32, alg="philox"
    )


def by_call(function):
    """A function of tensors, traced once for all blocks, and called by the runtime as it is.

    Making the operations of a draw anew for each block, or copying them, takes a good part of the
    time until the first step of a deep model.
    """
    return tf.function(function, autograph=False, experimental_attributes={"_noinline": True})


def draw_switch(seed, survival_prob):
    """Draws the paper's b, true with probability `survival_prob`.

    The draw is a function of the seed alone, the same in eager mode, in a graph and under XLA: the
    uniform number is made from bits here because TensorFlow and XLA round them differently.

    Args:
        seed: Integer tensor of shape (2,).
        survival_prob: float32 scalar tensor in [0, 1]. 0 is never true and 1 always.

    Returns:
        A bool scalar tensor.
    """
    bits = random_bits((), seed)
    upper = tf.cast(tf.bitwise.right_shift(bits, tf.constant(8, tf.uint32)), tf.int32)
    u = tf.cast(upper, tf.float32) * 2.0**-24  # in [0, 1), exact
    return u < survival_prob


draw_switch_by_call = by_call(draw_switch)


@tf.function(
    autograph=False,
    input_signature=[tf.TensorSpec((None, 2), tf.int64), tf.TensorSpec((None,), tf.float32)],
)
def draw_switches(seeds, survival_probs):
    """`draw_switch` for each of some seeds `(count, 2)` and probabilities `(count,)`."""
    return tf.map_fn(
        lambda pair: draw_switch(*pair), (seeds, survival_probs), fn_output_signature=tf.bool
    )


def run_or_skip(switch, run, skip):
    """`run()` where the switch is on and `skip(...)` where it is off; the other is not computed.

    Args:
        switch: Bool scalar tensor, or a bool.
        run: A function that returns (outputs, losses), losses being a list of tensors.
        skip: A function that returns outputs of the same structure, shapes and dtypes. It is given
            what `run` returned as symbolic tensors of another graph, of use only for their static
            shapes, or `None` if `run` was not called.

    Returns:
        (outputs, losses). When skipped, the losses are zeros in a graph, and absent if `run` was
        not called.
    """
    kept, dropped = sides(run, skip)
    if isinstance(switch, bool):
        return kept() if switch else dropped()
    return tf.cond(switch, kept, dropped)


def sides(run, skip):
    """What `run_or_skip` does if the switch is on, and what if not, as functions of nothing."""
    traced = []

    def kept():
        traced.append(run())
        return traced[-1]

    def dropped():  # traced after `kept`; in eager mode the only one that is called
        outputs, losses = traced[-1] if traced else (None, [])
        return skip(outputs), [tf.zeros(loss.shape, loss.dtype) for loss in losses]

    return kept, dropped
