"""Graph -> blocks and refusals: which sums are residual, and which of their inputs may be skipped.

The rules, by the numbers used in the comments below:

1. A merge adds exactly two different floating-point tensors of equal static shape.
2. What may be skipped is the closed region of the branch: calls that lead to it and nowhere else.
3. If one input is an ancestor of the other, it is the shortcut, and all between lies in the region.
4. Otherwise both regions start from a common tensor, and the side with less work, if it only
   changes size, is the shortcut. A layer that says which of its inputs is the branch is believed.
5. A branch may have several inputs.
6. A branch has weights that are not only embeddings, and shares none with the rest of the model.
7. Of blocks inside blocks either the innermost or the outermost are kept.
"""

from __future__ import annotations

import dataclasses
import html
import math

from tfa_stochastic_depth.graph import Graph
from tfa_stochastic_depth.survival import probabilities

NESTED = ("inner", "outer")


@dataclasses.dataclass(frozen=True)
class Block:
    """A residual block: a merge with its shortcut and its branch.

    Attributes:
        name: Name of the merge; inside nested models with their names before it, "encoder/add".
        kind: "identity" (the shortcut is the branch's input), "projection" (it is computed from
            it), or "layer" (one layer that adds its own shortcut).
        shortcut: Name of what makes the shortcut.
        layers: Names of the layers in the branch, first to last.
        params: Number of weights (scalars) in the branch.
        macs: Multiply-adds of the branch's kernels (convolution, dense, attention) for one sample,
            an estimate of its cost; `None` if that depends on sizes that are not fixed.
        existing: Survival probability of the drop that the branch already ends in, or that the
            sum makes itself; `None` if there is none.
        index: Place among the model's blocks, from 1.
        count: How many blocks the model has.
        survival_prob: Probability in [0, 1] that the branch is kept.
    """

    name: str
    kind: str
    shortcut: str
    layers: tuple[str, ...]
    params: int
    macs: int | None
    existing: float | None
    site: Site = dataclasses.field(repr=False)
    index: int = 0
    count: int = 0
    survival_prob: float = 1.0


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a block is, in the numbers of its graph.

    Attributes:
        graph: The number of the nested model that holds the block (`Graph.layer`).
        merge: The call that is replaced.
        shortcut: The tensor that is always kept (-1 for a layer that adds its own).
        branch: The tensor that may be dropped.
        region: The calls that do not run when it is.
        inputs: The tensors that the region takes, the block's own input first.
        drop: The call at the end of the region that is a drop of its own, or `None`.
        factor: What the branch is multiplied with before it is added.
    """

    graph: int
    merge: int
    shortcut: int
    branch: int
    region: frozenset[int]
    inputs: tuple[int, ...]
    drop: int | None = None
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A merge that is not wrapped, with the reason in plain words."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Residuals:
    """What was found in a model. `str()` gives a table, and so do notebooks.

    Attributes:
        model: Name of the model.
        blocks: Its residual blocks, in running order.
        refusals: The sums that are none, with the reasons.
        graph: The model's graph.
    """

    model: str
    blocks: tuple[Block, ...]
    refusals: tuple[Refusal, ...]
    graph: Graph = dataclasses.field(repr=False, compare=False)

    @property
    def expected_depth(self) -> float:
        """Expected number of branches that run in a training step."""
        return sum(block.survival_prob for block in self.blocks)

    @property
    def expected_share(self) -> float | None:
        """Expected share of the branches' multiply-adds that a training step executes, in [0, 1].

        It is what the time spent in branches shrinks to, as far as kernels decide it. `None` if
        there are none, or their number depends on sizes that are not fixed.
        """
        macs = [block.macs for block in self.blocks]
        if None in macs or not sum(macs):
            return None
        return sum(b.survival_prob * b.macs for b in self.blocks) / sum(macs)

    def plot(self, path):
        """Draws the model with its blocks: branches, shortcuts and survival probabilities.

        Needs the extra `[plot]`.

        Args:
            path: Where to write the picture; its ending says the format: `.svg`, `.png`, `.pdf`.

        Raises:
            ImportError: If pygraphviz is not installed.
            ValueError: If the path has another ending.
        """
        from tfa_stochastic_depth.plot import draw

        draw(self, path)

    def _repr_html_(self):
        rows = [_COLUMNS, *map(_row, self.blocks)]
        kinds = ["th", *["td"] * len(self.blocks)]
        table = "".join(
            "<tr>" + "".join(f"<{k}>{html.escape(cell)}</{k}>" for cell in row) + "</tr>"
            for k, row in zip(kinds, rows)
        )
        refused = "".join(
            f"<li><code>{html.escape(r.name)}</code>: {html.escape(r.reason)}</li>"
            for r in self.refusals
        )
        parts = [f"<p><b>{html.escape(self._title())}</b></p>"]
        parts += [f"<table>{table}</table>"] if self.blocks else []
        parts += [f"<p>{html.escape(line)}</p>" for line in self._sums()]
        parts += [f"<p>not wrapped:</p><ul>{refused}</ul>"] if refused else []
        return "".join(parts)

    def __str__(self):
        return "\n".join([*self._table(), *self._refused()])

    def _title(self):
        count = len(self.blocks)
        if not count:
            return f"No residual blocks found in {self.model!r}."
        return f"{count} residual block{'' if count == 1 else 's'} in {self.model!r}"

    def _sums(self):
        """Lines on all blocks together."""
        if not self.blocks:
            return []
        count = len(self.blocks)
        lines = [
            f"expected depth: {self.expected_depth:.4g} of {count} block{'' if count == 1 else 's'}"
            f" ({self.expected_depth / count:.1%})"
        ]
        share = self.expected_share
        if share is not None:
            lines.append(f"expected share of the branches' multiply-adds: {share:.1%}")
        elif any(block.macs is None for block in self.blocks):
            lines.append(
                "expected share of the branches' multiply-adds: unknown, for sizes that are not "
                "fixed"
            )
        return lines

    def _table(self):
        if not self.blocks:
            return [self._title()]
        rows = [_COLUMNS, *map(_row, self.blocks)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        rows.insert(1, tuple("-" * width for width in widths))
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows]
        return [self._title(), *lines, *self._sums()]

    def _refused(self):
        if not self.refusals:
            return []
        return ["not wrapped:", *(f"  {r.name}: {r.reason}" for r in self.refusals)]


_COLUMNS = ("#", "merge", "shortcut", "branch", "layers", "params", "survival_prob")


def _row(block):
    first, last = block.layers[0], block.layers[-1]
    return (
        str(block.index),
        block.name,
        block.kind if block.kind != "projection" else f"{block.kind} {block.shortcut}",
        first if first == last else f"{first} .. {last}",
        str(len(block.layers)),
        f"{block.params:,}",
        f"{block.survival_prob:.4g}",
    )


def find(graph, survival_prob, where=None, nested="inner"):
    """Finds the residual blocks of a graph and of the graphs nested in it.

    Args:
        graph: A `Graph`.
        survival_prob: As in `find_residuals`.
        where: A function from a `Block` to a bool, or `None` for all.
        nested: "inner" or "outer".

    Returns:
        A `Residuals` in which each merge is a block or a refusal.
    """
    if nested not in NESTED:
        raise ValueError(f'`nested` must be "inner" or "outer". Received: {nested!r}.')
    if where is not None and not callable(where):
        raise TypeError(
            "`where` must be a function from a block to a bool, or None for all blocks. "
            f"Received: {where!r} (of type {type(where).__name__})."
        )
    verdicts = _select(_number(_verdicts(graph)), where)
    verdicts = _number(_resolve_nesting(verdicts, nested, graph))
    blocks = [v for v in verdicts if isinstance(v, Block)]
    blocks = [
        dataclasses.replace(block, survival_prob=p)
        for block, p in zip(blocks, probabilities(survival_prob, blocks))
    ]
    refusals = [v for v in verdicts if isinstance(v, Refusal)]
    return Residuals(graph.name, tuple(blocks), tuple(refusals), graph)


def _number(verdicts):
    count = sum(isinstance(v, Block) for v in verdicts)
    index = 0
    numbered = []
    for verdict in verdicts:
        if isinstance(verdict, Block):
            index += 1
            verdict = dataclasses.replace(verdict, index=index, count=count)
        numbered.append(verdict)
    return numbered


def _select(verdicts, where):
    if where is None:
        return verdicts
    return [v if isinstance(v, Refusal) or _wanted(where, v) else _left_out(v) for v in verdicts]


def _wanted(where, block):
    answer = where(block)
    # NumPy's bools are not bools, and compare equal to them.
    if type(answer).__name__ not in ("bool", "bool_"):
        raise TypeError(
            "`where` must return a bool for each block. "
            f"Received: {answer!r} (of type {type(answer).__name__}) for block {block.name!r}."
        )
    return bool(answer)


def _left_out(block):
    return Refusal(block.name, "left out by `where`.")


def _resolve_nesting(verdicts, nested, graph):
    """Rule 7. Of blocks inside blocks, keeps the innermost or the outermost."""
    blocks = [v for v in verdicts if isinstance(v, Block)]
    inside, around = {}, {}  # block's place -> the first block found inside or around it
    at = {_place(b): b for b in blocks}
    graphs = {g.layer: g for _, g in graph.walk()}
    for outer in blocks:
        for place, _ in _places_in(graphs[outer.site.graph], outer.site.region):
            inner = at.get(place)
            if inner is not None and inner is not outer:
                inside.setdefault(_place(outer), inner)
                around.setdefault(_place(inner), outer)
    if nested == "inner":
        conflicts, reason = inside, 'holds the block {!r}; nested="outer" wraps this one instead.'
    else:
        conflicts, reason = around, "lies in the branch of the block {!r}, which is wrapped."
    return [
        Refusal(v.name, reason.format(conflicts[_place(v)].name))
        if isinstance(v, Block) and _place(v) in conflicts
        else v
        for v in verdicts
    ]


def _place(block):
    return block.site.graph, block.site.merge


def _places_in(graph, region):
    """The places of all calls of a region, those in nested models included, with the calls."""
    for i in sorted(region):
        call = graph.calls[i]
        yield (graph.layer, i), call
        for _, nested in call.graph.walk() if call.graph is not None else ():
            yield from (((nested.layer, j), inner) for j, inner in enumerate(nested.calls))


def _verdicts(graph):
    """A block or a refusal for each merge of a graph and of those nested in it, in order."""
    return list(_in_order(graph, (), graph.uses(), set()))


def _in_order(graph, path, uses, seen):
    for i, call in enumerate(graph.calls):
        if call.graph is not None and call.graph.layer not in seen:
            seen.add(call.graph.layer)
            yield from _in_order(call.graph, (*path, call.name), uses, seen)
        name = "/".join((*path, call.name))
        if call.closed is not None:
            yield Refusal(name, call.closed)
        if call.whole_block or call.addends:
            judge = _judge_layer if call.whole_block else _judge_merge
            try:
                yield judge(graph, i, name, uses)
            except _Refused as refused:
                yield Refusal(name, str(refused))


class _Refused(Exception):
    """The reason why a merge is no block; caught in this file."""


def _judge_layer(graph, i, name, uses):
    """A layer of which the caller says that it adds its own shortcut."""
    call = graph.calls[i]
    (start, end) = call.inputs[0], call.outputs[0]
    shapes = graph.tensors[start].shape, graph.tensors[end].shape
    if shapes[0] != shapes[1]:
        raise _Refused(
            f"cannot stand aside for its input: it takes {_shape(shapes[0])} and gives "
            f"{_shape(shapes[1])}."
        )
    if call.params == 0:
        raise _Refused("the layer has no weights.")
    site = Site(graph.layer, i, -1, end, frozenset([i]), tuple(dict.fromkeys(call.inputs)))
    _check_sharing(graph, site.region, uses)
    return Block(name, "layer", call.name, (call.name,), call.params, call.macs, None, site)


def _judge_merge(graph, i, name, uses):
    merge = graph.calls[i]
    first, second = _addends(graph, merge)
    if graph.between(first, second):
        kind, shortcut, branch = "identity", first, second
        start = first
    elif graph.between(second, first):
        kind, shortcut, branch = "identity", second, first
        start = second
    else:
        kind = "projection"
        shortcut, branch, start = _projection(graph, i, first, second)
    if merge.branch is not None and branch != merge.addends[merge.branch]:
        raise _Refused(
            f"what {merge.name!r} ({merge.kind}) takes for the branch, the output of "
            f"{_maker(graph, shortcut)}, is the shortcut by the paths that lead to it."
        )
    last = graph.producer[branch]
    drop = last if graph.calls[last].drop is not None and not graph.calls[last].addends else None
    drops = [graph.calls[j].drop for j in (drop, i) if j is not None]
    drops = [p for p in drops if p is not None]
    region = _region(graph, i, start, branch)
    _check_weights(graph, region)
    _check_sharing(graph, region, uses)
    inputs = graph.boundary(region)
    site = Site(
        graph=graph.layer,
        merge=i,
        shortcut=shortcut,
        branch=branch,
        region=region,
        inputs=(start, *(t for t in inputs if t != start)),
        drop=drop,
        factor=merge.factor,
    )
    calls = [graph.calls[j] for j in sorted(region)]
    return Block(
        name=name,
        kind=kind,
        shortcut=graph.calls[graph.producer[shortcut]].name
        if shortcut in graph.producer
        else "input",
        layers=tuple(call.name for call in calls),
        params=sum({call.layer: call.params for call in calls}.values()),
        macs=None if any(c.macs is None for c in calls) else sum(c.macs for c in calls),
        existing=math.prod(drops) if drops else None,
        site=site,
    )


def _addends(graph, call):
    """Rule 1."""
    if len(call.addends) != 2:
        raise _Refused(f"adds {len(call.addends)} tensors; a residual sum has two.")
    first, second = call.addends
    if first == second:
        raise _Refused("adds a tensor to itself.")
    a, b = graph.tensors[first], graph.tensors[second]
    if not (a.floating and b.floating):
        raise _Refused("adds tensors that are not floating-point.")
    if a.shape != b.shape:
        raise _Refused(
            f"adds tensors of different shapes, {_shape(a.shape)} and {_shape(b.shape)}."
        )
    return first, second


def _region(graph, merge, start, branch):
    """Rules 2, 3 and 5: the calls that may be skipped, or why they may not."""
    _check_closed_end(graph, merge, branch)
    closed = graph.closed_region(branch)
    on_path = graph.between(start, branch)
    for i in on_path:
        if i not in closed:
            raise _Refused(
                f"the branch cannot be skipped: {_escape(graph, i, on_path, closed | {merge})}."
            )
    return frozenset(on_path) | _private(graph, set(on_path), closed - set(on_path))


def _private(graph, on_path, aside):
    """Of the calls beside the path, those that belong to the branch.

    They take something from the path (by integers, which paths are not followed over), or feed
    the branch alone (a projection of a time embedding, say). What else leads to a sum is a tower
    of its own, maybe with blocks of its own: it stays outside, and its output is an input.
    """
    bound = set()
    for i in sorted(aside):
        if any(graph.producer.get(t) in on_path | bound for t in graph.calls[i].inputs):
            bound.add(i)
    outside = set()
    for i in sorted(aside - bound, reverse=True):
        call = graph.calls[i]
        followers = {u for t in call.outputs for u in graph.users.get(t, ())}
        if call.addends or call.whole_block or call.graph is not None or followers & outside:
            outside.add(i)
    return aside - outside


def _check_closed_end(graph, merge, tensor):
    if tensor in graph.outputs:
        raise _Refused(f"the output of {_maker(graph, tensor)} is an output of the model.")
    for user in graph.users[tensor]:
        if user != merge:
            raise _Refused(
                f"the output of {_maker(graph, tensor)} is also used by {graph.calls[user].name!r}."
            )


def _escape(graph, i, on_path, closed):
    """Says which tensor on the path from call `i`, which is not closed, is used where."""
    users = [(t, u) for t in graph.calls[i].outputs for u in graph.users.get(t, ())]
    for t in graph.calls[i].outputs:
        if t in graph.outputs:
            return f"the output of {_maker(graph, t)} is an output of the model"
    for t, user in users:
        if user not in closed and user not in on_path:
            return f"the output of {_maker(graph, t)} is also used by {_name(graph, user)}"
    return next(_escape(graph, u, on_path, closed) for _, u in users if u not in closed)


def _projection(graph, merge, first, second):
    """Rule 4: which of two sides that start together is the shortcut, and where they start."""
    given = graph.calls[merge].branch
    sides = {}
    for tensor in (first, second):
        if tensor in graph.producer:
            _check_closed_end(graph, merge, tensor)
        sides[tensor] = graph.closed_region(tensor)
    starts = [_starts(graph, sides[tensor]) for tensor in (first, second)]
    common = [t for t in starts[0] if t in starts[1]]
    if not common:
        raise _Refused("its two inputs do not start from a common tensor.")
    work = {t: sum(graph.calls[i].weighted for i in sides[t]) for t in (first, second)}
    if given is None and work[first] == work[second]:
        raise _Refused(
            f"its two inputs hold equal work ({work[first]} layers with weights each), so neither "
            "is a shortcut."
        )
    shortcut, branch = sorted((first, second), key=work.get)
    if given is not None:
        branch, shortcut = (first, second)[given], (second, first)[given]
    start, *others = _starts(graph, sides[shortcut])
    if others or start not in common:
        raise _Refused("its lighter side has an input that the other does not start from.")
    for i in sorted(sides[shortcut]):
        if given is None and not graph.calls[i].projection:
            raise _Refused(
                f"its lighter side holds {graph.calls[i].name!r} ({graph.calls[i].kind}), which is "
                "not a projection (convolution, dense, norm, pooling, padding, reshape, Lambda)."
            )
    return shortcut, branch, start


def _starts(graph, region):
    return [t for t in graph.boundary(region) if graph.tensors[t].floating]


def _check_weights(graph, region):
    """Rule 6, first half."""
    weighted = [graph.calls[i] for i in region if graph.calls[i].params]
    if not weighted:
        raise _Refused("the branch has no weights.")
    if all(call.embedding for call in weighted):
        raise _Refused("the branch only looks up embeddings.")


def _check_sharing(graph, region, uses):
    """Rule 6, second half. Layers without weights may be shared: each branch gets its own."""
    calls = dict(_places_in(graph, region))
    for call in calls.values():
        if call.params and not uses[call.layer] <= calls.keys():
            raise _Refused(f"the branch shares the layer {call.name!r} with the rest of the model.")


def _name(graph, i):
    return repr(graph.calls[i].name)


def _maker(graph, tensor):
    return _name(graph, graph.producer[tensor]) if tensor in graph.producer else "an input"


def _shape(shape):
    return "an unknown shape" if shape is None else str(shape)
