"""What the microscope saw: tables for the terminal, one JSON row for the file."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from rich import console as rich_console, table as rich_table, text as rich_text

from experiments.lib import questions, tables, terminal
from spec_jax.debug.microscope import compare, record as record_lib, scene as scene_lib
from spec_jax.model import observe


def _groups() -> dict[str, tuple[str, ...]]:
    """The operations of a layer in tables that fit a narrow terminal."""
    names = observe.LAYER_OPERATIONS
    bounds = [names.index(name) for name in ("q_norm", "k_cache", "mlp_norm")]
    titles = ("projections", "heads", "attention", "MLP")
    groups = zip([0, *bounds], [*bounds, len(names)], strict=True)
    return {
        title: names[first:last]
        for title, (first, last) in zip(titles, groups, strict=True)
    }


SAME = "·"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sight:
    """One look through the microscope: what was run, and what came out."""

    question: questions.Question
    prefix: compare.Prefix  # the K/V of both scenes, compared
    records: tuple[record_lib.Record, record_lib.Record]
    comparison: compare.Comparison

    @property
    def scene(self) -> scene_lib.Scene:
        """That of the first side; that of the second has another prefix's K/V."""
        return self.question.scenes[0]

    @property
    def is_equal(self) -> bool:
        """Whether no value differs, of the prefix or of the window."""
        return self.comparison.first is None and not self.prefix.differing

    @property
    def names_the_fault(self) -> bool:
        """Whether the first difference is where the fault was planted."""
        first, fault = self.comparison.first, self.question.fault
        if first is None or fault is None or self.prefix.differing:
            return False
        return (first.layer, first.operation) == (fault.layer, fault.operation)

    @property
    def choices_of_mismatch(self) -> tuple[int, int] | None:
        """What both sides choose where the line tells of two choices."""
        line = self.question.mismatch
        if line is None or line.verify_argmax == line.decode_argmax:
            return None
        one, other = self.comparison.choices[line.position - self.scene.start]
        return one.token, other.token

    @property
    def is_met_again(self) -> bool | None:
        """Whether both choices are those of the line; None where there is none."""
        line, found = self.question.mismatch, self.choices_of_mismatch
        if found is None:
            return None
        return found == (line.decode_argmax, line.verify_argmax)


def to_row(sight: Sight) -> dict[str, Any]:
    """The JSON row; `records.provenance` and the like come on top."""
    comparison, question = sight.comparison, sight.question
    scene, fault = question.scenes[0], question.fault
    reference, verify = question.sides
    return {
        "kind": "parity",
        "id": question.name,
        "reference": dataclasses.asdict(reference),
        "verify": dataclasses.asdict(verify),
        "fault": None if fault is None else dataclasses.asdict(fault),
        "start": scene.start,
        "window": scene.window,
        "history": question.history,
        "prefix": _prefix_row(sight.prefix),
        "operations": observe.LAYER_OPERATIONS,
        "layers": question.layers,
        "cells": [
            [
                _cell_row(comparison.cells[observe.key(layer, name)])
                for name in observe.LAYER_OPERATIONS
            ]
            for layer in question.layers
        ],
        "outside": {
            name: _cell_row(comparison.cells[name]) for name in observe.OUTSIDE
        },
        "equal": sight.is_equal,
        "num_values": comparison.num_values,
        "first": _first_row(sight),
        "growth": [
            {"layer": step.layer} | _cell_row(step.cell) for step in comparison.growth
        ],
        "rows": [_choices_row(sight, row) for row in range(len(scene.window))],
        "argmax_flips": [scene.start + row for row in comparison.flips],
        "met_again": sight.is_met_again,
        "moved_by_recording": [record.moved for record in sight.records],
        "unexplained": [record.unexplained for record in sight.records],
    }


def _cell_row(cell: compare.Cell) -> dict[str, int | float | None]:
    return {
        "differing": cell.differing,
        "elements": cell.elements,
        "max_ulp": cell.max_ulp,
        "relative": cell.relative,
    }


def _prefix_row(prefix: compare.Prefix) -> dict[str, Any]:
    first = prefix.first
    if first is not None:
        where = {"layer": first.layer, "part": first.part, "position": first.position}
        first = where | _cell_row(first.cell)
    return {
        "differing": prefix.differing,
        "elements": prefix.elements,
        "first": first,
    }


def _first_row(sight: Sight) -> dict[str, Any] | None:
    first = sight.comparison.first
    if first is None:
        return None
    return {
        "layer": first.layer,
        "operation": first.operation,
        "position": sight.scene.start + first.row,
    } | _cell_row(first.cell)


def _choices_row(sight: Sight, row: int) -> dict[str, Any]:
    one, other = sight.comparison.choices[row]
    return {
        "position": sight.scene.start + row,
        "token": sight.scene.window[row],
        "reference_argmax": one.token,
        "verify_argmax": other.token,
        "reference_top": _top_row(one),
        "verify_top": _top_row(other),
        "reference_texts": _texts(sight, one),
        "verify_texts": _texts(sight, other),
        "reference_margin_ulp": one.margin_ulp,
        "verify_margin_ulp": other.margin_ulp,
    }


def _top_row(choice: compare.Choice) -> list[list]:
    """JSON has no NaN and no infinity."""
    return [
        [token, logit if math.isfinite(logit) else None] for token, logit in choice.top
    ]


def _texts(sight: Sight, choice: compare.Choice) -> list[str] | None:
    """The texts of the highest tokens; None where there is no tokenizer."""
    if sight.question.tokenizer is None:
        return None
    return [sight.question.tokenizer.decode([token]) for token, _ in choice.top]


Row = Mapping[str, Any]


def print_sight(sight: Sight, row: Row, console: rich_console.Console) -> None:
    """Everything, the result first.

    Args:
      row: of `to_row`.
    """
    names = _describe(row["reference"]), _describe(row["verify"])
    lines = [f"reference: {names[0]}", f"verify:    {names[1]}"]
    if sight.question.fault is not None:
        lines.append(f"planted: {sight.question.fault.key}, {row['fault']['kind']}")
    console.print("\n".join(lines), highlight=False)
    for place, side in enumerate(("reference", "verify")):
        moved = row["moved_by_recording"][place]
        if moved:
            console.print(
                f"recording moved {moved:,d} elements of logits and K/V of "
                f"{names[place]}: what follows is of another program than the one that "
                "runs",
                style="bold red",
            )
        for name, count in row["unexplained"][place].items():
            console.print(
                f"{name} of {row[side]['path']}: {count:,d} elements do not follow "
                "from the operations before it, as they were read; inside the whole "
                "program the compiler rounds what it fuses in other places",
                highlight=False,
            )
    lines = [_prefix_line(row), _first_line(row), _flips_line(row)]
    if sight.is_met_again is not None:
        lines.append(_met_again_line(sight))
    for line in lines:
        console.print(line, style="bold", highlight=False)
    if not row["equal"]:
        for title, operations in _groups().items():
            _print_cells(row, title, operations, console)
        outside = (
            f"{name}: {cell['differing']:,d} of {cell['elements']:,d}"
            + (f", at most {cell['max_ulp']:,d} ulp" if cell["differing"] else "")
            for name, cell in row["outside"].items()
        )
        console.print("; ".join(outside), highlight=False)
        _print_growth(row, console)
    _print_choices(row, console)


def _describe(side: Row) -> str:
    text = (
        f"{side['path']}, impl {side['impl']}, {side['dtype']}, slab {side['slab']}, "
        f"pages of {side['page_size']}"
    )
    if side["tree"] is not None:
        text += f", a path of a tree of {len(side['tree'])} rows"
    if side["window_rows"] is None:
        return text
    return f"{text}, windows of {side['window_rows']} rows"


def _where(first: Row, *names: str) -> str:
    """Where a first difference is, and how much differs there."""
    layer = "" if first["layer"] is None else f"layer {first['layer']}, "
    place = ", ".join(str(first[name]) for name in names)
    return (
        f"first: {layer}{place}, position {first['position']}: "
        f"{first['differing']:,d} of {first['elements']:,d} elements, at most "
        f"{first['max_ulp']:,d} ulp"
    )


def _prefix_line(row: Row) -> str:
    """Who wrote the K/V before the window, and where it differs first."""
    prefix, first = row["prefix"], row["prefix"]["first"]
    what = "prefix K/V, written by autoregressive decoding for both runs"
    if row["history"] == "own":
        what = "prefix K/V, the second run's written by windows of its own path"
    if first is None:
        return f"{what}: no difference in {prefix['elements']:,d} values"
    total = f"in all {prefix['differing']:,d} of {prefix['elements']:,d}"
    return f"{what}: {_where(first, 'part')}; {total}"


def _first_line(row: Row) -> str:
    """The first difference in one line, or that there is none."""
    if row["first"] is None:
        return f"no difference in {row['num_values']:,d} values"
    return _where(row["first"], "operation")


def _flips_line(row: Row) -> str:
    flips = [
        f"position {one['position']}: {one['reference_argmax']} becomes "
        f"{one['verify_argmax']}"
        for one in row["rows"]
        if one["reference_argmax"] != one["verify_argmax"]
    ]
    return f"argmax flips: {'yes, ' + '; '.join(flips) if flips else 'no'}"


def _met_again_line(sight: Sight) -> str:
    line, found = sight.question.mismatch, sight.choices_of_mismatch
    if sight.is_met_again:
        return f"the mismatch is met again: {found[0]} against {found[1]}"
    return (
        f"the mismatch is NOT met again: {found[0]} against {found[1]}, and in the "
        f"run {line.decode_argmax} against {line.verify_argmax}"
    )


def _print_cells(
    row: Row, title: str, names: tuple[str, ...], console: rich_console.Console
) -> None:
    """Layers by operations: elements that differ, and the largest distance."""
    places = [row["operations"].index(name) for name in names]
    lines = [
        {"layer": layer}
        | {name: cells[at] for name, at in zip(names, places, strict=True)}
        for layer, cells in zip(row["layers"], row["cells"], strict=True)
    ]
    if not any(line[name]["differing"] for line in lines for name in names):
        console.print(f"{title}: no difference in any layer", highlight=False)
        return
    # Words apart, so that a narrow terminal breaks the heading and no number.
    columns: dict[str, tables.Column] = {"layer": "d"}
    for name in names:
        columns[name.replace("_", " ")] = lambda line, name=name: _cell_text(line[name])
    title = f"{title}: elements that differ / at most so many ulp"
    tables.print_rows(lines, columns, console, title=title)


def _cell_text(cell: Row) -> rich_text.Text:
    if not cell["differing"]:
        return rich_text.Text(SAME, style="dim")
    shade = "yellow" if cell["max_ulp"] <= 1 else "red"
    words = f"{_short(cell['differing'])}/{_short(cell['max_ulp'])}"
    return rich_text.Text(words, style=shade, no_wrap=True)


def _short(count: int) -> str:
    """At most five characters."""
    return str(count) if count < 10_000 else f"{count:.0e}".replace("e+0", "e")


GROWTH = {
    "layer": "d",
    "elements that differ": lambda row: (
        f"{row['differing']:,d} of {row['elements']:,d}"
    ),
    "at most ulp": ("max_ulp", ",d"),
    "relative": ".1e",
}


def _print_growth(row: Row, console: rich_console.Console) -> None:
    """How far the residual has parted, from the first layer where it has."""
    parted = [step["layer"] for step in row["growth"] if step["differing"]]
    if not parted:
        console.print("growth: the residual that leaves each layer is the same")
        return
    steps = [step for step in row["growth"] if step["layer"] >= parted[0]]
    title = "growth: the residual that leaves a layer"
    tables.print_rows(steps, GROWTH, console, title=title)


def _print_choices(row: Row, console: rich_console.Console) -> None:
    """The highest logits of both, row by row."""
    table = rich_table.Table(
        title="highest logits (token, its text: logit), margin in ulp"
    )
    for name in ("position", "reference", "margin", "verify", "margin"):
        is_top = name in ("reference", "verify")
        table.add_column(name, justify="left" if is_top else "right")
    for one in row["rows"]:
        cells = []
        for side in ("reference", "verify"):
            margin = terminal.format_value(one[f"{side}_margin_ulp"], ".3g")
            texts = one[f"{side}_texts"]
            cells += [_top_text(one[f"{side}_top"], texts), margin]
        flips = one["reference_argmax"] != one["verify_argmax"]
        style = "bold red" if flips else None
        table.add_row(str(one["position"]), *cells, style=style)
    console.print(table)


def _top_text(top: list[list], texts: list[str] | None) -> rich_text.Text:
    """One line a token; quoted, so that white space is seen."""
    quoted = [""] * len(top)
    if texts is not None:
        quoted = [f" {json.dumps(text, ensure_ascii=False)}" for text in texts]
    lines = (
        f"{token}{text}: {'not finite' if logit is None else f'{logit:.4g}'}"
        for text, (token, logit) in zip(quoted, top, strict=True)
    )
    return rich_text.Text("\n".join(lines))
