"""What a layer gives, without running it: for zeros that stand in for it, and for checks."""

from __future__ import annotations

import tensorflow as tf

from tfa_stochastic_depth import _keras


class Specs:
    """Symbolic outputs of layers by the shapes and dtypes of their inputs, traced once each."""

    def __init__(self):
        self._known = {}

    def outputs(self, layer, args, kwargs):
        key = _keras.trace_key(layer, args, kwargs)
        if key not in self._known:
            self._known[key] = _keras.trace(layer, args, kwargs)
        return self._known[key]

    def batch_axes(self, layer, args, kwargs, doubtful, size):
        """`_keras.batch_axes`, by the places of the tensors: these are new ones in every step."""
        leaves = [id(x) for x in tf.nest.flatten((args, kwargs))]
        places = {x: leaves.index(x) for x in doubtful}
        key = *_keras.trace_key(layer, args, kwargs), *places.values()
        if key not in self._known:
            found = _keras.batch_axes(layer, args, kwargs, doubtful, size)
            self._known[key] = {places[x] for x in found}
        return [x for x in doubtful if places[x] in self._known[key]]


def zeros_like_output(layer, arguments, outputs, dtype):
    """Zeros of the shapes that a layer's outputs would have, without running it.

    A size that is unknown statically is taken from the layer's first input: axis 0 is the batch,
    as everywhere in Keras, and for another axis the layer is traced on two made-up sizes to see
    which axis of the input it follows.

    Args:
        layer: The layer.
        arguments: What it is called with.
        outputs: Its outputs as symbolic tensors.
        dtype: Dtype of the zeros.

    Raises:
        ValueError: If a size follows no axis of the input.
    """
    first = tf.nest.flatten(arguments.inputs)[0]
    leaves = tf.nest.flatten(outputs)
    probes = []
    if any(size is None for y in leaves for size in tuple(y.shape)[1:]):
        for step in (8, 24):
            sizes = [None, *(64 + step * axis for axis in range(1, 32))]
            shapes = _keras.trace_sizes(layer, arguments.args, arguments.kwargs, sizes)
            probes.append((sizes, shapes))

    def size(leaf, axis, known):
        if known is not None:
            return known
        if axis == 0:
            return tf.shape(first)[0]
        for source in range(1, len(first.shape)):
            if all(shapes[leaf][axis] == sizes[source] for sizes, shapes in probes):
                return tf.shape(first)[source]
        raise ValueError(
            f"The size of axis {axis} of what {layer.name!r} gives, {tuple(leaves[leaf].shape)}, "
            "is not known before it runs, so nothing can stand in for it when it is dropped. Pass "
            "`shortcut=` in the call, or a `skip`."
        )

    zeros = [
        tf.zeros([size(leaf, axis, known) for axis, known in enumerate(y.shape)], dtype)
        for leaf, y in enumerate(leaves)
    ]
    return tf.nest.pack_sequence_as(outputs, zeros)
