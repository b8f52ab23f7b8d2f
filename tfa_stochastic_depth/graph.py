"""The values `Tensor`, `Call` and `Graph`: a functional model without TensorFlow in it."""

from __future__ import annotations

import dataclasses
import functools

import networkx as nx


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a graph.

    Attributes:
        shape: Static shape, `None` where a dimension is unknown; `None` if the rank is.
        floating: Whether it holds floating-point numbers (masks and ids do not).
    """

    shape: tuple | None
    floating: bool = True


@dataclasses.dataclass(frozen=True)
class Call:
    """One use of a layer or operation on tensors. Tensors are named by their place in the graph.

    Attributes:
        name: Name of what is called.
        kind: Its class name, for people to read.
        layer: A number that is equal for all calls of the same layer, in all graphs of a model.
        inputs: Tensors that go in, with repeats.
        outputs: Tensors that come out.
        addends: If the call is a sum, its tensor operands, in order.
        branch: Which of the addends is the branch, 0 or 1, if the layer itself says so.
        factor: What the layer multiplies the branch with.
        weighted: How many layers with weights it holds (a nested model may hold many).
        params: How many weights (scalars) they have.
        macs: How many multiply-adds of kernels it takes for one sample; `None` if that depends on
            sizes that are not fixed.
        embedding: Whether it looks vectors up by position or id.
        projection: Whether it only changes size: convolution, dense, norm, pooling, padding, ...
        drop: Survival probability, if the call is itself a random drop of a whole branch, or a sum
            that drops its branch.
        whole_block: Whether the caller said that this layer is a residual block by itself.
        graph: The graph inside, if a functional model is called, or a layer that was opened.
        closed: Why the blocks inside a layer cannot be reached, if it holds some that cannot.
    """

    name: str
    kind: str
    layer: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    addends: tuple[int, ...] = ()
    branch: int | None = None
    factor: float = 1.0
    weighted: int = 0
    params: int = 0
    macs: int | None = 0
    embedding: bool = False
    projection: bool = False
    drop: float | None = None
    whole_block: bool = False
    graph: Graph | None = None
    closed: str | None = None


@dataclasses.dataclass(frozen=True)
class Graph:
    """The calls of one functional model, in an order in which they can run.

    Attributes:
        name: Name of the model.
        layer: The number its calls carry where it is nested in another model; 0 for the outermost.
        tensors: All tensors, the model's inputs included.
        calls: All calls but those that make the model's inputs.
        outputs: The tensors that the model gives out.
    """

    name: str
    layer: int
    tensors: tuple[Tensor, ...]
    calls: tuple[Call, ...]
    outputs: tuple[int, ...]

    def walk(self):
        """Yields this graph and the graphs nested in it, each once, outer ones first.

        With each comes the path of names that leads to it.
        """
        seen, todo = set(), [((), self)]
        while todo:
            path, graph = todo.pop()
            if graph.layer not in seen:
                seen.add(graph.layer)
                yield path, graph
                todo += [((*path, c.name), c.graph) for c in graph.calls if c.graph is not None]

    def uses(self):
        """Layer -> the places of its calls, as (graph, call), in this graph and nested ones."""
        uses: dict[int, set[tuple[int, int]]] = {}
        for _, graph in self.walk():
            for i, call in enumerate(graph.calls):
                uses.setdefault(call.layer, set()).add((graph.layer, i))
        return uses

    @functools.cached_property
    def macs(self) -> int | None:
        """Multiply-adds of all calls for one sample, `None` if one of them is not known."""
        macs = [call.macs for call in self.calls]
        return None if None in macs else sum(macs)

    @functools.cached_property
    def producer(self) -> dict[int, int]:
        """Tensor -> the call that makes it. The model's inputs are not in it."""
        return {t: i for i, call in enumerate(self.calls) for t in call.outputs}

    @functools.cached_property
    def users(self) -> dict[int, tuple[int, ...]]:
        """Tensor -> the calls that take it, each once, in order. Unused tensors are not in it."""
        users: dict[int, list[int]] = {}
        for i, call in enumerate(self.calls):
            for t in dict.fromkeys(call.inputs):
                users.setdefault(t, []).append(i)
        return {t: tuple(calls) for t, calls in users.items()}

    @functools.cached_property
    def _post_dominated(self) -> dict[int, list[int]]:
        """Children in the post-dominator tree; call `i` is node `len(tensors) + i`."""
        first_call = len(self.tensors)
        end = first_call + len(self.calls)
        backwards = nx.DiGraph()
        backwards.add_node(end)
        backwards.add_edges_from((end, t) for t in self.outputs)
        for i, call in enumerate(self.calls):
            backwards.add_edges_from((first_call + i, t) for t in call.inputs)
            backwards.add_edges_from((t, first_call + i) for t in call.outputs)
        children: dict[int, list[int]] = {}
        for node, dominator in nx.immediate_dominators(backwards, end).items():
            if node != end:
                children.setdefault(dominator, []).append(node)
        return children

    def closed_region(self, tensor: int) -> frozenset[int]:
        """All calls every one of whose uses leads to `tensor` and nowhere else.

        These are exactly the calls that need not run when `tensor` is not needed.
        """
        first_call = len(self.tensors)
        found, todo = [], [tensor]
        while todo:
            node = todo.pop()
            if node >= first_call:
                found.append(node - first_call)
            todo.extend(self._post_dominated.get(node, ()))
        return frozenset(found)

    def boundary(self, region) -> tuple[int, ...]:
        """The tensors that enter a set of calls from outside, in order of first use."""
        return tuple(
            dict.fromkeys(
                t
                for i in sorted(region)
                for t in self.calls[i].inputs
                if self.producer.get(t) not in region
            )
        )

    def between(self, start: int, end: int) -> tuple[int, ...]:
        """The calls on the paths from one tensor to another over floating-point tensors.

        Empty if there is no such path. The search does not look before `start` was made.
        """
        earliest = self.producer.get(start, -1)
        leading = self._leading_to(end, earliest)
        on_path: list[int] = []
        reached = {start}
        for i in sorted(leading):
            if any(t in reached for t in self.calls[i].inputs if self.tensors[t].floating):
                on_path.append(i)
                reached.update(self.calls[i].outputs)
        return tuple(on_path) if end in reached else ()

    def _leading_to(self, tensor: int, earliest: int) -> set[int]:
        """Calls made after call `earliest` from which floating-point tensors lead to `tensor`."""
        found: set[int] = set()
        todo = [tensor]
        while todo:
            i = self.producer.get(todo.pop(), -1)
            if i > earliest and i not in found:
                found.add(i)
                todo.extend(t for t in self.calls[i].inputs if self.tensors[t].floating)
        return found
