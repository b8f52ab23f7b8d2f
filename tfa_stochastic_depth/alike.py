"""Blocks that are alike share one traced function.

Tracing a block and its gradient, with a conditional in both, takes much longer than tracing the
block alone. In a deep network most blocks are alike, but for the values of their weights.
"""

from __future__ import annotations

import tensorflow as tf

from tfa_stochastic_depth import _keras


def call_shared(key, function, arguments):
    """Calls `function(*arguments)`, traced once for all calls in this graph that have the same key.

    Args:
        key: A hashable value, equal for functions that do the same. The function that is traced is
            the one that came first.
        function: A function of nested structures of tensors, which come with their masks, and
            plain values. It returns a structure of tensors.
        arguments: Its arguments. Other values than tensors must be the same for the same key.
    """
    leaves = tf.nest.flatten(arguments)
    tensors = list({id(x): x for x in leaves if tf.is_tensor(x)}.values())
    number = {id(x): i for i, x in enumerate(tensors)}
    places = [number.get(id(x)) for x in leaves]
    key = key, tuple(places)
    functions = _keras.traced_here()
    if key not in functions:

        def traced(tensors, masks):
            for x, mask in zip(tensors, masks):
                _keras.set_mask(x, mask)
            values = [x if i is None else tensors[i] for x, i in zip(leaves, places)]
            return function(*tf.nest.pack_sequence_as(arguments, values))

        # TensorFlow copies it into the graph for each call. Called as it is ("_noinline") it would
        # be prepared once, and the first step of a ResNet-110 take a third less; but the gradient
        # of each block would be waited for as a whole, which takes 7 % of every step.
        functions[key] = tf.function(traced, autograph=False)
    return functions[key](tensors, [_keras.mask_of(x) for x in tensors])
