"""Random models, against rules that are written here a second time, by listing all paths."""

import collections
import functools
import itertools
import re

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from helpers import (
    assert_same_outputs,
    assert_same_weights,
    data,
    node_counts,
    outputs,
    randomize,
    weights_by_layer,
)
from tfa_stochastic_depth import (
    constant,
    find_residuals,
    get_survival_probs,
    set_survival_probs,
    wrap_residuals,
)
from tfa_stochastic_depth.graph import Call, Graph, Tensor
from tfa_stochastic_depth.residuals import find

keras = tf.keras
L = keras.layers

SHAPE = (None, 4)


def runs(examples, shrink=True):
    """How often a property is tried; the examples are the same every time."""
    phases = set(hypothesis.Phase) - (set() if shrink else {hypothesis.Phase.shrink})
    return hypothesis.settings(
        max_examples=examples,
        phases=phases - {hypothesis.Phase.explain},
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


# ------------------------------------------------------------------ random graphs

# Layers that Keras has, as they are read from a model of width 4.
LAYERS = {
    "Dense": {"weighted": 1, "params": 20, "projection": True},
    "LayerNormalization": {"weighted": 1, "params": 8, "projection": True},
    "BatchNormalization": {"weighted": 1, "params": 16, "projection": True},
    "Activation": {},
}
# And those that graphs written by hand may have besides.
MORE_LAYERS = {
    **LAYERS,
    "Dense2": LAYERS["Dense"],  # to be drawn more often
    "Dense3": LAYERS["Dense"],
    "Norm": LAYERS["LayerNormalization"],
    "Pooling": {"projection": True},
    "Embedding": {"weighted": 1, "params": 40, "embedding": True},
    "Wide": {"weighted": 1, "params": 30, "projection": True, "shape": (None, 6)},
    "Drop": {"drop": 0.9},
    "Encoder": {"weighted": 3, "params": 50, "whole_block": True},
    "Empty": {"whole_block": True},
    "Resizer": {"weighted": 1, "params": 30, "whole_block": True, "shape": (None, 6)},
}
SIZING = [kind for kind in LAYERS if LAYERS[kind].get("projection")]

STEPS = (
    *("row", "row", "block", "block", "layer", "sum", "join", "again", "mask", "two", "other"),
    "nested",
)


class Sketch:
    """A random graph in the making.

    Args:
        draw: Hypothesis's way to decide.
        model: What all graphs of the model have in common: numbers, layers, nested graphs.
        pure: Whether it is a graph that need not be built with Keras.
    """

    def __init__(self, draw, model, pure, number=0):
        self.draw, self.model, self.pure, self.number = draw, model, pure, number
        self.tensors, self.calls, self.floats, self.masks = [], [], [], []
        self.kinds = MORE_LAYERS if pure else LAYERS
        if number and not pure:  # moving statistics depend on the order of a model's calls
            self.kinds = {k: v for k, v in LAYERS.items() if k != "BatchNormalization"}
        self.inputs = [self.tensor() for _ in range(self.one_of(1, 1, 2))]
        if not pure:
            (self.block if number else self.one_of(self.row, self.nested))()
        for _ in range(self.one_of(*((1, 2) if number else (2, 3, 3, 4, 5)))):
            getattr(self, self.one_of(*(STEPS[:-1] if number else STEPS)))()

    def one_of(self, *options):
        return self.draw(st.sampled_from(options))

    def any(self):
        """A floating-point tensor, one of the last more likely."""
        return self.one_of(*reversed(self.floats[-3:]), *self.floats)

    def tensor(self, shape=SHAPE, floating=True, hidden=False):
        self.tensors.append(Tensor(shape, floating))
        if floating and not hidden:
            self.floats.append(len(self.tensors) - 1)
        return len(self.tensors) - 1

    def call(self, kind, *inputs, number=None, count=1, shape=SHAPE, floating=True, **fields):
        number = next(self.model["numbers"]) if number is None else number
        hidden = fields.pop("hidden", False)
        made = tuple(self.tensor(shape, floating, hidden) for _ in range(count))
        self.calls.append(Call(f"{kind.lower()}_n{number}", kind, number, inputs, made, **fields))
        return made[0]

    def layer(self, before=None, kinds=None):
        kind = self.one_of(*(kinds or self.kinds))
        before = self.any() if before is None else before
        number = next(self.model["numbers"])
        if kind != "BatchNormalization":
            self.model["layers"].append((kind, number))
        return self.call(kind, before, number=number, **self.kinds[kind])

    def again(self, before=None):
        """A layer, or a nested graph, that was called before."""
        earlier = [*self.model["layers"], *self.model["nested"]]
        again = self.one_of(*earlier) if earlier else None
        if again is None:
            return self.layer(before)
        if isinstance(again, Graph):
            return self.nest(again, *([] if before is None else [before]))
        kind, number = again
        before = self.any() if before is None else before
        return self.call(kind, before, number=number, **MORE_LAYERS[kind])

    def add(self, *addends, **fields):
        kind = self.one_of("Add", "Plus") if len(addends) == 2 else "Add"
        if self.pure and self.one_of(False, False, False, False, False, True):
            fields["branch"] = self.one_of(0, 1)
        floating = all(self.tensors[t].floating for t in addends)
        shape = self.tensors[addends[0]].shape
        return self.call(kind, *addends, addends=addends, floating=floating, shape=shape, **fields)

    def row(self):
        """Two or three sums that are likely to be blocks, each on what the last one gives."""
        last = self.any()
        for _ in range(self.one_of(2, 2, 3)):
            last = self.block(last)
        return last

    def block(self, start=None):
        """A sum that is a residual block, unless a later step spoils it."""
        start = short = branch = self.any() if start is None else start
        longer = self.one_of(0, 0, 1, 1, 2)
        for _ in range(longer + self.one_of(1, 1, 2)):
            branch = self.one_of(*[self.layer] * 5, self.again)(branch)
        extra = self.one_of("", "", "side", "tower", "mask")
        if extra == "side":
            branch = self.join(branch, self.layer())
        if extra == "tower" and self.pure:
            tower = self.any()
            if self.number or self.one_of(False, True):
                tower = self.add(tower, self.layer(tower))
            else:
                tower = self.nested()
            branch = self.join(branch, self.layer(tower))
        if extra == "mask":
            branch = self.mask(self.one_of(start, branch), branch)
        for _ in range(longer):
            short = self.layer(short, SIZING if self.number == 0 else SIZING[:2])
        if self.one_of(*[False] * 7, True):
            short = self.join(short, self.any())
        return self.add(*self.one_of((short, branch), (branch, short)))

    def sum(self):
        one = self.any()
        return self.add(one, self.one_of(*(set(self.floats) - {one} or {one})))

    def join(self, *tensors):
        tensors = tensors or [self.any() for _ in range(self.one_of(2, 2, 3))]
        if self.pure:
            return self.call("Join", *tensors, **self.one_of({}, LAYERS["Dense"]))
        wide = {"shape": (None, 4 * len(tensors)), "hidden": True, "projection": True}
        params = 4 * (4 * len(tensors) + 1)
        joined = self.call("Concatenate", *tensors, **wide)
        return self.call("Dense", joined, **{**LAYERS["Dense"], "params": params})

    def mask(self, source=None, target=None):
        """Integers made from one tensor, or those of an earlier step, applied to another."""
        source = self.any() if source is None else source
        if self.masks and self.one_of(True, False):
            made = self.one_of(*self.masks)
        else:
            made = self.call("Signs", source, floating=False)
            self.masks.append(made)
        way = self.one_of(*[""] * 5, "sum", "nested") if self.pure else ""
        if way == "sum":
            made = self.add(made, self.call("Signs", source, floating=False))
        if way == "nested" and self.model["nested"]:
            made = self.nest(self.one_of(*self.model["nested"]), made)
        return self.call("Gate", self.any() if target is None else target, made)

    def two(self):
        """A call with two outputs."""
        return self.call("Two", self.any(), count=2)

    def other(self):
        """What looks like a residual sum and is none."""
        what = self.one_of("three", "itself", "constant", "integers")
        if what == "three":
            return self.add(self.any(), self.any(), self.any())
        if what == "itself":
            t = self.any()
            return self.add(t, t)
        if what == "constant" or not self.pure:
            return self.call("PlusOne", self.any())
        return self.add(self.any(), self.call("Signs", self.any(), floating=False))

    def nested(self):
        sketch = Sketch(self.draw, self.model, self.pure, next(self.model["numbers"]))
        graph = sketch.done()
        self.model["nested"].append(graph)
        return self.nest(graph)

    def nest(self, graph, *first):
        """Calls a graph as a layer."""
        count = self.model["inputs"][graph.layer]
        inputs = [*first, *(self.any() for _ in range(count))][:count]
        leaves = {c.layer: c for _, g in walk(graph) for c in g.calls if c.graph is None}.values()
        made = [graph.tensors[t] for t in graph.outputs]
        made = tuple(self.tensor(t.shape, t.floating) for t in made)
        fields = {
            "weighted": sum(call.weighted for call in leaves),
            "params": sum(call.params for call in leaves),
            "projection": all(call.projection for call in graph.calls),
        }
        self.calls.append(
            Call(graph.name, "Functional", graph.layer, tuple(inputs), made, graph=graph, **fields)
        )
        return made[0]

    def done(self):
        """The graph. Calls whose results nobody takes are left out, as Keras does."""
        if not set(self.floats) - set(self.inputs):
            self.layer()
        made = [t for t in self.floats if t not in self.inputs]
        outputs = dict.fromkeys(
            [made[-1], *(self.one_of(*made) for _ in range(self.one_of(0, 0, 1)))]
        )
        calls, needed = [], set(outputs)
        for call in reversed(self.calls):
            if needed.intersection(call.outputs):
                needed.update(call.inputs)
                calls.insert(0, call)
        self.model["inputs"][self.number] = len(self.inputs)
        name = f"nested{self.number}" if self.number else "model"
        return Graph(name, self.number, tuple(self.tensors), tuple(calls), tuple(outputs))


@st.composite
def graphs(draw, pure=True):
    model = {"numbers": itertools.count(1), "layers": [], "nested": [], "inputs": {}}
    graph = Sketch(draw, model, pure).done()
    return graph if pure else (graph, model["inputs"])


def walk(graph, path=()):
    """A graph and those nested in it, each once, with the names that lead there."""
    found = {graph.layer: (path, graph)}
    for call in graph.calls:
        if call.graph is not None:
            for way, inner in walk(call.graph, (*path, call.name)):
                found.setdefault(inner.layer, (way, inner))
    return list(found.values())


# ------------------------------------------------------------------ the rules, a second time


class Refused(Exception):
    """Why a sum is no block: one of the words in `REASONS`."""


REASONS = {
    "count": r"adds \d+ tensors; a residual sum has two\.",
    "itself": r"adds a tensor to itself\.",
    "integers": r"adds tensors that are not floating-point\.",
    "shapes": r"adds tensors of different shapes, .*",
    "needed": r"the output of '\w+' is (also used by '\w+'|an output of the model)\.",
    "escapes": r"the branch cannot be skipped: .*",
    "no start": r"its two inputs do not start from a common tensor\.",
    "equal work": r"its two inputs hold equal work .*",
    "more starts": r"its lighter side has an input that the other does not start from\.",
    "no projection": r"its lighter side holds .*, which is not a projection .*",
    "says otherwise": r"what .* takes for the branch, .*, is the shortcut by the paths .*",
    "no weights": r"the (branch|layer) has no weights\.",
    "embeddings": r"the branch only looks up embeddings\.",
    "shared": r"the branch shares the layer '\w+' with the rest of the model\.",
    "resized": r"cannot stand aside for its input: .*",
    "around": r"holds the block .*",
    "inside": r"lies in the branch of the block .*",
}


class Rules:
    """What is to be found in a graph, judged by lists of all paths."""

    def __init__(self, graph):
        self.graph = graph
        self.knots = 0  # towers beside a branch that take something from inside it
        self.uses = collections.defaultdict(set)
        for _, g in walk(graph):
            for i, call in enumerate(g.calls):
                self.uses[call.layer].add((g.layer, i))

    def verdicts(self, nested):
        """A row of (name, place, block as a dict or the reason as a word), in running order."""
        found = [(name, place, self._judge(*place)) for name, place in self._merges(self.graph)]
        found = [(name, (graph.layer, i), verdict) for name, (graph, i), verdict in found]
        blocks = [(place, v) for _, place, v in found if isinstance(v, dict)]
        around = {p for p, v in blocks if any(q in v["places"] for q, _ in blocks if q != p)}
        inside = {p for p, _ in blocks if any(p in v["places"] for q, v in blocks if q != p)}
        left, word = (around, "around") if nested == "inner" else (inside, "inside")
        return [
            (name, place, word if place in left and isinstance(v, dict) else v)
            for name, place, v in found
        ]

    def _merges(self, graph, path=(), seen=None):
        seen = set() if seen is None else seen
        for i, call in enumerate(graph.calls):
            if call.graph is not None and call.layer not in seen:
                seen.add(call.layer)
                yield from self._merges(call.graph, (*path, call.name), seen)
            if call.addends or call.whole_block:
                yield "/".join((*path, call.name)), (graph, i)

    def _judge(self, graph, i):
        try:
            if graph.calls[i].whole_block:
                return self._whole(graph, i)
            return self._sum(graph, i)
        except Refused as refused:
            return str(refused)

    def _whole(self, graph, i):
        call = graph.calls[i]
        if graph.tensors[call.inputs[0]].shape != graph.tensors[call.outputs[0]].shape:
            raise Refused("resized")
        if not call.params:
            raise Refused("no weights")
        return self._block(graph, "layer", -1, call.outputs[0], {i}, call.inputs)

    def _sum(self, graph, i):
        merge = graph.calls[i]
        if len(merge.addends) != 2:
            raise Refused("count")
        one, two = merge.addends
        if one == two:
            raise Refused("itself")
        if not all(graph.tensors[t].floating for t in (one, two)):
            raise Refused("integers")
        if graph.tensors[one].shape != graph.tensors[two].shape:
            raise Refused("shapes")
        kind = "identity"
        if float_paths(graph, one, two):
            start, shortcut, branch = one, one, two
        elif float_paths(graph, two, one):
            start, shortcut, branch = two, two, one
        else:
            kind = "projection"
            start, shortcut, branch = self._projection(graph, i, one, two)
        if merge.branch is not None and merge.addends[merge.branch] != branch:
            raise Refused("says otherwise")
        must_end_here(graph, i, branch)
        free = skippable(graph, branch)
        on_path = {j for way in float_paths(graph, start, branch) for j in way}
        if not on_path <= free:
            raise Refused("escapes")
        beside = free - on_path
        towers = {j for j in beside if leads_to_a_tower(graph, beside, j)}
        region = free - towers
        if any(depends(graph, t, region) for j in towers for t in graph.calls[j].inputs):
            self.knots += 1
        weighted = [graph.calls[j] for j in region if graph.calls[j].params]
        if not weighted:
            raise Refused("no weights")
        if all(call.embedding for call in weighted):
            raise Refused("embeddings")
        made = {t for j in region for t in graph.calls[j].outputs}
        taken = [t for j in sorted(region) for t in graph.calls[j].inputs if t not in made]
        return self._block(graph, kind, shortcut, branch, region, [start, *taken])

    def _projection(self, graph, i, one, two):
        """Two sides that start together: the one with less work is the shortcut."""
        made = {t for call in graph.calls for t in call.outputs}
        side, starts, work = {}, {}, {}
        for t in (one, two):
            if t in made:
                must_end_here(graph, i, t)
            side[t] = skippable(graph, t)
            inner = {u for j in side[t] for u in graph.calls[j].outputs}
            entering = {u for j in side[t] for u in graph.calls[j].inputs} - inner
            starts[t] = {u for u in entering if graph.tensors[u].floating}
            work[t] = sum(graph.calls[j].weighted for j in side[t])
        if not starts[one] & starts[two]:
            raise Refused("no start")
        told = graph.calls[i].branch
        if told is None and work[one] == work[two]:
            raise Refused("equal work")
        if told is None:
            shortcut, branch = (one, two) if work[one] < work[two] else (two, one)
        else:
            shortcut, branch = (two, one) if told == 0 else (one, two)
        if len(starts[shortcut]) > 1 or not starts[shortcut] <= starts[branch]:
            raise Refused("more starts")
        if told is None and not all(graph.calls[j].projection for j in side[shortcut]):
            raise Refused("no projection")
        return *starts[shortcut], shortcut, branch

    def _block(self, graph, kind, shortcut, branch, region, inputs):
        places = {(graph.layer, j): graph.calls[j] for j in region}
        for j in region:
            if graph.calls[j].graph is not None:
                for _, g in walk(graph.calls[j].graph):
                    places.update({(g.layer, k): call for k, call in enumerate(g.calls)})
        for call in places.values():
            if call.params and not self.uses[call.layer] <= places.keys():
                raise Refused("shared")
        return {
            "kind": kind,
            "shortcut": shortcut,
            "branch": branch,
            "region": frozenset(region),
            "inputs": tuple(dict.fromkeys(inputs)),
            "places": frozenset(places),
        }


def takers(graph, tensor):
    return [i for i, call in enumerate(graph.calls) if tensor in call.inputs]


def must_end_here(graph, merge, tensor):
    if tensor in graph.outputs or takers(graph, tensor) != [merge]:
        raise Refused("needed")


@functools.lru_cache(maxsize=1000)
def ways_out(graph, i):
    """All ways from a call to where its results end: sets of the tensors on them.

    They end at an output of the model, or at a call whose results nobody takes.
    """
    ways = set()
    for t in graph.calls[i].outputs:
        if t in graph.outputs:
            ways.add(frozenset([t]))
        for taker in takers(graph, t):
            ways.update(way | {t} for way in ways_out(graph, taker))
    return ways or {frozenset()}


def skippable(graph, tensor):
    """The calls all of whose ways out pass through a tensor."""
    calls = range(len(graph.calls))
    return {i for i in calls if all(tensor in way for way in ways_out(graph, i))}


def float_paths(graph, start, end):
    """All paths between two tensors over floating-point ones, as rows of calls."""
    if start == end:
        return [()]
    if not graph.tensors[start].floating:
        return []
    return [
        (i, *way)
        for i in takers(graph, start)
        for t in graph.calls[i].outputs
        for way in float_paths(graph, t, end)
    ]


def leads_to_a_tower(graph, beside, i):
    """Whether a call beside the path is, or leads over others there to, a sum or nested model."""
    call = graph.calls[i]
    if call.addends or call.whole_block or call.graph is not None:
        return True
    followers = {j for t in call.outputs for j in takers(graph, t)} & beside
    return any(leads_to_a_tower(graph, beside, j) for j in followers)


def depends(graph, tensor, region):
    """Whether a tensor is made, at some distance, from what a region makes."""
    for i, call in enumerate(graph.calls):
        if tensor in call.outputs:
            return i in region or any(depends(graph, t, region) for t in call.inputs)
    return False


def word(reason):
    """The word for the reason that a refusal gives."""
    (found,) = [key for key, pattern in REASONS.items() if re.fullmatch(pattern, reason)]
    return found


# ------------------------------------------------------------------ what is found in graphs


@pytest.mark.parametrize("nested", ["inner", "outer"])
def test_blocks_and_refusals_are_those_of_the_rules(nested):
    """Every sum is a block or a refusal, and the ones that listing all paths says."""
    seen = collections.Counter()

    @runs(400)
    @hypothesis.given(graphs())
    def check(graph):
        rules = Rules(graph)
        expected = rules.verdicts(nested)
        seen["graphs"] += 1
        if rules.knots:  # they have tests of their own
            seen["knots"] += 1
            return
        found = find(graph, constant(1), nested=nested)
        assert [(r.name, word(r.reason)) for r in found.refusals] == [
            (name, v) for name, _, v in expected if isinstance(v, str)
        ]
        assert [
            (
                b.name,
                (b.site.graph, b.site.merge),
                (b.kind, b.site.shortcut, b.site.branch, b.site.region, b.site.inputs),
            )
            for b in found.blocks
        ] == [
            (name, p, (v["kind"], v["shortcut"], v["branch"], v["region"], v["inputs"]))
            for name, p, v in expected
            if isinstance(v, dict)
        ]
        seen.update({v if isinstance(v, str) else v["kind"] for _, _, v in expected})
        seen["in nested"] += any(p[0] for _, p, v in expected if isinstance(v, dict))
        seen["several inputs"] += any(
            len(v["inputs"]) > 1 for _, _, v in expected if isinstance(v, dict)
        )

    check()
    assert not set(REASONS) - {"around", "inside"} - seen.keys()
    assert seen["around" if nested == "inner" else "inside"] > 5
    assert seen["identity"] > 60 and seen["projection"] > 30 and seen["layer"] > 20
    assert seen["several inputs"] > 15 and seen["in nested"] > 3
    assert min(seen["needed"], seen["escapes"], seen["shared"], seen["no start"]) > 5
    assert seen["knots"] < 40


def assert_branches_can_be_left_out(graph, nested):
    """Runs a graph in order without its branches, and each branch from its inputs alone."""
    found = find(graph, constant(1), nested=nested).blocks
    for _, g in walk(graph):
        sites = {b.site.merge: b.site for b in found if b.site.graph == g.layer}
        dropped = [i for site in sites.values() for i in site.region - {site.merge}]
        assert len(dropped) == len(set(dropped)), "two branches overlap"
        made = {t for call in g.calls for t in call.outputs}
        there = set(range(len(g.tensors))) - made
        for i, call in enumerate(g.calls):
            if i in sites and sites[i].shortcut >= 0:
                site = sites[i]
                assert {site.shortcut, *site.inputs} <= there, call.name
                inside = set(site.inputs)
                for j in sorted(site.region):
                    assert set(g.calls[j].inputs) <= inside, g.calls[j].name
                    inside.update(g.calls[j].outputs)
                assert site.branch in inside
                there.update(call.outputs)
            elif i not in dropped:
                assert set(call.inputs) <= there, call.name
                there.update(call.outputs)
        assert set(g.outputs) <= there


@pytest.mark.parametrize("nested", ["inner", "outer"])
def test_the_rest_runs_without_the_branches(nested):
    @runs(100)
    @hypothesis.given(graphs())
    def check(graph):
        rules = Rules(graph)
        rules.verdicts(nested)
        hypothesis.assume(not rules.knots)  # they have tests of their own
        assert_branches_can_be_left_out(graph, nested)

    check()


def knot(nested):
    """x + gate(conv(x), integers made from conv(x)) by a sum, or by a nested model."""
    dense = LAYERS["Dense"]
    calls = [Call("conv", "Dense", 1, (0,), (1,), **dense)]
    signs = Call("signs", "Signs", 2, (1,), (2,))
    more = Call("more", "Signs", 3, (1,), (3,))
    if nested:
        copied = Call("inner", "Signs", 5, (0,), (1,))
        inner = Graph("nested", 4, (Tensor(SHAPE, False),) * 2, (copied,), (1,))
        calls += [signs, Call("nested", "Functional", 4, (2,), (4,), graph=inner)]
    else:
        calls += [signs, more, Call("masks", "Add", 4, (2, 3), (4,), addends=(2, 3))]
    calls += [Call("gate", "Gate", 6, (1, 4), (5,)), Call("sum", "Add", 7, (0, 5), (6,), (0, 5))]
    tensors = tuple(Tensor(SHAPE, t not in (2, 3, 4)) for t in range(7))
    return Graph("model", 0, tensors, tuple(calls), (6,))


@pytest.mark.parametrize("nested", [False, True], ids=["sum", "nested model"])
def test_integers_made_inside_a_branch_do_not_leave_it_on_their_way_back(nested):
    """Whether the outer sum is a block or not: what is wrapped can be run."""
    graph = knot(nested)
    assert Rules(graph).verdicts("inner")[-1][0] == "sum"
    assert_branches_can_be_left_out(graph, "inner")


# ------------------------------------------------------------------ models built from them


class Two(L.Layer):
    """A layer with two outputs."""

    def call(self, x):
        return x, -x


class Signs(L.Layer):
    """Makes integers."""

    def call(self, x):
        return tf.cast(x > 0, "int32")


class Gate(L.Layer):
    """Applies integers."""

    def call(self, inputs):
        x, mask = inputs
        return x * tf.cast(mask, x.dtype)


MAKE = {
    "Dense": lambda name: L.Dense(4, name=name),
    "Activation": lambda name: L.Activation("tanh", name=name),
    "Two": lambda name: Two(name=name),
    "Signs": lambda name: Signs(name=name),
    "Gate": lambda name: Gate(name=name),
}
OPERATORS = {"Plus": lambda a, b: a + b, "PlusOne": lambda x: x + 1.0}


class Built:
    """A Keras model of a graph.

    Args:
        graph: A `Graph`.
        inputs: How many inputs it and the graphs nested in it have, by their numbers.
    """

    def __init__(self, graph, inputs):
        self.graph = graph
        self.inputs = inputs
        self.layers = {}
        self.names = {}  # the place of a call -> its name in Keras
        self.model = randomize(self._model(graph))

    def _model(self, graph):
        inputs = [
            keras.Input((4,), name=f"in{i}_{graph.layer}") for i in range(self.inputs[graph.layer])
        ]
        values = dict(enumerate(inputs))
        for i, call in enumerate(graph.calls):
            if call.graph is not None and call.layer not in self.layers:
                self.layers[call.layer] = self._model(call.graph)
            taken = [values[t] for t in call.inputs]
            if call.kind in OPERATORS:
                made = OPERATORS[call.kind](*taken)
            else:
                if call.layer not in self.layers:
                    make = MAKE.get(call.kind, lambda name: getattr(L, call.kind)(name=name))  # noqa: B023
                    self.layers[call.layer] = make(call.name)
                made = self.layers[call.layer](taken if len(taken) > 1 else taken[0])
            made = tf.nest.flatten(made)
            values.update(zip(call.outputs, made))
            self.names[graph.layer, i] = made[0]._keras_history[0].name
        given = [values[t] for t in graph.outputs]
        return keras.Model(inputs if len(inputs) > 1 else inputs[0], given, name=graph.name)

    def run(self, values, blocks, graph=None):
        """What the model gives in training when blocks are dropped, by calling its layers.

        Args:
            values: One array for each input.
            blocks: The dropped ones, as `Rules` gives them, by their places.
            graph: A nested graph to run instead.
        """
        graph = self.graph if graph is None else graph
        dropped = {place for block in blocks.values() for place in block["places"]}
        values = dict(enumerate(values))
        for i, call in enumerate(graph.calls):
            place = graph.layer, i
            if place in blocks:
                made = values[blocks[place]["shortcut"]]
            elif place in dropped:
                continue
            else:
                taken = [values[t] for t in call.inputs]
                made = self._run_call(call, taken, blocks)
            values.update(zip(call.outputs, tf.nest.flatten(made)))
        return [values[t] for t in graph.outputs]

    def _run_call(self, call, taken, blocks):
        if call.kind in OPERATORS:
            return OPERATORS[call.kind](*taken)
        if call.graph is not None:
            return self.run(taken, blocks, call.graph)
        layer = self.layers[call.layer]
        training = {"training": True} if call.kind == "BatchNormalization" else {}
        return layer(taken if len(taken) > 1 else taken[0], **training)


@st.composite
def models(draw, blocks):
    """A random model, an option, what the rules find, and whether each block is kept.

    Args:
        draw: Hypothesis's way to decide.
        blocks: A function from the number of blocks to whether such a model is wanted.
    """
    graph, inputs = draw(graphs(pure=False))
    nested = draw(st.sampled_from(["inner", "outer"]))
    verdicts = Rules(graph).verdicts(nested)
    count = sum(isinstance(v, dict) for _, _, v in verdicts)
    hypothesis.assume(verdicts and blocks(count))
    switches = draw(st.lists(st.sampled_from([0, 1]), min_size=count, max_size=count))
    return graph, inputs, nested, verdicts, switches


def build(graph, inputs):
    keras.backend.clear_session(**({"free_memory": False} if hasattr(keras, "ops") else {}))
    return Built(graph, inputs)


def state(model):
    return weights_by_layer(model), model.get_config(), node_counts(model)


def assert_same_state(ours, theirs):
    assert_same_weights(ours[0], theirs[0])
    assert repr(ours[1]) == repr(theirs[1])
    assert ours[2] == theirs[2]


def assert_close(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def assert_found(found, built, verdicts):
    """What is found in a Keras model is what the rules find in the graph it was made from."""
    blocks = {
        built.names[place]: (v["kind"], sorted(built.names[place[0], i] for i in v["region"]))
        for _, place, v in verdicts
        if isinstance(v, dict)
    }
    refusals = [(built.names[place], v) for _, place, v in verdicts if isinstance(v, str)]
    last = [b.name.split("/")[-1] for b in found.blocks]
    assert dict(zip(last, ((b.kind, sorted(b.layers)) for b in found.blocks))) == blocks
    assert len(last) == len(blocks)
    last = [r.name.split("/")[-1] for r in found.refusals]
    assert sorted(zip(last, (word(r.reason) for r in found.refusals))) == sorted(refusals)


def test_a_wrapped_model_computes_what_is_left_when_branches_are_dropped():
    seen = collections.Counter()

    @runs(25, shrink=False)
    @hypothesis.given(models(lambda blocks: blocks >= 2))
    def check(drawn):
        graph, inputs, nested, verdicts, switches = drawn
        built = build(graph, inputs)
        model = built.model
        before = state(model)
        found = find_residuals(model, nested=nested)
        assert_found(found, built, verdicts)

        # With nothing dropped it is the model that it was made from.
        values = [data(3, 4, seed=i) for i in range(len(model.inputs))]
        x = values if len(values) > 1 else values[0]
        probs = [1 / (i + 1) for i in range(len(found.blocks))]
        wrapped = wrap_residuals(model, probs, nested=nested)
        assert get_survival_probs(wrapped) == pytest.approx(probs)  # in the order of the blocks
        set_survival_probs(wrapped, [1] * len(probs))
        assert_same_state(state(model), before)
        assert_same_weights(weights_by_layer(wrapped), before[0])
        assert_same_outputs(wrapped, model, x)
        assert_same_outputs(wrapped, model, x, training=True)

        # With some dropped it is the rest.
        set_survival_probs(wrapped, switches)
        places = {name: place for place, name in built.names.items()}
        blocks = {place: v for _, place, v in verdicts if isinstance(v, dict)}
        order = [places[b.name.split("/")[-1]] for b in found.blocks]
        dropped = {place: blocks[place] for place, on in zip(order, switches) if not on}
        assert_close(outputs(wrapped, x, training=True), built.run(values, dropped))

        # Moving statistics have moved where calls have run, and nowhere else.
        after, expected = weights_by_layer(wrapped), weights_by_layer(model)
        for name in expected:
            assert_close(after[name], expected[name])

        seen.update({v if isinstance(v, str) else v["kind"] for _, _, v in verdicts})
        seen["refusals"] += any(isinstance(v, str) for _, _, v in verdicts)
        seen["mixed"] += len(set(switches)) > 1
        seen["in nested"] += any(graph for graph, _ in blocks)
        seen["moved"] += any("batchnormalization" in name for name in before[0])

    check()
    assert seen["identity"] >= 10 and seen["projection"] >= 5
    assert min(seen["refusals"], seen["mixed"], seen["moved"]) >= 5 and seen["in nested"] >= 2


def test_a_model_without_blocks_is_an_error_that_lists_every_sum():
    @runs(10, shrink=False)
    @hypothesis.given(models(lambda blocks: blocks == 0))
    def check(drawn):
        graph, inputs, nested, verdicts, _ = drawn
        built = build(graph, inputs)
        before = state(built.model)
        found = find_residuals(built.model, nested=nested)
        assert_found(found, built, verdicts)
        with pytest.raises(ValueError) as error:
            wrap_residuals(built.model, nested=nested)
        lines = str(error.value).splitlines()
        assert lines[0] == "`model` 'model' has no residual block that can be wrapped."
        assert lines[2:] == [f"  {r.name}: {r.reason}" for r in found.refusals]
        assert_same_state(state(built.model), before)

    check()


@pytest.mark.parametrize("nested", [False, True], ids=["sum", "nested model"])
def test_a_branch_that_adds_up_integers_of_its_own_can_be_wrapped_or_is_refused(nested):
    inputs = x = keras.Input((4,))
    x = L.Add()([x, L.Dense(4)(x)])
    y = L.Dense(4)(x)
    if nested:
        ints = keras.Input((4,), dtype="int32")
        mask = keras.Model(ints, Signs()(ints))(Signs()(y))
    else:
        mask = L.Add()([Signs()(y), Signs()(y)])
    model = randomize(keras.Model(inputs, L.Add()([x, Gate()([y, mask])])))
    assert_same_outputs(wrap_residuals(model, constant(1)), model, data(3, 4))
