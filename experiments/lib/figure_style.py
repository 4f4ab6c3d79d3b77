"""What all figures share: style, colours, panels.

Needs matplotlib, an extra.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

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


@contextlib.contextmanager
def style() -> Iterator[None]:
    """The settings under which figures are made and written."""
    with matplotlib.rc_context(_STYLE):
        yield


def new(
    height: float, *panels: int, **keywords: Any
) -> tuple[Figure, Sequence[matplotlib.axes.Axes]]:
    """A figure and its panels, `(rows, columns)` of them."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots(*panels, squeeze=False, **keywords)
    return figure, axes.ravel()


def looks(place: int) -> dict[str, Any]:
    """Colour and marker of the curve at this place of a legend."""
    looks = {"color": COLOURS[place], "marker": MARKERS[place], "markersize": 5}
    # A marker at the end of an axis, such as a rate of 1, is whole.
    return looks | {"clip_on": False}


def errors(rows: Sequence[Row], name: str) -> tuple[list[float], list[list[float]]]:
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


def legend_above(figure: Figure, axes: matplotlib.axes.Axes, title: str) -> None:
    """Above the panels: inside it would hide bars, of which it knows nothing."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 2 if max(map(len, labels)) > 24 else 4
    place = {"loc": "outside upper center", "ncols": min(columns, len(labels))}
    figure.legend(handles, labels, title=title, **place)


def whole_numbers(axis: Any) -> None:
    """Ticks of an axis at whole numbers alone."""
    axis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
