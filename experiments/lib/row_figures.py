"""Figures of one row each: a divergence, the tree of a round, a calibration.

Needs matplotlib, an extra.
"""

import itertools
import math
from collections.abc import Sequence

import matplotlib
import matplotlib.axes
import matplotlib.colors
import matplotlib.ticker

from experiments.lib import curves, figures


Row = curves.Row
Figure = figures.Figure


@figures.styled
def divergence(row: Row) -> Figure:
    """Layers by operations: relative difference as colour, units in the last place.

    What stands before and after the layers is a band of one cell, in its place.
    Distances in units in the last place say little about size: between values of both
    signs near zero they are as large as numbers get. They stand in the cells as text.

    Args:
      row: of kind "parity"; a cell is `{"differing", "elements", "max_ulp",
        "relative"}`, or None where there was nothing to compare.

    Raises:
      ValueError: a row of a version that wrote no relative differences.
    """
    operations, outside = row["operations"], row["outside"]
    bands = {name: [cell] * len(operations) for name, cell in outside.items()}
    first = {name: cells for name, cells in bands.items() if name == "embed"}
    last = {name: cells for name, cells in bands.items() if name != "embed"}
    layers = dict(zip(map(str, row["layers"]), row["cells"], strict=True))
    lines = first | layers | last
    scale = _Scale([cell for line in lines.values() for cell in line])
    values = [[scale.level(cell) for cell in line] for line in lines.values()]
    figure, (axes,) = figures.new(2.4 + 0.24 * len(lines), 1, 1)
    colours = matplotlib.colormaps["viridis"].with_extremes(
        under="#d0d0d0", over="#ff00ff"
    )
    norm = matplotlib.colors.Normalize(scale.lowest, scale.highest)
    looks = {"cmap": colours, "norm": norm, "interpolation": "none"}
    image = axes.imshow(values, aspect="auto", **looks)
    for y, line in enumerate(lines.values()):
        # A band is one cell: its number stands once.
        for x, cell in enumerate(line if len(set(map(id, line))) > 1 else line[:1]):
            if cell is not None and cell["max_ulp"]:
                _write_ulp(axes, x, y, cell["max_ulp"], norm(values[y][x]))
    axes.grid(visible=False)
    axes.set_xticks(range(len(operations)), operations)
    axes.tick_params(axis="x", rotation=45)
    for label in axes.get_xticklabels():
        label.set(ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(lines)), lines, fontsize=9)
    axes.set_ylabel("layer")
    formatter = matplotlib.ticker.FuncFormatter(lambda x, _: f"{10**x:.0e}")
    bar = figure.colorbar(
        image,
        ax=axes,
        pad=0.02,
        format=formatter,
        ticks=matplotlib.ticker.MaxNLocator(integer=True),
    )
    bar.set_label("relative difference (norms)")
    axes.set_title(_first(row), fontsize=11)
    return figure


class _Scale:
    """Decades of relative differences, from the smallest to the largest one.

    Attributes:
      lowest, highest: the ends, as logarithms to base 10.
    """

    def __init__(self, cells: Sequence[Row | None]):
        if any(cell is not None and "relative" not in cell for cell in cells):
            raise ValueError(
                "the row has no relative differences, which an earlier parity.py did "
                "not write; run it again"
            )
        levels = [
            math.log10(cell["relative"])
            for cell in cells
            if cell is not None and cell["differing"] and cell["relative"]
        ]
        self.lowest = math.floor(min(levels, default=-8.0))
        self.highest = max(math.ceil(max(levels, default=0.0)), self.lowest + 1)

    def level(self, cell: Row | None) -> float:
        """Where a cell's colour lies: below the scale if its bits are equal, above it
        if its difference is no number."""
        if cell is None:
            return math.nan
        if not cell["differing"]:
            return self.lowest - 1
        if cell["relative"] is None:
            return self.highest + 1
        if not cell["relative"]:  # The signs of zeros.
            return self.lowest
        return math.log10(cell["relative"])


def _write_ulp(
    axes: matplotlib.axes.Axes, x: int, y: int, ulp: int, shade: float
) -> None:
    """A cell's distance in units in the last place, readable on its colour."""
    text = str(ulp) if ulp < 1000 else f"{ulp:.0e}".replace("e+0", "e").replace("+", "")
    colour = "black" if shade > 0.6 else "white"
    looks = {"fontsize": 5, "color": colour, "ha": "center", "va": "center"}
    looks["in_layout"] = False  # It stands inside the panel, whatever its size.
    axes.text(x, y, text, **looks)


def _first(row: Row) -> str:
    """The first differences in words, and what the colours do not say.

    Rows without a `prefix` are of runs that started from the same K/V.
    """
    before = (row.get("prefix") or {}).get("first")
    first, where = row.get("first"), "nothing differs"
    if first is not None:
        layer = "" if first["layer"] is None else f"layer {first['layer']}, "
        where = f"first: {layer}{first['operation']}, position {first['position']}"
    colours = (
        f"{where}\nnumbers: largest difference (ULP); grey: equal bits, white: not "
        "compared, pink: not finite"
    )
    if before is None:
        return colours
    return (
        f"prefix K/V: first: layer {before['layer']}, {before['part']}, "
        f"position {before['position']}\nwindow: {colours}"
    )


@figures.styled
def tree(row: Row) -> Figure:
    """The drafts of a round by depth; the path that the target kept is drawn bold."""
    parents, kept = row["parents"], {0, *row["kept"]}
    depth, place = _tree_layout(parents)
    figure, (axes,) = figures.new(max(2.4, 0.36 * (max(place) + 1)), 1, 1)
    for column, parent in enumerate(parents):
        is_kept = column in kept
        looks = {"color": "#009E73" if is_kept else "#7F7F7F", "zorder": 1}
        if column:
            ends = [depth[parent], depth[column]], [place[parent], place[column]]
            axes.plot(*ends, linewidth=2.4 if is_kept else 0.8, **looks)
        weight = "bold" if is_kept else "normal"
        _token(axes, depth[column], place[column], row["pieces"][column], weight)
    last = row["kept"][-1] if row["kept"] else 0
    at = depth[last] + 1, place[last] + 0.45
    axes.plot([depth[last], at[0]], [place[last], at[1]], ":", color="#0072B2")
    _token(axes, *at, row["own_piece"], "bold", color="#0072B2")
    axes.set_xlim(-0.4, max(max(depth), at[0]) + 0.6)
    axes.set_ylim(max(*place, at[1]) + 0.6, -0.6)  # From top to bottom.
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    axes.set_xlabel("depth (drafts from the pending token)")
    axes.set_title("green: kept; blue: the target's own token", fontsize=11)
    figures.whole_numbers(axes.xaxis)
    return figure


def _tree_layout(parents: Sequence[int]) -> tuple[list[int], list[float]]:
    """Returns the depth of each column, and its place from top to bottom."""
    children: dict[int, list[int]] = {}
    depth = [0] * len(parents)
    for column, parent in enumerate(parents[1:], 1):
        children.setdefault(parent, []).append(column)
        depth[column] = depth[parent] + 1
    place, leaves = [0.0] * len(parents), itertools.count()

    def settle(column: int) -> float:
        below = [settle(child) for child in children.get(column, ())]
        place[column] = sum(below) / len(below) if below else float(next(leaves))
        return place[column]

    settle(0)
    return depth, place


def _token(axes, x: float, y: float, piece: str, weight: str, **looks: str) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    words = {"ha": "center", "va": "center", "fontsize": 9, "family": "monospace"}
    # "$" would begin a formula.
    text = ascii(piece)[1:-1].replace("$", r"\$") or " "
    axes.text(x, y, text, bbox=box, fontweight=weight, zorder=2, **words, **looks)


@figures.styled
def reliability(row: Row) -> Figure:
    """Share of drafts kept over the chance that was given, before and after fitting."""
    figure, (axes,) = figures.new(4.2, 1, 1)
    axes.plot([0, 1], [0, 1], ":", color="#7F7F7F")
    for place, (label, suffix) in enumerate((("before", "_before"), ("fitted", ""))):
        names = ("rounds", "chance", "kept")
        counts, *both = (row[f"bin_{name}{suffix}"] for name in names)
        at = [number for number, count in enumerate(counts) if count]
        chances, kept = ([values[number] for number in at] for values in both)
        error = sum(row[f"ece{suffix}"]) / len(row[f"ece{suffix}"])
        label = f"{label}: calibration error {error:.3f}"
        axes.plot(chances, kept, label=label, **figures.looks_of(place))
    axes.set(xlabel="chance that the drafts up to one are kept, as given")
    axes.set(ylabel="share of rounds that kept them")
    title = f"gamma {row['gamma']}, temperature {row['temperature']:g}"
    axes.legend(title=title, loc="upper left")
    return figure
