"""Functional model -> `Graph`, with the Keras objects behind its numbers kept beside it."""

from __future__ import annotations

import dataclasses

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
        nested: Layer number -> the reading of a functional model that is called as a layer.
    """

    model: object
    graph: Graph
    tensors: tuple
    nodes: tuple
    nested: dict[int, Reading]

    def walk(self):
        """Yields this reading and the nested ones, outer ones first."""
        yield self
        for nested in self.nested.values():
            yield from nested.walk()


def read(model, block_layers=()):
    """Reads a functional or Sequential model and the ones nested in it.

    Args:
        model: A built functional or Sequential `keras.Model`.
        block_layers: Layer classes that are whole residual blocks by themselves.

    Raises:
        TypeError: If `model` is no model of this Keras, or a subclassed one; if `block_layers`
            holds something other than layer classes.
        ValueError: If it is not built yet, or has losses that a rebuilt model would lose.
    """
    block_layers = _check_block_layers(block_layers)
    _keras.check_functional(model)
    return _Reader(block_layers).read(model)


class _Reader:
    """Numbers layers over all nested models and reads each model once."""

    def __init__(self, block_layers):
        self.block_layers = block_layers
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

    def _read(self, model, number):
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
        return Reading(model, graph, tuple(tensors), nodes, nested)

    def _call(self, node, place, nested):
        layer = _keras.callee(node)
        number = self.number(layer)
        graph = None
        if _keras.is_functional(layer):
            nested[number] = self.read(layer)
            graph = nested[number].graph
        return Call(
            name=layer.name,
            kind=type(layer).__name__,
            layer=number,
            inputs=tuple(place[id(t)] for t in _keras.tensors_in(node)),
            outputs=tuple(place[id(t)] for t in _keras.tensors_out(node)),
            addends=tuple(place[id(t)] for t in _keras.addends(node)),
            weighted=_keras.count_weighted(layer),
            params=_keras.count_params(layer),
            embedding=_keras.is_embedding(layer),
            projection=_keras.is_projection(layer),
            drop=_keras.own_survival_prob(layer),
            whole_block=isinstance(layer, self.block_layers),
            graph=graph,
        )


def _check_block_layers(block_layers):
    classes = block_layers if isinstance(block_layers, (tuple, list, set)) else (block_layers,)
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, _keras.keras.layers.Layer)):
            raise TypeError(
                "`block_layers` must be a tuple of layer classes of this Keras "
                f"({_keras.NAME}), such as (MyTransformerBlock,). Received: {cls!r}."
            )
    return tuple(classes)
