"""The figures: rows of results -> SVG whose bytes depend on nothing else.

Every function takes the rows of one figure and returns it; `save` writes it. They
draw what they are given and measure nothing. Needs matplotlib, an extra.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

import matplotlib
import matplotlib.axes
import matplotlib.figure
import matplotlib.ticker

from experiments.lib import curves


Row = curves.Row
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
styled = matplotlib.rc_context(_STYLE)
"""Decorates functions that make or write a figure."""


@styled
def save(figure: Figure, path: pathlib.Path, *, rows: Sequence[Row]) -> None:
    """Writes the figure in the format of the path's suffix; the same bytes each time.

    Under it stands which model, machine and prompts it is of. An SVG names the rows
    that it was drawn from by `curves.digests`, see `read_source`.

    Args:
      rows: those that the figure was drawn from.
    """
    metadata = None
    if path.suffix == ".svg":
        digests = " ".join(curves.digests(rows))
        # No date, and no version of what drew it: only SVG would carry them.
        metadata = {"Date": None, "Creator": "spec_jax", "Source": digests}
    looks = {"x": 0.01, "ha": "left", "fontsize": 7, "color": "#555555"}
    figure.supxlabel(curves.caption(rows), **looks)
    figure.savefig(path, metadata=metadata, dpi=150)
    if path.suffix == ".svg":  # Without white space around lines: a twentieth of it.
        lines = path.read_text().splitlines()
        path.write_text("".join(line.strip() + "\n" for line in lines))


def read_source(path: pathlib.Path) -> list[str]:
    """Returns the digests of the rows that an SVG was drawn from."""
    root = ElementTree.parse(path).getroot()
    found = root.find(".//{http://purl.org/dc/elements/1.1/}source")
    return [] if found is None or not found.text else found.text.split()


def new(
    height: float, *panels: int, **keywords: Any
) -> tuple[Figure, Sequence[matplotlib.axes.Axes]]:
    """Returns a figure and its panels, `(rows, columns)` of them."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots(*panels, squeeze=False, **keywords)
    return figure, axes.ravel()


def looks_of(place: int) -> dict[str, Any]:
    """Returns colour and marker of the curve at this place of a legend."""
    # A marker at the end of an axis, such as a rate of 1, is whole.
    looks = {"color": COLOURS[place], "marker": MARKERS[place], "markersize": 5}
    return looks | {"clip_on": False}


def _spread(rows: Sequence[Row], name: str) -> tuple[list[float], list[list[float]]]:
    """Returns medians, and how far the percentiles lie below and above; 0 where
    unknown."""
    sides: list[list[float]] = [[], []]
    for row in rows:
        for side, end, sign in zip(sides, ("p10", "p90"), (-1, 1), strict=True):
            found = row[f"{name}_{end}"]
            # The median over runs may lie outside of percentiles over prompts.
            far = 0.0 if found is None else sign * (found - row[name])
            side.append(max(0.0, far))
    return [row[name] for row in rows], sides


def _legend_above(
    figure: Figure, panels: Sequence[matplotlib.axes.Axes], title: str | None, most: int
) -> None:
    """Puts each label of the panels once above them: inside, it would hide bars."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    place = {"loc": "outside upper center", "ncols": most}
    figure.legend([*found.values()], [*found], title=title, **place)


def _columns(found: Sequence[curves.Curve]) -> int:
    widest = max(len(curve.label) for curve in found)
    return min(2 if widest > 24 else 4, len(found))


def whole_numbers(axis: Any) -> None:
    axis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))


def _rates(row: Row) -> list[float]:
    """Returns the shares that were kept by position; NaN where none was drafted."""
    found = row["conditional_acceptance"]
    return [float("nan") if rate is None else rate for rate in found]


def _rounds_at(row: Row) -> list[tuple[int, str]]:
    """Returns of how many rounds each position's share is, if the row says so.

    A round that drafted fewer tokens is no part of it: the share itself tells. Where
    nothing was kept that is unknown, and it is at most the rounds that came so far.
    """
    kept, found = row.get("accepted_hist", ()), []
    for at, rate in enumerate(row["conditional_acceptance"][: len(kept)]):
        if rate is None:
            break
        rounds = round(sum(kept[at + 1 :]) / rate) if rate else sum(kept[at:])
        found.append((rounds, "" if rate else "\u2264"))
    return found


def _number_positions(
    axes: matplotlib.axes.Axes, found: Sequence[curves.Curve]
) -> None:
    """Numbers the positions, each with the fewest rounds that a share there is of."""
    whole_numbers(axes.xaxis)
    axes.set(xlabel="position (token)")
    counts = [_rounds_at(curve.rows[0]) for curve in found]
    if all(counts):
        most = max(map(len, counts))
        fewest = [min(c[at] for c in counts if at < len(c)) for at in range(most)]
        shown = range(0, most, -(-most // 8))
        labels = [f"{at + 1}\n{fewest[at][1]}{_short(fewest[at][0])}" for at in shown]
        axes.set_xticks([at + 1 for at in shown], labels, fontsize=8)
        axes.set(xlabel="position, fewest rounds")


def _short(count: int) -> str:
    """Writes 12,345 as 12k."""
    return f"{count:,}" if count < 10_000 else f"{count // 1000:,}k"


def _level_one(axes: matplotlib.axes.Axes) -> None:
    """Draws where speculation is as fast as autoregressive decoding."""
    axes.axhline(1, color="#444444", linewidth=1, linestyle=":")


def speedup(summaries: Sequence[Row]) -> Figure:
    """Speed-up and acceptance rate over gamma."""
    words = {"ylabel": "accepted / proposed", "ylim": (0, 1)}
    words |= {"xlabel": "gamma (tokens drafted per round)"}
    return _speedups(curves.by_gamma(summaries), "acceptance_rate", words)


def sweep_speedup(rows: Sequence[Row]) -> Figure:
    """Speed-up and accepted length over gamma, all categories of a cell together."""
    words = {"ylabel": "tokens a round", "ylim": (1, None)}
    words |= {"xlabel": "gamma (tokens drafted per round, at most)"}
    return _speedups(curves.cells_by_gamma(rows), "mean_accepted_length", words)


@styled
def _speedups(found: Sequence[curves.Curve], name: str, words: Mapping) -> Figure:
    """Draws speed-up over gamma, and below it another number of the rows."""
    figure, (top, bottom) = new(5.6, 2, 1, sharex=True, height_ratios=(3, 2))
    for place, curve in enumerate(found):
        # A little aside, so that the bars of one gamma do not hide each other.
        shift = 0.06 * (place - (len(found) - 1) / 2)
        gammas = [row["gamma"] for row in curve.rows]
        aside, looks = [gamma + shift for gamma in gammas], looks_of(place)
        spread = _spread(curve.rows, "speedup_e2e")
        top.errorbar(aside, *spread, label=curve.label, **looks)
        bottom.plot(gammas, [row[name] for row in curve.rows], **looks)
    _level_one(top)
    top.set(ylabel="speed-up over plain\ndecoding (times)")
    top.set_ylim(bottom=0)
    title = "median, bars: 10th to 90th percentile"
    _legend_above(figure, [top], title, _columns(found))
    whole_numbers(bottom.xaxis)
    bottom.set(**words)
    return figure


@styled
def acceptance(summaries: Sequence[Row]) -> Figure:
    """P(draft kept at a position, if all before it were), at the largest gamma."""
    found = curves.of_largest_gamma(summaries, "conditional_acceptance")
    figure, (axes,) = new(3.4, 1, 1)
    for place, curve in enumerate(found):
        kept = _rates(curve.rows[0])
        axes.plot(range(1, len(kept) + 1), kept, label=curve.label, **looks_of(place))
    axes.set(ylim=(0, 1), ylabel="P(kept, if all before were)")
    axes.legend(title=f"gamma {found[0].rows[0]['gamma']}", loc="lower right")
    _number_positions(axes, found)
    return figure


@styled
def accepted_lengths(summaries: Sequence[Row]) -> Figure:
    """Share of the rounds by the drafts that they kept, at the largest gamma."""
    found = curves.of_largest_gamma(summaries, "accepted_hist")
    figure, (axes,) = new(3.4, 1, 1)
    width = 0.8 / len(found)
    for place, curve in enumerate(found):
        row = curve.rows[0]
        label = f"{curve.label}: {row['mean_accepted_length']:.2f} tokens a round"
        shares = [100 * rounds / row["rounds"] for rounds in row["accepted_hist"]]
        shift = width * (place - (len(found) - 1) / 2)
        at = [length + shift for length in range(len(shares))]
        axes.bar(at, shares, width, color=COLOURS[place], label=label)
    axes.grid(visible=False, axis="x")
    axes.set(xlabel="drafted tokens kept in a round", ylabel="rounds (%)")
    axes.legend(title=f"gamma {found[0].rows[0]['gamma']}")
    whole_numbers(axes.xaxis)
    return figure


@styled
def step_cost(steps: Sequence[Row]) -> Figure:
    """What a step costs with several active rows, in time and relative to one row."""
    found = curves.by_active_rows(steps)
    figure, panels = new(3.9, 1, 2)
    for place, curve in enumerate(found):
        active = [row["num_active"] for row in curve.rows]
        for axes, name in zip(panels, ("ms", "ratio"), strict=True):
            spread = _spread(curve.rows, name)
            axes.errorbar(active, *spread, label=curve.label, **looks_of(place))
    panels[0].set(ylabel="time of a step (ms)")
    panels[1].set(ylabel="relative to one active row (times)")
    title = "median, bars: 10th to 90th percentile"
    _legend_above(figure, panels[:1], title, _columns(found))
    for axes in panels:
        axes.set(xlabel="active rows of the slab")
        axes.set_ylim(bottom=0)
        whole_numbers(axes.xaxis)
    return figure


@styled
def hugging_face(rows: Sequence[Row]) -> Figure:
    """Tokens a second over gamma, ours and Hugging Face's; without drafts as a line."""
    panels = curves.comparison(rows)
    figure, every = new(4.2, 1, len(panels), sharey=True)
    for axes, (length, found) in zip(every, panels.items(), strict=True):
        for place, curve in enumerate(found):
            _draw_speed(axes, curve, looks_of(place))
        tokens = sorted(set(found[0].rows[0]["prompt_tokens"]))
        title = f"{length}: {' and '.join(map(str, tokens))} tokens"
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("K (drafted per round)")
        gammas = {row["gamma"] for curve in found for row in curve.rows}
        axes.set_xticks(sorted(gammas - {None}))
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        number = matplotlib.ticker.StrMethodFormatter("{x:g}")
        axes.yaxis.set_major_formatter(number)
        axes.minorticks_off()
    every[0].set_ylabel("tokens/s, prefill included")
    _legend_above(figure, every[:1], None, 2)
    return figure


def _draw_speed(
    axes: matplotlib.axes.Axes, curve: curves.Curve, looks: Mapping[str, Any]
) -> None:
    """Draws a curve with its spread; of plain decoding, a level with its own."""
    middle, errors = _spread(curve.rows, "tok_s")
    if curve.rows[0]["gamma"] is not None:
        gammas = [row["gamma"] for row in curve.rows]
        axes.errorbar(gammas, middle, errors, label=curve.label, **looks)
        return
    (level,), ((below,), (above,)) = middle, errors
    axes.axhline(level, color=looks["color"], linestyle="--", label=curve.label)
    axes.axhspan(level - below, level + above, color=looks["color"], alpha=0.15)


@styled
def sweep_categories(rows: Sequence[Row]) -> Figure:
    """Acceptance by category, at the largest gamma."""
    names, found = curves.cells_by_category(rows)
    figure, (axes,) = new(1.6 + len(names) * max(0.3, 0.13 * len(found)), 1, 1)
    thick = 0.8 / len(found)
    for place, curve in enumerate(found):
        shift = thick * (place - (len(found) - 1) / 2)
        at = [names.index(row["category"]) + shift for row in curve.rows]
        # Where nothing was proposed, nothing was accepted either.
        rates = [row["acceptance_rate"] or 0.0 for row in curve.rows]
        axes.barh(at, rates, thick, color=COLOURS[place], label=curve.label)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(xlim=(0, 1), xlabel="accepted / proposed")
    title = f"gamma {found[0].rows[0]['gamma']}"
    _legend_above(figure, [axes], title, _columns(found))
    return figure


def sweep_positions(rows: Sequence[Row]) -> Figure:
    """P(draft kept at a position, if all before it were) on each prompt set."""
    return _by_position(curves.cells_by_position(rows), max(r["gamma"] for r in rows))


def ablations(rows: Sequence[Row]) -> Figure:
    """P(draft kept at a position, if all before it were) of each variant of DSpark."""
    panels: dict[str, list[curves.Curve]] = {}
    for row in rows:
        curve = curves.Curve(label=row["variant"], rows=(row,))
        panels.setdefault(f"T = {row['temperature']:g}", []).append(curve)
    return _by_position(panels, max(row["gamma"] for row in rows))


@styled
def _by_position(panels: Mapping[str, Sequence[curves.Curve]], gamma: int) -> Figure:
    """Draws shares that are kept over positions, a panel under each title."""
    columns = min(len(panels), 3)
    height = -(-len(panels) // columns)
    figure, places = new(1.2 + 2.4 * height, height, columns, sharey=True)
    every = places[: len(panels)]
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, found) in zip(every, panels.items(), strict=True):
        for place, curve in enumerate(found):
            kept = _rates(curve.rows[0])
            axes.plot(
                range(1, len(kept) + 1), kept, label=curve.label, **looks_of(place)
            )
        axes.set_title(title, fontsize=9)
        axes.set(ylim=(0, 1))
        _number_positions(axes, found)
    for axes in every[::columns]:
        axes.set_ylabel("P(kept, if all before were)")
    _legend_above(figure, every, f"gamma {gamma}", 3)
    return figure


@styled
def improvement(rows: Sequence[Row]) -> Figure:
    """The factor of Theorem 3.8 over gamma; a ring marks the best gamma."""
    found = curves.improvements(rows)
    acceptances = list(dict.fromkeys(c.rows[0]["acceptance"] for c in found))
    costs = list(dict.fromkeys(curve.rows[0]["cost"] for curve in found))
    figure, panels = new(3.9, 1, len(costs), sharey=True)
    for first, of_curve in ((curve.rows[0], curve.rows) for curve in found):
        axes = panels[costs.index(first["cost"])]
        looks = looks_of(acceptances.index(first["acceptance"]))
        gammas = [row["gamma"] for row in of_curve]
        factors = [row["improvement"] for row in of_curve]
        axes.plot(gammas, factors, label=f"a = {first['acceptance']:g}", **looks)
        best = gammas.index(first["best_gamma"])
        ring = {"s": 110, "facecolors": "none", "edgecolors": looks["color"]}
        axes.scatter([gammas[best]], [factors[best]], **ring)
    for axes, cost in zip(panels, costs, strict=True):
        _level_one(axes)
        axes.set_title(f"c = {cost:g}", fontsize=11)
        axes.set(xlabel="gamma (tokens drafted per round)")
        axes.set_ylim(bottom=0)
        whole_numbers(axes.xaxis)
    panels[0].set_ylabel("expected speed-up (times)")
    title = "a: chance that a draft is kept; c: its cost; ring: best gamma"
    _legend_above(figure, panels, title, 4)
    return figure
