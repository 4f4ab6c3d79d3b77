"""Where a figure comes from: rows of results -> a caption, and what identifies them.

Knows rows; draws nothing.
"""

import hashlib
import json
import pathlib
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.lib import curves


Row = curves.Row

WIDTH = 120
"""Characters of a line of a caption."""

SHOWN = 3
"""Values of one name that a caption lists; of more it says how many there are."""


def caption(rows: Sequence[Row]) -> str:
    """Says which model, machine and prompts the rows are of, from their own fields.

    Fields that no row has are left out.
    """
    if all(row.get("kind") == "theory" for row in rows):
        return "computed by a formula: no model, no machine, no prompts"
    parts = {
        "model": _model(rows),
        "machine": _machine(rows),
        "prompts": _prompts(rows),
    }
    words = [f"{name}: {', '.join(found)}" for name, found in parts.items() if found]
    return "\n".join(line for part in words for line in textwrap.wrap(part, WIDTH))


def digests(rows: Iterable[Row]) -> list[str]:
    """Identifies each row: twelve digits of the SHA-256 of its JSON, keys sorted."""
    lines = (json.dumps(row, sort_keys=True) for row in rows)
    return [hashlib.sha256(line.encode()).hexdigest()[:12] for line in lines]


def _model(rows: Sequence[Row]) -> list[str]:
    sides = [
        row[name] for row in rows for name in ("reference", "verify") if name in row
    ]
    names = {name: _each(rows, name) for name in ("target", "draft")}
    found = [f"{role} {_listed(map(_name, of))}" for role, of in names.items() if of]
    for name in ("dtype", "impl"):
        values = [*_each(rows, name), *_each(sides, name)]
        found += [_listed(values)] if values else []
    return found


def _machine(rows: Sequence[Row]) -> list[str]:
    found = []
    is_cpu = all(row.get("platform", "cpu") == "cpu" for row in rows)
    devices = _each(rows, "cpu" if is_cpu else "device_kind")
    found += [_listed(devices)] if devices else []
    if is_cpu and any("native_isa" in row for row in rows):
        sets = [row.get("native_isa") or "chosen by XLA" for row in rows]
        found.append(f"instruction set {_listed(sets)}")
    versions = _each(rows, "jax_version")
    return found + ([f"jax {_listed(versions)}"] if versions else [])


def _prompts(rows: Sequence[Row]) -> list[str]:
    found = [_listed(map(_set_name, _each(rows, "prompt_source")))]
    # The cells of a sweep are of one category each: together they have all prompts.
    counts: dict[Any, dict[Any, int]] = {}
    for row in rows:
        if isinstance(row.get("prompts"), int):
            of_set = counts.setdefault(row.get("prompt_source"), {})
            of_set[row.get("category")] = row["prompts"]
    if counts:
        totals = [sum(by_category.values()) for by_category in counts.values()]
        found.append(f"{_listed(totals)} prompts")
    found += [f"prompt {_listed(map(_name, _each(rows, 'id')))}"] * ("id" in rows[0])
    if _each(rows, "gen_tokens"):
        found.append(f"{_listed(_each(rows, 'gen_tokens'))} tokens each")
    if _each(rows, "context"):
        found.append(f"after {_listed(_each(rows, 'context'))} tokens")
    if all("window" in row for row in rows):
        lengths = [f"{len(row['window'])} tokens from {row['start']}" for row in rows]
        found.append(f"a window of {_listed(lengths)}")
    return [words for words in found if words]


def _each(rows: Iterable[Row], name: str) -> list[Any]:
    """The values of a name, those that are None left out."""
    return [row[name] for row in rows if row.get(name) is not None]


def _listed(values: Iterable[Any]) -> str:
    """The different values, in their order."""
    different = list(dict.fromkeys(map(str, values)))
    if len(different) > SHOWN:
        return f"{len(different)} different"
    return " / ".join(different)


def _name(path: str) -> str:
    """A model or a file without the folders around it."""
    return pathlib.PurePath(path).name


def _set_name(source: str) -> str:
    """What `--prompts` was given: bundled prompts, or a file and the folder around."""
    if source.partition("@")[0].isdecimal():
        return f"bundled ({source})"
    return "/".join(pathlib.PurePath(source).parts[-2:])
