"""Rows of a batch: which of them a layer runs on in `mode="row"`, and how they are put back."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfa_stochastic_depth import _keras
from tfa_stochastic_depth.switch import by_call, random_bits


def count_rows(survival_prob, size):
    """How many of `size` rows are kept: `round(survival_prob * size)`, and 1 if that is 0.

    Only with a survival probability of 0 there is none. The product is one of float32 numbers, and
    halves are rounded to the even number, whether it is known when a function is traced or not.

    Args:
        survival_prob: Python float, or float32 scalar tensor, in [0, 1].
        size: Python int, or int32 scalar tensor.

    Returns:
        A Python int if both are known, else an int32 scalar tensor.
    """
    if isinstance(survival_prob, float) and isinstance(size, int):
        count = int(np.round(np.float32(survival_prob) * np.float32(size)))
        return min(max(count, int(survival_prob > 0)), size)
    p = tf.convert_to_tensor(survival_prob, tf.float32)
    count = tf.cast(tf.round(p * tf.cast(size, tf.float32)), tf.int32)
    return tf.minimum(tf.maximum(count, tf.cast(p > 0, tf.int32)), size)


def draw_rows(seed, count, size):
    """Draws `count` of `size` rows, each set of them with the same probability.

    The draw is a function of the seed alone, the same in eager mode, in a graph and under XLA.

    Args:
        seed: Integer tensor of shape (2,).
        count: Python int, or int32 scalar tensor, at most `size`.
        size: Python int, or int32 scalar tensor.

    Returns:
        An int32 tensor of shape (count,), with each row at most once, in no order.
    """
    bits = random_bits(tf.reshape(size, (1,)), seed)
    return tf.math.top_k(tf.bitcast(bits, tf.int32), count).indices


class Rows:
    """Some of the rows (entries along axis 0) of a batch.

    Args:
        count: How many they are, at most `size`: a Python int, or an int32 scalar tensor.
        size: How many the batch has, the same.
        every: Whether they are all of them: a bool, or a bool tensor if only a run can tell.
            Where it is known there is no conditional, and where they are all nothing is gathered.
        places: int32 tensor (count, 1) of them; `None` if they are known to be all.
        kept: Whether what is made of them is kept: `True`, or a bool tensor. If that is false it
            is as if there were none of these rows, though they are taken.
    """

    def __init__(self, count, size, every, places, kept=True):
        self._count = count
        self._size = size
        self._every = every
        self._places = places
        self._kept = kept

    def parts(self):
        """What it is made of."""
        return self._count, self._size, self._every, self._places, self._kept

    @property
    def are_all(self):
        """Whether they are known to be all rows."""
        return self._every is True

    @property
    def scale(self):
        """`size / count`, a float32 scalar tensor."""
        return tf.cast(self._size, tf.float32) / tf.cast(self._count, tf.float32)

    def take(self, x):
        """These rows of a tensor.

        TensorFlow's gradient is made of slices that may overlap, to be added up. This one puts rows
        in place. It is one for the whole conditional: TensorFlow disregards one inside of it where
        a persistent tape watches.
        """
        if self._every is True:
            return x
        if not x.dtype.is_floating:
            return self._taken(x)
        rows, x = self._here(), tf.identity(x)
        # Not to keep all of `x` for its shape. XLA does not, and has to see where it comes from.
        shape = None if _keras.compiles_with_xla() else tf.shape(x)

        @tf.custom_gradient
        def take(x):
            def gradient(dy):
                size = tf.shape(x) if shape is None else shape
                some = lambda: tf.scatter_nd(rows._places, dy, size)  # noqa: E731
                return rows._either(lambda: dy, some, x, rows._size)

            return rows._taken(x), gradient

        return take(x)

    def take_beside(self, x):
        """(A tensor, these rows of it), with the gradient of the rows added to that of the tensor.

        For a shortcut: with `take` there would be a tensor of zeros with rows in it, to be added.
        """
        if self._every is True:
            return x, x
        rows = self._here()

        @tf.custom_gradient
        def split(x):
            def gradient(dx, dy):
                return rows._sum(dx, dy)

            return (tf.identity(x), rows._taken(x)), gradient

        return split(tf.identity(x))

    def add(self, x, y):
        """A tensor `x` with `y` added to these rows."""
        if self._every is True:
            return x + y
        rows = self._here()

        @tf.custom_gradient
        def add(x, y):
            def gradient(dz):
                return dz, rows._by_kind(
                    lambda: dz,
                    lambda: tf.gather_nd(dz, rows._places),
                    lambda: tf.zeros(tf.concat([[rows._count], tf.shape(dz)[1:]], 0), dz.dtype),
                    dz,
                    rows._count,
                )

            return rows._sum(x, y), gradient

        return add(tf.identity(x), tf.identity(y))

    def put(self, x, y):
        """A tensor `x` with `y` in place of these rows."""
        if self._every is True:
            return y
        y = self._if_kept(y, lambda: self.take(x))
        some = lambda: tf.tensor_scatter_nd_update(x, self._places, y)  # noqa: E731
        return self._either(lambda: y, some, x, self._size)

    def spread(self, y):
        """Zeros with `y` in place of these rows."""
        if self._every is True:
            return y
        z = self._if_kept(y, lambda: tf.zeros_like(y))

        def some():
            shape = tf.concat([[self._size], tf.shape(z)[1:]], 0)
            return tf.scatter_nd(self._places, z, shape)

        return self._either(lambda: z, some, z, self._size)

    def check(self, y, what):
        """A tensor `y`, which must have one row for each of these.

        Raises:
            ValueError: If it has another number of rows. Where only a run can tell, running it
                raises a `tf.errors.InvalidArgumentError`.
        """
        if self._every is True:
            return y
        text = (
            f'{what} must have one row for each row that goes in, with mode="row". Where a layer '
            'moves rows (a reshape across the batch), use mode="batch".'
        )
        known = y.shape[0] if y.shape.rank else 0
        if known is not None and isinstance(self._count, int):
            if known != self._count:
                raise ValueError(
                    f"{text} Received: the shape {tuple(y.shape)} for {self._count} rows."
                )
            return y
        equal = tf.debugging.assert_equal(tf.shape(y)[0], self._count, text)
        with tf.control_dependencies([equal]):
            return tf.identity(y)

    def _if_kept(self, y, other):
        return y if self._kept is True else tf.where(self._kept, y, other())

    def _taken(self, x):
        return self._either(lambda: x, lambda: tf.gather_nd(x, self._places), x, self._count)

    def _sum(self, x, y):
        return self._by_kind(
            lambda: x + y,
            lambda: tf.tensor_scatter_nd_add(x, self._places, y),
            lambda: x,
            x,
            self._size,
        )

    def _by_kind(self, every, some, none, like, rows):
        """As `_either`, and `none()` if what is made of these rows is not kept."""
        if self._kept is True:
            return self._either(every, some, like, rows)
        # The usual case comes first: a step passes one conditional then, and not one in another.
        with _keras.on_host():
            usual = tf.logical_and(self._kept, tf.logical_not(self._every))
        y = tf.cond(usual, some, lambda: tf.cond(self._kept, every, none))
        return _shaped(y, like, rows)

    def _either(self, every, some, like, rows):
        """`every()` or `some()`, which are shaped as `like` but for the number of rows."""
        y = some() if self._every is False else tf.cond(self._every, every, some)
        return _shaped(y, like, rows)

    def _here(self):
        """The same as tensors of this graph, which may be that of a side of a conditional."""
        with _keras.on_host():
            return Rows(*(tf.identity(x) if tf.is_tensor(x) else x for x in self.parts()))


def _shaped(y, like, rows):
    y.set_shape([rows if isinstance(rows, int) else None, *like.shape[1:]])
    return y


ALL = Rows(None, None, True, None)


def choose_rows(seed, survival_prob, size, training, static):
    """Draws the rows of a training step.

    Args:
        seed: Integer tensor of shape (2,).
        survival_prob: Python float, or float32 scalar tensor.
        size: How many rows there are, a Python int, or an int32 scalar tensor.
        training: `True`, or a bool tensor. Without training they are all.
        static: Whether nothing may depend on what only a run can tell.

    Returns:
        (Rows, whether there are any): a bool, or a bool tensor if only a run can tell. Then there
        is always one to run on, whose results are not kept if there should be none.
    """
    known = training is True and isinstance(survival_prob, float) and isinstance(size, int)
    if not (static or known):
        p = tf.convert_to_tensor(survival_prob, tf.float32)
        given = seed, p, tf.convert_to_tensor(size), training
        count, every, some, places = _choose_by_call(*given)
        return Rows(count, size, every, places, some), some
    count = count_rows(survival_prob, size)
    every, some = (count == size, count > 0) if known else (survival_prob == 1, survival_prob > 0)
    places = draw_rows(seed, count, size)[:, tf.newaxis] if some and not every else None
    return Rows(count, size, every, places), some


def _choose(seed, survival_prob, size, training):
    count = count_rows(survival_prob, size)
    if training is not True:
        count = tf.where(training, count, size)
    some = count > 0
    count = tf.minimum(tf.maximum(count, 1), size)
    return count, tf.equal(count, size), some, draw_rows(seed, count, size)[:, tf.newaxis]


_choose_by_call = by_call(_choose)
