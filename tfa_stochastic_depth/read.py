"""Functional model -> `Graph`, with the Keras objects behind its numbers kept beside it."""

from __future__ import annotations

import dataclasses
import math
import numbers

from tfa_stochastic_depth import _keras
from tfa_stochastic_depth.graph import Call, Graph, Tensor


@dataclasses.dataclass(frozen=True)
class Reading:
    """A graph and what stands behind it.

    Attributes:
        model: The functional model that was read.
        graph: Its graph.
        tensors: The symbolic tensor behind each tensor of the graph.
        nodes: Keras's record of each call of the graph.
        nested: Layer number -> the reading of a functional model that is called as a layer, or of
            the one that stands for an opened layer.
        opened: Whether the model stands for a layer that was opened to reach the blocks inside.
    """

    model: object
    graph: Graph
    tensors: tuple
    nodes: tuple
    nested: dict[int, Reading]
    opened: bool = False


def read(model, block_layers=(), merge_layers=None):
    """Reads a functional or Sequential model and the ones nested in it.

    A layer that holds layers of `block_layers` inside is opened: a functional model of what it
    does is read in its place.

    Args:
        model: A built functional or Sequential `keras.Model`.
        block_layers: Layer classes that are whole residual blocks by themselves.
        merge_layers: Layer class -> (branch, factor), or a function from the layer to that.

    Raises:
        TypeError: If `model` is no model of this Keras, or a subclassed one; if `block_layers`
            holds something other than layer classes, or `merge_layers` is of another form.
        ValueError: If it is not built yet, or has losses that a rebuilt model would lose.
    """
    block_layers = _check_block_layers(block_layers)
    merge_layers = _check_merge_layers({} if merge_layers is None else merge_layers)
    _keras.check_functional(model)
    holders = _keras.holders(_keras.called_layers(model)) if block_layers else {}
    return _Reader(block_layers, merge_layers, holders).read(model)


class _Reader:
    """Numbers layers over all nested models and reads each model once."""

    def __init__(self, block_layers, merge_layers, holders):
        self.block_layers = block_layers
        self.merge_layers = merge_layers
        self.holders = holders
        self.numbers = {}
        self.readings = {}
        self.kept = []  # an id is a name only as long as its object lives

    def number(self, layer):
        self.kept.append(layer)
        return self.numbers.setdefault(id(layer), len(self.numbers))

    def read(self, model):
        number = self.number(model)
        if number not in self.readings:
            self.readings[number] = self._read(model, number)
        return self.readings[number]

    def _read(self, model, number, opened=False):
        functional = _keras.functional(model)
        _keras.check_no_side_losses(functional)
        inputs, outputs = map(_keras.flatten, _keras.signature(functional))
        nodes = tuple(n for n in _keras.calls(functional) if not _keras.is_input_call(n))
        tensors = [*inputs, *(t for n in nodes for t in _keras.tensors_out(n))]
        tensors = list({id(t): t for t in tensors}.values())
        place = {id(t): i for i, t in enumerate(tensors)}
        nested = {}
        calls = tuple(self._call(node, place, nested) for node in nodes)
        graph = Graph(
            name=model.name,
            layer=number,
            tensors=tuple(Tensor(_keras.shape(t), _keras.is_floating(t)) for t in tensors),
            calls=calls,
            outputs=tuple(place[id(t)] for t in outputs),
        )
        return Reading(model, graph, tuple(tensors), nodes, nested, opened)

    def _call(self, node, place, nested):
        layer = _keras.callee(node)
        number = self.number(layer)
        whole_block = isinstance(layer, self.block_layers)
        closed = None
        if _keras.is_functional(layer):
            nested[number] = self.read(layer)
        elif not whole_block and self._holds_blocks(layer):
            try:
                nested[number] = self._open(layer, number, node)
            except ValueError as error:
                closed = f"the blocks inside cannot be reached: {error}."
        graph = nested[number].graph if number in nested else None
        made = _keras.as_sum(node, self.merge_layers)
        drop = made.survival_prob if made.addends else _keras.own_survival_prob(layer)
        return Call(
            name=layer.name,
            kind=type(layer).__name__,
            layer=number,
            inputs=tuple(place[id(t)] for t in _keras.tensors_in(node)),
            outputs=tuple(place[id(t)] for t in _keras.tensors_out(node)),
            addends=tuple(place[id(t)] for t in made.addends),
            branch=made.branch,
            factor=made.factor,
            weighted=_keras.count_weighted(layer),
            params=_keras.count_params(layer),
            macs=_keras.count_macs(node) if graph is None else graph.macs,
            embedding=_keras.is_embedding(layer),
            projection=_keras.is_projection(layer),
            drop=drop,
            whole_block=whole_block,
            graph=graph,
            closed=closed,
        )

    def _holds_blocks(self, layer):
        if isinstance(layer, _keras.Wrapper):  # of this package: wrapped before
            return False
        return any(isinstance(part, self.block_layers) for part in _keras.with_sublayers(layer))

    def _open(self, layer, number, node):
        """The reading of what an opaque layer does.

        Raises:
            ValueError: If it cannot be opened.
        """
        if number in self.readings:
            raise ValueError("it is called more than once")
        for part in _keras.with_sublayers(layer):
            if _keras.weights(part) and len(self.holders[id(part)]) > 1:
                raise ValueError(f"it shares the layer {part.name!r} with another")
        self.readings[number] = self._read(_keras.open_layer(layer, node), number, opened=True)
        return self.readings[number]


def _check_block_layers(block_layers):
    classes = block_layers if isinstance(block_layers, (tuple, list, set)) else (block_layers,)
    for cls in classes:
        if not _is_layer_class(cls):
            raise TypeError(
                "`block_layers` must be a tuple of layer classes of this Keras "
                f"({_keras.NAME}), such as (MyTransformerBlock,). Received: {cls!r}."
            )
    return tuple(classes)


def _check_merge_layers(merge_layers):
    if not isinstance(merge_layers, dict) or not all(map(_is_layer_class, merge_layers)):
        raise TypeError(
            "`merge_layers` must be a dict from layer classes of this Keras "
            f"({_keras.NAME}) to (branch, factor) or to functions from a layer to that, such as "
            f"{{ScaledAdd: (1, 0.5)}}. Received: {merge_layers!r}."
        )
    return {cls: _merge_rule(cls, rule) for cls, rule in merge_layers.items()}


def _merge_rule(cls, rule):
    def checked(layer):
        value = rule(layer) if callable(rule) else rule
        if (
            isinstance(value, (tuple, list))
            and len(value) == 2
            and value[0] in (0, 1)
            and isinstance(value[1], numbers.Real)
            and not any(isinstance(x, bool) for x in value)
            and math.isfinite(value[1])
        ):
            return int(value[0]), float(value[1])
        raise TypeError(
            f"`merge_layers[{cls.__name__}]` must be (branch, factor), branch being the place of "
            "the branch among the two inputs, 0 or 1, and factor the number it is multiplied with, "
            f"or a function from the layer to that. Received: {value!r}."
        )

    if not callable(rule):
        checked(None)
    return checked


def _is_layer_class(cls):
    return isinstance(cls, type) and issubclass(cls, _keras.keras.layers.Layer)
