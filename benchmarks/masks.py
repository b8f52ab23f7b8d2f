"""Stochastic depth as others do it: the branch is computed, and then multiplied by zero."""

import tensorflow as tf

keras = tf.keras


class NotHere(Exception):
    """A variant that cannot run, with the reason."""


class MaskedSum(keras.layers.Layer):
    """`shortcut + mask * branch` in training: the branch is always computed (KerasCV, TFA).

    Args:
        survival_prob: Probability of a mask of 1.
        per_sample: Whether each sample has a mask of its own.
    """

    def __init__(self, survival_prob, per_sample=False, **kwargs):
        super().__init__(**kwargs)
        self.survival_prob = survival_prob
        self.per_sample = per_sample

    def call(self, tensors, training=None):
        shortcut, branch = tensors
        if not training:
            return shortcut + self.survival_prob * branch
        count = tf.shape(branch)[0] if self.per_sample else 1
        mask = tf.random.uniform([count] + [1] * (len(branch.shape) - 1)) < self.survival_prob
        return shortcut + tf.cast(mask, branch.dtype) * branch

    def compute_output_shape(self, shapes):
        return shapes[0]


def tfa_layer():
    """The layer of tensorflow-addons."""
    try:
        from tensorflow_addons.layers import StochasticDepth
    except ImportError:
        raise NotHere("tensorflow-addons is not installed") from None
    return StochasticDepth
