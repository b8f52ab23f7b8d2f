"""The picture of a model with its residual blocks."""

from __future__ import annotations

import html
import pathlib

FORMATS = (".svg", ".png", ".pdf")

_BRANCH = "#1f6fb4"
_SHORTCUT = "#d9730d"
_OTHER = "#8a8f98"
_ROWS = 16  # of a box; longer chains are cut in the middle


def draw(residuals, path):
    """Writes a picture of a model: its blocks as frames, shortcuts and branches in two colours.

    Args:
        residuals: A `Residuals`.
        path: Path of the file; one of the endings in `FORMATS`.

    Raises:
        ImportError: If pygraphviz is not installed.
        ValueError: If the path has another ending.
    """
    path = pathlib.Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(
            f"`path` must end in {', '.join(FORMATS)}, which says the format. "
            f"Received: {str(path)!r}."
        )
    _source(residuals).draw(str(path), format=path.suffix[1:].lower(), prog="dot")


def _source(residuals):
    """The picture as a pygraphviz graph."""
    try:
        import pygraphviz
    except ImportError as error:
        raise ImportError(
            "Drawing needs pygraphviz 2 or newer, which brings Graphviz along: "
            "pip install tfa-stochastic-depth[plot]"
        ) from error
    picture = pygraphviz.AGraph(directed=True, strict=False, compound=True)
    picture.graph_attr.update(fontname="Helvetica", nodesep="0.3", ranksep="0.3")
    picture.graph_attr.update(labelloc="t", labeljust="l", label=_legend(residuals.model))
    picture.node_attr.update(fontname="Helvetica", fontsize="10", shape="plain")
    picture.edge_attr.update(color=_OTHER, arrowsize="0.6")
    _Drawing(picture, residuals.blocks).add(residuals.graph)
    return picture


class _Drawing:
    """Adds the graphs of a model, nested ones as frames, to a picture."""

    def __init__(self, picture, blocks):
        self._picture = picture
        self._blocks = {(b.site.graph, b.site.merge): b for b in blocks}
        self._holders = {place[0] for place in self._blocks}  # graphs with blocks of their own
        self._count = 0

    def add(self, graph):
        """Draws the outermost graph."""
        makers = {}
        for t in range(len(graph.tensors)):
            if t not in graph.producer:
                makers[t] = self._box(self._picture, ["input"], _OTHER)
        self._graph(self._picture, graph, makers)
        ends = dict.fromkeys(makers[t] for t in graph.outputs)
        output = self._box(self._picture, ["output"], _OTHER)
        for end in ends:
            self._picture.add_edge(end, output)

    def _graph(self, frame, graph, makers):
        """Draws the calls of a graph. `makers` is tensor -> node, and is filled up."""
        groups = _groups(graph, self._blocks, self._expands)
        for i, call in enumerate(graph.calls):
            group = groups[i]
            if i != (group.calls[0] if group.merge is None else group.merge):
                continue  # drawn with the others of its group
            if group.merge is not None:
                self._block(frame, graph, group, self._blocks[graph.layer, i], makers)
            elif self._expands(call):
                self._nested(frame, graph, call, makers)
            else:
                self._plain(frame, graph, group.calls, makers, _OTHER)

    def _expands(self, call):
        """Whether the inside of a call is drawn: blocks are in it."""
        inside = call.graph.walk() if call.graph is not None else ()
        return any(graph.layer in self._holders for _, graph in inside)

    def _nested(self, frame, graph, call, makers):
        inner = self._frame(frame, call.name, "#f7f7f7", _OTHER)
        entries = [t for t in range(len(call.graph.tensors)) if t not in call.graph.producer]
        own = dict(zip(entries, (makers[t] for t in dict.fromkeys(call.inputs))))
        for t in entries[len(own) :]:
            own[t] = self._box(inner, ["input"], _OTHER)
        self._graph(inner, call.graph, own)
        makers.update(zip(call.outputs, (own[t] for t in call.graph.outputs)))

    def _plain(self, frame, graph, calls, makers, colour, title=None):
        """Draws a chain of calls as one box, and the edges that lead to it."""
        node = self._box(frame, [_words(graph.calls[i]) for i in calls], colour, title)
        weight = "1" if colour == _SHORTCUT else "8"  # how straight
        for t in graph.boundary(calls):
            self._picture.add_edge(makers[t], node, color=colour, weight=weight)
        for i in calls:
            makers.update(dict.fromkeys(graph.calls[i].outputs, node))
        return node

    def _block(self, frame, graph, group, block, makers):
        title = f"{block.index}  {block.name}   p = {block.survival_prob:.3g}"
        inner = self._frame(frame, "", "#eef4fb", _BRANCH)
        site = block.site
        if block.kind == "layer":
            self._plain(inner, graph, [site.merge], makers, _BRANCH, title)
            return
        if group.shortcut:
            self._plain(inner, graph, group.shortcut, makers, _SHORTCUT)
        self._plain(inner, graph, sorted(site.region), makers, _BRANCH, title)
        merge = self._name()
        inner.add_node(
            merge, label="+", shape="circle", fixedsize="true", width="0.3", fontsize="14"
        )
        self._picture.add_edge(makers[site.branch], merge, color=_BRANCH, penwidth="2", weight="8")
        self._picture.add_edge(makers[site.shortcut], merge, color=_SHORTCUT, penwidth="2")
        makers.update(dict.fromkeys(graph.calls[site.merge].outputs, merge))

    def _frame(self, frame, title, fill, colour):
        return frame.add_subgraph(
            name=f"cluster_{self._name()}",
            label=title,
            labelloc="b",
            labeljust="r",
            fontsize="11",
            fontname="Helvetica-Bold",
            style="rounded,filled",
            fillcolor=fill,
            color=colour,
        )

    def _box(self, frame, lines, colour, title=None):
        if len(lines) > _ROWS:
            half = _ROWS // 2
            hidden = len(lines) - 2 * half
            lines = [*lines[:half], f"... {hidden} more ...", *lines[-half:]]
        texts = [html.escape(line) for line in lines]
        if title is not None:  # not that of the frame, which edges would cross
            texts.insert(0, f'<FONT COLOR="{colour}"><B>{html.escape(title)}</B></FONT>')
        rows = "".join(f'<TR><TD ALIGN="LEFT">{text}</TD></TR>' for text in texts)
        node = self._name()
        frame.add_node(
            node,
            label=f'<<TABLE BORDER="1" CELLBORDER="0" CELLSPACING="0" CELLPADDING="2" '
            f'STYLE="ROUNDED" COLOR="{colour}" BGCOLOR="white">{rows}</TABLE>>',
        )
        return node

    def _name(self):
        self._count += 1
        return f"n{self._count}"


class _Group:
    """Calls that are drawn together: a block, or a chain of calls."""

    def __init__(self, calls, merge=None, shortcut=()):
        self.calls = calls
        self.merge = merge
        self.shortcut = shortcut


def _groups(graph, blocks, expands):
    """Call -> its group. A block is drawn where its merge is, so all it needs is there by then."""
    groups = {}
    for i in range(len(graph.calls)):
        block = blocks.get((graph.layer, i))
        if block is None:
            continue
        shortcut = ()
        if block.kind == "projection":
            shortcut = graph.between(block.site.inputs[0], block.site.shortcut)
            shortcut = tuple(j for j in shortcut if j not in groups)
        group = _Group([*shortcut, *block.site.region, i], merge=i, shortcut=shortcut)
        groups.update(dict.fromkeys(group.calls, group))
    for i, call in enumerate(graph.calls):
        if i in groups:
            continue
        before = {graph.producer.get(t) for t in call.inputs}
        last = before.pop() if len(before) == 1 else None
        chain = (
            last is not None
            and groups[last].merge is None
            and not expands(call)
            and not expands(graph.calls[last])
            and all(graph.users.get(t) == (i,) for t in graph.calls[last].outputs)
            and not set(graph.calls[last].outputs) & set(graph.outputs)
        )
        if chain:
            groups[last].calls.append(i)
            groups[i] = groups[last]
        else:
            groups[i] = _Group([i])
    return groups


def _legend(name):
    words = [
        f"<B>{html.escape(name)}</B>",
        f'<FONT COLOR="{_BRANCH}">branch, dropped with 1 - p</FONT>',
        f'<FONT COLOR="{_SHORTCUT}">shortcut, always kept</FONT>',
    ]
    return f"<{'    '.join(words)}>"


def _words(call):
    return f"{call.name}  ({call.kind})"
