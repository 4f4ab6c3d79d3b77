"""Rows of results -> the curves of a figure, its caption, and what identifies them.

Knows rows; draws nothing.
"""

import dataclasses
import hashlib
import json
import pathlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.lib import sweep_cells as cells


Row = Mapping[str, Any]

MAX_CURVES = 8
"""As many as there are colours that everybody can tell apart."""

_SETTINGS = (
    *("target", "draft", "drafter", "impl", "dtype", "prompt_source", "gen_tokens"),
    *("page_size", "prefill", "cache"),
    *("temperature", "rule", "gamma_policy", "schedule", "confidence", "batch"),
    "repeats",
)
"""What sets one speculative run apart from another, besides gamma."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Rows that share their settings."""

    label: str  # the settings in which it differs from the other curves
    rows: tuple[Row, ...]  # in the order in which they are drawn


def is_round_summary(row: Row) -> bool:
    """Whether the row sums up speculative runs of chains, of `spec_round.py`."""
    is_summary = row.get("kind") == "summary" and {"gamma", "accepted_hist"} <= set(row)
    return is_summary and not row.get("tree")


def is_window_cost(row: Row) -> bool:
    """Whether the row times a slab with so many active rows, of `latency.py`."""
    name = str(row.get("step"))
    return row.get("kind") == "step" and name.endswith((" active row", " active rows"))


def by_gamma(summaries: Sequence[Row]) -> list[Curve]:
    """Curves over gamma: settings that were run with two values of it, or more.

    Raises:
      ValueError: there are none, or one setting was run twice with one gamma.
    """
    grouped = group_by(summaries, _SETTINGS)
    kept = {key: rows for key, rows in grouped.items() if len(rows) > 1}
    for rows in kept.values():
        _check_axis(rows, "gamma", _SETTINGS)
    if not kept:
        raise ValueError(
            "no settings were run with two values of gamma; run spec_round.py with "
            "another --gamma"
        )
    return labelled(kept, _SETTINGS, sort_by="gamma")


def _check_axis(rows: Sequence[Row], axis: str, names: Sequence[str]) -> None:
    """Raises `ValueError` where a curve has two rows of one value on its axis."""
    values = [row[axis] for row in rows]
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise ValueError(
            f"{axis} {twice[0]} of {_describe(rows[0], names)} is there "
            f"{values.count(twice[0])} times; name one file of them, or tell them "
            "apart with --where"
        )


def of_largest_gamma(summaries: Sequence[Row], name: str) -> list[Curve]:
    """A curve of each setting with the largest gamma; equal ones share a curve.

    Args:
      name: of the list that is to be drawn.
    """
    largest = max(row["gamma"] for row in summaries)
    chosen: dict[tuple, list[Row]] = {}
    for row in summaries:
        if row["gamma"] == largest:
            same = (row["impl"], tuple(row[name]))
            chosen.setdefault(same, [row])
    return labelled(chosen, _SETTINGS)


def by_active_rows(steps: Sequence[Row]) -> list[Curve]:
    """Curves over the active rows of a slab, one for each model and implementation.

    Raises:
      ValueError: one of them was timed twice with as many rows.
    """
    names = ("target", "dtype", "impl", "slab", "context")
    grouped = group_by(steps, names)
    for rows in grouped.values():
        _check_axis(rows, "num_active", names)
    return labelled(grouped, names, sort_by="num_active")


def comparison(rows: Sequence[Row]) -> dict[str, list[Curve]]:
    """By class of lengths: a curve over gamma of each side and method.

    Raises:
      ValueError: rows of more than one run of `compare_hf.py`.
    """
    panels = {}
    for length in dict.fromkeys(row["length"] for row in rows):
        of_length = [row for row in rows if row["length"] == length]
        runs = [(row["side"], row["method"], row["gamma"]) for row in of_length]
        if len(set(runs)) < len(runs):
            raise ValueError(
                f"{length} prompts of one run are there twice: name the file of one "
                "comparison, or tell them apart with --where"
            )
        # Plain decoding drafts nothing, and is a curve of one row.
        panels[length] = [
            Curve(
                label=" ".join(names),
                rows=tuple(sorted(of_curve, key=lambda row: row["gamma"] or 0)),
            )
            for names, of_curve in group_by(of_length, ("side", "method")).items()
        ]
    return panels


def group_by(rows: Sequence[Row], names: Sequence[str]) -> dict[tuple, list[Row]]:
    """The rows that share the values of these names, in their order."""
    grouped: dict[tuple, list[Row]] = {}
    for row in rows:
        grouped.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return grouped


def labelled(
    grouped: Mapping[tuple, Sequence[Row]],
    names: Sequence[str],
    *,
    sort_by: str | None = None,
    otherwise: str = "impl",
) -> list[Curve]:
    """Curves that say in which settings they differ.

    Args:
      grouped: the rows of each curve, by `names`.
      sort_by: the name whose values order the rows of a curve.
      otherwise: the setting that a curve says where all agree.

    Raises:
      ValueError: more of them than can be told apart.
    """
    firsts = [rows[0] for rows in grouped.values()]
    varying = [
        name for name in names if len({str(row.get(name)) for row in firsts}) > 1
    ]
    if len(firsts) > MAX_CURVES:
        raise ValueError(
            f"{len(firsts)} curves, of which {MAX_CURVES} can be told apart; they "
            f"differ in {', '.join(varying)}: choose with --where NAME=VALUE"
        )
    curves = [
        Curve(
            label=_describe(rows[0], varying or (otherwise,)),
            rows=tuple(sorted(rows, key=lambda row: row[sort_by]) if sort_by else rows),
        )
        for rows in grouped.values()
    ]
    return sorted(curves, key=lambda curve: curve.label)


def _describe(row: Row, names: Sequence[str]) -> str:
    """The row's settings in words."""
    present = [name for name in names if row.get(name) is not None]
    return ", ".join(_LABELS.get(name, "{}").format(row[name]) for name in present)


_CELL_AXES = ("prompt_source", "temperature", "drafter", "gamma_policy")
"""What sets one curve of a sweep apart from another, besides gamma."""


def is_cell(row: Row) -> bool:
    """Whether the row is a finished cell of `sweep.py`, of chains of one length."""
    is_of_chains = "tree" not in row and "schedule" not in row
    return row.get("kind") == "sweep" and is_of_chains


def has_category(row: Row) -> bool:
    """Whether it is one of prompts of a category."""
    return is_cell(row) and row.get("category") is not None


def cells_by_gamma(rows: Sequence[Row]) -> list[Curve]:
    """Curves over gamma, of all categories together.

    Raises:
      ValueError: a cell that is there twice, more curves than can be told apart, or
        no two gammas.
    """
    _check_once(rows)
    totals = _shortened(cells.totals(rows))
    if len({row["gamma"] for row in totals}) < 2:
        raise ValueError(
            "no cells of two gammas; run sweep.py with another --gamma on the same file"
        )
    return labelled(
        group_by(totals, _CELL_AXES), _CELL_AXES, sort_by="gamma", otherwise="drafter"
    )


def cells_by_category(rows: Sequence[Row]) -> tuple[list[str], list[Curve]]:
    """The names of the categories, and curves over them at the largest gamma."""
    _check_once(rows)
    largest = max(row["gamma"] for row in rows)
    chosen = _shortened([row for row in rows if row["gamma"] == largest])
    curves = labelled(group_by(chosen, _CELL_AXES), _CELL_AXES, otherwise="drafter")
    return list(dict.fromkeys(row["category"] for row in chosen)), curves


def cells_by_position(rows: Sequence[Row]) -> dict[str, list[Curve]]:
    """By prompt set: a curve over the drafts of a round at the largest gamma, of each
    drafter, temperature and policy; all categories together.

    Raises:
      ValueError: as `cells_by_gamma`.
    """
    _check_once(rows)
    largest = max(row["gamma"] for row in rows)
    chosen = [row for row in rows if row["gamma"] == largest]
    totals, names = _shortened(cells.totals(chosen)), _CELL_AXES[1:]
    return {
        source: labelled(group_by(of_set, names), names, otherwise="drafter")
        for (source,), of_set in group_by(totals, ("prompt_source",)).items()
    }


def improvements(rows: Sequence[Row]) -> list[Curve]:
    """A curve over gamma for each acceptance and cost, of `theory.improvement_rows`."""
    names = ("acceptance", "cost")
    return [
        Curve(label="", rows=tuple(sorted(of_pair, key=lambda row: row["gamma"])))
        for of_pair in group_by(rows, names).values()
    ]


def _shortened(rows: Sequence[Row]) -> list[Row]:
    """The rows, with the name of a file of prompts in the place of its path.

    And with its folder's, where two files have one name.
    """
    paths = {
        row["prompt_source"]: pathlib.PurePath(row["prompt_source"]) for row in rows
    }
    names = [path.name for path in paths.values()]
    short = {
        source: path.name if names.count(path.name) == 1 else "/".join(path.parts[-2:])
        for source, path in paths.items()
    }
    return [{**row, "prompt_source": short[row["prompt_source"]]} for row in rows]


def _check_once(rows: Sequence[Row]) -> None:
    found = [cells.cell_of(row) for row in rows]
    twice = {cell for cell in found if found.count(cell) > 1}
    if twice:
        cell = min(twice, key=str)
        raise ValueError(
            f"{cell} is there {found.count(cell)} times; name the file of one sweep"
        )


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
