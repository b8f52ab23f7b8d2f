"""Blocks that are alike share one traced function.

Tracing a block and its gradient, with a conditional in both, takes much longer than tracing the
block alone. In a deep network most blocks are alike, but for the values of their weights.
"""

from __future__ import annotations

import tensorflow as tf

from tfa_stochastic_depth import _keras

# In a graph with more blocks than these they are called by the runtime, not copied into the graph.
COPIES = 24


def call_shared(key, function, arguments, callable_as_is=True):
    """Calls `function(*arguments)`, traced once for all calls in this graph that have the same key.

    TensorFlow copies it into the graph for each call, and prepares each copy anew (some 50 ms of
    the first step). In a deep model the runtime calls it instead, which takes some 50 microseconds
    a call, as it is handed from thread to thread. Its gradient is copied anyway: what a call gives
    is there only when it has all been computed, and of a gradient every part is waited for by
    itself. On GPUs, where it was not measured, nothing is called.

    Args:
        key: A hashable value, equal for functions that do the same. The function that is traced is
            the one that came first.
        function: A function of nested structures of tensors, which come with their masks, and
            plain values. It returns a structure of tensors.
        arguments: Its arguments. Other values than tensors must be the same for the same key.
        callable_as_is: Whether it may be called instead of copied.
    """
    leaves = tf.nest.flatten(arguments)
    tensors = list({id(x): x for x in leaves if tf.is_tensor(x)}.values())
    number = {id(x): i for i, x in enumerate(tensors)}
    places = [number.get(id(x)) for x in leaves]
    key = key, tuple(places)
    functions, calls = _keras.kept_here("functions"), _keras.kept_here("calls")
    if key not in functions:

        def traced(tensors, masks):
            for x, mask in zip(tensors, masks):
                _keras.set_mask(x, mask)
            values = [x if i is None else tensors[i] for x, i in zip(leaves, places)]
            return function(*tf.nest.pack_sequence_as(arguments, values))

        functions[key] = tf.function(traced, autograph=False)
    given = tensors, [_keras.mask_of(x) for x in tensors]
    if callable_as_is and not _keras.has_accelerator():
        _keras.call_forward_pass(functions[key], given, lambda: len(calls) > COPIES)
    calls[len(calls)] = key
    return functions[key](*given)
