"""Which weights of a branch can take the factor that its output is multiplied with."""

from __future__ import annotations

import collections

from tfa_stochastic_depth import _keras
from tfa_stochastic_depth.layer import StochasticDepth


class Foldable:
    """Finds the weights that multiply all that a branch gives if they are multiplied by a number.

    They must be used in that branch only, and once.

    Args:
        model: The functional model that holds the branches.
    """

    def __init__(self, model):
        self._calls = collections.Counter()
        self._count(model, set())

    def weights(self, layer):
        """The weights to multiply, as a list of (layer, names), for what a layer gives.

        A functional model is looked into. `None` if there are no such weights.
        """
        if self._calls[id(layer)] != 1:
            return None
        if _keras.is_functional(layer):
            return self._in_graph(_keras.functional(layer))
        names = _keras.linear_weights(layer)
        return [(layer, names)] if names else None

    def _count(self, layer, seen):
        """Counts how often each layer is called, in all graphs."""
        if isinstance(layer, StochasticDepth):
            inside = [x for x in (layer.layer, layer.skip) if _keras.is_layer(x)]
        elif _keras.is_functional(layer):
            inside = [_keras.callee(node) for node in _keras.calls(_keras.functional(layer))]
        else:
            return
        if id(layer) not in seen:
            seen.add(id(layer))
            self._calls.update(map(id, inside))
            for x in inside:
                self._count(x, seen)

    def _in_graph(self, graph, outside=lambda t: None):
        """The weights to multiply for what a graph gives.

        `outside` says which they are if one of its inputs is to be multiplied.
        """
        outputs = _keras.flatten(_keras.signature(graph)[1])
        if len(outputs) != 1:
            return None
        nodes = _keras.calls(graph)
        maker = {id(t): node for node in nodes for t in _keras.tensors_out(node)}
        uses = collections.Counter(id(t) for node in nodes for t in _keras.tensors_in(node))
        uses[id(outputs[0])] += 1

        def at(tensor):
            node = maker[id(tensor)]
            if uses[id(tensor)] > 1 or len(_keras.tensors_out(node)) > 1:
                return None
            if _keras.is_input_call(node):
                return outside(tensor)
            op = _keras.callee(node)
            if _keras.is_functional(op):
                inner = _keras.functional(op)
                given = zip(_keras.flatten(_keras.signature(inner)[0]), _keras.tensors_in(node))
                given = {id(ours): theirs for ours, theirs in given}
                alone = self._calls[id(op)] == 1
                return self._in_graph(inner, lambda t: at(given[id(t)])) if alone else None
            if _keras.is_layer(op) and (own := self.weights(op)):
                return own
            for choice in _keras.scales_with(node):
                found = [at(t) for t in choice]
                if None not in found:
                    return [pair for pairs in found for pair in pairs]
            return None

        return at(outputs[0])
