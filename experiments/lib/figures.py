"""The figures: rows of results -> SVG whose bytes depend on nothing else.

Every function takes the rows of one figure and returns it; `save` writes it. They
draw what they are given and measure nothing. Needs matplotlib, an extra.
"""

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

import matplotlib
import matplotlib.axes
import matplotlib.ticker

from experiments.lib import (
    curves,
    divergence as divergence_lib,
    figure_style as parts,
)


Row = curves.Row
Figure = parts.Figure

divergence = divergence_lib.draw


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
    with parts.style():
        figure.supxlabel(
            curves.caption(rows), x=0.01, ha="left", fontsize=7, color="#555555"
        )
        try:
            figure.savefig(path, metadata=metadata, dpi=150)
            if path.suffix == ".svg":
                path.write_text(_dense(path.read_text()))
        except OSError as error:
            raise ValueError(
                f"{path}: cannot be written ({error.strerror}); name another file"
            ) from None


def _dense(svg: str) -> str:
    """Returns an SVG without the white space around its lines, a twentieth of it."""
    return "".join(line.strip() + "\n" for line in svg.splitlines())


def read_source(path: pathlib.Path) -> list[str]:
    """The digests of the rows that an SVG was drawn from; none if it names none."""
    root = ElementTree.parse(path).getroot()
    found = root.find(".//{http://purl.org/dc/elements/1.1/}source")
    return [] if found is None else found.text.split()


def speedup(summaries: Sequence[Row]) -> Figure:
    """Speed-up and acceptance rate over gamma."""
    figure, bottom = _speedups(curves.by_gamma(summaries), "acceptance_rate")
    bottom.set_ylabel("accepted / proposed")
    bottom.set_ylim(0, 1)
    bottom.set_xlabel("gamma (tokens drafted per round)")
    return figure


def sweep_speedup(rows: Sequence[Row]) -> Figure:
    """Speed-up and accepted length over gamma, all categories of a cell together."""
    figure, bottom = _speedups(curves.cells_by_gamma(rows), "mean_accepted_length")
    bottom.set_ylabel("tokens a round")
    bottom.set_ylim(bottom=1)
    bottom.set_xlabel("gamma (tokens drafted per round, at most)")
    return figure


def _speedups(
    found: Sequence[curves.Curve], name: str
) -> tuple[Figure, matplotlib.axes.Axes]:
    """Speed-up over gamma, and below it another number of the rows, with its axes."""
    with parts.style():
        figure, (top, bottom) = parts.new(5.6, 2, 1, sharex=True, height_ratios=(3, 2))
        for place, curve in enumerate(found):
            # A little aside, so that the bars of one gamma do not hide each other.
            shift = 0.06 * (place - (len(found) - 1) / 2)
            gammas = [row["gamma"] for row in curve.rows]
            middle, errors = parts.errors(curve.rows, "speedup_e2e")
            aside = [gamma + shift for gamma in gammas]
            looks = parts.looks(place)
            top.errorbar(aside, middle, errors, label=curve.label, **looks)
            bottom.plot(gammas, [row[name] for row in curve.rows], **looks)
        _level_one(top)
        top.set_ylabel("speed-up over plain\ndecoding (times)")
        top.set_ylim(bottom=0)
        parts.legend_above(figure, top, "median, bars: 10th to 90th percentile")
        parts.whole_numbers(bottom.xaxis)
    return figure, bottom


def acceptance(summaries: Sequence[Row]) -> Figure:
    """P(draft kept at a position, if all before it were), at the largest gamma."""
    name = "conditional_acceptance"
    found = curves.of_largest_gamma(summaries, name)
    with parts.style():
        figure, (axes,) = parts.new(3.4, 1, 1)
        for place, curve in enumerate(found):
            rates = curve.rows[0][name]
            positions = range(1, len(rates) + 1)
            kept = [float("nan") if rate is None else rate for rate in rates]
            axes.plot(positions, kept, label=curve.label, **parts.looks(place))
        axes.set_ylim(0, 1)
        axes.set_xlabel("position in the draft (token)")
        axes.set_ylabel("P(kept, if all before were)")
        gamma = found[0].rows[0]["gamma"]
        title = f"gamma {gamma}, {_counts(found)}".removesuffix(", ")
        axes.legend(title=title, loc="lower right")
        parts.whole_numbers(axes.xaxis)
    return figure


def _counts(found: Sequence[curves.Curve]) -> str:
    """Rounds that kept all drafts before a position: the most at the first one, and the
    fewest at the last that has a rate; nothing of rows without a histogram."""
    ends = []
    for row in (curve.rows[0] for curve in found):
        rates = [rate for rate in row["conditional_acceptance"] if rate is not None]
        last = max(0, len(rates) - 1)
        if "accepted_hist" in row:
            ends += [sum(row["accepted_hist"][place:]) for place in (0, last)]
    return f"n = {max(ends):,} to {min(ends):,} rounds" if ends else ""


def accepted_lengths(summaries: Sequence[Row]) -> Figure:
    """Share of the rounds by the drafts that they kept, at the largest gamma."""
    name = "accepted_hist"
    found = curves.of_largest_gamma(summaries, name)
    with parts.style():
        figure, (axes,) = parts.new(3.4, 1, 1)
        width = 0.8 / len(found)
        for place, curve in enumerate(found):
            row = curve.rows[0]
            mean = f"{row['mean_accepted_length']:.2f} tokens a round"
            shares = [100 * rounds / row["rounds"] for rounds in row[name]]
            shift = width * (place - (len(found) - 1) / 2)
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
        axes.legend(title=f"gamma {found[0].rows[0]['gamma']}")
        parts.whole_numbers(axes.xaxis)
    return figure


def step_cost(steps: Sequence[Row]) -> Figure:
    """What a step costs with several active rows, in time and relative to one row."""
    found = curves.by_active_rows(steps)
    with parts.style():
        figure, (left, right) = parts.new(3.9, 1, 2)
        for place, curve in enumerate(found):
            live = [row["num_active"] for row in curve.rows]
            for axes, name in ((left, "ms"), (right, "ratio")):
                middle, errors = parts.errors(curve.rows, name)
                looks = parts.looks(place)
                axes.errorbar(live, middle, errors, label=curve.label, **looks)
        left.set_ylabel("time of a step (ms)")
        right.set_ylabel("relative to one active row (times)")
        parts.legend_above(figure, left, "median, bars: 10th to 90th percentile")
        for axes in (left, right):
            axes.set_xlabel("active rows of the slab")
            axes.set_ylim(bottom=0)
            parts.whole_numbers(axes.xaxis)
    return figure


def hugging_face(rows: Sequence[Row]) -> Figure:
    """Tokens a second over gamma, ours and Hugging Face's; without drafts as a line."""
    panels = curves.comparison(rows)
    with parts.style():
        figure, every = parts.new(4.2, 1, len(panels), sharey=True)
        for axes, (length, found) in zip(every, panels.items(), strict=True):
            for place, curve in enumerate(found):
                _draw_speed(axes, curve, parts.looks(place))
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
        handles, labels = every[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


def _draw_speed(
    axes: matplotlib.axes.Axes, curve: curves.Curve, looks: Mapping[str, Any]
) -> None:
    """A curve with its spread; of autoregressive decoding, a level with its own."""
    middle, errors = parts.errors(curve.rows, "tok_s")
    if curve.rows[0]["gamma"] is not None:
        gammas = [row["gamma"] for row in curve.rows]
        axes.errorbar(gammas, middle, errors, label=curve.label, **looks)
        return
    (level,), ((below,), (above,)) = middle, errors
    axes.axhline(level, color=looks["color"], linestyle="--", label=curve.label)
    axes.axhspan(level - below, level + above, color=looks["color"], alpha=0.15)


def sweep_categories(rows: Sequence[Row]) -> Figure:
    """Acceptance by category, at the largest gamma."""
    names, found = curves.cells_by_category(rows)
    with parts.style():
        height = 1.6 + len(names) * max(0.3, 0.13 * len(found))
        figure, (axes,) = parts.new(height, 1, 1)
        thick = 0.8 / len(found)
        for place, curve in enumerate(found):
            shift = thick * (place - (len(found) - 1) / 2)
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
        gamma = found[0].rows[0]["gamma"]
        parts.legend_above(figure, axes, f"gamma {gamma}")
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


def _by_position(panels: Mapping[str, Sequence[curves.Curve]], gamma: int) -> Figure:
    """Shares that are kept over positions, a panel of curves under each title."""
    with parts.style():
        columns = min(len(panels), 3)
        height = -(-len(panels) // columns)
        figure, places = parts.new(1.2 + 2.4 * height, height, columns, sharey=True)
        every = places[: len(panels)]
        for axes in places[len(panels) :]:
            axes.set_visible(False)
        for axes, (title, found) in zip(every, panels.items(), strict=True):
            for place, curve in enumerate(found):
                rates = curve.rows[0]["conditional_acceptance"]
                kept = [float("nan") if rate is None else rate for rate in rates]
                looks = parts.looks(place)
                axes.plot(range(1, len(kept) + 1), kept, label=curve.label, **looks)
            title = f"{title}\n{_counts(found)}".rstrip()
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("position (token)")
            axes.set_ylim(0, 1)
            parts.whole_numbers(axes.xaxis)
        for axes in every[::columns]:
            axes.set_ylabel("P(kept, if all before were)")
        handles, labels = _of_all(every)
        place = {"loc": "outside upper center", "ncols": 3}
        figure.legend(handles, labels, title=f"gamma {gamma}", **place)
    return figure


def improvement(rows: Sequence[Row]) -> Figure:
    """The factor of Theorem 3.8 over gamma; a ring marks the best gamma."""
    found = curves.improvements(rows)
    acceptances = list(dict.fromkeys(c.rows[0]["acceptance"] for c in found))
    costs = list(dict.fromkeys(curve.rows[0]["cost"] for curve in found))
    with parts.style():
        figure, panels = parts.new(3.9, 1, len(costs), sharey=True)
        for curve in found:
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


def tree(row: Row) -> Figure:
    """The drafts of a round by depth; the path that the target kept is drawn bold."""
    parents, kept = row["parents"], {0, *row["kept"]}
    depth, place = _tree_layout(parents)
    with parts.style():
        figure, (axes,) = parts.new(max(2.4, 0.36 * (max(place) + 1)), 1, 1)
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
        parts.whole_numbers(axes.xaxis)
    return figure


def reliability(row: Row) -> Figure:
    """Share of drafts kept over the chance that was given, before and after fitting."""
    with parts.style():
        figure, (axes,) = parts.new(4.2, 1, 1)
        axes.plot([0, 1], [0, 1], ":", color="#7F7F7F")
        for place, (label, suffix) in enumerate(
            (("before", "_before"), ("fitted", ""))
        ):
            counts, chances, kept = (
                row[f"bin_{name}{suffix}"] for name in ("rounds", "chance", "kept")
            )
            at = [number for number, count in enumerate(counts) if count]
            error = sum(row[f"ece{suffix}"]) / len(row[f"ece{suffix}"])
            axes.plot(
                [chances[number] for number in at],
                [kept[number] for number in at],
                label=f"{label}: calibration error {error:.3f}",
                **parts.looks(place),
            )
        axes.set_xlabel("chance that the drafts up to one are kept, as given")
        axes.set_ylabel("share of rounds that kept them")
        title = f"gamma {row['gamma']}, temperature {row['temperature']:g}"
        axes.legend(title=title, loc="upper left")
    return figure


def _tree_layout(parents: Sequence[int]) -> tuple[list[int], list[float]]:
    """The depth of each column, and its place among the leaves, from top to bottom."""
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


def _level_one(axes: matplotlib.axes.Axes) -> None:
    """Where speculation is as fast as autoregressive decoding."""
    axes.axhline(1, color="#444444", linewidth=1, linestyle=":")


def _of_all(panels: Sequence[matplotlib.axes.Axes]) -> tuple[list, list[str]]:
    """Handles and labels of all panels, each label once."""
    by_label = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            by_label.setdefault(label, handle)
    return list(by_label.values()), list(by_label)
