"""Which sums are residual blocks, on graphs written by hand. No TensorFlow in them."""

import dataclasses
import itertools

import numpy as np
import pytest

from tfa_stochastic_depth.graph import Call, Graph, Tensor
from tfa_stochastic_depth.residuals import Refusal, find
from tfa_stochastic_depth.survival import constant, existing

SHAPE = (None, 8)


@pytest.fixture(autouse=True)
def fresh_keras():
    """In place of the one all tests share: nothing here touches Keras."""


class Draft:
    """A graph in the making. Its methods return the number of a tensor."""

    layers = itertools.count(1000)

    def __init__(self, name="model", number=0):
        self.name = name
        self.number = number
        self.tensors = []
        self.calls = []

    def tensor(self, shape=SHAPE, floating=True):
        self.tensors.append(Tensor(shape, floating))
        return len(self.tensors) - 1

    def call(self, name, *inputs, shape=SHAPE, floating=True, kind="Layer", layer=None, **fields):
        output = self.tensor(shape, floating)
        layer = next(self.layers) if layer is None else layer
        self.calls.append(Call(name, kind, layer, inputs, (output,), **fields))
        return output

    def dense(self, name, *inputs, **fields):
        fields = {"kind": "Dense", "weighted": 1, "params": 72, "projection": True, **fields}
        return self.call(name, *inputs, **fields)

    def relu(self, name, *inputs, **fields):
        return self.call(name, *inputs, kind="Activation", **fields)

    def add(self, name, *addends, **fields):
        return self.call(name, *addends, kind="Add", addends=addends, **fields)

    def done(self, *outputs):
        return Graph(self.name, self.number, tuple(self.tensors), tuple(self.calls), outputs)


def nest(draft, graph, *inputs):
    """Calls a graph as a layer."""
    return draft.call(
        graph.name,
        *inputs,
        kind="Functional",
        layer=graph.layer,
        graph=graph,
        params=sum(call.params for call in graph.calls),
        weighted=sum(call.weighted for call in graph.calls),
    )


def blocks(graph, survival_prob=0.5, **options):
    return [b.name for b in find(graph, survival_prob, **options).blocks]


def only_block(graph):
    found = find(graph, 0.5)
    assert not found.refusals
    (block,) = found.blocks
    return block


def only_refusal(graph, **options):
    found = find(graph, 0.5, **options)
    assert not found.blocks
    (refusal,) = found.refusals
    return refusal.reason


def region(graph, block):
    return [graph.calls[i].name for i in sorted(block.site.region)]


# ------------------------------------------------------------------ identity shortcuts


@pytest.mark.parametrize("shortcut_first", [True, False])
def test_identity_shortcut_in_either_operand_order(shortcut_first):
    g = Draft()
    x = g.dense("stem", g.tensor())
    a = g.dense("conv", x)
    b = g.relu("relu", a)
    s = g.add("sum", *((x, b) if shortcut_first else (b, x)))
    graph = g.done(g.dense("head", s))
    block = only_block(graph)
    assert (block.name, block.kind, block.shortcut) == ("sum", "identity", "stem")
    assert (block.layers, block.params, block.existing) == (("conv", "relu"), 72, None)
    assert (block.index, block.count) == (1, 1)
    site = block.site
    assert (site.graph, site.merge, site.shortcut, site.branch) == (0, 3, x, b)
    assert (site.region, site.inputs) == ({1, 2}, (x,))


def test_the_models_input_may_be_the_shortcut():
    g = Draft()
    x = g.tensor()
    block = only_block(g.done(g.add("sum", x, g.dense("conv", x))))
    assert block.shortcut == "input"


def test_layers_before_and_after_are_not_in_the_branch():
    g = Draft()
    x = g.relu("pre", g.tensor())
    s = g.add("sum", g.dense("conv", x), x)
    graph = g.done(g.relu("post", s))
    assert region(graph, only_block(graph)) == ["conv"]


def test_a_branch_that_forks_and_joins_is_one_branch():
    """Squeeze and excite: the gate lies in the region."""
    g = Draft()
    x = g.tensor()
    a = g.dense("conv", x)
    gate = g.dense("excite", g.dense("squeeze", a))
    b = g.call("multiply", a, gate)
    graph = g.done(g.add("sum", b, x))
    assert region(graph, only_block(graph)) == ["conv", "squeeze", "excite", "multiply"]


def test_blocks_in_a_row_are_numbered_in_running_order():
    g = Draft()
    x = g.tensor()
    for i in range(3):
        x = g.add(f"sum{i}", x, g.dense(f"conv{i}", x))
    found = find(g.done(x), 0.4)
    assert [(b.name, b.index, b.count) for b in found.blocks] == [
        ("sum0", 1, 3), ("sum1", 2, 3), ("sum2", 3, 3)
    ]  # fmt: skip
    assert [b.survival_prob for b in found.blocks] == pytest.approx([0.8, 0.6, 0.4])


# ------------------------------------------------------------------ rule 1: what a merge is


def one_sum(draw_addends):
    """A model whose only sum adds what `draw_addends(draft, x, dense)` says."""
    g = Draft()
    x = g.tensor()
    return g.done(g.add("sum", *draw_addends(g, x, g.dense("conv", x))))


@pytest.mark.parametrize(
    ("addends", "reason"),
    [
        (lambda g, x, a: (x, a, a), "adds 3 tensors; a residual sum has two."),
        (lambda g, x, a: (a,), "adds 1 tensors; a residual sum has two."),
        (lambda g, x, a: (a, a), "adds a tensor to itself."),
        (
            lambda g, x, a: (a, g.call("mask", a, floating=False)),
            "adds tensors that are not floating-point.",
        ),
        (
            lambda g, x, a: (g.call("ids", a, floating=False), a),
            "adds tensors that are not floating-point.",
        ),
        (
            lambda g, x, a: (x, g.dense("gate", a, shape=(None, 1))),
            "adds tensors of different shapes, (None, 8) and (None, 1).",
        ),
        (
            lambda g, x, a: (g.dense("gate", a, shape=(None, 1, 8)), x),
            "adds tensors of different shapes, (None, 1, 8) and (None, 8).",
        ),
        (
            lambda g, x, a: (x, g.dense("fixed", a, shape=(2, 8))),
            "adds tensors of different shapes, (None, 8) and (2, 8).",
        ),
        (
            lambda g, x, a: (g.call("opaque", a, shape=None), x),
            "adds tensors of different shapes, an unknown shape and (None, 8).",
        ),
    ],
)
def test_sums_that_are_no_merge(addends, reason):
    assert only_refusal(one_sum(addends)) == reason


def test_a_call_without_addends_is_neither_block_nor_refusal():
    """A sum with a constant, or no sum at all."""
    g = Draft()
    x = g.tensor()
    found = find(g.done(g.call("plus_three", g.dense("conv", x))), 0.5)
    assert found.blocks == found.refusals == ()


def test_sizes_that_are_unknown_are_equal_to_each_other():
    g = Draft()
    shape = (None, None, None, 3)
    x = g.tensor(shape)
    assert blocks(g.done(g.add("sum", x, g.dense("conv", x, shape=shape), shape=shape))) == ["sum"]


# ------------------------------------------------------------------ rules 2, 3: what may be skipped


def chain(uses, outputs=(), last="c"):
    """x -> a -> b -> c, x + c, and calls or model outputs that take one of these too."""
    g = Draft()
    t = {"x": g.tensor()}
    for before, name in zip("xab", "abc"):
        t[name] = g.dense(name, t[before])
    t["sum"] = g.add("sum", t["x"], t[last])
    ends = [g.dense(f"tap_{name}", t[name]) for name in uses]
    return g.done(t["sum"], *ends, *(t[name] for name in outputs))


@pytest.mark.parametrize("escaping", ["a", "b"])
def test_a_tensor_used_outside_is_named_with_its_user(escaping):
    assert only_refusal(chain([escaping])) == (
        f"the branch cannot be skipped: the output of '{escaping}' is also used by "
        f"'tap_{escaping}'."
    )


@pytest.mark.parametrize("escaping", ["a", "b"])
def test_a_tensor_that_the_model_gives_out_is_named(escaping):
    assert only_refusal(chain([], outputs=[escaping])) == (
        f"the branch cannot be skipped: the output of '{escaping}' is an output of the model."
    )


def test_the_branch_itself_used_outside():
    assert only_refusal(chain(["c"])) == "the output of 'c' is also used by 'tap_c'."


def test_the_branch_itself_given_out():
    assert only_refusal(chain([], outputs=["c"])) == "the output of 'c' is an output of the model."


def test_the_shortcut_may_be_used_elsewhere_and_given_out():
    assert blocks(chain(["x"], outputs=["x", "sum"])) == ["sum"]


def test_a_tap_that_comes_back_into_the_branch_is_no_escape():
    g = Draft()
    x = g.tensor()
    a = g.dense("a", x)
    b = g.call("join", g.dense("b", a), g.relu("tap", a))
    assert blocks(g.done(g.add("sum", x, b))) == ["sum"]


def test_a_branch_that_a_later_sum_takes_too_is_refused():
    """The later sum is a block: what it adds to is the branch of the first."""
    g = Draft()
    x = g.tensor()
    a = g.dense("a", x)
    s = g.add("sum", x, a)
    graph = g.done(g.add("later", g.dense("b", s), a))
    found = find(graph, 0.5)
    assert found.refusals == (Refusal("sum", "the output of 'a' is also used by 'later'."),)
    (block,) = found.blocks
    assert (block.name, block.shortcut, region(graph, block)) == ("later", "a", ["sum", "b"])
    assert block.site.inputs == (a, x)


# ------------------------------------------------------------------ rule 4: projections


def two_sides(*, left=(), right=(), swap=False, start=True):
    """x -> stem -> left calls and right calls, and their sum; a side is a row of (name, fields)."""
    g = Draft()
    x = g.tensor()
    if start:
        x = g.dense("stem", x)
    ends = []
    for side in (left, right):
        t = x
        for name, fields in side:
            t = g.call(name, t, **fields)
        ends.append(t)
    return g.done(g.relu("end", g.add("sum", *(reversed(ends) if swap else ends))))


CONV = {"kind": "Conv2D", "weighted": 1, "params": 9, "projection": True}
NORM = {"kind": "BatchNormalization", "weighted": 1, "params": 4, "projection": True}
POOL = {"kind": "MaxPooling2D", "projection": True}
RELU = {"kind": "Activation"}
BRANCH = (("conv1", CONV), ("relu1", RELU), ("conv2", CONV), ("norm2", NORM))


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    "side",
    [
        (("short", CONV),),
        (("short", CONV), ("short_norm", NORM)),
        (("short", POOL),),
        (("short", POOL), ("short_conv", CONV), ("short_norm", NORM)),
    ],
    ids=["conv", "conv and norm", "pool", "pool, conv and norm"],
)
def test_projection_shortcuts_in_either_operand_order(side, swap):
    graph = two_sides(left=(*BRANCH, ("norm3", NORM)), right=side, swap=swap)
    block = only_block(graph)
    assert (block.kind, block.shortcut) == ("projection", side[-1][0])
    assert region(graph, block) == ["conv1", "relu1", "conv2", "norm2", "norm3"]
    stem = graph.calls[0].outputs[0]
    assert block.site.inputs == (stem,)
    assert graph.calls[graph.producer[block.site.shortcut]].name == side[-1][0]
    assert graph.calls[graph.producer[block.site.branch]].name == "norm3"
    assert block.params == 9 + 9 + 4 + 4


@pytest.mark.parametrize("swap", [False, True])
def test_equal_work_on_both_sides_is_refused(swap):
    side = (("short", CONV), ("short_conv", CONV), ("short_norm", NORM))
    assert only_refusal(two_sides(left=BRANCH, right=side, swap=swap)) == (
        "its two inputs hold equal work (3 layers with weights each), so neither is a shortcut."
    )


def test_a_lighter_side_that_does_more_than_change_size_is_refused():
    side = (("short", CONV), ("squash", RELU))
    assert only_refusal(two_sides(left=BRANCH, right=side)) == (
        "its lighter side holds 'squash' (Activation), which is not a projection (convolution, "
        "dense, norm, pooling, padding, reshape, Lambda)."
    )


def test_sides_that_start_from_different_tensors_are_refused():
    """Feature pyramids, and sums of two inputs."""
    g = Draft()
    x, y = g.tensor(), g.tensor()
    a = g.dense("deep", g.dense("deeper", x))
    graph = g.done(g.add("sum", a, g.dense("lateral", y)))
    assert only_refusal(graph) == "its two inputs do not start from a common tensor."


def test_a_sum_of_two_model_inputs_is_refused():
    g = Draft()
    graph = g.done(g.add("sum", g.tensor(), g.tensor()))
    assert only_refusal(graph) == "its two inputs do not start from a common tensor."


def test_embeddings_of_the_same_ids_do_not_start_from_a_common_tensor():
    g = Draft()
    ids = g.tensor((None,), floating=False)
    lookup = {"kind": "Embedding", "embedding": True, "weighted": 1, "params": 80}
    words, places = g.call("words", ids, **lookup), g.call("places", ids, **lookup)
    assert only_refusal(g.done(g.add("sum", words, places))) == (
        "its two inputs do not start from a common tensor."
    )


def test_a_lighter_side_with_an_input_of_its_own_is_refused():
    g = Draft()
    x, y = g.dense("stem", g.tensor()), g.tensor()
    a = g.dense("conv2", g.dense("conv1", x))
    b = g.dense("mixed", x, y)
    assert only_refusal(g.done(g.add("sum", a, b))) == (
        "its lighter side has an input that the other does not start from."
    )


@pytest.mark.parametrize("name", ["norm2", "short"])
@pytest.mark.parametrize("how", ["used", "given out"])
def test_a_side_that_is_needed_elsewhere_is_refused(name, how):
    graph = two_sides(left=BRANCH, right=(("short", CONV),))
    tensor = next(c.outputs[0] for c in graph.calls if c.name == name)
    if how == "used":
        tap = Call("tap", "Dense", 1, (tensor,), (len(graph.tensors),))
        graph = dataclasses.replace(
            graph,
            tensors=(*graph.tensors, Tensor(SHAPE)),
            calls=(*graph.calls, tap),
            outputs=(*graph.outputs, len(graph.tensors)),
        )
        reason = f"the output of '{name}' is also used by 'tap'."
    else:
        graph = dataclasses.replace(graph, outputs=(*graph.outputs, tensor))
        reason = f"the output of '{name}' is an output of the model."
    assert only_refusal(graph) == reason


# ------------------------------------------------------------------ rule 5: several inputs


def test_masks_and_context_are_inputs_of_the_branch_after_the_blocks_own():
    g = Draft()
    mask, context, x = g.tensor((None, 4), floating=False), g.tensor(), g.tensor()
    a = g.dense("cross", g.dense("query", x), context, mask)
    graph = g.done(g.add("sum", a, x))
    block = only_block(graph)
    assert block.site.inputs == (x, context, mask)
    assert region(graph, block) == ["query", "cross"]


def test_a_blocks_own_input_comes_first_even_if_another_is_taken_earlier():
    g = Draft()
    context, x = g.tensor(), g.tensor()
    a = g.dense("join", g.dense("early", context), x)
    b = g.add("inner", a, g.dense("late", context, a))
    graph = g.done(g.add("sum", x, g.dense("last", b)), g.relu("out", context))
    assert find(graph, 0.5, nested="outer").blocks[0].site.inputs[0] == x


def test_a_side_input_computed_for_the_branch_alone_is_skipped_with_it():
    """A time embedding with its own projection in each block."""
    g = Draft()
    time, x = g.tensor(), g.tensor()
    scale = g.dense("time_proj", time)
    graph = g.done(g.add("sum", x, g.dense("conv", x, scale)), g.relu("out", time))
    block = only_block(graph)
    assert region(graph, block) == ["time_proj", "conv"]
    assert block.site.inputs == (x, time)


def test_a_side_input_computed_for_others_too_runs_in_any_case():
    g = Draft()
    time, x = g.tensor(), g.tensor()
    scale = g.dense("time_proj", time)
    s = g.add("sum1", x, g.dense("conv1", x, scale))
    graph = g.done(g.add("sum2", s, g.dense("conv2", s, scale)))
    found = find(graph, 0.5)
    assert [region(graph, b) for b in found.blocks] == [["conv1"], ["conv2"]]
    assert [b.site.inputs for b in found.blocks] == [(x, scale), (s, scale)]


def test_a_tower_that_feeds_only_this_branch_keeps_its_own_blocks():
    """A text encoder whose last use is the one cross attention."""
    g = Draft()
    text, x = g.tensor(), g.tensor()
    t = g.add("text_sum", text, g.dense("text_conv", text))
    t = g.dense("text_norm", t)
    graph = g.done(g.add("sum", x, g.dense("cross", x, t)))
    found = find(graph, 0.5)
    assert [(b.name, region(graph, b)) for b in found.blocks] == [
        ("text_sum", ["text_conv"]),
        ("sum", ["text_norm", "cross"]),
    ]


def test_paths_are_judged_on_floating_point_tensors():
    """A mask made from the first tensors and used in every block does not join the blocks."""
    g = Draft()
    ids = g.tensor((None,), floating=False)
    mask = g.call("not_equal", ids, floating=False)
    x = g.call("embed", ids, embedding=True, weighted=1, params=80)
    for i in range(2):
        x = g.add(f"sum{i}", x, g.dense(f"attend{i}", x, mask))
    found = find(g.done(x), 0.5)
    assert [b.layers for b in found.blocks] == [("attend0",), ("attend1",)]
    assert not found.refusals


def test_a_mask_made_in_the_branch_and_used_outside_it_is_an_escape():
    g = Draft()
    x = g.tensor()
    a = g.dense("conv", x)
    mask = g.call("compare", a, floating=False)
    s = g.add("sum", x, g.dense("attend", a, mask))
    assert only_refusal(g.done(g.dense("later", s, mask))) == (
        "the branch cannot be skipped: the output of 'conv' is also used by 'compare'."
    )


# ------------------------------------------------------------------ rule 6: weights


def test_a_branch_without_weights_is_refused():
    g = Draft()
    x = g.tensor()
    assert only_refusal(g.done(g.add("sum", x, g.relu("relu", x)))) == (
        "the branch has no weights."
    )


def test_a_branch_that_only_looks_up_positions_is_refused():
    """GPT-2's x + PositionEmbedding(x)."""
    g = Draft()
    x = g.tensor()
    places = g.call("places", x, embedding=True, weighted=1, params=80)
    assert only_refusal(g.done(g.add("sum", x, g.relu("drop", places)))) == (
        "the branch only looks up embeddings."
    )


def test_an_embedding_beside_other_weights_is_no_reason_to_refuse():
    g = Draft()
    x = g.tensor()
    places = g.call("places", x, embedding=True, weighted=1, params=80)
    assert blocks(g.done(g.add("sum", x, g.dense("mix", places)))) == ["sum"]


def test_a_layer_with_weights_shared_with_the_outside_is_refused():
    g = Draft()
    x = g.dense("tied", g.tensor(), layer=5)
    a = g.relu("relu", g.dense("tied", x, layer=5))
    assert only_refusal(g.done(g.add("sum", x, a))) == (
        "the branch shares the layer 'tied' with the rest of the model."
    )


def test_blocks_that_share_weights_with_each_other_are_refused():
    """ALBERT's way: every block is the same layers."""
    g = Draft()
    x = g.tensor()
    for i in range(2):
        x = g.add(f"sum{i}", x, g.dense("tied", x, layer=5))
    found = find(g.done(x), 0.5)
    assert {r.reason for r in found.refusals} == {
        "the branch shares the layer 'tied' with the rest of the model."
    }
    assert [r.name for r in found.refusals] == ["sum0", "sum1"]


def test_a_layer_used_twice_in_one_branch_is_fine_and_its_weights_count_once():
    g = Draft()
    x = g.tensor()
    a = g.dense("twice", g.dense("twice", x, layer=5), layer=5)
    block = only_block(g.done(g.add("sum", x, a)))
    assert (block.layers, block.params) == (("twice", "twice"), 72)


def test_a_layer_without_weights_may_be_shared():
    g = Draft()
    x = g.relu("relu", g.tensor(), layer=5)
    a = g.dense("conv", g.relu("relu", x, layer=5))
    assert blocks(g.done(g.add("sum", x, a))) == ["sum"]


def test_a_layer_shared_with_a_nested_model_is_refused():
    inner = Draft("inner", 1)
    x = inner.tensor()
    inner = inner.done(inner.relu("end", inner.dense("tied", x, layer=5)))
    g = Draft()
    x = nest(g, inner, g.tensor())
    assert only_refusal(g.done(g.add("sum", x, g.dense("tied", x, layer=5)))) == (
        "the branch shares the layer 'tied' with the rest of the model."
    )


def test_a_layer_in_a_nested_model_in_the_branch_shared_with_the_outside_is_refused():
    inner = Draft("inner", 1)
    inner = inner.done(inner.dense("tied", inner.tensor(), layer=5))
    g = Draft()
    x = g.dense("tied", g.tensor(), layer=5)
    assert only_refusal(g.done(g.add("sum", x, nest(g, inner, x)))) == (
        "the branch shares the layer 'tied' with the rest of the model."
    )


def test_a_nested_model_shared_with_the_outside_is_refused():
    inner = Draft("inner", 1)
    inner = inner.done(inner.dense("dense", inner.tensor()))
    g = Draft()
    x = nest(g, inner, g.tensor())
    assert only_refusal(g.done(g.add("sum", x, nest(g, inner, x)))) == (
        "the branch shares the layer 'inner' with the rest of the model."
    )


# ------------------------------------------------------------------ rule 7: blocks in blocks


def block_in_block():
    g = Draft()
    x = g.tensor()
    a = g.dense("before", x)
    s = g.add("inner", a, g.dense("conv", a))
    return g.done(g.add("outer", x, g.dense("after", s)))


@pytest.mark.parametrize(
    ("nested", "kept", "left", "reason"),
    [
        (
            "inner",
            "inner",
            "outer",
            "holds the block 'inner'; nested=\"outer\" wraps this one instead.",
        ),
        ("outer", "outer", "inner", "lies in the branch of the block 'outer', which is wrapped."),
    ],
)
def test_of_blocks_in_blocks_one_is_kept(nested, kept, left, reason):
    found = find(block_in_block(), 0.5, nested=nested)
    assert [(b.name, b.index, b.count) for b in found.blocks] == [(kept, 1, 1)]
    assert found.refusals == (Refusal(left, reason),)


def three_deep():
    g = Draft()
    x = g.tensor()
    a = g.dense("a", x)
    b = g.dense("b", a)
    inner = g.add("inner", b, g.dense("c", b))
    middle = g.add("middle", a, inner)
    return g.done(g.add("outer", x, middle))


@pytest.mark.parametrize(("nested", "kept"), [("inner", "inner"), ("outer", "outer")])
def test_of_three_levels_the_last_one_is_kept(nested, kept):
    assert blocks(three_deep(), nested=nested) == [kept]


def test_where_decides_before_nesting_does():
    """So that `where` can choose the outer one of a single pair."""
    found = find(block_in_block(), 0.5, where=lambda block: block.name != "inner")
    assert [b.name for b in found.blocks] == ["outer"]
    assert found.refusals == (Refusal("inner", "left out by `where`."),)


def test_a_block_in_a_nested_model_lies_inside_a_block_around_that_model():
    inner = Draft("core", 1)
    x = inner.tensor()
    inner = inner.done(inner.add("sum", x, inner.dense("conv", x)))
    g = Draft()
    x = g.tensor()
    graph = g.done(g.add("around", x, nest(g, inner, x)))
    assert blocks(graph) == ["core/sum"]
    assert blocks(graph, nested="outer") == ["around"]


def test_blocks_of_nested_models_are_named_by_their_path_and_come_in_running_order():
    core = Draft("core", 2)
    x = core.tensor()
    core = core.done(core.add("sum", x, core.dense("conv", x)))
    body = Draft("body", 1)
    body = body.done(nest(body, core, body.tensor()))
    g = Draft()
    x = g.tensor()
    x = g.add("first", x, g.dense("conv1", x))
    x = nest(g, body, x)
    x = nest(g, body, x)  # the second call brings no new block
    graph = g.done(g.add("last", x, g.dense("conv2", x)))
    found = find(graph, 0.5)
    assert [b.name for b in found.blocks] == ["first", "body/core/sum", "last"]
    assert [b.site.graph for b in found.blocks] == [0, 2, 0]
    assert not found.refusals


# ------------------------------------------------------------------ rule 8: drops that are there


def test_the_drop_that_ends_a_branch_is_read():
    g = Draft()
    x = g.tensor()
    for i, drop in enumerate((0.9, None, 0.7)):
        x = g.add(f"sum{i}", x, g.call("drop", g.dense("conv", x), drop=drop))
    found = find(g.done(x), existing(1.0))
    assert [b.existing for b in found.blocks] == [0.9, None, 0.7]
    assert [b.survival_prob for b in found.blocks] == [0.9, 1.0, 0.7]
    assert found.expected_depth == pytest.approx(2.6)


def test_a_drop_before_the_end_of_a_branch_is_not_the_branchs():
    g = Draft()
    x = g.tensor()
    a = g.dense("conv", g.call("drop", x, drop=0.9))
    assert only_block(g.done(g.add("sum", x, a))).existing is None


def test_a_drop_and_a_sum_that_drops_are_both_in_the_existing_probability():
    g = Draft()
    x = g.tensor()
    a = g.call("drop", g.dense("conv", x), drop=0.8)
    graph = g.done(g.add("sum", x, a, drop=0.5))
    block = only_block(graph)
    assert block.existing == pytest.approx(0.4)
    assert graph.calls[block.site.drop].name == "drop"


def test_a_sum_that_drops_has_no_drop_in_its_branch():
    g = Draft()
    x = g.tensor()
    block = only_block(g.done(g.add("sum", x, g.dense("conv", x), drop=0.5)))
    assert (block.existing, block.site.drop) == (0.5, None)


def test_a_branch_that_ends_in_a_sum_that_drops_keeps_it():
    """It is the branch's last call, and no drop that could be left out."""
    g = Draft()
    x = g.tensor()
    a = g.dense("a", x)
    inner = g.add("inner", g.dense("c", g.dense("b", a)), a, drop=0.5)
    found = find(g.done(g.add("sum", x, inner)), 0.5, nested="outer")
    (block,) = found.blocks
    assert (block.name, block.existing, block.site.drop) == ("sum", None, None)


# ------------------------------------------------------------------ sums that name their branch


@pytest.mark.parametrize("branch", [0, 1])
def test_a_sum_that_says_which_input_is_the_branch(branch):
    g = Draft()
    x = g.tensor()
    a = g.dense("conv", x)
    addends = (x, a) if branch else (a, x)
    block = only_block(g.done(g.add("sum", *addends, branch=branch, factor=0.25)))
    assert (block.site.shortcut, block.site.branch, block.site.factor) == (x, a, 0.25)


def test_a_sum_that_takes_the_shortcut_for_the_branch_is_refused():
    g = Draft()
    x = g.dense("stem", g.tensor())
    graph = g.done(g.add("sum", x, g.dense("conv", x), branch=0))
    assert only_refusal(graph) == (
        "what 'sum' (Add) takes for the branch, the output of 'stem', is the shortcut by the paths "
        "that lead to it."
    )


@pytest.mark.parametrize("branch", [0, 1])
def test_a_sum_of_equal_sides_is_a_block_if_it_names_the_branch(branch):
    """Neither their work nor what they are made of says more than the layer itself."""
    g = Draft()
    x = g.tensor()
    sides = [g.call("left", g.dense("l", x)), g.call("right", g.dense("r", x))]
    block = only_block(g.done(g.add("sum", *sides, branch=branch)))
    assert (block.kind, block.site.branch) == ("projection", sides[branch])
    assert block.shortcut == ("right", "left")[branch]


# ------------------------------------------------------------------ what it costs


def test_the_cost_of_a_branch_is_that_of_its_calls():
    g = Draft()
    x = g.tensor()
    x = g.add("one", x, g.dense("b", g.dense("a", x, macs=30), macs=10))
    x = g.add("two", x, g.dense("c", x, macs=60))
    found = find(g.done(g.dense("head", x, macs=1000)), [0.9, 0.3])
    assert [b.macs for b in found.blocks] == [40, 60]
    assert found.expected_share == pytest.approx((0.9 * 40 + 0.3 * 60) / 100)
    assert found.graph.macs == 1100


def test_the_cost_is_not_known_where_sizes_are_not():
    g = Draft()
    x = g.tensor()
    x = g.add("one", x, g.dense("a", x, macs=30))
    x = g.add("two", x, g.dense("b", g.dense("c", x, macs=None), macs=1))
    found = find(g.done(x), 0.5)
    assert [b.macs for b in found.blocks] == [30, None]
    assert found.expected_share is None
    assert str(found).splitlines()[-1] == (
        "expected share of the branches' multiply-adds: unknown, for sizes that are not fixed"
    )


# ------------------------------------------------------------------ layers that stay closed


def test_a_layer_whose_blocks_cannot_be_reached_is_listed():
    g = Draft()
    x = g.call("stack", g.tensor(), params=9, closed="the blocks inside cannot be reached: so.")
    found = find(g.done(g.add("sum", x, g.dense("conv", x))), 0.5)
    assert [b.name for b in found.blocks] == ["sum"]
    assert [(r.name, r.reason) for r in found.refusals] == [
        ("stack", "the blocks inside cannot be reached: so.")
    ]


# ------------------------------------------------------------------ layers that are whole blocks


def whole(shape=SHAPE, **fields):
    g = Draft()
    fields = {"whole_block": True, "params": 100, "weighted": 4, **fields}
    x = g.tensor()
    mask = g.tensor((None,), floating=False)
    return g.done(g.call("encoder", x, mask, kind="Encoder", shape=shape, **fields))


def test_a_layer_that_is_a_block_by_itself():
    block = only_block(whole())
    assert (block.name, block.kind, block.layers, block.params) == (
        "encoder", "layer", ("encoder",), 100
    )  # fmt: skip
    assert (block.site.region, block.site.inputs, block.site.shortcut) == ({0}, (0, 1), -1)


def test_a_whole_block_that_changes_the_shape_is_refused():
    assert only_refusal(whole(shape=(None, 4))) == (
        "cannot stand aside for its input: it takes (None, 8) and gives (None, 4)."
    )


def test_a_whole_block_without_weights_is_refused():
    assert only_refusal(whole(params=0)) == "the layer has no weights."


def test_a_whole_block_used_twice_is_refused():
    g = Draft()
    x = g.tensor()
    for _ in range(2):
        x = g.call("tied", x, whole_block=True, params=9, layer=5)
    assert {r.reason for r in find(g.done(x), 0.5).refusals} == {
        "the branch shares the layer 'tied' with the rest of the model."
    }


def test_a_whole_block_inside_a_block_is_the_inner_one():
    g = Draft()
    x = g.tensor()
    a = g.call("encoder", x, whole_block=True, params=9)
    graph = g.done(g.add("sum", x, a))
    assert blocks(graph) == ["encoder"]
    assert blocks(graph, nested="outer") == ["sum"]


# ------------------------------------------------------------------ where


def three_blocks():
    g = Draft("three")
    x = g.tensor()
    for i in (1, 2, 3):
        x = g.add(f"sum{i}", x, g.relu(f"relu{i}", g.dense(f"conv{i}", x)))
    return g.done(x)


def test_where_sees_blocks_numbered_and_leaves_out_the_rest():
    seen = []

    def where(block):
        seen.append((block.name, block.index, block.count))
        return block.index != 2

    found = find(three_blocks(), 0.5, where=where)
    assert seen == [("sum1", 1, 3), ("sum2", 2, 3), ("sum3", 3, 3)]
    assert [(b.name, b.index, b.count) for b in found.blocks] == [("sum1", 1, 2), ("sum3", 2, 2)]
    assert [b.survival_prob for b in found.blocks] == [0.75, 0.5]
    assert found.refusals == (Refusal("sum2", "left out by `where`."),)


def test_where_may_return_numpy_bools():
    assert blocks(three_blocks(), where=lambda b: np.bool_(b.index > 1)) == ["sum2", "sum3"]


@pytest.mark.parametrize("answer", [1, None, "yes", 0.5, np.ones(2, bool)])
def test_where_must_return_bools(answer):
    with pytest.raises(TypeError) as error:
        find(three_blocks(), 0.5, where=lambda block: answer)
    assert str(error.value) == (
        f"`where` must return a bool for each block. Received: {answer!r} "
        f"(of type {type(answer).__name__}) for block 'sum1'."
    )


def test_where_must_be_a_function():
    with pytest.raises(TypeError) as error:
        find(three_blocks(), 0.5, where=[True])
    assert str(error.value) == (
        "`where` must be a function from a block to a bool, or None for all blocks. "
        "Received: [True] (of type list)."
    )


@pytest.mark.parametrize("nested", ["both", None, "Inner"])
def test_nested_must_be_inner_or_outer(nested):
    with pytest.raises(ValueError) as error:
        find(three_blocks(), 0.5, nested=nested)
    assert str(error.value) == f'`nested` must be "inner" or "outer". Received: {nested!r}.'


# ------------------------------------------------------------------ the result


@pytest.mark.parametrize(
    ("survival_prob", "probs"),
    [
        (0.4, [0.8, 0.6, 0.4]),
        (1.0, [1, 1, 1]),
        (0, [2 / 3, 1 / 3, 0]),
        ([0.9, 0.1, 0.3], [0.9, 0.1, 0.3]),
        (np.array([0.9, 0.1, 0.3]), [0.9, 0.1, 0.3]),
        (constant(0.7), [0.7, 0.7, 0.7]),
        (lambda block: block.index / 4, [0.25, 0.5, 0.75]),
    ],
)
def test_survival_prob_is_a_number_a_sequence_or_a_rule(survival_prob, probs):
    found = find(three_blocks(), survival_prob)
    assert [b.survival_prob for b in found.blocks] == pytest.approx(probs)
    assert found.expected_depth == pytest.approx(sum(probs))


def test_the_papers_expected_depth_of_54_blocks():
    g = Draft()
    x = g.tensor()
    for i in range(54):
        x = g.add(f"sum{i}", x, g.dense(f"conv{i}", x))
    assert find(g.done(x), 0.5).expected_depth == pytest.approx(40.25)


def test_the_printed_table():
    g = Draft("tiny")
    x = g.tensor()
    a = g.dense("conv1", x, params=1234, macs=800)
    x = g.add("sum1", x, g.relu("relu1", a))
    b = g.dense("conv3", g.dense("conv2", x, macs=100), macs=100)
    x = g.add("a_longer_name", g.dense("short", x), b)
    x = g.add("sum3", x, g.call("encode", x, whole_block=True, params=1))
    x = g.add("sum4", x, x)
    assert str(find(g.done(x), [0.875, 0.5, 1 / 3])) == (
        "3 residual blocks in 'tiny'\n"
        "#  merge          shortcut          branch          layers  params  survival_prob\n"
        "-  -------------  ----------------  --------------  ------  ------  -------------\n"
        "1  sum1           identity          conv1 .. relu1  2       1,234   0.875\n"
        "2  a_longer_name  projection short  conv2 .. conv3  2       144     0.5\n"
        "3  encode         layer             encode          1       1       0.3333\n"
        "expected depth: 1.708 of 3 blocks (56.9%)\n"
        "expected share of the branches' multiply-adds: 80.0%\n"
        "not wrapped:\n"
        "  sum3: holds the block 'encode'; nested=\"outer\" wraps this one instead.\n"
        "  sum4: adds a tensor to itself."
    )


def test_the_printed_table_of_one_block():
    g = Draft("tiny")
    x = g.tensor()
    assert str(find(g.done(g.add("sum", x, g.dense("conv", x))), 0.5)) == (
        "1 residual block in 'tiny'\n"
        "#  merge  shortcut  branch  layers  params  survival_prob\n"
        "-  -----  --------  ------  ------  ------  -------------\n"
        "1  sum    identity  conv    1       72      0.5\n"
        "expected depth: 0.5 of 1 block (50.0%)"
    )


def test_the_printed_table_of_no_block():
    g = Draft("tiny")
    x = g.tensor()
    empty = find(g.done(g.dense("conv", x)), 0.5)
    assert str(empty) == "No residual blocks found in 'tiny'."
    assert empty.expected_depth == 0
    refused = find(g.done(g.add("sum", x, x)), 0.5)
    assert str(refused) == (
        "No residual blocks found in 'tiny'.\nnot wrapped:\n  sum: adds a tensor to itself."
    )


def test_notebooks_get_a_table():
    g = Draft("a<b>")
    x = g.tensor()
    x = g.add("sum1", x, g.dense("conv & co", x, macs=1))
    shown = find(g.done(g.add("sum2", x, x)), 0.25)._repr_html_()
    assert shown.startswith("<p><b>1 residual block in &#x27;a&lt;b&gt;&#x27;</b></p><table><tr>")
    assert "<tr><th>#</th><th>merge</th>" in shown
    assert "<td>conv &amp; co</td><td>1</td><td>72</td><td>0.25</td></tr></table>" in shown
    assert "<p>expected depth: 0.25 of 1 block (25.0%)</p>" in shown
    assert "<p>expected share of the branches&#x27; multiply-adds: 25.0%</p>" in shown
    assert shown.endswith("<li><code>sum2</code>: adds a tensor to itself.</li></ul>")
    empty = find(Draft("m").done(), 0.5)._repr_html_()
    assert empty == "<p><b>No residual blocks found in &#x27;m&#x27;.</b></p>"


def test_findings_are_values():
    first, again = (find(three_blocks(), 0.5) for _ in range(2))
    assert first == again
    assert first != find(three_blocks(), 0.6)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.blocks[0].survival_prob = 1.0
