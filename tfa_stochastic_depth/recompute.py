"""A conditional for XLA, whose gradient computes the chosen side again, but for what is dear."""

from __future__ import annotations

import tensorflow as tf

from tfa_stochastic_depth import _keras
from tfa_stochastic_depth.switch import run_or_skip, sides

# Operations that take longer to compute again than their results to be kept: products, reductions
# (those of LayerNormalization), and functions that take a series (those of gelu and softmax). What
# stands between them is computed again, in passing. Of a transformer, measured on CPUs, a kept
# block costs 1.2 times a plain one with nothing kept, 1.06 with products and reductions, and 1.02
# with these.
_DEAR = frozenset(
    "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum XlaEinsum XlaDot XlaDotV2 "
    "Conv Conv2D Conv3D DepthwiseConv2dNative Conv2DBackpropInput Conv3DBackpropInputV2 XlaConvV2 "
    "Mean Sum Max Min Prod EuclideanNorm "
    "Softmax LogSoftmax Exp Erf Erfc Tanh Sigmoid Softplus Elu Selu".split()
)


def note_dear(function):
    """Calls a function in a graph.

    Returns:
        (its result, the floating-point tensors made there that take long to compute, in order).
    """
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    result = function()
    made = graph.get_operations()[before:]
    outputs = [y for operation in made if operation.type in _DEAR for y in operation.outputs]
    return result, [y for y in outputs if y.dtype.is_floating]


def describe(tensors):
    """What they were made by, their shapes and dtypes: equal for equal calls."""
    return [(y.op.type, tuple(y.shape), y.dtype) for y in tensors]


def run_or_skip_twice(switch, run, skip, run_again, skip_again, sources, dear):
    """As `run_or_skip`, with a gradient that computes the chosen side again, in a cond of its own.

    For XLA. What a `tf.cond` computed on the way to its results is needed by its gradient. XLA
    hands it from one conditional to the other in full size, filled with zeros when the switch is
    off, so that a dropped layer costs a good part of a kept one. Here only `sources` are handed on,
    and of the rest what is dear. (XLA drops those of them that the gradient does not need.)

    Args:
        switch: Bool scalar tensor.
        run: As in `run_or_skip`.
        skip: As in `run_or_skip`.
        run_again: A function that returns what `run` did, and changes no variable.
        skip_again: The same for `skip`.
        sources: What the results depend on: floating-point tensors, and `tf.Variable`s.
        dear: What `describe(...)` says of what is dear in `run_again`. If it is something else in
            `run`, all is computed again.

    Returns:
        As `run_or_skip`.
    """

    def run_and_keep():
        (outputs, losses), kept = note_dear(run)
        return (outputs, kept if describe(kept) == dear else []), losses

    def skip_and_keep(traced):
        outputs, kept = traced
        return skip(outputs), _zeros(kept, run_again)

    (outputs, kept), losses = run_or_skip(switch, run_and_keep, skip_and_keep)
    results = outputs, losses
    leaves = tf.nest.flatten(results)
    # Masks are among the results too.
    places = [i for i, y in enumerate(leaves) if y.dtype.is_floating]

    def gradient_of(side, gradients):
        with tf.GradientTape() as tape:
            tape.watch(sources)
            again, made = note_dear(lambda: tf.nest.flatten(side()))
        zero = tf.UnconnectedGradients.ZERO
        found = tape.gradient([again[i] for i in places], sources, gradients, zero)
        return [tf.convert_to_tensor(g) for g in found], made

    def gradient_of_kept(side, gradients):
        found, made = gradient_of(side, gradients)
        for y, value in zip(made, kept):
            _keras.replace_uses(y, tf.identity(value))
        return found

    @tf.custom_gradient
    def with_gradient(*values):
        def gradient(*gradients):
            on, off = sides(run_again, skip_again)
            found = tf.cond(
                switch,
                lambda: gradient_of_kept(on, gradients),
                lambda: gradient_of(off, gradients)[0],
            )
            return [None] * len(places) + found

        return [tf.identity(y) for y in values[: len(places)]], gradient

    # With the values of variables, rather than the variables, as arguments, TensorFlow does not
    # look for variables by itself.
    stopped = [tf.stop_gradient(leaves[i]) for i in places]
    for i, y in zip(places, with_gradient(*stopped, *map(tf.convert_to_tensor, sources))):
        leaves[i] = y
    return tf.nest.pack_sequence_as(results, leaves)


def _zeros(tensors, make):
    """Zeros shaped as tensors of another graph.

    Where a size is not known when this is traced, they are made again, by `make()`. XLA knows the
    sizes, and computes nothing else of it.
    """
    if any(y.shape.num_elements() is None for y in tensors):
        return [tf.zeros_like(y) for y in note_dear(make)[1]]
    return [tf.zeros(y.shape, y.dtype) for y in tensors]
