"""What a `StochasticDepth` is called with, whole or for some rows of the batch."""

from __future__ import annotations

import tensorflow as tf

from tfa_stochastic_depth import _keras


class Arguments:
    """The arguments of one call.

    Attributes:
        inputs: A tensor or a structure of them, what `args` starts with.
        args: The positional arguments of the layer.
        kwargs: Its keyword arguments.
        shortcut: The shortcut in the wrapper's compute dtype, or `None`.
        stand_in: What stands in for the layer: the shortcut as it came, or else the inputs.
    """

    def __init__(self, args, kwargs, shortcut, stand_in, mask):
        self.inputs = args[0]
        self.args = args
        self.kwargs = kwargs
        self.shortcut = shortcut
        self.stand_in = stand_in
        self._mask = mask  # the masks of `stand_in`, if they were given, and do not come with it
        # A layer may take the mask from a tensor that it is called with.
        self._masks = {id(x): _keras.mask_of(x) for x in self.tensors()}
        self._origins = []  # (tensor, the one here that was made of it)

    def parts(self):
        """What it is made of."""
        return self.args, self.kwargs, self.shortcut, self.stand_in, self._mask

    def tensors(self):
        """The tensors among the arguments of the layer, and the shortcut, each once."""
        leaves = tf.nest.flatten((self.args, self.kwargs, self.stand_in, self.shortcut))
        return list({id(x): x for x in leaves if tf.is_tensor(x)}.values())

    def masks(self):
        """The masks of what stands in for the layer, by place, as they are now.

        Keras 3's attention takes the mask from the query that it is called with, and a sum after
        it sees none.
        """
        if self._mask is None:
            return _keras.masks_of(self.stand_in)
        return {i: mask for i, mask in enumerate(_keras.flatten(self._mask)) if mask is not None}

    def copy(self):
        """The same values as tensors of their own, with the masks that they came with."""
        return self._mapped(self.tensors(), tf.identity)

    def batch_size(self):
        """How many rows there are, a Python int if it is known, else an int32 scalar tensor."""
        first = tf.nest.flatten(self.inputs)[0]
        if not first.shape.rank:
            raise ValueError(
                'mode="row" needs inputs with a batch axis, (batch, ...). Received: the shape '
                f"{first.shape}."
            )
        return tf.shape(first)[0] if first.shape[0] is None else first.shape[0]

    def take(self, rows, layer, specs):
        """The arguments for some rows. Tensors without a batch axis stay whole.

        So does the shortcut, to which what the layer makes of them is added.

        Raises:
            ValueError: If one of them has no rows that could be taken.
        """
        if rows.are_all:
            return self
        batched = self._batched(layer, specs)
        for x in batched:
            if not isinstance(x, tf.Tensor):
                raise ValueError(
                    'mode="row" takes rows of ordinary tensors. Use mode="batch" for '
                    f"{layer.name!r}, which is called with a {type(x).__name__}."
                )
        # What is only a shortcut, or a stand-in, is not needed by rows.
        given = {id(x) for x in tf.nest.flatten((self.args, self.kwargs))}
        batched = [x for x in batched if id(x) in given]
        beside = {id(x): x for x in tf.nest.flatten(self.shortcut) if id(x) in given}

        def take(x):
            if id(x) not in beside:
                return rows.take(x)
            beside[id(x)], y = rows.take_beside(x)
            return y

        taken = self._mapped(batched, take)
        taken.shortcut = tf.nest.map_structure(lambda x: beside.get(id(x), x), self.shortcut)
        return taken

    def lose_masks(self, taken):
        """Takes the masks away from tensors whose rows have lost them."""
        for x, y in taken._origins if taken is not self else ():
            if _keras.mask_of(y) is None:
                _keras.clear_mask(x)

    def _batched(self, layer, specs):
        """The tensors that have the batch as their first axis.

        A functional model says so for each of its inputs. Others have it where the size of the axis
        is that of the inputs', unless the layer does not run with another number of their rows:
        positions, or an attention mask for all samples, may be of that size by chance.
        """
        first, *_ = leaves = tf.nest.flatten(self.inputs)
        declared = _keras.declared_shapes(layer)
        whole = set()
        if len(declared) == len(leaves) and declared[0][0] is None:
            whole = {id(x) for x, shape in zip(leaves, declared) if not shape or shape[0]}
            others = [x for x in self.tensors() if all(x is not y for y in leaves)]
        else:
            others = self.tensors()
        size = first.shape[0]
        whole |= {id(x) for x in others if x is not first and not _may_have(x, size)}
        certain = {id(x) for x in tf.nest.flatten((self.inputs, self.stand_in, self.shortcut))}
        doubtful = [id(x) for x in others if id(x) not in whole | certain]
        if doubtful and size is not None:
            found = specs.batch_axes(layer, self.args, self.kwargs, doubtful, size)
            whole |= set(doubtful) - set(found)
        return [x for x in self.tensors() if id(x) not in whole]

    def _mapped(self, tensors, function):
        """These arguments with `function(x)`, and of its mask, in place of some of the tensors."""
        values = {}
        for x in tensors:
            y = values[id(x)] = function(x)
            mask = self._masks[id(x)]
            _keras.set_mask(y, None if mask is None else function(mask))
        replace = lambda x: values.get(id(x), x)  # noqa: E731
        args, kwargs, shortcut, stand_in = tf.nest.map_structure(
            replace, (self.args, self.kwargs, self.shortcut, self.stand_in)
        )
        copy = Arguments(args, kwargs, shortcut, stand_in, self._mask)
        copy._origins = [(x, values[id(x)]) for x in tensors]
        return copy


def _may_have(x, size):
    """Whether the first axis of a tensor may be the batch, of which `size` (or `None`) is known."""
    if x.shape.rank is None:
        return True
    return x.shape.rank > 0 and (x.shape[0] is None or x.shape[0] == size)
