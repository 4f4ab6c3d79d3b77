"""The figures: rows of results -> SVG whose bytes depend on nothing else.

Every function takes the rows of one figure and returns it; `save` writes it. They
draw what they are given and measure nothing. Needs matplotlib, an extra.
"""

import contextlib
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.axes
import matplotlib.colors
import matplotlib.figure
import matplotlib.ticker

from experiments.support import figure_data


Row = figure_data.Row
Figure = matplotlib.figure.Figure

# Okabe and Ito's palette, which keeps its differences to the colour-blind, without
# its yellow, which does not on white.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#56B4E9", "#E69F00", "#000000", "#7F7F7F"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_WIDTH = 7.6  # inches, at 11 points a line: as wide as a README column
_STYLE = {
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    # Letters and not outlines: a tenth of the bytes.
    "svg.fonttype": "none",
    # Names inside the file are hashes, of this and not of the time.
    "svg.hashsalt": "spec_jax",
}


def save(figure: Figure, path: pathlib.Path) -> None:
    """Writes the figure in the format of the path's suffix; the same bytes each time.

    Raises:
      ValueError: a path that cannot be written, or an unknown suffix.
    """
    # Only SVG would carry a date, and the version that drew it.
    is_svg = path.suffix == ".svg"
    metadata = {"Date": None, "Creator": "spec_jax"} if is_svg else None
    with _style():
        try:
            figure.savefig(path, metadata=metadata, dpi=150)
        except OSError as error:
            raise ValueError(
                f"{path}: cannot be written ({error.strerror}); name another file"
            ) from None


@contextlib.contextmanager
def _style() -> Iterator[None]:
    with matplotlib.rc_context(_STYLE):
        yield


def _new(
    height: float, *panels: int, **keywords: Any
) -> tuple[Figure, Sequence[matplotlib.axes.Axes]]:
    """A figure and its panels, `(rows, columns)` of them."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots(*panels, squeeze=False, **keywords)
    return figure, axes.ravel()


def _looks(place: int) -> dict[str, Any]:
    return {"color": COLOURS[place], "marker": MARKERS[place], "markersize": 5}


def _errors(rows: Sequence[Row], name: str) -> tuple[list[float], list[list[float]]]:
    """Medians, and how far the percentiles lie below and above; 0 where unknown."""
    middle = [row[name] for row in rows]
    ends = [(row[f"{name}_p10"], row[f"{name}_p90"]) for row in rows]
    below = [
        m - (m if low is None else low)
        for m, (low, _) in zip(middle, ends, strict=True)
    ]
    above = [
        (m if high is None else high) - m
        for m, (_, high) in zip(middle, ends, strict=True)
    ]
    # The median over the runs may lie outside of percentiles over the prompts.
    return middle, [[max(0.0, error) for error in side] for side in (below, above)]


def _legend_above(figure: Figure, axes: matplotlib.axes.Axes, title: str) -> None:
    """Above the panels: inside it would hide bars, of which it knows nothing."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 2 if max(map(len, labels)) > 24 else 4
    place = {"loc": "outside upper center", "ncols": min(columns, len(labels))}
    figure.legend(handles, labels, title=title, **place)


def _whole_numbers(axis: Any) -> None:
    axis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))


def speedup(summaries: Sequence[Row]) -> Figure:
    """Speed-up and acceptance rate over gamma."""
    curves = figure_data.by_gamma(summaries)
    with _style():
        figure, (top, bottom) = _new(5.6, 2, 1, sharex=True, height_ratios=(3, 2))
        for place, curve in enumerate(curves):
            # A little aside, so that the bars of one gamma do not hide each other.
            shift = 0.06 * (place - (len(curves) - 1) / 2)
            gammas = [row["gamma"] for row in curve.rows]
            middle, errors = _errors(curve.rows, "speedup_e2e")
            aside = [gamma + shift for gamma in gammas]
            looks = _looks(place)
            top.errorbar(aside, middle, errors, label=curve.label, **looks)
            rates = [row["acceptance_rate"] for row in curve.rows]
            bottom.plot(gammas, rates, **looks)
        top.axhline(1, color="#444444", linewidth=1, linestyle=":")
        top.set_ylabel("speed-up over plain\ndecoding (times)")
        top.set_ylim(bottom=0)
        _legend_above(figure, top, "median, bars: 10th to 90th percentile")
        bottom.set_ylabel("accepted / proposed")
        bottom.set_ylim(0, 1)
        bottom.set_xlabel("gamma (tokens drafted per round)")
        _whole_numbers(bottom.xaxis)
    return figure


def acceptance(summaries: Sequence[Row]) -> Figure:
    """P(draft kept at a position, if all before it were), at the largest gamma."""
    name = "conditional_acceptance"
    curves = figure_data.of_largest_gamma(summaries, name)
    with _style():
        figure, (axes,) = _new(3.4, 1, 1)
        for place, curve in enumerate(curves):
            rates = curve.rows[0][name]
            positions = range(1, len(rates) + 1)
            kept = [float("nan") if rate is None else rate for rate in rates]
            axes.plot(positions, kept, label=curve.label, **_looks(place))
        axes.set_ylim(0, 1)
        axes.set_xlabel("position in the draft (token)")
        axes.set_ylabel("P(kept, if all before were)")
        gamma = curves[0].rows[0]["gamma"]
        axes.legend(title=f"gamma {gamma}", loc="lower right")
        _whole_numbers(axes.xaxis)
    return figure


def accepted_lengths(summaries: Sequence[Row]) -> Figure:
    """Share of the rounds by the drafts that they kept, at the largest gamma."""
    name = "accepted_hist"
    curves = figure_data.of_largest_gamma(summaries, name)
    with _style():
        figure, (axes,) = _new(3.4, 1, 1)
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
                color=COLOURS[place],
                label=f"{curve.label}: {mean}",
            )
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("drafted tokens kept in a round")
        axes.set_ylabel("rounds (%)")
        axes.legend(title=f"gamma {curves[0].rows[0]['gamma']}")
        _whole_numbers(axes.xaxis)
    return figure


def step_cost(steps: Sequence[Row]) -> Figure:
    """What a step costs with several live rows, in time and beside one row."""
    curves = figure_data.by_live_rows(steps)
    with _style():
        figure, (left, right) = _new(3.9, 1, 2)
        for place, curve in enumerate(curves):
            live = [row["num_live"] for row in curve.rows]
            for axes, name in ((left, "ms"), (right, "ratio")):
                middle, errors = _errors(curve.rows, name)
                looks = _looks(place)
                axes.errorbar(live, middle, errors, label=curve.label, **looks)
        left.set_ylabel("time of a step (ms)")
        right.set_ylabel("beside one live row (times)")
        _legend_above(figure, left, "median, bars: 10th to 90th percentile")
        for axes in (left, right):
            axes.set_xlabel("live rows of the slab")
            axes.set_ylim(bottom=0)
            _whole_numbers(axes.xaxis)
    return figure


def hugging_face(rows: Sequence[Row]) -> Figure:
    """Tokens a second over gamma, ours and Hugging Face's; plain decoding as a line."""
    panels = figure_data.comparison(rows)
    with _style():
        figure, every = _new(4.2, 1, len(panels), sharey=True)
        for axes, (length, curves) in zip(every, panels.items(), strict=True):
            for place, curve in enumerate(curves):
                _draw_speed(axes, curve, _looks(place))
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
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def _draw_speed(
    axes: matplotlib.axes.Axes, curve: figure_data.Curve, looks: Mapping[str, Any]
) -> None:
    """A curve with its spread; of plain decoding, a level with its own."""
    middle, errors = _errors(curve.rows, "tok_s")
    if curve.rows[0]["gamma"] is not None:
        gammas = [row["gamma"] for row in curve.rows]
        axes.errorbar(gammas, middle, errors, label=curve.label, **looks)
        return
    (level,), ((below,), (above,)) = middle, errors
    axes.axhline(level, color=looks["color"], linestyle="--", label=curve.label)
    axes.axhspan(level - below, level + above, color=looks["color"], alpha=0.15)


def divergence(row: Row) -> Figure:
    """Layers by operations: the largest difference, in units in the last place.

    What stands before and after the layers is a band of one cell, in its place.

    Args:
      row: of kind "parity"; a cell is `{"differing", "elements", "max_ulp"}`, or None
        where there was nothing to compare.
    """
    operations, outside = row["operations"], row["outside"]
    bands = {name: [cell] * len(operations) for name, cell in outside.items()}
    first = {name: cells for name, cells in bands.items() if name == "embed"}
    last = {name: cells for name, cells in bands.items() if name != "embed"}
    layers = dict(zip(map(str, row["layers"]), row["cells"], strict=True))
    lines = first | layers | last
    values = [[_ulp_level(cell) for cell in line] for line in lines.values()]
    with _style():
        figure, (axes,) = _new(2.0 + 0.22 * len(lines), 1, 1)
        largest = max([1.0, *(level for line in values for level in line)])
        colours = matplotlib.colormaps["viridis"].with_extremes(under="#d0d0d0")
        norm = matplotlib.colors.Normalize(0, largest)
        looks = {"cmap": colours, "norm": norm, "interpolation": "none"}
        image = axes.imshow(values, aspect="auto", **looks)
        axes.grid(visible=False)
        axes.set_xticks(range(len(operations)), operations)
        axes.tick_params(axis="x", rotation=45)
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(lines)), lines, fontsize=9)
        axes.set_ylabel("layer")
        formatter = matplotlib.ticker.FuncFormatter(lambda x, _: f"{10**x:,.0f}")
        bar = figure.colorbar(image, ax=axes, pad=0.02, format=formatter)
        bar.set_label("largest difference (ULP)")
        axes.set_title(_first(row), fontsize=11)
    return figure


_EQUAL = -1.0


def _ulp_level(cell: Row | None) -> float:
    """Where the cell's colour lies: under the scale if nothing in it differs."""
    if cell is None:
        return math.nan
    return math.log10(cell["max_ulp"]) if cell["max_ulp"] else _EQUAL


def _first(row: Row) -> str:
    """The first differences in words, and what the colours do not say.

    Rows without a `prefix` are of runs that started from the same K/V.
    """
    before = (row.get("prefix") or {}).get("first")
    first, where = row.get("first"), "nothing differs"
    if first is not None:
        layer = "" if first["layer"] is None else f"layer {first['layer']}, "
        where = f"first: {layer}{first['operation']}, position {first['position']}"
    colours = f"{where}; grey: equal bits, white: not compared"
    if before is None:
        return colours
    return (
        f"prefix K/V: first: layer {before['layer']}, {before['part']}, "
        f"position {before['position']}\nwindow: {colours}"
    )
