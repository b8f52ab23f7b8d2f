"""The masks of what comes out of a block, as place among the outputs -> mask."""

from __future__ import annotations

import tensorflow as tf

from tfa_stochastic_depth import _keras
from tfa_stochastic_depth.rows import ALL


def set_masks(tensors, masks):
    """Tensors with these masks, and no others."""
    leaves = []
    for i, x in enumerate(tf.nest.flatten(tensors)):
        if _keras.mask_of(x) is not None:
            x = tf.identity(x)  # the mask belongs to whoever made the tensor
        _keras.set_mask(x, masks.get(i))
        leaves.append(x)
    return tf.nest.pack_sequence_as(tensors, leaves)


def sum_masks(shortcut, shortcut_masks, branch_masks, rows=ALL):
    """The masks of the sums of some rows of a shortcut and a branch that has only these rows."""
    shortcut_masks = {i: rows.take(mask) for i, mask in shortcut_masks.items()}
    masks = {
        i: _keras.sum_mask([x, x], [shortcut_masks.get(i), branch_masks.get(i)])
        for i, x in enumerate(tf.nest.flatten(shortcut))
    }
    return {i: mask for i, mask in masks.items() if mask is not None}


def stand_in_masks(outputs, masks, like):
    """Masks for a dropped layer's outputs: `masks` where they fit, else nothing is masked.

    Args:
        outputs: What stands in for the layer's outputs.
        masks: Place -> the mask that it has.
        like: Place -> the mask that the layer's output would have. These places must be filled.
    """
    leaves, filled = tf.nest.flatten(outputs), {}
    for i, mask in like.items():
        filled[i] = masks.get(i)
        if filled[i] is None or not filled[i].shape[1:].is_compatible_with(mask.shape[1:]):
            filled[i] = tf.ones(tf.shape(leaves[i])[: mask.shape.rank], tf.bool)
    return filled
