"""Replays a model's calls, with a `StochasticDepth` wherever a block was found."""

from __future__ import annotations

import dataclasses
import random

from tfa_stochastic_depth import _keras
from tfa_stochastic_depth.layer import Replaced, StochasticDepth
from tfa_stochastic_depth.replay import Copies, new_arguments, record

keras = _keras.keras

# The end of the name of the layer that multiplies a branch as the sum it replaces did.
FACTOR = "_scale"


def rewrite(reading, residuals, options, replace_existing=True, share_layers=False, seed=None):
    """Builds a new model in which each block of `residuals` is one `StochasticDepth` layer.

    The input model stays as it is, unless `share_layers` is set: then the new model's layers are
    its layers, which record the new calls.

    Args:
        reading: The `Reading` of the model.
        residuals: The `Residuals` found in its graph; at least one block.
        options: Keyword arguments of each `StochasticDepth`.
        replace_existing: Whether to leave out the drop that a branch already ends in.
        share_layers: Whether to use the model's own layers instead of copies.
        seed: Integer from which each block gets a seed of its own, or `None`.

    Returns:
        An uncompiled `keras.Model`, of the class of the input model where that is possible.

    Raises:
        ValueError: If there is no block, or a layer cannot be copied.
    """
    if not residuals.blocks:
        raise ValueError(_nothing_to_wrap(reading, residuals))
    seeds = random.Random(None if seed is None else int(seed))
    wrapped = {}
    for block in residuals.blocks:
        own_seed = None if seed is None else seeds.getrandbits(31)
        wrapped.setdefault(block.site.graph, {})[block.site.merge] = (block, own_seed)
    rewriter = _Rewriter(reading, wrapped, options, replace_existing, share_layers)
    model = rewriter.model(reading)
    if not share_layers:
        rewriter.copies.copy_state()
    return model


def _nothing_to_wrap(reading, residuals):
    lines = [f"`model` {reading.model.name!r} has no residual block that can be wrapped."]
    if any(isinstance(part, StochasticDepth) for part in _keras.with_sublayers(reading.model)):
        lines.append("It already holds StochasticDepth layers: has it been wrapped before?")
    if residuals.refusals:
        lines += ["Sums that were found, and why they are none:"]
        lines += [f"  {r.name}: {r.reason}" for r in residuals.refusals]
    else:
        lines.append("It holds no sum of two tensors (Add(), x + y).")
    return "\n".join(lines)


class _Rewriter:
    def __init__(self, reading, wrapped, options, replace_existing, share_layers):
        self._wrapped = wrapped  # graph -> merge -> (block, seed)
        self._options = options
        self._replace_existing = replace_existing
        self._share_layers = share_layers
        self._uses = reading.graph.uses()
        self.copies = Copies(
            "pass `share_layers=True`, so that the result uses the model's own layers"
        )

    def model(self, reading, owner=None):
        """The new model for a reading; a nested model that is called twice is made once.

        With an `owner`, a `_Scope`, it is one that shares no layer with any other.
        """
        graph = reading.graph.layer
        scope = _whole(reading.graph) if owner is None else owner.inside(graph)
        # It is private to its owner, if it has one.
        key = graph, owner and owner.name
        return self.copies.model(reading.model, key, lambda: self._build(reading, scope))

    def _build(self, reading, scope):
        signature = _keras.signature(_keras.functional(reading.model))
        values = {id(t): _keras.copy_input(t) for t in _keras.flatten(signature[0])}
        blocks = self._wrapped.get(reading.graph.layer, {})
        inside = {i for m, (block, _) in blocks.items() for i in block.site.region - {m}}
        for i, node in enumerate(reading.nodes):
            if i in blocks:
                record(node, self._block(reading, *blocks[i], values), values)
            elif i not in inside:
                record(node, self._call(reading, i, values, scope), values)
        inputs, outputs = (_keras.map_structure(lambda t: values[id(t)], s) for s in signature)
        return _keras.rebuild(reading.model, inputs, outputs)

    def _call(self, reading, i, values, scope):
        """Repeats call `i` on new values."""
        args, kwargs = new_arguments(reading.nodes[i], values)
        callee = self._callee(reading, i, scope)
        nested = reading.nested.get(reading.graph.calls[i].layer)
        if nested is not None and nested.opened and self._is_rebuilt(nested):
            tensors = {id(t): t for t in _keras.tensors_in(reading.nodes[i])}
            return callee([values[t] for t in tensors])
        return callee(*args, **kwargs)

    def _callee(self, reading, i, scope):
        """What is called in place of the callee of call `i`."""
        layer = _keras.callee(reading.nodes[i])
        number = reading.graph.calls[i].layer
        nested = reading.nested.get(number)
        # A layer without weights that is used elsewhere too gets a copy for each branch and each
        # model: one layer inside a branch and outside it could not be saved.
        private = not _keras.weights(layer) and not self._uses[number] <= scope.places
        needs_copy = private and scope.in_branch
        if nested is not None and (self._is_rebuilt(nested) or (needs_copy and not nested.opened)):
            return self.model(nested, scope if needs_copy else None)
        if self._share_layers and not needs_copy:
            return layer
        return self.copies.layer(layer, (number, scope.name if private else None))

    def _is_rebuilt(self, nested):
        """Whether a nested model is replayed, rather than copied or shared as one layer."""
        if any(graph.layer in self._wrapped for _, graph in nested.graph.walk()):
            return True
        if nested.opened or self._share_layers or not _keras.keeps_class(nested.model):
            return False
        if not isinstance(nested.model, keras.Sequential):
            return True
        # Rebuilt, a Sequential model would be a functional one; copied, it shares no layer.
        inside = {graph.layer for _, graph in nested.graph.walk()}
        users = [{graph for graph, _ in places} for places in self._uses.values()]
        return any(graphs & inside and not graphs <= inside for graphs in users)

    def _block(self, reading, block, seed, values):
        """Calls a `StochasticDepth` where a block was."""
        site, node = block.site, reading.nodes[block.site.merge]
        options = {"name": self._name(reading, site.merge), "seed": seed, **self._options}
        if block.kind == "layer":
            layer = self._callee(reading, site.merge, _whole(reading.graph))
            args, kwargs = new_arguments(node, values)
            wrapper = StochasticDepth(layer, block.survival_prob, skip="identity", **options)
            return wrapper(*args, **kwargs)
        if not _keras.emits_mask(node):
            options["supports_masking"] = False
        options["replaced"] = self._replaced(reading, site)
        wrapper = StochasticDepth(
            self._branch(reading, block),
            block.survival_prob,
            dtype=_keras.output_policy(node),
            **options,
        )
        inputs = [values[id(reading.tensors[t])] for t in site.inputs]
        shortcut = values[id(reading.tensors[site.shortcut])]
        return wrapper(inputs[0] if len(inputs) == 1 else inputs, shortcut=shortcut)

    def _replaced(self, reading, site):
        """What the block had in place of a `StochasticDepth`, for `unwrap_residuals`."""
        call, node = reading.graph.calls[site.merge], reading.nodes[site.merge]
        merge, drop = _keras.callee(node), None
        # A sum by another name is made again, unless it drops its branch itself.
        plain = call.branch is None or call.drop is not None or _keras.weights(merge)
        if self._replace_existing and site.drop is not None:
            drop = _keras.callee(reading.nodes[site.drop])
        return Replaced(
            branch=call.addends.index(site.branch),
            merge=None if plain else _keras.serialize(merge),
            drop=None if drop is None else _keras.serialize(drop),
        )

    def _name(self, reading, i):
        """The name of a merge, made unique where one layer makes several sums."""
        calls = reading.graph.calls
        before = sum(call.layer == calls[i].layer for call in calls[:i])
        return f"{calls[i].name}_{before}" if before else calls[i].name

    def _branch(self, reading, block):
        """The branch of a block as a model of its own."""
        site = block.site
        name = f"{self._name(reading, site.merge)}_branch"
        places = {(site.graph, i) for i in site.region}
        branch = _Scope((site.graph, site.merge), places, in_branch=True)
        region, end = set(site.region), site.branch
        if self._replace_existing and site.drop is not None:
            region.remove(site.drop)
            (end,) = reading.graph.calls[site.drop].inputs
        tensors = [reading.tensors[t] for t in site.inputs]
        inputs = [
            _keras.input_like(t, f"{name}_input{i or ''}", self._has_rows(reading, site, t))
            for i, t in enumerate(tensors)
        ]
        values = dict(zip(map(id, tensors), inputs))
        for i in sorted(region):
            record(reading.nodes[i], self._call(reading, i, values, branch), values)
        output = values[id(reading.tensors[end])]
        if site.factor != 1:
            dtype = _keras.policy_for(output.dtype)
            scale = keras.layers.Rescaling(site.factor, name=f"{name}{FACTOR}", dtype=dtype)
            output = scale(output)
        return keras.Model(inputs[0] if len(inputs) == 1 else inputs, output, name=name)

    def _has_rows(self, reading, site, tensor):
        """Whether the branch may be run on some rows of a tensor: its first axis is the batch."""
        shape = _keras.shape(tensor)
        batch = _keras.shape(reading.tensors[site.shortcut])
        return self._options["mode"] == "row" and shape and batch and shape[0] == batch[0]


@dataclasses.dataclass(frozen=True)
class _Scope:
    """A model or a branch, in which a layer without weights is one object.

    Attributes:
        name: Tells it from all others.
        places: The calls in it, as (graph, call).
        in_branch: Whether it lies in a branch.
    """

    name: tuple
    places: set
    in_branch: bool

    def inside(self, graph):
        """The scope of a nested model that is this one's own: all of it is used nowhere else."""
        return _Scope((*self.name, graph), set(), self.in_branch)


def _whole(graph):
    places = {(graph.layer, i) for i in range(len(graph.calls))}
    return _Scope((graph.layer,), places, in_branch=False)
