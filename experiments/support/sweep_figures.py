"""Figures of sweeps and of the theory: drawn as `figures` are, and written by it."""

from collections.abc import Sequence

import matplotlib.axes

from experiments.support import figure_data, figure_parts as parts, sweep_data


Row = figure_data.Row
Figure = parts.Figure


def speedup(rows: Sequence[Row]) -> Figure:
    """Speed-up and accepted length over gamma, all categories of a cell together."""
    curves = sweep_data.by_gamma(rows)
    with parts.style():
        figure, (top, bottom) = parts.new(5.6, 2, 1, sharex=True, height_ratios=(3, 2))
        for place, curve in enumerate(curves):
            # A little aside, so that the bars of one gamma do not hide each other.
            shift = 0.06 * (place - (len(curves) - 1) / 2)
            gammas = [row["gamma"] for row in curve.rows]
            middle, errors = parts.errors(curve.rows, "speedup_e2e")
            looks = parts.looks(place)
            aside = [gamma + shift for gamma in gammas]
            top.errorbar(aside, middle, errors, label=curve.label, **looks)
            lengths = [row["mean_accepted_length"] for row in curve.rows]
            bottom.plot(gammas, lengths, **looks)
        _level_one(top)
        top.set_ylabel("speed-up over plain\ndecoding (times)")
        top.set_ylim(bottom=0)
        parts.legend_above(figure, top, "median, bars: 10th to 90th percentile")
        bottom.set_ylabel("tokens a round")
        bottom.set_ylim(bottom=1)
        bottom.set_xlabel("gamma (tokens drafted per round, at most)")
        parts.whole_numbers(bottom.xaxis)
    return figure


def categories(rows: Sequence[Row]) -> Figure:
    """Acceptance by category, at the largest gamma."""
    names, curves = sweep_data.by_category(rows)
    with parts.style():
        height = 1.6 + len(names) * max(0.3, 0.13 * len(curves))
        figure, (axes,) = parts.new(height, 1, 1)
        thick = 0.8 / len(curves)
        for place, curve in enumerate(curves):
            shift = thick * (place - (len(curves) - 1) / 2)
            axes.barh(
                [names.index(row["category"]) + shift for row in curve.rows],
                # Where nothing was proposed, nothing was accepted either.
                [row["acceptance_rate"] or 0.0 for row in curve.rows],
                thick,
                color=parts.COLOURS[place],
                label=curve.label,
            )
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlim(0, 1)
        axes.set_xlabel("accepted / proposed")
        gamma = curves[0].rows[0]["gamma"]
        parts.legend_above(figure, axes, f"gamma {gamma}")
    return figure


def improvement(rows: Sequence[Row]) -> Figure:
    """The factor of Theorem 3.8 over gamma; a ring marks the best gamma."""
    curves = sweep_data.improvements(rows)
    acceptances = list(dict.fromkeys(c.rows[0]["acceptance"] for c in curves))
    costs = list(dict.fromkeys(curve.rows[0]["cost"] for curve in curves))
    with parts.style():
        figure, panels = parts.new(3.9, 1, len(costs), sharey=True)
        for curve in curves:
            first = curve.rows[0]
            axes = panels[costs.index(first["cost"])]
            looks = parts.looks(acceptances.index(first["acceptance"]))
            label = f"a = {first['acceptance']:g}"
            gammas = [row["gamma"] for row in curve.rows]
            factors = [row["improvement"] for row in curve.rows]
            axes.plot(gammas, factors, label=label, **looks)
            best = gammas.index(first["best_gamma"])
            ring = {"s": 110, "facecolors": "none", "edgecolors": looks["color"]}
            axes.scatter([gammas[best]], [factors[best]], **ring)
        for axes, cost in zip(panels, costs, strict=True):
            _level_one(axes)
            axes.set_title(f"c = {cost:g}", fontsize=11)
            axes.set_xlabel("gamma (tokens drafted per round)")
            axes.set_ylim(bottom=0)
            parts.whole_numbers(axes.xaxis)
        panels[0].set_ylabel("expected speed-up (times)")
        handles, labels = _of_all(panels)
        place = {"loc": "outside upper center", "ncols": 4}
        title = "a: chance that a draft is kept; c: its cost; ring: best gamma"
        figure.legend(handles, labels, title=title, **place)
    return figure


def _level_one(axes: matplotlib.axes.Axes) -> None:
    """Where speculation is as fast as plain decoding."""
    axes.axhline(1, color="#444444", linewidth=1, linestyle=":")


def _of_all(panels: Sequence[matplotlib.axes.Axes]) -> tuple[list, list[str]]:
    """Handles and labels of all panels, each label once."""
    by_label = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            by_label.setdefault(label, handle)
    return list(by_label.values()), list(by_label)
