"""What the microscope saw: tables for the terminal, one JSON row for the file."""

import dataclasses
import json
import math
from typing import Any

from rich import console as rich_console, table as rich_table, text as rich_text

from experiments.lib import mismatches, scenes, tables, terminal
from spec_jax.debug.microscope import (
    compare,
    faults,
    record as record_lib,
    scene as scene_lib,
)
from spec_jax.model import observe, tokenizer as tokenizer_lib


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

    name: str  # of the prompt, or of the file that it comes from
    # Of the first side; that of the second differs in the prefix's K/V alone
    scene: scene_lib.Scene
    history: str  # of `scenes.HISTORIES`
    prefix: compare.Prefix  # the K/V of both scenes, compared
    sides: tuple[scenes.Side, scenes.Side]  # the two ways to run the scene
    layers: tuple[int, ...]  # those that were looked at
    fault: faults.Fault | None  # planted in the second side, if any
    # The line that the window comes from, if it does
    mismatch: mismatches.Mismatch | None
    records: tuple[record_lib.Record, record_lib.Record]
    comparison: compare.Comparison
    # Of the model; None where its folder has none
    tokenizer: tokenizer_lib.Tokenizer | None

    @property
    def is_equal(self) -> bool:
        """Whether no value differs, of the prefix or of the window."""
        return self.comparison.first is None and not self.prefix.differing

    @property
    def names_the_fault(self) -> bool:
        """Whether the first difference is where the fault was planted."""
        first = self.comparison.first
        return (
            first is not None
            and not self.prefix.differing
            and self.fault is not None
            and (first.layer, first.operation)
            == (self.fault.layer, self.fault.operation)
        )

    @property
    def choices_of_mismatch(self) -> tuple[int, int] | None:
        """What both sides choose where the line tells of two choices."""
        line = self.mismatch
        if line is None or line.verify_argmax == line.decode_argmax:
            return None
        one, other = self.comparison.choices[line.position - self.scene.start]
        return one.token, other.token

    @property
    def is_met_again(self) -> bool | None:
        """Whether both choices are those of the line; None where there is none."""
        found = self.choices_of_mismatch
        if found is None:
            return None
        return found == (self.mismatch.decode_argmax, self.mismatch.verify_argmax)


def to_row(sight: Sight) -> dict[str, Any]:
    """The JSON row; `records.provenance` and the like come on top."""
    comparison, scene = sight.comparison, sight.scene
    reference, verify = sight.sides
    return {
        "kind": "parity",
        "id": sight.name,
        "reference": dataclasses.asdict(reference),
        "verify": dataclasses.asdict(verify),
        "fault": None if sight.fault is None else dataclasses.asdict(sight.fault),
        "start": scene.start,
        "window": scene.window,
        "history": sight.history,
        "prefix": _prefix_row(sight.prefix),
        "operations": observe.LAYER_OPERATIONS,
        "layers": sight.layers,
        "cells": [
            [
                _cell_row(comparison.cells[observe.key(layer, name)])
                for name in observe.LAYER_OPERATIONS
            ]
            for layer in sight.layers
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
    if sight.tokenizer is None:
        return None
    return [sight.tokenizer.decode([token]) for token, _ in choice.top]


def print_sight(sight: Sight, console: rich_console.Console) -> None:
    """Everything, the result first."""
    reference, verify = (_describe(side) for side in sight.sides)
    console.print(f"reference: {reference}\nverify:    {verify}", highlight=False)
    if sight.fault is not None:
        console.print(
            f"planted: {sight.fault.key}, {sight.fault.kind}", highlight=False
        )
    for side, record in zip(sight.sides, sight.records, strict=True):
        if record.moved:
            console.print(
                f"recording moved {record.moved:,d} elements of logits and K/V of "
                f"{_describe(side)}: what follows is of another program than the one "
                "that runs",
                style="bold red",
            )
        for name, count in record.unexplained.items():
            console.print(
                f"{name} of {side.path}: {count:,d} elements do not follow from the "
                "operations before it, as they were read; inside the whole program the "
                "compiler rounds what it fuses in other places",
                highlight=False,
            )
    lines = [prefix_line(sight), first_line(sight), _flips_line(sight)]
    if sight.is_met_again is not None:
        lines.append(_met_again_line(sight))
    for line in lines:
        console.print(line, style="bold", highlight=False)
    if not sight.is_equal:
        for title, names in _groups().items():
            _print_cells(sight, title, names, console)
        console.print(_outside_line(sight), highlight=False)
        _print_growth(sight, console)
    _print_choices(sight, console)


def _describe(side: scenes.Side) -> str:
    text = (
        f"{side.path}, impl {side.impl}, {side.dtype}, slab {side.slab}, "
        f"pages of {side.page_size}"
    )
    if side.window_rows is None:
        return text
    return f"{text}, windows of {side.window_rows} rows"


def prefix_line(sight: Sight) -> str:
    """Who wrote the K/V before the window, and where it differs first."""
    prefix, first = sight.prefix, sight.prefix.first
    what = "prefix K/V, written by plain decoding for both runs"
    if sight.history == "own":
        what = "prefix K/V, the second run's written by windows of its own path"
    if first is None:
        return f"{what}: no difference in {prefix.elements:,d} values"
    return (
        f"{what}: first: layer {first.layer}, {first.part}, position "
        f"{first.position}: {first.cell.differing:,d} of {first.cell.elements:,d} "
        f"elements, at most {first.cell.max_ulp:,d} ulp; in all {prefix.differing:,d} "
        f"of {prefix.elements:,d}"
    )


def first_line(sight: Sight) -> str:
    """The first difference in one line, or that there is none."""
    first = sight.comparison.first
    if first is None:
        return f"no difference in {sight.comparison.num_values:,d} values"
    layer = "" if first.layer is None else f"layer {first.layer}, "
    return (
        f"first: {layer}{first.operation}, position {sight.scene.start + first.row}: "
        f"{first.cell.differing:,d} of {first.cell.elements:,d} elements, at most "
        f"{first.cell.max_ulp:,d} ulp"
    )


def _print_cells(
    sight: Sight, title: str, names: tuple[str, ...], console: rich_console.Console
) -> None:
    """Layers by operations: elements that differ, and the largest distance."""
    rows = [
        {"layer": layer}
        | {name: sight.comparison.cells[observe.key(layer, name)] for name in names}
        for layer in sight.layers
    ]
    if not any(row[name].differing for row in rows for name in names):
        console.print(f"{title}: no difference in any layer", highlight=False)
        return
    # Words apart, so that a narrow terminal breaks the heading and no number.
    columns: dict[str, tables.Column] = {"layer": "d"}
    for name in names:
        columns[name.replace("_", " ")] = lambda row, name=name: _cell_text(row[name])
    title = f"{title}: elements that differ / at most so many ulp"
    tables.print_rows(rows, columns, console, title=title)


def _cell_text(cell: compare.Cell) -> rich_text.Text:
    if not cell.differing:
        return rich_text.Text(SAME, style="dim")
    shade = "yellow" if cell.max_ulp <= 1 else "red"
    return rich_text.Text(
        f"{_short(cell.differing)}/{_short(cell.max_ulp)}", style=shade, no_wrap=True
    )


def _short(count: int) -> str:
    """At most five characters."""
    return str(count) if count < 10_000 else f"{count:.0e}".replace("e+0", "e")


def _outside_line(sight: Sight) -> str:
    cells = sight.comparison.cells
    return "; ".join(
        f"{name}: {cells[name].differing:,d} of {cells[name].elements:,d}"
        + (f", at most {cells[name].max_ulp:,d} ulp" if cells[name].differing else "")
        for name in observe.OUTSIDE
    )


GROWTH = {
    "layer": "d",
    "elements that differ": lambda row: (
        f"{row['differing']:,d} of {row['elements']:,d}"
    ),
    "at most ulp": ("max_ulp", ",d"),
    "relative": ".1e",
}


def _print_growth(sight: Sight, console: rich_console.Console) -> None:
    """How far the residual has parted, from the first layer where it has."""
    growth = sight.comparison.growth
    parted = [step.layer for step in growth if step.cell.differing]
    if not parted:
        console.print("growth: the residual that leaves each layer is the same")
        return
    rows = [
        {"layer": step.layer} | _cell_row(step.cell)
        for step in growth
        if step.layer >= parted[0]
    ]
    title = "growth: the residual that leaves a layer"
    tables.print_rows(rows, GROWTH, console, title=title)


def _print_choices(sight: Sight, console: rich_console.Console) -> None:
    """The highest logits of both, row by row."""
    table = rich_table.Table(
        title="highest logits (token, its text: logit), margin in ulp"
    )
    for name in ("position", "reference", "margin", "verify", "margin"):
        is_top = name in ("reference", "verify")
        table.add_column(name, justify="left" if is_top else "right")
    for row, both in enumerate(sight.comparison.choices):
        cells = []
        for choice in both:
            margin = terminal.format_value(choice.margin_ulp, ".3g")
            cells += [_top_text(sight, choice), margin]
        style = "bold red" if both[0].token != both[1].token else None
        table.add_row(str(sight.scene.start + row), *cells, style=style)
    console.print(table)


def _top_text(sight: Sight, choice: compare.Choice) -> rich_text.Text:
    """One line a token; quoted, so that white space is seen."""
    texts = _texts(sight, choice)
    quoted = [""] * len(choice.top)
    if texts is not None:
        quoted = [f" {json.dumps(text, ensure_ascii=False)}" for text in texts]
    lines = (
        f"{token}{text}: {logit:.4g}"
        for text, (token, logit) in zip(quoted, choice.top, strict=True)
    )
    return rich_text.Text("\n".join(lines))


def _flips_line(sight: Sight) -> str:
    flips = [
        f"position {sight.scene.start + row}: {one.token} becomes {other.token}"
        for row, (one, other) in enumerate(sight.comparison.choices)
        if one.token != other.token
    ]
    return f"argmax flips: {'yes, ' + '; '.join(flips) if flips else 'no'}"


def _met_again_line(sight: Sight) -> str:
    line, found = sight.mismatch, sight.choices_of_mismatch
    if sight.is_met_again:
        return f"the mismatch is met again: {found[0]} against {found[1]}"
    return (
        f"the mismatch is NOT met again: {found[0]} against {found[1]}, and in the "
        f"run {line.decode_argmax} against {line.verify_argmax}"
    )
