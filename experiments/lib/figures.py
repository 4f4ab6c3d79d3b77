"""The figures: rows of results -> SVG whose bytes depend on nothing else.

Every function takes the rows of one figure and returns it; `draw` writes it. They draw
what they are given and measure nothing. Needs matplotlib, an extra.
"""

import itertools
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.axes
import matplotlib.colors
import matplotlib.figure
import matplotlib.ticker
import numpy as np

from experiments.lib import curves


Row = curves.Row
Curves = Sequence[curves.Curve]
Axes = matplotlib.axes.Axes
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
GAMMA = "gamma (tokens drafted per round)"
KEPT = "P(kept, if all before were)"
SPREAD = "median, bars: 10th to 90th percentile"


@matplotlib.rc_context(_STYLE)
def draw(make: Callable[..., Figure], rows: Sequence[Row], path: pathlib.Path) -> None:
    """Writes `make(rows)` as SVG, the same bytes each time.

    Under it stands which model, machine and prompts it is of. The file names the rows
    that it was drawn from by `curves.digests`, see `read_source`.
    """
    figure = make(rows)
    looks = {"x": 0.01, "ha": "left", "fontsize": 7, "color": "#555555"}
    figure.supxlabel(curves.caption(rows), **looks)
    # No date, and no version of what drew it.
    metadata = {"Date": None, "Creator": "spec_jax"}
    metadata["Source"] = " ".join(curves.digests(rows))
    figure.savefig(path, metadata=metadata, dpi=150)
    # Without white space around lines: a twentieth of it.
    lines = path.read_text().splitlines()
    path.write_text("".join(line.strip() + "\n" for line in lines))


def read_source(path: pathlib.Path) -> list[str]:
    """Returns the digests of the rows that an SVG was drawn from."""
    found = re.search("<dc:source>(.*)</dc:source>", path.read_text())
    return found[1].split() if found else []


def new(height: float, *panels: int, **keywords: Any) -> tuple[Figure, Sequence[Axes]]:
    """Returns a figure and its panels, `(rows, columns)` of them."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(*panels, squeeze=False, **keywords).ravel()


def _looks(place: int) -> dict[str, Any]:
    """Returns colour and marker of the curve at this place of a legend."""
    # A marker at the end of an axis, such as a rate of 1, is whole.
    looks = {"color": COLOURS[place], "marker": MARKERS[place], "markersize": 5}
    return looks | {"clip_on": False}


def _plot(axes: Axes, found: Curves, x: str, y: str, *, aside: float = 0.0) -> None:
    """Draws a number of the rows over another, which is whole.

    Its 10th and 90th percentiles, where rows have them, are bars. A row without `x` is
    a level, and they are a band.

    Args:
      aside: how far curves are moved apart, so that bars do not hide each other.
    """
    whole_numbers(axes)
    for place, (label, rows) in enumerate(found):
        middle = np.array([row[y] for row in rows], float)
        if f"{y}_p10" not in rows[0]:
            axes.plot([row[x] for row in rows], middle, label=label, **_looks(place))
            continue
        low, high = (
            np.array([row[y + end] for row in rows], float) for end in ("_p10", "_p90")
        )
        # The median over runs may lie outside of percentiles over prompts.
        spread = np.nan_to_num(np.maximum(0, [middle - low, high - middle]))
        if rows[0][x] is None:
            looks = {"color": COLOURS[place]}
            axes.axhline(middle[0], linestyle="--", label=label, **looks)
            ends = middle - spread[0], middle + spread[1]
            axes.axhspan(*np.ravel(ends), alpha=0.15, **looks)
            continue
        at = [row[x] + aside * (place - (len(found) - 1) / 2) for row in rows]
        axes.errorbar(at, middle, spread, label=label, **_looks(place))


def _bars(axes: Axes, found: Mapping[str, Sequence[float]]) -> None:
    """Draws bars of each label beside those of the others, over 0, 1, 2, ..."""
    width = 0.8 / len(found)
    for place, (label, heights) in enumerate(found.items()):
        at = np.arange(len(heights)) + width * (place - (len(found) - 1) / 2)
        axes.bar(at, heights, width, color=COLOURS[place], label=label)
    axes.grid(visible=False, axis="x")
    whole_numbers(axes)


def _legend(figure: Figure, title: str | None, columns: int | None = None) -> None:
    """Puts each label once above the panels: inside, it would hide bars."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    most = columns or (2 if max(map(len, found)) > 24 else 4)
    place = {"loc": "outside upper center", "ncols": min(most, len(found))}
    figure.legend([*found.values()], [*found], title=title, **place)


def whole_numbers(axes: Axes) -> None:
    """Puts no ticks between whole numbers, from left to right."""
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))


def _level_one(axes: Axes) -> None:
    """Draws where speculation is as fast as autoregressive decoding."""
    axes.axhline(1, color="#444444", linewidth=1, linestyle=":")


def speedup(summaries: Sequence[Row]) -> Figure:
    """Speed-up and acceptance rate over gamma."""
    found = curves.by_gamma(summaries)
    figure, (top, bottom) = new(5.6, 2, 1, sharex=True, height_ratios=(3, 2))
    _plot(top, found, "gamma", "speedup_e2e", aside=0.06)
    _plot(bottom, found, "gamma", "acceptance_rate")
    _level_one(top)
    top.set(ylabel="speed-up over plain\ndecoding (times)", ylim=(0, None))
    bottom.set(xlabel=GAMMA, ylabel="accepted / proposed", ylim=(0, 1))
    _legend(figure, SPREAD)
    return figure


def acceptance(summaries: Sequence[Row]) -> Figure:
    """P(draft kept at a position, if all before it were), at the largest gamma."""
    found = curves.of_largest_gamma(summaries, "conditional_acceptance")
    figure, (axes,) = new(3.4, 1, 1)
    _plot_positions(axes, found)
    axes.set(ylabel=KEPT)
    axes.legend(title=f"gamma {found[0].rows[0]['gamma']}", loc="lower right")
    return figure


def accepted_lengths(summaries: Sequence[Row]) -> Figure:
    """Share of the rounds by the drafts that they kept, at the largest gamma."""
    rows = {
        c.label: c.rows[0] for c in curves.of_largest_gamma(summaries, "accepted_hist")
    }
    figure, (axes,) = new(3.4, 1, 1)
    _bars(
        axes,
        {
            f"{label}: {row['mean_accepted_length']:.2f} tokens a round": [
                100 * rounds / row["rounds"] for rounds in row["accepted_hist"]
            ]
            for label, row in rows.items()
        },
    )
    axes.set(xlabel="drafted tokens kept in a round", ylabel="rounds (%)")
    axes.legend(title=f"gamma {max(row['gamma'] for row in summaries)}")
    return figure


def step_cost(steps: Sequence[Row]) -> Figure:
    """What a step costs with several active rows, in time and relative to one row."""
    found = curves.by_active_rows(steps)
    figure, panels = new(3.9, 1, 2)
    labels = {
        "ms": "time of a step (ms)",
        "ratio": "relative to one active row (times)",
    }
    for axes, (name, label) in zip(panels, labels.items(), strict=True):
        _plot(axes, found, "num_active", name)
        axes.set(xlabel="active rows of the slab", ylabel=label, ylim=(0, None))
    _legend(figure, SPREAD)
    return figure


def hugging_face(rows: Sequence[Row]) -> Figure:
    """Tokens a second over gamma, ours and Hugging Face's; without drafts as a line."""
    lengths = curves.group_by(rows, ("length",))
    figure, every = new(4.2, 1, len(lengths), sharey=True)
    for axes, ((length,), of_length) in zip(every, lengths.items(), strict=True):
        _plot(axes, curves.by_method(of_length), "gamma", "tok_s")
        tokens = sorted(set(of_length[0]["prompt_tokens"]))
        title = f"{length}: {' and '.join(map(str, tokens))} tokens"
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("K (drafted per round)")
        axes.set_xticks(sorted({row["gamma"] for row in of_length} - {None}))
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
        axes.minorticks_off()
    every[0].set_ylabel("tokens/s, prefill included")
    _legend(figure, None)
    return figure


def sweep_positions(rows: Sequence[Row]) -> Figure:
    """P(draft kept at a position, if all before it were) on each prompt set."""
    return _by_position(curves.cells_by_position(rows))


def sweep_contexts(rows: Sequence[Row]) -> Figure:
    """Tokens a round over the tokens of a prompt, of `sweep.py --context`."""
    figure, (axes,) = new(3.4, 1, 1)
    _plot(axes, curves.by_context(rows), "prompt_tokens", "mean_accepted_length")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({int(row["category"]) for row in rows}))
    axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    axes.set(xlabel="tokens of the prompt", ylabel="tokens a round", ylim=(1, None))
    _legend(figure, None)
    return figure


def drift(rows: Sequence[Row]) -> Figure:
    """Reward and drafts kept over steps of learning, of `rollouts.py --steps`."""
    figure, (top, bottom) = new(4.4, 2, 1, sharex=True)
    curve = [curves.Curve("", tuple(sorted(rows, key=lambda row: row["step"])))]
    _plot(top, curve, "step", "reward")
    _plot(bottom, curve, "step", "acceptance_rate")
    top.set(ylabel="mean reward", ylim=(0, 1))
    bottom.set(xlabel="step", ylabel="accepted / proposed", ylim=(0, 1))
    return figure


def ablations(rows: Sequence[Row]) -> Figure:
    """P(draft kept at a position, if all before it were) of each variant of DSpark."""
    panels = curves.group_by(rows, ("temperature",))
    one_each = lambda rows: [curves.Curve(row["variant"], (row,)) for row in rows]
    return _by_position({f"T = {t:g}": one_each(of) for (t,), of in panels.items()})


def _by_position(panels: Mapping[str, Curves]) -> Figure:
    """Draws shares that are kept over positions, a panel under each title."""
    columns = min(len(panels), 3)
    height = -(-len(panels) // columns)
    figure, every = new(1.2 + 2.4 * height, height, columns, sharey=True)
    for axes, (title, found) in zip(every, panels.items(), strict=False):
        _plot_positions(axes, found)
        axes.set_title(title, fontsize=9)
    for axes in every[::columns]:
        axes.set_ylabel(KEPT)
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    _legend(figure, f"gamma {found[0].rows[0]['gamma']}", columns=3)
    return figure


def _plot_positions(axes: Axes, found: Curves) -> None:
    """Draws shares over positions, each with the fewest rounds that one is of."""
    for place, (label, (row, *_)) in enumerate(found):
        shares = np.array(row["conditional_acceptance"], float)  # NaN: none drafted
        at = range(1, len(shares) + 1)
        axes.plot(at, shares, label=label, **_looks(place))
    whole_numbers(axes)
    axes.set(xlabel="position (token)", ylim=(0, 1))
    counts = [_rounds_at(curve.rows[0]) for curve in found]
    if all(counts):
        fewest = [min(filter(None, of)) for of in itertools.zip_longest(*counts)]
        shown = range(0, len(fewest), -(-len(fewest) // 8))
        short = lambda n: f"{n:,}" if n < 10_000 else f"{n // 1000:,}k"
        labels = [f"{at + 1}\n{fewest[at][1]}{short(fewest[at][0])}" for at in shown]
        axes.set_xticks([at + 1 for at in shown], labels, fontsize=8)
        axes.set(xlabel="position, fewest rounds")


def _rounds_at(row: Row) -> list[tuple[int, str]]:
    """Returns of how many rounds each position's share is, if the row says so.

    A round that drafted fewer tokens is no part of it: the share itself tells. Where
    nothing was kept that is unknown, and it is at most the rounds that came so far.
    """
    kept, rates = row.get("accepted_hist", ()), row["conditional_acceptance"]
    known = itertools.takewhile(lambda rate: rate is not None, rates[: len(kept)])
    return [
        (round(sum(kept[at:]) / rate), "") if rate else (sum(kept[at - 1 :]), "\u2264")
        for at, rate in enumerate(known, 1)
    ]


def improvement(rows: Sequence[Row]) -> Figure:
    """The factor of Theorem 3.8 over gamma; a ring marks the best gamma."""
    costs = curves.group_by(rows, ("cost",))
    figure, panels = new(3.9, 1, len(costs), sharey=True)
    for axes, ((cost,), of_cost) in zip(panels, costs.items(), strict=True):
        pairs = curves.group_by(of_cost, ("acceptance",)).items()
        found = [curves.Curve(f"a = {a:g}", tuple(of_pair)) for (a,), of_pair in pairs]
        _plot(axes, found, "gamma", "improvement")
        for curve, colour in zip(found, COLOURS, strict=False):
            best = max(row["improvement"] for row in curve.rows)
            at = curve.rows[0]["best_gamma"]
            axes.scatter([at], [best], s=110, facecolors="none", edgecolors=colour)
        _level_one(axes)
        axes.set_title(f"c = {cost:g}", fontsize=11)
        axes.set(xlabel=GAMMA)
    panels[0].set(ylabel="expected speed-up (times)", ylim=(0, None))
    _legend(figure, "a: chance that a draft is kept; c: its cost; ring: best gamma")
    return figure


def reliability(rows: Sequence[Row]) -> Figure:
    """Share of drafts kept over the chance that was given, before and after fitting."""
    (row,) = rows
    figure, (axes,) = new(4.2, 1, 1)
    axes.plot([0, 1], [0, 1], ":", color="#7F7F7F")
    for place, (label, suffix) in enumerate((("before", "_before"), ("fitted", ""))):
        names = ("rounds", "chance", "kept")
        bins = zip(*(row[f"bin_{name}{suffix}"] for name in names), strict=True)
        _, chances, kept = zip(*(of_bin for of_bin in bins if of_bin[0]), strict=True)
        label += f": calibration error {np.mean(row[f'ece{suffix}']):.3f}"
        axes.plot(chances, kept, label=label, **_looks(place))
    axes.set(xlabel="chance that the drafts up to one are kept, as given")
    axes.set(ylabel="share of rounds that kept them")
    title = f"gamma {row['gamma']}, temperature {row['temperature']:g}"
    axes.legend(title=title, loc="upper left")
    return figure
