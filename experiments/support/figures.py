"""The figures: rows of results -> SVG whose bytes depend on nothing else.

Every function takes the rows of one figure and returns it; `save` writes it. They
draw what they are given and measure nothing. Needs matplotlib, an extra.
"""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

import matplotlib
import matplotlib.axes
import matplotlib.colors
import matplotlib.ticker

from experiments.support import figure_data, figure_parts as parts, figure_source


Row = figure_data.Row
Figure = parts.Figure


def save(figure: Figure, path: pathlib.Path, *, rows: Sequence[Row]) -> None:
    """Writes the figure in the format of the path's suffix; the same bytes each time.

    Under it stands which model, machine and prompts it is of. An SVG names the rows
    that it was drawn from by `figure_source.digests`, see `read_source`.

    Args:
      rows: those that the figure was drawn from.

    Raises:
      ValueError: a path that cannot be written, or an unknown suffix.
    """
    metadata = None
    if path.suffix == ".svg":
        digests = " ".join(figure_source.digests(rows))
        # No date, and no version of what drew it: only SVG would carry them.
        metadata = {"Date": None, "Creator": "spec_jax", "Source": digests}
    with parts.style():
        figure.supxlabel(
            figure_source.caption(rows), x=0.01, ha="left", fontsize=7, color="#555555"
        )
        try:
            figure.savefig(path, metadata=metadata, dpi=150)
        except OSError as error:
            raise ValueError(
                f"{path}: cannot be written ({error.strerror}); name another file"
            ) from None


def read_source(path: pathlib.Path) -> list[str]:
    """The digests of the rows that an SVG was drawn from; none if it names none."""
    root = ElementTree.parse(path).getroot()
    found = root.find(".//{http://purl.org/dc/elements/1.1/}source")
    return [] if found is None else found.text.split()


def speedup(summaries: Sequence[Row]) -> Figure:
    """Speed-up and acceptance rate over gamma."""
    curves = figure_data.by_gamma(summaries)
    with parts.style():
        figure, (top, bottom) = parts.new(5.6, 2, 1, sharex=True, height_ratios=(3, 2))
        for place, curve in enumerate(curves):
            # A little aside, so that the bars of one gamma do not hide each other.
            shift = 0.06 * (place - (len(curves) - 1) / 2)
            gammas = [row["gamma"] for row in curve.rows]
            middle, errors = parts.errors(curve.rows, "speedup_e2e")
            aside = [gamma + shift for gamma in gammas]
            looks = parts.looks(place)
            top.errorbar(aside, middle, errors, label=curve.label, **looks)
            rates = [row["acceptance_rate"] for row in curve.rows]
            bottom.plot(gammas, rates, **looks)
        top.axhline(1, color="#444444", linewidth=1, linestyle=":")
        top.set_ylabel("speed-up over plain\ndecoding (times)")
        top.set_ylim(bottom=0)
        parts.legend_above(figure, top, "median, bars: 10th to 90th percentile")
        bottom.set_ylabel("accepted / proposed")
        bottom.set_ylim(0, 1)
        bottom.set_xlabel("gamma (tokens drafted per round)")
        parts.whole_numbers(bottom.xaxis)
    return figure


def acceptance(summaries: Sequence[Row]) -> Figure:
    """P(draft kept at a position, if all before it were), at the largest gamma."""
    name = "conditional_acceptance"
    curves = figure_data.of_largest_gamma(summaries, name)
    with parts.style():
        figure, (axes,) = parts.new(3.4, 1, 1)
        for place, curve in enumerate(curves):
            rates = curve.rows[0][name]
            positions = range(1, len(rates) + 1)
            kept = [float("nan") if rate is None else rate for rate in rates]
            axes.plot(positions, kept, label=curve.label, **parts.looks(place))
        axes.set_ylim(0, 1)
        axes.set_xlabel("position in the draft (token)")
        axes.set_ylabel("P(kept, if all before were)")
        gamma = curves[0].rows[0]["gamma"]
        axes.legend(title=f"gamma {gamma}", loc="lower right")
        parts.whole_numbers(axes.xaxis)
    return figure


def accepted_lengths(summaries: Sequence[Row]) -> Figure:
    """Share of the rounds by the drafts that they kept, at the largest gamma."""
    name = "accepted_hist"
    curves = figure_data.of_largest_gamma(summaries, name)
    with parts.style():
        figure, (axes,) = parts.new(3.4, 1, 1)
        width = 0.8 / len(curves)
        for place, curve in enumerate(curves):
            row = curve.rows[0]
            mean = f"{row['mean_accepted_length']:.2f} tokens a round"
            shares = [100 * rounds / row["rounds"] for rounds in row[name]]
            shift = width * (place - (len(curves) - 1) / 2)
            axes.bar(
                [length + shift for length in range(len(shares))],
                shares,
                width,
                color=parts.COLOURS[place],
                label=f"{curve.label}: {mean}",
            )
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("drafted tokens kept in a round")
        axes.set_ylabel("rounds (%)")
        axes.legend(title=f"gamma {curves[0].rows[0]['gamma']}")
        parts.whole_numbers(axes.xaxis)
    return figure


def step_cost(steps: Sequence[Row]) -> Figure:
    """What a step costs with several live rows, in time and beside one row."""
    curves = figure_data.by_live_rows(steps)
    with parts.style():
        figure, (left, right) = parts.new(3.9, 1, 2)
        for place, curve in enumerate(curves):
            live = [row["num_live"] for row in curve.rows]
            for axes, name in ((left, "ms"), (right, "ratio")):
                middle, errors = parts.errors(curve.rows, name)
                looks = parts.looks(place)
                axes.errorbar(live, middle, errors, label=curve.label, **looks)
        left.set_ylabel("time of a step (ms)")
        right.set_ylabel("beside one live row (times)")
        parts.legend_above(figure, left, "median, bars: 10th to 90th percentile")
        for axes in (left, right):
            axes.set_xlabel("live rows of the slab")
            axes.set_ylim(bottom=0)
            parts.whole_numbers(axes.xaxis)
    return figure


def hugging_face(rows: Sequence[Row]) -> Figure:
    """Tokens a second over gamma, ours and Hugging Face's; plain decoding as a line."""
    panels = figure_data.comparison(rows)
    with parts.style():
        figure, every = parts.new(4.2, 1, len(panels), sharey=True)
        for axes, (length, curves) in zip(every, panels.items(), strict=True):
            for place, curve in enumerate(curves):
                _draw_speed(axes, curve, parts.looks(place))
            tokens = sorted(set(curves[0].rows[0]["prompt_tokens"]))
            title = f"{length}: {' and '.join(map(str, tokens))} tokens"
            axes.set_title(title, fontsize=11)
            axes.set_xlabel("K (drafted per round)")
            gammas = {row["gamma"] for curve in curves for row in curve.rows}
            axes.set_xticks(sorted(gammas - {None}))
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
            number = matplotlib.ticker.StrMethodFormatter("{x:g}")
            axes.yaxis.set_major_formatter(number)
            axes.minorticks_off()
        every[0].set_ylabel("tokens/s, prefill included")
        handles, labels = every[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


def _draw_speed(
    axes: matplotlib.axes.Axes, curve: figure_data.Curve, looks: Mapping[str, Any]
) -> None:
    """A curve with its spread; of plain decoding, a level with its own."""
    middle, errors = parts.errors(curve.rows, "tok_s")
    if curve.rows[0]["gamma"] is not None:
        gammas = [row["gamma"] for row in curve.rows]
        axes.errorbar(gammas, middle, errors, label=curve.label, **looks)
        return
    (level,), ((below,), (above,)) = middle, errors
    axes.axhline(level, color=looks["color"], linestyle="--", label=curve.label)
    axes.axhspan(level - below, level + above, color=looks["color"], alpha=0.15)


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
    with parts.style():
        figure, (axes,) = parts.new(2.4 + 0.24 * len(lines), 1, 1)
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
