"""Sights of the microscope: one JSON row for the file, and lines for the terminal."""

import json
import math
from collections.abc import Mapping
from typing import Any

from rich import console as rich_console

from experiments.lib import questions, tables
from experiments.lib.microscope import compare, record as record_lib
from spec_jax.model import observe


Row = Mapping[str, Any]


def look(question: questions.Question) -> dict[str, Any]:
    """Runs and records both paths, compares, and returns the JSON row.

    `records.provenance` and the like come on top.
    """
    first, second = question.paths
    scene, own = question.scenes
    fault, line = question.fault, question.mismatch
    taken = (
        record_lib.take(first, question.params_of(first), scene),
        record_lib.take(second, question.params_of(second), own, fault),
    )
    prefix, found = compare.compare_prefixes(scene, own), compare.compare(*taken)
    layers = range(first.model.config.num_layers)

    def cell(name: str, layer: int | None = None) -> Row:
        return _cell(found.cells[observe.key(layer, name)])

    return {
        "kind": "parity",
        "id": question.name,
        "reference": first.to_row(),
        "verify": second.to_row(),
        "fault": None if fault is None else vars(fault),
        "start": scene.start,
        "window": scene.window,
        "history": question.history,
        "prefix": {
            "differing": prefix.differing,
            "elements": prefix.elements,
            "first": _first(prefix.first, "part", start=0),
        },
        "operations": observe.LAYER_OPERATIONS,
        "layers": list(layers),
        "cells": [
            [cell(name, layer) for name in observe.LAYER_OPERATIONS] for layer in layers
        ],
        "outside": {name: cell(name) for name in observe.OUTSIDE},
        "equal": found.first is None and not prefix.differing,
        "num_values": found.num_values,
        "first": _first(found.first, "operation", start=scene.start),
        "growth": [{"layer": n} | cell("mlp_residual", n) for n in layers],
        "rows": [
            _choices(question, scene.start + row, scene.window[row], *choices)
            for row, choices in enumerate(found.choices)
        ],
        "argmax_flips": [scene.start + row for row in found.flips],
        "met_again": None if line is None else is_met_again(line, scene.start, found),
        "moved_by_recording": [record.moved for record in taken],
        "unexplained": [record.unexplained for record in taken],
        "weights_sha256": question.weights_sha256,
    }


def names_the_fault(row: Row) -> bool:
    """Returns whether the first difference is where the fault was planted."""
    first, fault = row["first"], row["fault"]
    if first is None or row["prefix"]["differing"]:
        return False
    return all(first[name] == fault[name] for name in ("layer", "operation"))


def is_met_again(line, start: int, found: compare.Comparison) -> bool | None:
    """Returns whether both choices are the line's; None where it tells of one."""
    if line.verify_argmax == line.decode_argmax:
        return None
    one, other = found.choices[line.position - start]
    return (one.token, other.token) == (line.decode_argmax, line.verify_argmax)


def _cell(cell: compare.Cell) -> dict[str, int | float | None]:
    names = ("differing", "elements", "max_ulp", "relative")
    return {name: getattr(cell, name) for name in names}


def _first(first: compare.First | None, what: str, *, start: int) -> Row | None:
    if first is None:
        return None
    where = {"layer": first.layer, what: first.operation, "position": start + first.row}
    return where | _cell(first.cell)


def _choices(question, position: int, token: int, *choices: compare.Choice) -> Row:
    """Returns the choices of both paths at a position, with their texts if it can."""
    row, words = {"position": position, "token": token}, question.tokenizer
    for side, choice in zip(("reference", "verify"), choices, strict=True):
        texts = None
        if words is not None:
            texts = [words.decode([token]) for token, _ in choice.top]
        row |= {
            f"{side}_argmax": choice.token,
            # JSON has no NaN and no infinity.
            f"{side}_top": [
                [token, logit if math.isfinite(logit) else None]
                for token, logit in choice.top
            ],
            f"{side}_texts": texts,
            f"{side}_margin_ulp": choice.margin_ulp,
        }
    return row


def print_row(row: Row, console: rich_console.Console) -> None:
    """Prints what is compared, the first difference, its growth, and the choices."""
    sides = {side: _describe(row[side]) for side in ("reference", "verify")}
    lines = [f"{side}: {what}" for side, what in sides.items()]
    if row["fault"] is not None:
        key = observe.key(row["fault"]["layer"], row["fault"]["operation"])
        lines.append(f"planted: {key}, {row['fault']['kind']}")
    for line in lines:
        console.print(line, highlight=False)
    for moved, wrong, side in zip(
        row["moved_by_recording"], row["unexplained"], sides, strict=True
    ):
        if moved:
            console.print(
                f"recording moved {moved:,d} elements of logits and K/V of {side}: "
                "this is another program than the one that runs",
                style="bold red",
            )
        for name, count in wrong.items():
            console.print(
                f"{name} of {side}: {count:,d} elements do not follow from the "
                "operations before it, as they were read; inside the whole program the "
                "compiler rounds what it fuses in other places",
                highlight=False,
            )
    for line in (_prefix_line(row), _first_line(row), *_choice_lines(row)):
        console.print(line, style="bold", highlight=False)
    parted = [step["layer"] for step in row["growth"] if step["differing"]]
    if parted:
        steps = [step for step in row["growth"] if step["layer"] >= parted[0]]
        title = "growth: the residual that leaves a layer"
        tables.print_rows(steps, GROWTH, console, title=title)
    title = "highest logits (token, its text: logit), margin in ulp"
    tables.print_rows(row["rows"], CHOICES, console, title=title)


def _describe(side: Row) -> str:
    text = f"{side['path']}, impl {side['impl']}, {side['dtype']}, slab {side['slab']}"
    if side["tree"] is not None:
        return f"{text}, a path of a tree of {len(side['tree'])} rows"
    height = side["window_rows"]
    return text if height is None else f"{text}, windows of {height} rows"


def _where(first: Row, name: str) -> str:
    layer = "" if first["layer"] is None else f"layer {first['layer']}, "
    return (
        f"first: {layer}{first[name]}, position {first['position']}: "
        f"{first['differing']:,d} of {first['elements']:,d} elements, at most "
        f"{first['max_ulp']:,d} ulp"
    )


def _prefix_line(row: Row) -> str:
    """Says who wrote the K/V before the window, and where it differs first."""
    prefix, what = row["prefix"], "prefix K/V, decoding's for both runs"
    if row["history"] == "own":
        what = "prefix K/V, the second run's written by windows of its own path"
    if prefix["first"] is None:
        return f"{what}: no difference in {prefix['elements']:,d} values"
    total = f"in all {prefix['differing']:,d} of {prefix['elements']:,d}"
    return f"{what}: {_where(prefix['first'], 'part')}; {total}"


def _first_line(row: Row) -> str:
    if row["first"] is None:
        return f"no difference in {row['num_values']:,d} values"
    return _where(row["first"], "operation")


def _choice_lines(row: Row) -> list[str]:
    """Says which choices differ, and whether a mismatch does as it did in its run."""
    flips = ", ".join(map(str, row["argmax_flips"]))
    lines = [f"argmax flips: {f'at {flips}' if flips else 'no'}"]
    if row["met_again"] is not None:
        lines.append(f"the mismatch is {'' if row['met_again'] else 'NOT '}met again")
    return lines


GROWTH: Mapping[str, tables.Column] = {
    "layer": "d",
    "differing": ",d",
    "elements": ",d",
    "at most ulp": ("max_ulp", ",d"),
    "relative": ".1e",
}


def _top(row: Row, side: str) -> tables.Cell:
    """Returns a token a line, its text quoted; red where the choice flips."""
    texts = row[f"{side}_texts"] or [None] * len(row[f"{side}_top"])
    lines = []
    for text, (token, logit) in zip(texts, row[f"{side}_top"], strict=True):
        quoted = "" if text is None else f" {json.dumps(text, ensure_ascii=False)}"
        shown = "not finite" if logit is None else f"{logit:.4g}"
        lines.append(f"{token}{quoted}: {shown}")
    flips = row["reference_argmax"] != row["verify_argmax"]
    return tables.wrong("\n".join(lines), flips)


CHOICES: Mapping[str, tables.Column] = {
    "position": "d",
    "reference": lambda row: _top(row, "reference"),
    "margin": ("reference_margin_ulp", ".3g"),
    "verify": lambda row: _top(row, "verify"),
    "verify's margin": ("verify_margin_ulp", ".3g"),
}
