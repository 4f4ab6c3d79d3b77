"""Figures of rows of results, as SVG whose bytes depend on nothing else.

Each function takes the rows of one figure and returns it; `draw` writes it. Nothing is
measured here. This module needs matplotlib, of the extra `plot`.
"""

import hashlib
import json
import math
import pathlib
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.axes
import matplotlib.colors
import matplotlib.figure
import matplotlib.ticker
import numpy as np

from experiments.lib import microscope


Row = Mapping[str, Any]
Axes = matplotlib.axes.Axes
Figure = matplotlib.figure.Figure

# Okabe and Ito's palette, whose colours the colour-blind can tell apart, without its
# yellow, which is hard to see on white.
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
    # Letters take a tenth of the bytes of their outlines.
    "svg.fonttype": "none",
    # Names inside the file are hashes, salted with this instead of the time.
    "svg.hashsalt": "spec_jax",
}
SPREAD = "median, bars: 10th to 90th percentile"

RUN = (
    *("target", "draft", "drafter", "impl", "dtype", "prompt_source", "gen_tokens"),
    *("page_size", "prefill", "cache", "temperature", "rule", "gamma_policy"),
    *("schedule", "confidence", "batch", "repeats"),
)
"""Fields that tell one speculative run from another, besides gamma."""

_LABELS = {
    "gen_tokens": "{} tokens",
    "page_size": "pages of {}",
    "prefill": "{} prefill",
    "repeats": "{} repeats",
    "cache": "{} cache",
    "batch": "batches of {}",
    "confidence": "confidence {}",
    "schedule": "scheduled by {}",
    "temperature": "T = {}",
    "rule": "rule {}",
}


Curves = Mapping[str, Sequence[Row]]
"""Rows of each curve, in the order in which they are drawn, by the curve's label: the
settings in which curves differ from each other."""


def group_by(rows: Iterable[Row], names: Sequence[str]) -> dict[tuple, list[Row]]:
    """Returns the rows by their values of these names, in their order."""
    grouped: dict[tuple, list[Row]] = {}
    for row in rows:
        grouped.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return grouped


def curves_of(
    rows: Iterable[Row], names: Sequence[str], *, axis: str, otherwise: str = "impl"
) -> Curves:
    """Returns curves of rows that agree in `names`; labels say in which these differ.

    Args:
      axis: the name whose values order the rows of a curve.
      otherwise: the setting that labels a curve where all agree.

    Raises:
      ValueError: more curves than can be told apart, or two rows of one value.
    """
    grouped = list(group_by(rows, names).values())
    values = {name: {str(of[0].get(name)) for of in grouped} for name in names}
    varying = [name for name in names if len(values[name]) > 1]
    if len(grouped) > len(COLOURS):
        raise ValueError(
            f"{len(grouped)} curves, of which {len(COLOURS)} can be told apart; they "
            f"differ in {', '.join(varying)}: choose with --where NAME=VALUE"
        )
    made = {}
    for of in grouped:
        label = _describe(of[0], varying or (otherwise,))
        for value, same in group_by(of, [axis]).items():
            if len(same) > 1:
                raise ValueError(
                    f"{axis} {value[0]} of {label} is there {len(same)} times; name "
                    "one file of them, or tell them apart with --where"
                )
        made[label] = sorted(of, key=lambda row: row[axis])
    return dict(sorted(made.items()))


def _describe(row: Row, names: Sequence[str]) -> str:
    """Returns the row's settings in words."""
    present = [name for name in names if row.get(name) is not None]
    return ", ".join(_LABELS.get(name, "{}").format(row[name]) for name in present)


def cells_by_position(rows: Sequence[Row]) -> dict[str, Curves]:
    """Returns, by prompt set, curves over the drafts of a round at the largest gamma:
    one of each drafter, temperature, policy and category.

    Raises:
      ValueError: two rows of one cell, or more curves than can be told apart.
    """
    names = ("temperature", "drafter", "gamma_policy", "category")
    largest, found = max(row["gamma"] for row in rows), {}
    of_largest = [row for row in rows if row["gamma"] == largest]
    for (source,), of_set in group_by(of_largest, ["prompt_source"]).items():
        cells = curves_of(of_set, names, axis="gamma", otherwise="drafter")
        found["/".join(pathlib.PurePath(source).parts[-2:])] = {
            label: [
                {"position": position, "kept": kept}
                for position, kept in enumerate(cell["conditional_acceptance"], 1)
            ]
            for label, (cell,) in cells.items()
        }
    return found


CAPTION = (
    *("target", "draft", "dtype", "impl", "native_isa", "cpu", "device_kind"),
    *("jax_version", "prompt_source", "prompts", "gen_tokens", "id"),
)
"""Fields of rows, and of both sides of a parity, that a caption lists."""


def caption(rows: Sequence[Row]) -> str:
    """Returns the model, machine and prompts of the rows, as their fields name them.

    At most three values of a field are listed.
    """
    parts = [(row, row.get("reference", {}), row.get("verify", {})) for row in rows]
    words = []
    for name in CAPTION:
        found = [part.get(name) for each in parts for part in each]
        values = [*dict.fromkeys(str(value) for value in found if value is not None)]
        listed = f"{len(values)} different"
        if len(values) <= 3:
            listed = " / ".join(values)
        words += [f"{name.replace('_', ' ')} {listed}"] if values else []
    return "\n".join(textwrap.wrap(", ".join(words), 120))


def digests(rows: Iterable[Row]) -> list[str]:
    """Returns twelve digits of the SHA-256 of each row's JSON, with keys sorted."""
    lines = (json.dumps(row, sort_keys=True) for row in rows)
    return [hashlib.sha256(line.encode()).hexdigest()[:12] for line in lines]


@matplotlib.rc_context(_STYLE)
def draw(make: Callable[..., Figure], rows: Sequence[Row], path: pathlib.Path) -> None:
    """Writes `make(rows)` as SVG, the same bytes each time.

    A caption below names the model, machine and prompts. The file has the digests
    (`digests`) of the rows that it was drawn from; see `read_source`.
    """
    figure = make(rows)
    looks = {"x": 0.01, "ha": "left", "fontsize": 7, "color": "#555555"}
    figure.supxlabel(caption(rows), **looks)
    # Neither a date nor the version of matplotlib.
    metadata = {"Date": None, "Creator": "spec_jax"}
    metadata["Source"] = " ".join(digests(rows))
    figure.savefig(path, metadata=metadata, dpi=150)
    # White space around lines is a twentieth of the file.
    lines = path.read_text().splitlines()
    path.write_text("".join(line.strip() + "\n" for line in lines))


def read_source(path: pathlib.Path) -> list[str]:
    """Returns the digests of the rows that an SVG was drawn from."""
    found = re.search("<dc:source>(.*)</dc:source>", path.read_text())
    return found[1].split() if found else []


def new(height: float, *panels: int, **keywords: Any) -> tuple[Figure, Sequence[Axes]]:
    """Returns a figure and its panels, as many rows and columns as `panels` says."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(*panels, squeeze=False, **keywords).ravel()


def _plot(axes: Axes, found: Curves, x: str, y: str, *, aside: float = 0.0) -> None:
    """Draws the field `y` of the rows over the field `x`, a whole number.

    Bars show the 10th and 90th percentiles of `y`, where rows have them.

    Args:
      aside: how far curves are moved apart, so that bars do not hide each other.
    """
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    for place, (label, rows) in enumerate(found.items()):
        # A marker at the end of an axis, such as a rate of 1, is not cut off.
        looks = {"color": COLOURS[place], "marker": MARKERS[place], "markersize": 5}
        looks |= {"label": label, "clip_on": False}
        # NaN where nothing was measured.
        middle, low, high = (
            np.array([row.get(y + end, math.nan) for row in rows], float)
            for end in ("", "_p10", "_p90")
        )
        if f"{y}_p10" not in rows[0]:
            axes.plot([row[x] for row in rows], middle, **looks)
            continue
        # The median over runs may lie outside of percentiles over prompts.
        spread = np.nan_to_num(np.maximum(0, [middle - low, high - middle]))
        at = [row[x] + aside * (place - (len(found) - 1) / 2) for row in rows]
        axes.errorbar(at, middle, spread, **looks)


def _legend(figure: Figure, title: str | None, columns: int | None = None) -> None:
    """Puts a legend above the panels, each label once: inside it would hide bars."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    most = columns or (2 if max(map(len, found)) > 24 else 4)
    place = {"loc": "outside upper center", "ncols": min(most, len(found))}
    figure.legend([*found.values()], [*found], title=title, **place)


def speedup(summaries: Sequence[Row]) -> Figure:
    """Draws speed-up and acceptance rate over gamma."""
    runs = group_by(summaries, RUN).values()
    several = [row for rows in runs if len(rows) > 1 for row in rows]
    if not several:
        raise ValueError(
            "no settings were run with two values of gamma; run spec_round.py with "
            "another --gamma"
        )
    found = curves_of(several, RUN, axis="gamma")
    figure, (top, bottom) = new(5.6, 2, 1, sharex=True, height_ratios=(3, 2))
    _plot(top, found, "gamma", "speedup_e2e", aside=0.06)
    _plot(bottom, found, "gamma", "acceptance_rate")
    # The speed of autoregressive decoding.
    top.axhline(1, color="#444444", linewidth=1, linestyle=":")
    top.set(ylabel="speed-up over plain\ndecoding (times)", ylim=(0, None))
    bottom.set(
        xlabel="gamma (tokens drafted per round)",
        ylabel="accepted / proposed",
        ylim=(0, 1),
    )
    _legend(figure, SPREAD)
    return figure


def step_cost(steps: Sequence[Row]) -> Figure:
    """Draws the cost of a step over active rows, in time and relative to one row."""
    names = ("target", "dtype", "impl", "slab", "context")
    found = curves_of(steps, names, axis="num_active")
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


def sweep_positions(rows: Sequence[Row]) -> Figure:
    """Draws P(draft kept at a position, if all before it were) on each prompt set."""
    panels = cells_by_position(rows)
    columns = min(len(panels), 3)
    height = -(-len(panels) // columns)
    figure, every = new(1.2 + 2.4 * height, height, columns, sharey=True)
    for axes, (title, found) in zip(every, panels.items(), strict=False):
        _plot(axes, found, "position", "kept")
        axes.set(xlabel="position (token)", ylim=(0, 1))
        axes.set_title(title, fontsize=9)
    for axes in every[::columns]:
        axes.set_ylabel("P(kept, if all before were)")
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    _legend(figure, f"gamma {max(row['gamma'] for row in rows)}", columns=3)
    return figure


def sweep_contexts(rows: Sequence[Row]) -> Figure:
    """Draws tokens per round over the tokens of a prompt, from `sweep.py --context`."""
    names = ("prompt_source", "temperature", "drafter", "gamma_policy", "gamma")
    at = [row | {"prompt_tokens": int(row["category"])} for row in rows]
    found = curves_of(at, names, axis="prompt_tokens", otherwise="drafter")
    figure, (axes,) = new(3.4, 1, 1)
    _plot(axes, found, "prompt_tokens", "mean_accepted_length")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row["prompt_tokens"] for row in at}))
    axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    axes.set(xlabel="tokens of the prompt", ylabel="tokens a round", ylim=(1, None))
    _legend(figure, None)
    return figure


def drift(rows: Sequence[Row]) -> Figure:
    """Draws reward and acceptance rate over steps, from `rollouts.py --steps`."""
    figure, (top, bottom) = new(4.4, 2, 1, sharex=True)
    curve = {"": sorted(rows, key=lambda row: row["step"])}
    _plot(top, curve, "step", "reward")
    _plot(bottom, curve, "step", "acceptance_rate")
    top.set(ylabel="mean reward", ylim=(0, 1))
    bottom.set(xlabel="step", ylabel="accepted / proposed", ylim=(0, 1))
    return figure


def divergence(rows: Sequence[Row]) -> Figure:
    """Draws the relative difference of each operation of each layer, as a colour.

    An operation before or after the layers is a band of one colour, in its place.

    Args:
      rows: just one, of kind "parity"; a cell is `{"differing", "elements", "max_ulp",
        "relative"}`, or None where there was nothing to compare.
    """
    if len(rows) > 1:
        raise ValueError(f"{len(rows)} parities; name the file of one")
    (row,) = rows
    operations = row["operations"]
    bands = {name: [cell] * len(operations) for name, cell in row["outside"].items()}
    first = {name: bands.pop(name) for name in ("embed",) if name in bands}
    layers = dict(zip(map(str, row["layers"]), row["cells"], strict=True))
    lines = first | layers | bands
    values, lowest, highest = levels([*lines.values()])
    figure, (axes,) = new(2.4 + 0.24 * len(lines), 1, 1)
    cmap = matplotlib.colormaps["viridis"].with_extremes(
        under="#d0d0d0", over="#ff00ff"
    )
    norm = matplotlib.colors.Normalize(lowest, highest)
    looks = {"cmap": cmap, "norm": norm, "interpolation": "none"}
    image = axes.imshow(values, aspect="auto", **looks)
    axes.grid(visible=False)
    turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(operations)), operations, **turned)
    axes.set_yticks(range(len(lines)), lines, fontsize=9)
    axes.set_ylabel("layer")
    words = "grey: equal bits, white: not compared, pink: not finite"
    axes.set_title(
        f"first difference: {microscope.first_of(row)}\n{words}", fontsize=11
    )
    ticks = {
        "ticks": matplotlib.ticker.MaxNLocator(integer=True),
        "format": lambda x, _: f"{10**x:.0e}",
    }
    label = "relative difference (norms)"
    figure.colorbar(image, ax=axes, pad=0.02, label=label, **ticks)
    return figure


def levels(lines: Sequence[Sequence[Row | None]]) -> tuple[np.ndarray, int, int]:
    """Returns log10 of relative differences `[lines, cells]`, and the ends of a scale.

    Cells of equal bits are below the lower end, cells whose difference is no number
    above the upper end; NaN where there was nothing to compare.
    """
    found = np.array([[_decade(cell) for cell in line] for line in lines])
    sized = found[np.isfinite(found)]
    lowest = math.floor(np.min(sized, initial=0.0)) if sized.size else -8
    highest = max(math.ceil(sized.max()) if sized.size else 0, lowest + 1)
    outside = {"neginf": lowest - 1, "posinf": highest + 1}
    return np.nan_to_num(found, nan=math.nan, **outside), lowest, highest


def _decade(cell: Row | None) -> float:
    """Returns a cell's value as `levels`, with infinities for values off the scale."""
    if cell is None:
        return math.nan
    if not cell["differing"]:
        return -math.inf
    if cell["relative"] is None:
        return math.inf
    # The relative difference of zeros of different signs is 0.
    return math.log10(max(cell["relative"], 1e-12))
