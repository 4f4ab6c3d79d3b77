"""Figures of one row each, drawn in cells and boxes: a divergence, the tree of a round.

Needs matplotlib, an extra.
"""

import itertools
import math
from collections.abc import Sequence

import matplotlib
import matplotlib.colors
import matplotlib.ticker
import numpy as np

from experiments.lib import curves, figures


Row = curves.Row


def divergence(rows: Sequence[Row]) -> figures.Figure:
    """Layers by operations: relative difference as colour, units in the last place.

    What stands before and after the layers is a band of one cell, in its place.
    Distances in units in the last place say little about size: between values of both
    signs near zero they are as large as numbers get. They stand in the cells as text.

    Args:
      rows: one of kind "parity"; a cell is `{"differing", "elements", "max_ulp",
        "relative"}`, or None where there was nothing to compare.
    """
    (row,) = rows
    operations, outside = row["operations"], row["outside"]
    bands = {name: [cell] * len(operations) for name, cell in outside.items()}
    first = {name: bands.pop(name) for name in ("embed",) if name in bands}
    layers = dict(zip(map(str, row["layers"]), row["cells"], strict=True))
    lines = first | layers | bands
    values, lowest, highest = levels([*lines.values()])
    figure, (axes,) = figures.new(2.4 + 0.24 * len(lines), 1, 1)
    cmap = matplotlib.colormaps["viridis"].with_extremes(
        under="#d0d0d0", over="#ff00ff"
    )
    norm = matplotlib.colors.Normalize(lowest, highest)
    looks = {"cmap": cmap, "norm": norm, "interpolation": "none"}
    image = axes.imshow(values, aspect="auto", **looks)
    for y, (name, line) in enumerate(lines.items()):
        # A band is one cell: its number stands once.
        for x, cell in enumerate(line[:1] if name in outside else line):
            if cell is not None and cell["max_ulp"]:
                ulp = cell["max_ulp"]
                power = f"{ulp:.0e}".replace("e+0", "e").replace("+", "")
                text = str(ulp) if ulp < 1000 else power
                looks = {"color": "black" if norm(values[y][x]) > 0.6 else "white"}
                looks |= {"fontsize": 5, "ha": "center", "va": "center"}
                # It stands inside the panel, whatever its size.
                axes.text(x, y, text, **looks, in_layout=False)
    axes.grid(visible=False)
    turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(operations)), operations, **turned)
    axes.set_yticks(range(len(lines)), lines, fontsize=9)
    axes.set_ylabel("layer")
    axes.set_title(_first(row), fontsize=11)
    ticks = {
        "ticks": matplotlib.ticker.MaxNLocator(integer=True),
        "format": lambda x, _: f"{10**x:.0e}",
    }
    label = "relative difference (norms)"
    figure.colorbar(image, ax=axes, pad=0.02, label=label, **ticks)
    return figure


def levels(lines: Sequence[Sequence[Row | None]]) -> tuple[np.ndarray, int, int]:
    """Returns decades of relative differences `[lines, cells]`, lowest and highest.

    Cells of equal bits are below the lowest, those whose difference is no number above
    the highest; NaN where there was nothing to compare.
    """
    # Equal bits have no relative difference; that of the signs of zeros is 0.
    none = {"differing": 0, "relative": None}
    of = lambda name: [[(cell or none)[name] for cell in line] for line in lines]
    relative, differs = np.array(of("relative"), float), np.array(of("differing")) > 0
    is_sized = differs & (relative > 0)
    found = np.log10(relative, where=is_sized, out=np.full(relative.shape, np.nan))
    lowest = math.floor(np.min(found[is_sized], initial=0.0)) if is_sized.any() else -8
    highest = max(math.ceil(found[is_sized].max()) if is_sized.any() else 0, lowest + 1)
    found[differs & ~is_sized] = lowest
    found[differs & np.isnan(relative)] = highest + 1
    found[~differs & [[cell is not None for cell in line] for line in lines]] = (
        lowest - 1
    )
    return found, lowest, highest


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


def tree(rows: Sequence[Row]) -> figures.Figure:
    """The drafts of a round by depth; the path that the target kept is drawn bold."""
    (row,) = rows
    parents, kept = row["parents"], {0, *row["kept"]}
    depth, place = _tree_layout(parents)
    figure, (axes,) = figures.new(max(2.4, 0.36 * (max(place) + 1)), 1, 1)

    def draw(column: int, parent: int, piece: str, width: float, **looks: str) -> None:
        ends = [depth[parent], depth[column]], [place[parent], place[column]]
        axes.plot(*ends, linewidth=width, zorder=1, **looks)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        words = {"ha": "center", "va": "center", "fontsize": 9, "family": "monospace"}
        # "$" would begin a formula.
        text = ascii(piece)[1:-1].replace("$", r"\$") or " "
        axes.text(depth[column], place[column], text, bbox=box, zorder=2, **words)

    for column, parent in enumerate(parents):
        looks = (2.4, "#009E73") if column in kept else (0.8, "#7F7F7F")
        draw(column, parent, row["pieces"][column], looks[0], color=looks[1])
    last = row["kept"][-1] if row["kept"] else 0
    depth.append(depth[last] + 1)
    place.append(place[last] + 0.45)
    draw(len(parents), last, row["own_piece"], 1.5, color="#0072B2", linestyle=":")
    axes.set(xlim=(-0.4, max(depth) + 0.6), ylim=(max(place) + 0.6, -0.6), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    axes.set_xlabel("depth (drafts from the pending token)")
    axes.set_title("green: kept; blue: the target's own token", fontsize=11)
    figures.whole_numbers(axes)
    return figure


def _tree_layout(parents: Sequence[int]) -> tuple[list[int], list[float]]:
    """Returns the depth of each column, and its place from top to bottom."""
    depth, place, leaves = [0] * len(parents), [0.0] * len(parents), itertools.count()

    def settle(column: int) -> float:
        below = []
        for child in range(column + 1, len(parents)):
            if parents[child] == column:
                depth[child] = depth[column] + 1
                below.append(settle(child))
        place[column] = sum(below) / len(below) if below else float(next(leaves))
        return place[column]

    settle(0)
    return depth, place
