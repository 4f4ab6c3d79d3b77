"""Rows of results -> the curves of a figure, its caption, and what identifies them.

Knows rows; draws nothing.
"""

import collections
import hashlib
import json
import pathlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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


class Curve(NamedTuple):
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


def is_cell(row: Row) -> bool:
    """Whether the row is a finished cell of `sweep.py`, of chains of one length."""
    is_of_chains = "tree" not in row and "schedule" not in row
    return row.get("kind") == "sweep" and is_of_chains


def is_at_context(row: Row) -> bool:
    """Whether the row is a cell whose prompts were brought to so many tokens."""
    return is_cell(row) and str(row.get("category")).isdecimal()


def by_context(rows: Sequence[Row]) -> list[Curve]:
    """Curves over the tokens of a prompt, one for each drafter and its settings.

    Raises:
      ValueError: a cell that is there twice, or more curves than can be told apart.
    """
    names = ("prompt_source", "temperature", "drafter", "gamma_policy", "gamma")
    at = [row | {"prompt_tokens": int(row["category"])} for row in rows]
    grouped = group_by(at, names).values()
    return labelled(grouped, names, axis="prompt_tokens", otherwise="drafter")


def by_gamma(summaries: Sequence[Row]) -> list[Curve]:
    """Curves over gamma: settings that were run with two values of it, or more.

    Raises:
      ValueError: there are none, or one setting was run twice with one gamma.
    """
    grouped = group_by(summaries, _SETTINGS).values()
    if not (kept := [rows for rows in grouped if len(rows) > 1]):
        raise ValueError(
            "no settings were run with two values of gamma; run spec_round.py with "
            "another --gamma"
        )
    return labelled(kept, _SETTINGS, axis="gamma")


def of_largest_gamma(summaries: Sequence[Row], name: str) -> list[Curve]:
    """A curve of each setting with the largest gamma; equal ones share a curve.

    Args:
      name: of the list that is to be drawn.
    """
    rows = _of_largest_gamma(summaries)
    different = {(row["impl"], tuple(row[name])): row for row in reversed(rows)}
    return labelled([[row] for row in different.values()], _SETTINGS)


def by_active_rows(steps: Sequence[Row]) -> list[Curve]:
    """Curves over the active rows of a slab, one for each model and implementation.

    Raises:
      ValueError: one of them was timed twice with as many rows.
    """
    names = ("target", "dtype", "impl", "slab", "context")
    return labelled(group_by(steps, names).values(), names, axis="num_active")


def by_method(comparison: Sequence[Row]) -> list[Curve]:
    """Curves over gamma of each side and method of a comparison, in its order.

    Raises:
      ValueError: rows of more than one run of `compare_hf.py`.
    """
    names = ("side", "method")
    grouped = group_by(comparison, names)
    # Plain decoding drafts nothing, and is a curve of one row.
    return [
        Curve(" ".join(name), _sorted(rows, "gamma", names))
        for name, rows in grouped.items()
    ]


def cells_by_position(rows: Sequence[Row]) -> dict[str, list[Curve]]:
    """By prompt set: a curve over the drafts of a round at the largest gamma, of each
    drafter, temperature and policy; all categories together.

    Raises:
      ValueError: a cell that is there twice, or more curves than can be told apart.
    """
    cell, count = collections.Counter(map(cells.cell_of, rows)).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{cell} is there {count} times; name the file of one sweep")
    names, totals = ("temperature", "drafter", "gamma_policy"), cells.totals(rows)
    sets = group_by(_of_largest_gamma(totals), ("prompt_source",))
    titles = _short(source for (source,) in sets)
    return {
        title: labelled(group_by(of_set, names).values(), names, otherwise="drafter")
        for title, of_set in zip(titles, sets.values(), strict=True)
    }


def group_by(rows: Iterable[Row], names: Sequence[str]) -> dict[tuple, list[Row]]:
    """The rows that share the values of these names, in their order."""
    grouped: dict[tuple, list[Row]] = {}
    for row in rows:
        grouped.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return grouped


def labelled(
    grouped: Iterable[Sequence[Row]],
    names: Sequence[str],
    *,
    axis: str | None = None,
    otherwise: str = "impl",
) -> list[Curve]:
    """Curves that say in which settings they differ.

    Args:
      grouped: the rows of each curve, which agree in `names`.
      axis: the name whose values order the rows of a curve.
      otherwise: the setting that a curve says where all agree.

    Raises:
      ValueError: more of them than can be told apart, or two rows of one value.
    """
    grouped = list(grouped)
    values = {name: {str(rows[0].get(name)) for rows in grouped} for name in names}
    varying = [name for name in names if len(values[name]) > 1]
    if len(grouped) > MAX_CURVES:
        raise ValueError(
            f"{len(grouped)} curves, of which {MAX_CURVES} can be told apart; they "
            f"differ in {', '.join(varying)}: choose with --where NAME=VALUE"
        )
    return sorted(
        (
            Curve(
                _describe(rows[0], varying or (otherwise,)),
                _sorted(rows, axis, names) if axis else tuple(rows),
            )
            for rows in grouped
        ),
        key=lambda curve: curve.label,
    )


def _sorted(rows: Sequence[Row], axis: str, names: Sequence[str]) -> tuple[Row, ...]:
    """The rows in the order of `axis`; raises `ValueError` where two have one value."""
    value, count = collections.Counter(row[axis] for row in rows).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"{axis} {value} of {_describe(rows[0], names)} is there {count} times; "
            "name one file of them, or tell them apart with --where"
        )
    return tuple(sorted(rows, key=lambda row: row[axis]))


def _describe(row: Row, names: Sequence[str]) -> str:
    """The row's settings in words."""
    present = [name for name in names if row.get(name) is not None]
    return ", ".join(_LABELS.get(name, "{}").format(row[name]) for name in present)


def _of_largest_gamma(rows: Sequence[Row]) -> list[Row]:
    largest = max(row["gamma"] for row in rows)
    return [row for row in rows if row["gamma"] == largest]


def _short(sources: Iterable[str]) -> list[str]:
    """Files of prompts without folders, but for one where two files have one name."""
    paths = [pathlib.PurePath(source) for source in sources]
    count = collections.Counter(path.name for path in paths)
    return ["/".join(path.parts[-1 - (count[path.name] > 1) :]) for path in paths]


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
    sides = [
        row[side] for row in rows for side in ("reference", "verify") if side in row
    ]
    each = lambda name, of=rows: [row[name] for row in of if row.get(name) is not None]
    names = lambda name: [pathlib.PurePath(path).name for path in each(name)]
    is_cpu = all(row.get("platform", "cpu") == "cpu" for row in rows)
    has_isa = is_cpu and any("native_isa" in row for row in rows)
    isa = [row.get("native_isa") or "chosen by XLA" for row in rows if has_isa]
    parts = {
        "model": (
            ("target {}", names("target")),
            ("draft {}", names("draft")),
            ("{}", each("dtype") + each("dtype", sides)),
            ("{}", each("impl") + each("impl", sides)),
        ),
        "machine": (
            ("{}", each("cpu" if is_cpu else "device_kind")),
            ("instruction set {}", isa),
            ("jax {}", each("jax_version")),
        ),
        "prompts": (
            ("{}", map(_set_name, each("prompt_source"))),
            ("{} prompts", _num_prompts(rows)),
            ("prompt {}", names("id")),
            ("{} tokens each", each("gen_tokens")),
            ("after {} tokens", each("context")),
            (
                "a window of {}",
                [
                    f"{len(r['window'])} tokens from {r['start']}"
                    for r in rows
                    if "window" in r
                ],
            ),
        ),
    }
    lines = []
    for part, fields in parts.items():
        listed = ((form, _listed(values)) for form, values in fields)
        words = ", ".join(form.format(values) for form, values in listed if values)
        lines += textwrap.wrap(f"{part}: {words}", WIDTH) if words else []
    return "\n".join(lines)


def _num_prompts(rows: Sequence[Row]) -> list[int]:
    """The prompts of each set: the cells of a sweep are of one category each, and have
    all prompts together."""
    counts: dict[Any, dict[Any, int]] = {}
    for row in rows:
        if isinstance(row.get("prompts"), int):
            of_set = counts.setdefault(row.get("prompt_source"), {})
            of_set[row.get("category")] = row["prompts"]
    return [sum(by_category.values()) for by_category in counts.values()]


def _listed(values: Iterable[Any]) -> str:
    """The different values, in their order."""
    different = list(dict.fromkeys(map(str, values)))
    return (
        " / ".join(different)
        if len(different) <= SHOWN
        else f"{len(different)} different"
    )


def _set_name(source: str) -> str:
    """What `--prompts` was given: bundled prompts, or a file and the folder around."""
    if source.partition("@")[0].isdecimal():
        return f"bundled ({source})"
    return "/".join(pathlib.PurePath(source).parts[-2:])


def digests(rows: Iterable[Row]) -> list[str]:
    """Identifies each row: twelve digits of the SHA-256 of its JSON, keys sorted."""
    lines = (json.dumps(row, sort_keys=True) for row in rows)
    return [hashlib.sha256(line.encode()).hexdigest()[:12] for line in lines]
