"""The picture of a run: for each setting a panel of bars, with marks where they should end.

    python benchmarks/picture.py results.json results.png

draws what an earlier `run.py --json results.json` measured.
"""

import json
import math
import pathlib
import sys

from matplotlib.figure import Figure

COLORS = {
    "plain": "#8c8c8c",
    "plain/half": "#8c8c8c",
    "mask": "#c9a66b",
    "mask/sample": "#c9a66b",
    "tfa": "#c9a66b",
    "batch": "#3b76af",
    "row": "#4c9a6a",
    "ours": "#3b76af",
}
MARK = {"color": "black", "markeredgecolor": "white", "markersize": 6, "zorder": 3}
NUMBERS = {"va": "center", "fontsize": 8}


def draw_panel(axis, title, variants):
    """Draws one setting: measured ratios as bars, executed shares as marks."""
    names = [name for name in variants if name.partition(" ")[0] != "plain"]
    rows = [variants[name] for name in names]
    for place, (name, row) in enumerate(zip(names, rows)):
        color = COLORS[name.partition(" ")[0]]
        axis.barh(place, row["fit"], 0.72, color=color, xerr=row["error"], ecolor="#333333")
        numbers = f"{row['fit']:.2f}  ({row['executed']:.2f})"
        axis.text(1.01, place, numbers, transform=axis.get_yaxis_transform(), **NUMBERS)
    executed = [row["executed"] for row in rows]
    axis.plot(executed, range(len(rows)), "D", clip_on=False, **MARK)
    axis.axvline(1, color=COLORS["plain"], linewidth=1, linestyle="--", zorder=0)
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(0, max(1.25, 0.05 + max(row["fit"] + row["error"] for row in rows)))
    axis.set_title(title, fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)


def draw(results, path):
    """Draws the train steps of a run.

    Args:
        results: What `run.main` returned.
        path: Where to write the picture.
    """
    panels = results["steps"]
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    tallest = max(len(panel["variants"]) for panel in panels.values())
    size = 6.5 * columns, 1 + lines * (0.7 + 0.27 * tallest)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis, (title, panel) in zip(axes, panels.items()):
        draw_panel(axis, title, panel["variants"])
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(
        "Time of a step / time of the plain model's step: bars, with standard error\n"
        "Share of the branches' multiply-adds that was executed: diamonds, (in brackets)"
        f"\nTensorFlow {results['tensorflow']}, {results['machine']}",
        fontsize=11,
    )
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw(json.loads(pathlib.Path(sys.argv[1]).read_text()), sys.argv[2])
