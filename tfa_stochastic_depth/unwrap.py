"""`unwrap_residuals`: the way back to a plain Keras model."""

from __future__ import annotations

import inspect

from tfa_stochastic_depth import _keras
from tfa_stochastic_depth.fold import Foldable
from tfa_stochastic_depth.layer import StochasticDepth, stochastic_depth_layers
from tfa_stochastic_depth.replay import Copies, new_arguments, record
from tfa_stochastic_depth.rewrite import FACTOR
from tfa_stochastic_depth.transfer import is_branch

keras = _keras.keras


def unwrap_residuals(model, *, fold=True):
    """Builds a plain Keras model that predicts what a model with `StochasticDepth` layers does.

    It is the model that `wrap_residuals` was given, with the weights of the wrapped one: the same
    layers under the same names, called in the same order, so that weights and weights files pass
    between the two. What `wrap_residuals` replaced is there again (drops of their own, sums by
    another name). It is not compiled, and shares nothing with `model`.

    With `rescale="inference"` branches count with their survival probability `p` at inference.
    That factor goes into the last weights of the branch, where these are weights of a linear layer
    (convolution, dense, normalization, attention) followed by nothing but what passes a factor on
    (ReLU, pooling, reshaping, dropout, ...). Where they are not, a `Rescaling` layer does it. A
    layer with `skip="identity"` or a projection as `skip` becomes the sum
    `p * layer(x) + (1 - p) * skip(x)` of `Rescaling` layers.

    Args:
        model: A functional or Sequential `keras.Model` that holds `StochasticDepth` layers: one
            made by `wrap_residuals`, or by hand.
        fold: `True`: the result predicts what `model` does. `False`: all branches count in full,
            with the weights as they were trained, for training on without stochastic depth. With
            `rescale="training"` both are the same.

    Returns:
        A new, uncompiled `keras.Model`.

    Raises:
        TypeError: If `model` is a subclassed model or no model of this Keras, or `fold` no bool.
        ValueError: If it holds no `StochasticDepth` layer, or one inside a layer of another kind,
            or a layer that cannot be copied.

    Example:

    >>> import tensorflow as tf
    >>> from tfa_stochastic_depth import unwrap_residuals, wrap_residuals
    >>> x = tf.keras.Input(shape=(8,))
    >>> y = tf.keras.layers.Dense(8, name="dense")(x)
    >>> y = tf.keras.layers.Add(name="sum")([x, y])
    >>> wrapped = wrap_residuals(tf.keras.Model(x, y), 0.5)
    >>> [layer.name for layer in wrapped.layers[1:]]
    ['sum']
    >>> [layer.name for layer in unwrap_residuals(wrapped).layers[1:]]
    ['dense', 'sum']
    """
    if not isinstance(fold, bool):
        raise TypeError(f"`fold` must be True or False. Received: {fold!r}.")
    _keras.check_functional(model)
    wrappers = stochastic_depth_layers(model)
    unwrapper = _Unwrapper(model, fold)
    plain = unwrapper.model(model)
    missed = [wrapper.name for wrapper in wrappers if id(wrapper) not in unwrapper.done]
    if missed:
        raise ValueError(
            f"`model` {model.name!r} must hold its StochasticDepth layers in functional models, "
            f"which can be built without them. Received: {missed[0]!r}, inside a layer of another "
            "kind. Build the plain model anew and use `copy_weights(model, plain)`."
        )
    unwrapper.copies.copy_state()
    twins = unwrapper.copies.twins()
    for layers in unwrapper.to_scale.values():
        for layer, names, factor in layers:
            for name in names:
                _keras.scale_weight(twins[id(layer)], name, factor)
    return plain


def _is_rebuilt(layer):
    """Whether what a layer calls is replayed, rather than the layer copied as a whole."""
    if not _keras.is_functional(layer):
        return False
    if any(isinstance(part, StochasticDepth) for part in _keras.with_sublayers(layer)):
        return True
    return _keras.keeps_class(layer) and not isinstance(layer, keras.Sequential)


class _Unwrapper:
    def __init__(self, model, fold):
        self.done = set()  # ids of the wrappers that were met
        self.to_scale = {}  # id of a wrapper -> [(layer, names of weights, factor)]
        self.copies = Copies("build the plain model anew and use `copy_weights(wrapped, plain)`")
        self._named = {}  # (place, name) -> the key of the layer that has it
        self._made = {}  # what stands for a wrapper: (its id, name) -> layer
        self._fold = fold
        self._foldable = Foldable(model)

    def model(self, model, key=None):
        """The plain version of a functional model; there is one for each key."""
        key = id(model) if key is None else key
        return self.copies.model(model, key, lambda: self._build(model, key))

    def _build(self, model, place):
        graph = _keras.functional(model)
        signature = _keras.signature(graph)
        values = {id(t): _keras.copy_input(t) for t in _keras.flatten(signature[0])}
        self._replay(graph, values, place)
        inputs, outputs = (_keras.map_structure(lambda t: values[id(t)], s) for s in signature)
        return _keras.rebuild(model, inputs, outputs)

    def _replay(self, graph, values, place):
        """Repeats the calls of a graph. `place` tells the graph that they become part of."""
        for node in _keras.calls(graph):
            if not _keras.is_input_call(node):
                record(node, self._call(node, values, place), values)

    def _call(self, node, values, place):
        layer = _keras.callee(node)
        args, kwargs = new_arguments(node, values)
        if isinstance(layer, StochasticDepth):
            self.done.add(id(layer))
            given = inspect.signature(StochasticDepth.call).bind(layer, *args, **kwargs)
            given.apply_defaults()
            outputs = self._unwrapped(layer, given.arguments, place)
            return outputs if layer.passes_masks else _each(_without_mask, outputs)
        return self._copy(layer, place)(*args, **kwargs)

    def _copy(self, layer, place):
        """The copy of a layer, or the plain version of a model, for the graph of that place."""
        if not _keras.is_layer(layer) or _keras.weights(layer):
            key = id(layer)
        else:  # branches had copies of their own of layers without weights: make them one again
            key = place, _keras.same_without_weights(layer)
        if _keras.is_layer(layer) and self._named.setdefault((place, layer.name), key) != key:
            raise ValueError(
                f"`model` holds several layers named {layer.name!r}, in StochasticDepth layers of "
                "their own, which would be in one model without these. Received: the second of "
                "them. Give them other names."
            )
        if _is_rebuilt(layer):
            return self.model(layer, key)
        return self.copies.layer(layer, key)

    def _unwrapped(self, wrapper, given, place):
        """What a `StochasticDepth` gives at inference, from other layers."""
        factor = wrapper.survival_prob if self._fold and wrapper.rescale == "inference" else 1.0
        inputs, shortcut = given["inputs"], given["shortcut"]
        merge = self._own(wrapper, "merge", lambda _: self._replaced(wrapper, "merge"))
        branch = self._branch(wrapper, given, place, without_factor=merge is not None)
        if wrapper.skip is not None:
            if factor == 1:
                return self._cast(wrapper, branch)
            skip = wrapper.skip
            other = inputs if skip == "identity" else self._copy(skip, place)(inputs)
            taken = wrapper.layer.name == wrapper.name
            name = f"{wrapper.name}_sum" if taken else wrapper.name
            branch = self._rescaled(wrapper, branch, factor, f"{wrapper.name}_branch_scale")
            other = self._rescaled(wrapper, other, 1.0 - factor, f"{wrapper.name}_skip_scale")
            return self._added(wrapper, branch, other, name)
        if factor != 1 and not self._takes_factor(wrapper, factor):
            name, summed = f"{wrapper.name}_branch_factor", shortcut is not None
            branch = self._rescaled(wrapper, branch, factor, name, summed)
        drop = self._own(wrapper, "drop", lambda _: self._replaced(wrapper, "drop"))
        if drop is not None:
            branch = drop(branch)
        if shortcut is None:
            return self._cast(wrapper, branch)
        operands = shortcut, branch
        if wrapper.replaced and wrapper.replaced.branch == 0:
            operands = branch, shortcut
        if merge is not None:
            return merge(list(operands))
        if not wrapper.passes_masks:
            return self._own(wrapper, wrapper.name, _keras.plus)(*operands)
        return self._added(wrapper, *operands, wrapper.name)

    def _replaced(self, wrapper, what):
        """A layer that `wrap_residuals` replaced, or `None`."""
        return wrapper.replaced and _keras.deserialize(getattr(wrapper.replaced, what))

    def _branch(self, wrapper, given, place, without_factor):
        """What the layer in a `StochasticDepth` gives."""
        layer, inputs = wrapper.layer, given["inputs"]
        if not is_branch(layer, wrapper):
            kwargs = dict(given["kwargs"])
            if given["mask"] is not None and _keras.accepts(layer, "mask"):
                kwargs["mask"] = given["mask"]
            return self._copy(layer, place)(inputs, *given["args"], **kwargs)
        graph = _keras.functional(layer)
        ours, output = _keras.signature(graph)
        values = dict(zip(map(id, _keras.flatten(ours)), _keras.flatten(inputs)))
        self._replay(graph, values, place)
        last = _keras.calls(graph)[-1]
        if without_factor and _keras.callee(last).name == f"{layer.name}{FACTOR}":
            (output,) = _keras.tensors_in(last)
        return _keras.map_structure(lambda t: values[id(t)], output)

    def _takes_factor(self, wrapper, factor):
        """Whether weights of the branch take the factor on it; they are noted then."""
        found = self._foldable.weights(wrapper.layer)
        if found is not None:
            self.to_scale[id(wrapper)] = [(*pair, factor) for pair in found]
        return found is not None

    def _rescaled(self, wrapper, tensors, factor, name, summed=False):
        """Tensors times a number; `summed` if they are added to one that has the same mask."""

        def layer(name):
            return keras.layers.Rescaling(factor, name=name, dtype=_keras.policy_like(wrapper))

        def scaled(x, i):
            y = self._own(wrapper, f"{name}{i}", layer)(x)
            lost = _keras.mask_of(x) is not None and _keras.mask_of(y) is None
            if lost and wrapper.passes_masks and not summed:
                raise ValueError(
                    f"What the StochasticDepth {wrapper.name!r} gives has a mask and has to be "
                    "multiplied by a layer, which hands no mask on in this Keras. Received: a "
                    "layer of which no weights can take the factor. Pass `fold=False`, or train "
                    'with rescale="training".'
                )
            return y

        return _each(scaled, tensors)

    def _added(self, wrapper, tensors, others, name):
        def layer(name):
            return keras.layers.Add(name=name, dtype=_keras.policy_like(wrapper))

        return _each(
            lambda x, i, y: self._own(wrapper, f"{name}{i}", layer)([x, y]), tensors, others
        )

    def _cast(self, wrapper, tensors):
        """Tensors in the dtype that a `StochasticDepth` gives."""

        def layer(name):
            dtype = _keras.policy_like(wrapper)
            return keras.layers.Activation("linear", name=name, dtype=dtype)

        def cast(x, i):
            if _keras.dtype_name(x) == wrapper.compute_dtype:
                return x
            return self._own(wrapper, f"{wrapper.name}{i}", layer)(x)

        return _each(cast, tensors)

    def _own(self, wrapper, name, make):
        """A layer that does a part of a wrapper's work: the same in all calls of the wrapper."""
        key = id(wrapper), name
        if key not in self._made:
            self._made[key] = make(name)
        return self._made[key]


def _without_mask(x, i):
    return x if _keras.mask_of(x) is None else _keras.without_mask(x)


def _each(function, tensors, *others):
    """`function(tensor, a number for names, *others)` for each tensor of a structure."""
    numbers = iter(["", *(f"_{i}" for i in range(1, len(_keras.flatten(tensors))))])
    return _keras.map_structure(lambda x, *y: function(x, next(numbers), *y), tensors, *others)
