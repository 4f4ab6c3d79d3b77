"""Curves of a figure from rows of results, its caption, and digests of the rows.

This module handles rows, and draws nothing.
"""

import hashlib
import json
import pathlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


Row = Mapping[str, Any]

MAX_CURVES = 8
"""Most curves of a figure: as many as there are colours that all can tell apart."""

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


def is_cell(row: Row) -> bool:
    """Returns whether a row is a finished cell of `sweep.py` that drafted chains."""
    return row.get("kind") == "sweep" and "tree" not in row


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
    if len(grouped) > MAX_CURVES:
        raise ValueError(
            f"{len(grouped)} curves, of which {MAX_CURVES} can be told apart; they "
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


def first_of(row: Row) -> str:
    """Returns the first difference of a parity in words."""
    first = row.get("first")
    if first is None:
        return "none"
    layer = "" if first["layer"] is None else f"layer {first['layer']}, "
    return f"{layer}{first['operation']}, position {first['position']}"


def digests(rows: Iterable[Row]) -> list[str]:
    """Returns twelve digits of the SHA-256 of each row's JSON, with keys sorted."""
    lines = (json.dumps(row, sort_keys=True) for row in rows)
    return [hashlib.sha256(line.encode()).hexdigest()[:12] for line in lines]
