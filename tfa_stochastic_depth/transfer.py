"""`copy_weights`: between a model and its wrapped version, either way."""

from __future__ import annotations

import collections

from tfa_stochastic_depth import _keras
from tfa_stochastic_depth.layer import StochasticDepth

keras = _keras.keras


def copy_weights(source, target):
    """Gives a model the weights of another, of which one is the wrapped version of the other.

    Layers are matched by their names, so it works between a model and what `wrap_residuals` made
    of it, in both directions, and also if one of them was saved and loaded. The survival
    probabilities and the seeds of `StochasticDepth` layers are left alone, and the branches are
    not scaled: with `rescale="training"` the plain model gives the same predictions as the wrapped.

    Args:
        source: The model whose weights are read.
        target: The model whose weights are written.

    Raises:
        TypeError: If one of them is no `keras.Model`.
        ValueError: If they do not have the same layers, with weights of the same shapes. Nothing
            is written then.

    Example:

    >>> import tensorflow as tf
    >>> from tfa_stochastic_depth import copy_weights, wrap_residuals
    >>> x = tf.keras.Input(shape=(8,))
    >>> y = tf.keras.layers.Add()([x, tf.keras.layers.Dense(8)(x)])
    >>> model = tf.keras.Model(x, y)
    >>> wrapped = wrap_residuals(model, 0.5)
    >>> copy_weights(wrapped, model)  # after training `wrapped`
    """
    models = {"source": source, "target": target}
    for argument, model in models.items():
        if not isinstance(model, keras.Model):
            raise TypeError(
                f"`{argument}` must be a keras.Model. Received: {model!r} "
                f"(of type {type(model).__name__})."
            )
    sources, targets = _weighted(source), _weighted(target)
    _check_same("only in `source`", sources, targets)
    _check_same("only in `target`", targets, sources)
    for key, layer in sources.items():
        ours, theirs = (_keras.own_sizes(x) for x in (targets[key], layer))
        if ours != theirs:
            raise ValueError(
                f"The weights of the layer {_words(key)} have other shapes in `target`, {ours}, "
                f"than in `source`, {theirs}. Nothing was copied."
            )
    for key, layer in sources.items():
        _keras.copy_own_state(layer, targets[key])


def _check_same(where, layers, others):
    missing = [_words(key) for key in layers if key not in others]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ValueError(
            "`source` and `target` must be a model and its wrapped version, with the same layers. "
            f"Received: models of which {', '.join(missing[:5])}{more} are {where}. "
            "Nothing was copied."
        )


def _weighted(model):
    """Where a layer is, by names -> the layer, for all layers with weights of their own.

    Wrappers and the branches that `wrap_residuals` made are left out of the names.
    """
    found, seen, count = {}, set(), collections.Counter()

    def visit(layer, path):
        for child in _keras.children(layer):
            if id(child) in seen:
                continue
            seen.add(id(child))
            ours = isinstance(child, StochasticDepth) or _is_branch(child, layer)
            own = path if ours else (*path, child.name)
            if _keras.own_weights(child) and not isinstance(child, StochasticDepth):
                found[own, count[own]] = child
                count[own] += 1
            visit(child, own)

    visit(model, ())
    return found


def _is_branch(layer, holder):
    """Whether a layer is the model that holds the branch of a block."""
    if not isinstance(holder, StochasticDepth) or not isinstance(layer, keras.Model):
        return False
    return layer is holder.layer and layer.name == f"{holder.name}_branch"


def _words(key):
    return repr("/".join(key[0]))
