"""`copy_weights`: between a model and its wrapped version, either way."""

from __future__ import annotations

import collections

from tfa_stochastic_depth import _keras
from tfa_stochastic_depth.layer import StochasticDepth

keras = _keras.keras


def copy_weights(source, target):
    """Gives a model the weights of another, of which one is the wrapped version of the other.

    What a functional model calls is matched by name, so it works between a model and what
    `wrap_residuals` made of it, in both directions, and also if one of them was saved and loaded.
    The survival probabilities and the seeds of `StochasticDepth` layers are left alone, and the
    branches are not scaled: with `rescale="training"` the plain model gives the same predictions
    as the wrapped one.

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
    pairs = list(_pairs(source, target, ()))
    for layer, twin, path in pairs:
        ours, theirs = (_keras.shapes(_keras.own_weights(x)) for x in (twin, layer))
        if ours != theirs:
            raise ValueError(
                f"The weights of the layer {_words(path)} have other shapes in `target`, {ours}, "
                f"than in `source`, {theirs}. Nothing was copied."
            )
    for layer, twin, _ in pairs:
        _keras.copy_own_state(layer, twin)


def _pairs(source, target, path):
    """Yields the layers inside two that belong together, with the names that lead to them.

    What is called in a functional model goes by its name. What is inside of other layers goes by
    its place: its names may be made up anew in each copy.
    """
    ours, theirs = _inside(target), _inside(source)
    if _keras.is_functional(source) or _keras.is_functional(target):
        ours, theirs = _by_name(ours), _by_name(theirs)
    else:
        ours, theirs = dict(enumerate(ours)), dict(enumerate(theirs))
    _check_same("only in `source`", path, theirs, ours)
    _check_same("only in `target`", path, ours, theirs)
    for key, layer in theirs.items():
        own = (*path, layer.name)
        yield layer, ours[key], own
        yield from _pairs(layer, ours[key], own)


def _inside(layer):
    """The layers with weights inside a layer; wrappers and their branches are looked through."""
    found = {}
    for child in _keras.children(layer):
        ours = isinstance(child, StochasticDepth) or is_branch(child, layer)
        if _keras.weights(child):
            found.update((id(x), x) for x in (_inside(child) if ours else [child]))
    return list(found.values())


def _by_name(layers):
    count, found = collections.Counter(), {}
    for layer in layers:
        found[layer.name, count[layer.name]] = layer
        count[layer.name] += 1
    return found


def _check_same(where, path, layers, others):
    missing = [_words((*path, layer.name)) for key, layer in layers.items() if key not in others]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ValueError(
            "`source` and `target` must be a model and its wrapped version, with the same layers. "
            f"Received: models of which {', '.join(missing[:5])}{more} are {where}. "
            "Nothing was copied."
        )


def is_branch(layer, holder):
    """Whether a layer is the model that holds the branch of a block."""
    if not isinstance(holder, StochasticDepth) or not isinstance(layer, keras.Model):
        return False
    return layer is holder.layer and layer.name == f"{holder.name}_branch"


def _words(path):
    return repr("/".join(path))
