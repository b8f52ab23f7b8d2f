"""The picture of a model: what is in it. What it looks like has to be looked at."""

import builtins
import pathlib

import pytest
import tensorflow as tf

from tfa_stochastic_depth import find_residuals
from tfa_stochastic_depth.plot import _BRANCH, _SHORTCUT, _source

keras = tf.keras
L = keras.layers


def model():
    """A stem, an identity block, a projection block around a fork, a nested block, a head."""
    x = inputs = keras.Input((4,), name="in")
    x = L.Dense(4, name="stem")(x)
    x = L.ReLU(name="stem_relu")(x)
    x = L.Add(name="first")([x, L.Dense(4, name="a2")(L.Dense(4, name="a1")(x))])
    gate = L.Dense(6, name="gate")(x)
    y = L.Multiply(name="gated")([L.Dense(6, name="b1")(x), gate])
    x = L.Add(name="second")([L.Dense(6, name="short")(x), y])
    u = keras.Input((6,), name="u")
    v = L.Add(name="third")([L.LayerNormalization(name="c1")(u), u])
    x = keras.Model(u, v, name="inner")(x)
    return keras.Model(inputs, L.Dense(2, name="head")(x), name="drawn")


def boxes(picture):
    return {node: node.attr["label"] or "" for node in picture.nodes()}


def box_with(picture, text):
    (node,) = [node for node, label in boxes(picture).items() if text in label]
    return node


def reached(picture, node):
    return {edge[1] for edge in picture.out_edges(node)}


def test_every_layer_is_drawn_once_and_blocks_with_their_probability():
    picture = _source(find_residuals(model(), [0.9, 0.8, 0.25]))
    text = "".join(boxes(picture).values())
    names = "stem stem_relu a1 a2 gate b1 gated short c1 head"
    for name in names.split():
        assert text.count(f">{name}  (") == 1
    for title in ("1  first   p = 0.9", "2  second   p = 0.8", "3  inner/third   p = 0.25"):
        assert text.count(title) == 1
    assert list(boxes(picture).values()).count("+") == 3


def test_chains_are_one_box_and_branches_another():
    picture = _source(find_residuals(model()))
    assert box_with(picture, ">stem  (") == box_with(picture, ">stem_relu  (")
    assert box_with(picture, ">a1  (") == box_with(picture, ">a2  (")
    assert box_with(picture, ">gate  (") == box_with(picture, ">gated  (")
    assert box_with(picture, ">stem  (") != box_with(picture, ">a1  (")


def test_edges_and_their_colours():
    picture = _source(find_residuals(model()))
    stem, branch = box_with(picture, ">stem  ("), box_with(picture, ">a1  (")
    (merge,) = reached(picture, branch)
    assert boxes(picture)[merge] == "+"
    assert reached(picture, stem) == {branch, merge}
    assert picture.get_edge(branch, merge).attr["color"] == _BRANCH
    assert picture.get_edge(stem, merge).attr["color"] == _SHORTCUT
    short = box_with(picture, ">short  (")
    assert reached(picture, merge) == {short, box_with(picture, ">b1  (")}
    (second,) = reached(picture, short)
    assert picture.get_edge(short, second).attr["color"] == _SHORTCUT
    # From there into the nested model, as branch and as shortcut, and out again to the head.
    inner = box_with(picture, ">c1  (")
    (third,) = reached(picture, inner)
    assert reached(picture, second) == {inner, third}
    assert reached(picture, third) == {box_with(picture, ">head  (")}
    (end,) = reached(picture, box_with(picture, ">head  ("))
    assert ">output<" in boxes(picture)[end]


def test_frames_hold_the_blocks_and_nested_models():
    source = _source(find_residuals(model())).string()
    assert source.count("subgraph cluster_") == 4
    assert "label=inner" in source


def test_long_chains_are_cut_in_the_middle():
    x = inputs = keras.Input((4,))
    for i in range(40):
        x = L.Dense(4, name=f"dense{i}")(x)
    picture = _source(find_residuals(keras.Model(inputs, L.Add()([inputs, x]))))
    label = boxes(picture)[box_with(picture, "dense0  (")]
    assert "... 24 more ..." in label
    assert "dense7  (" in label and "dense8  (" not in label and "dense32  (" in label


def test_layers_that_are_blocks_and_models_without_any():
    x = inputs = keras.Input((4,))
    x = L.Dense(4, name="block")(x)
    plain = keras.Model(inputs, x)
    picture = _source(find_residuals(plain, block_layers=L.Dense))
    assert "1  block   p = 0.5" in boxes(picture)[box_with(picture, ">block  (")]
    assert "p = " not in _source(find_residuals(plain)).string().replace("1 - p", "")


def test_names_are_no_markup():
    x = keras.Input((4,))
    y = L.Add(name="a.b")([x, L.Dense(4, name="x_and_y")(x)])
    found = find_residuals(keras.Model(x, y, name="drawn"))
    object.__setattr__(found, "model", "<b>&")
    assert "&lt;b&gt;&amp;" in _source(found).string()


@pytest.mark.parametrize(
    ("ending", "start"),
    [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF"), (".SVG", b"<?")],
)
def test_files(tmp_path, ending, start):
    path = tmp_path / f"blocks{ending}"
    find_residuals(model()).plot(path if ending != ".png" else str(path))
    assert path.read_bytes().startswith(start)


@pytest.mark.parametrize("path", ["blocks", "blocks.jpeg", pathlib.Path("a.svg/b")])
def test_another_ending(path):
    with pytest.raises(ValueError) as error:
        find_residuals(model()).plot(path)
    assert str(error.value) == (
        f"`path` must end in .svg, .png, .pdf, which says the format. Received: {str(path)!r}."
    )


def test_without_pygraphviz(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "pygraphviz":
            raise ImportError("No module named 'pygraphviz'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError) as error:
        find_residuals(model()).plot(tmp_path / "blocks.svg")
    assert str(error.value) == (
        "Drawing needs pygraphviz 2 or newer, which brings Graphviz along: "
        "pip install tfa-stochastic-depth[plot]"
    )
