"""Blocks that are alike share one traced function.

Tracing a block and its gradient, with a conditional in both, takes much longer than tracing the
block alone. In a deep network most blocks are alike, but for the values of their weights.
"""

from __future__ import annotations

import tensorflow as tf

from tfa_stochastic_depth import _keras


def call_shared(key, function, arguments, as_it_is=False):
    """Calls `function(*arguments)`, traced once for all calls in this graph that have the same key.

    Args:
        key: A hashable value, equal for functions that do the same. The function that is traced is
            the one that came first.
        function: A function of nested structures of tensors, which come with their masks, and
            plain values. It returns a structure of tensors.
        arguments: Its arguments. Other values than tensors must be the same for the same key.
        as_it_is: Whether the runtime calls the function as it is, and copies only its gradient into
            this graph. Each copy is prepared for running anew, so that the first step takes
            longer; but what a called function gives is there only when it has all been computed,
            and of a gradient every part is waited for by itself.
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

        functions[key] = tf.function(
            traced,
            autograph=False,
            experimental_attributes={"_noinline": True} if as_it_is else None,
        )
    given = tensors, [_keras.mask_of(x) for x in tensors]
    if as_it_is:
        _keras.copy_gradient(functions[key], given)
    return functions[key](*given)
