"""`Graph` answers questions about paths, on graphs written by hand. No TensorFlow in them."""

import hypothesis
import pytest
from hypothesis import strategies as st

from tfa_stochastic_depth.graph import Call, Graph, Tensor


@pytest.fixture(autouse=True)
def fresh_keras():
    """In place of the one all tests share: nothing here touches Keras."""


class Named:
    """A graph, asked and answering by names instead of numbers."""

    def __init__(self, *lines, inputs="x", outputs="y", masks=""):
        """Each line is one call, "name: what goes in -> what comes out"."""
        parsed = [line.replace("->", ":").split(":") for line in lines]
        made = [t for _, _, after in parsed for t in after.split()]
        self.names = [*inputs.split(), *made]
        self.place = {name: i for i, name in enumerate(self.names)}
        calls = [
            Call(name.strip(), "Kind", i + 1, self.numbers(before), self.numbers(after))
            for i, (name, before, after) in enumerate(parsed)
        ]
        tensors = [Tensor((None, 8), name not in masks.split()) for name in self.names]
        self.graph = Graph("model", 0, tuple(tensors), tuple(calls), self.numbers(outputs))

    def numbers(self, names):
        return tuple(self.place[name] for name in names.split())

    def calls(self, places):
        return " ".join(self.graph.calls[i].name for i in sorted(places))

    def closed(self, tensor):
        return self.calls(self.graph.closed_region(self.place[tensor]))

    def between(self, start, end):
        return self.calls(self.graph.between(self.place[start], self.place[end]))

    def boundary(self, *calls):
        region = {i for i, call in enumerate(self.graph.calls) if call.name in calls}
        return " ".join(self.names[t] for t in self.graph.boundary(region))


# ------------------------------------------------------------------ closed_region


RESIDUAL = ("conv: x -> a", "norm: a -> b", "add: x b -> s", "head: s -> y")


@pytest.mark.parametrize(
    ("lines", "tensor", "region"),
    [
        pytest.param(RESIDUAL, "b", "conv norm", id="the branch of a block"),
        pytest.param(RESIDUAL, "a", "conv", id="a tensor inside the branch"),
        pytest.param(RESIDUAL, "x", "", id="an input has nothing before it"),
        pytest.param(RESIDUAL, "s", "conv norm add", id="everything leads to the sum"),
        pytest.param(RESIDUAL, "y", "conv norm add head", id="everything leads to the output"),
        pytest.param(
            ("stem: x -> t", "conv: t -> a", "add: t a -> y"), "a", "conv", id="the fork is not in"
        ),
        pytest.param(
            ("conv: x -> a", "left: a -> b", "right: a -> c", "join: b c -> d", "add: x d -> y"),
            "d",
            "conv left right join",
            id="a fork that joins again",
        ),
        pytest.param(
            ("conv: x -> a", "left: a -> b", "right: a -> c", "join: b c -> d", "add: x d -> y"),
            "b",
            "left",
            id="one arm of it",
        ),
        pytest.param(
            ("conv: x -> a", "norm: a -> b", "add: x b -> s", "tap: a -> t", "join: s t -> y"),
            "b",
            "norm",
            id="a tap takes what is before it out",
        ),
        pytest.param(
            ("norm: x -> g", "gate: g -> m", "conv: g m -> b", "add: x b -> y"),
            "b",
            "norm gate conv",
            id="a side path of its own",
        ),
    ],
)
def test_closed_region_is_what_leads_nowhere_else(lines, tensor, region):
    assert Named(*lines).closed(tensor) == region


def test_closed_region_counts_a_model_output_as_a_use():
    graph = Named("conv: x -> a", "norm: a -> b", "add: x b -> y", outputs="y a")
    assert graph.closed("b") == "norm"
    assert graph.closed("a") == "conv"  # all uses of conv lead to `a`, though not on to `b`


def test_closed_region_counts_uses_as_masks_too():
    graph = Named("conv: x -> a", "norm: a -> b", "add: x b -> s", "lstm: s a -> y", masks="a")
    assert graph.closed("b") == "norm"


def test_closed_region_takes_a_call_whose_other_output_is_unused():
    graph = Named("attend: x -> a scores", "add: x a -> y")
    assert graph.closed("a") == "attend"
    assert graph.closed("scores") == ""


def test_closed_region_leaves_a_call_whose_other_output_is_used():
    graph = Named("attend: x -> a scores", "add: x a -> s", "head: s scores -> y")
    assert graph.closed("a") == ""


def test_closed_region_of_a_tensor_that_no_output_needs_is_empty():
    graph = Named("conv: x -> a", "dead: a -> b", "head: a -> y")
    assert graph.closed("b") == ""


def test_an_output_may_be_an_input():
    graph = Named("conv: x -> a", "add: x a -> y", outputs="x y")
    assert graph.closed("a") == "conv"


# ------------------------------------------------------------------ boundary, between


def test_boundary_names_what_enters_in_order_of_first_use():
    graph = Named(
        "norm: x -> a", "attend: a mask context a -> b", "add: x b -> y", inputs="mask context x"
    )
    assert graph.boundary("norm", "attend") == "x mask context"
    assert graph.boundary("attend") == "a mask context"
    assert graph.boundary("norm", "attend", "add") == "x mask context"
    assert graph.boundary() == ""


def test_between_is_all_calls_on_all_paths():
    graph = Named(
        "stem: x -> t", "left: t -> a", "right: t -> b", "other: x -> o", "join: a b o -> j",
        "add: t j -> y",
    )  # fmt: skip
    assert graph.between("t", "j") == "left right join"
    assert graph.between("x", "j") == "stem left right other join"
    assert graph.between("t", "a") == "left"


@pytest.mark.parametrize(
    ("start", "end"), [("b", "a"), ("a", "b"), ("b", "x"), ("a", "x")], ids=lambda t: t
)
def test_between_is_empty_without_a_path(start, end):
    assert Named("left: x -> a", "right: x -> b", "add: a b -> y").between(start, end) == ""


def test_between_follows_floating_point_tensors_only():
    graph = Named("mask: x -> m", "attend: q m -> a", "add: x a -> y", inputs="x q", masks="m")
    assert graph.between("x", "a") == ""
    assert graph.between("q", "a") == "attend"


def test_between_does_not_go_on_from_a_mask_made_on_the_way():
    graph = Named(
        "norm: x -> n", "compare: n -> m", "scale: o m -> p", "mul: n p -> b", "add: x b -> y",
        inputs="x o", masks="m",
    )  # fmt: skip
    assert graph.between("x", "b") == "norm mul"


# ------------------------------------------------------------------ producer, users, walk, uses


def test_producer_and_users():
    named = Named("conv: x x -> a b", "add: x a -> y")
    graph, place = named.graph, named.place
    assert graph.producer == {place["a"]: 0, place["b"]: 0, place["y"]: 1}
    assert graph.users == {place["x"]: (0, 1), place["a"]: (1,)}  # each user once, unused ones out


def nested_graphs():
    """An outer model that calls one model twice, which calls one more."""
    tensors = (Tensor((None, 8)), Tensor((None, 8)), Tensor((None, 8)))
    dense = Call("dense", "Dense", 3, (0,), (1,))
    core = Graph("core", 2, tensors[:2], (dense,), (1,))
    middle = Graph(
        "middle", 1, tensors[:2], (Call("core", "Functional", 2, (0,), (1,), graph=core),), (1,)
    )
    calls = [
        Call("middle", "Functional", 1, (0,), (1,), graph=middle),
        Call("middle", "Functional", 1, (1,), (2,), graph=middle),
        Call("dense", "Dense", 3, (2,), (3,)),
    ]
    return Graph("outer", 0, (*tensors, tensors[0]), tuple(calls), (3,))


def test_walk_yields_each_graph_once_with_its_path_outer_first():
    walked = [(path, graph.name) for path, graph in nested_graphs().walk()]
    assert walked == [((), "outer"), (("middle",), "middle"), (("middle", "core"), "core")]


def test_uses_finds_the_calls_of_a_layer_in_all_graphs():
    assert nested_graphs().uses() == {1: {(0, 0), (0, 1)}, 2: {(1, 0)}, 3: {(0, 2), (2, 0)}}


def test_graphs_are_values():
    assert nested_graphs() == nested_graphs()
    assert hash(nested_graphs()) == hash(nested_graphs())
    with pytest.raises(AttributeError):
        nested_graphs().name = "other"


# ------------------------------------------------------------------ against brute force


@st.composite
def graphs(draw):
    """Random graphs: calls with one or two outputs, repeats among inputs, dead ends, masks."""
    tensors = draw(st.integers(1, 2))
    calls = []
    for i in range(draw(st.integers(1, 8))):
        inputs = draw(st.lists(st.integers(0, tensors - 1), min_size=1, max_size=3))
        count = draw(st.sampled_from((1, 1, 1, 2)))
        outputs = tuple(range(tensors, tensors + count))
        calls.append(Call(f"call{i}", "Kind", i + 1, tuple(inputs), outputs))
        tensors += count
    floating = draw(
        st.lists(st.sampled_from((True, True, False)), min_size=tensors, max_size=tensors)
    )
    last = draw(st.lists(st.integers(0, tensors - 1), max_size=2, unique=True))
    outputs = tuple(dict.fromkeys([tensors - 1, *last]))
    return Graph("random", 0, tuple(Tensor((None,), f) for f in floating), tuple(calls), outputs)


def paths(graph, tensor, stop):
    """All paths from a tensor to one that `stop` holds for: lists of tensors and of calls."""
    if stop(tensor):
        yield [tensor], []
    for i, call in enumerate(graph.calls):
        if tensor in call.inputs:
            for t in call.outputs:
                for along, through in paths(graph, t, stop):
                    yield [tensor, *along], [i, *through]


thoroughly = hypothesis.settings(max_examples=200, deadline=None, derandomize=True, database=None)


@thoroughly
@hypothesis.given(graphs())
def test_closed_region_agrees_with_listing_all_paths(graph):
    for tensor in range(len(graph.tensors)):
        closed = set()
        for i, call in enumerate(graph.calls):
            ways = [
                tensor in along
                for t in call.outputs
                for along, _ in paths(graph, t, lambda t: t in graph.outputs)
            ]
            if ways and all(ways):
                closed.add(i)
        assert graph.closed_region(tensor) == closed


@thoroughly
@hypothesis.given(graphs())
def test_between_agrees_with_listing_all_paths(graph):
    for start in range(len(graph.tensors)):
        for end in range(len(graph.tensors)):
            on_path = {
                i
                for along, through in paths(graph, start, end.__eq__)
                # Whether the end itself is a mask is not the question.
                if all(graph.tensors[t].floating for t in along[:-1])
                for i in through
            }
            assert graph.between(start, end) == tuple(sorted(on_path))


@thoroughly
@hypothesis.given(graphs(), st.data())
def test_boundary_is_what_a_region_takes_and_does_not_make(graph, data):
    region = data.draw(st.sets(st.integers(0, len(graph.calls) - 1)))
    made = {t for i in region for t in graph.calls[i].outputs}
    taken = {t for i in region for t in graph.calls[i].inputs}
    boundary = graph.boundary(region)
    assert set(boundary) == taken - made
    assert len(set(boundary)) == len(boundary)
