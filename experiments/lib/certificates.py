"""Certificates of the exactness suite: settings, environment and results of a run.

A certificate holds the SHA-256 of every result of every prompt. Each list of these
hashes is stored once, under its own hash: cells with equal bits name the same list.
This module handles rows and JSON, and runs nothing.
"""

import hashlib
import json
import operator
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.lib import exact_cells as cells_lib, files, suite
from spec_jax.debug import evidence


FORMAT = "spec_jax exactness certificate"
VERSION = 1
KINDS = ("plain", "spec")
REMOVED = {"verify_path": "paged-decode", "draft_cache": "persistent"}
"""Axes that cells once had, each with the value that all cells have today."""


def sha256_of(value: Any) -> str:
    """Returns the SHA-256 of a JSON value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def make(
    header: Mapping[str, Any],
    cells: Sequence[cells_lib.Cell],
    rows: Sequence[suite.Row],
) -> dict[str, Any]:
    """Returns the certificate of a complete run.

    Args:
      header: that of the run's file of rows: settings, environment, weights, prompts.
      rows: one for every cell and prompt.
    """
    lists: dict[str, list[str]] = {}

    def put(hashes: list[str]) -> str:
        digest = sha256_of(hashes)
        lists[digest] = hashes
        return digest

    entries = []
    for cell in cells:
        own = [row for row in rows if row["cell"] == cell.name]
        own.sort(key=lambda row: row["index"])
        results = {
            kind: {
                what: put([row[f"{kind}_sha256"][what] for row in own])
                for what in evidence.WHATS
            }
            for kind in KINDS
        }
        entries.append(_summary(cell, own) | results)
    across = across_pages(cells, rows)
    body = {
        "format": FORMAT,
        "version": VERSION,
        **header,
        "exact": all(entry["exact"] for entry in entries) and not across,
        "warnings": _warnings(entries) + across,
        "cells": entries,
        "lists": lists,
    }
    return body | {"sha256": sha256_of(body)}


def _summary(cell: cells_lib.Cell, own: Sequence[suite.Row]) -> dict[str, Any]:
    """Returns the numbers of a cell, from the rows of its prompts.

    `texts` counts different texts: prompts that a model continues in the same way are
    one witness. `equal` counts prompts in which each of `evidence.WHATS` is that of
    decoding; `exact` says whether all are, without logits of NaN or infinity, whose
    equality proves nothing.
    """
    counts = ("tokens", "rounds", "proposed", "accepted")
    counts += ("nonfinite_logits", "constant_logits")
    equal = {
        what: sum(all(d["what"] != what for d in row["differences"]) for row in own)
        for what in evidence.WHATS
    }
    found = {
        "cell": cell.to_row(),
        "prompts": len(own),
        "texts": len({row["spec_sha256"]["tokens"] for row in own}),
        **{name: sum(row[name] for row in own) for name in counts},
        "equal": equal,
    }
    is_exact = not found["nonfinite_logits"] and set(equal.values()) == {len(own)}
    return found | {"exact": is_exact}


def _warnings(summaries: Sequence[suite.Row]) -> list[str]:
    """Returns sentences on logits for which equality proves less than it seems to."""
    found = []
    for name, what in (
        ("nonfinite_logits", "hold NaN or infinity: equality means nothing there"),
        ("constant_logits", "are all equal: they prove nothing"),
    ):
        count = sum(summary[name] for summary in summaries)
        if count:
            total = sum(summary["tokens"] for summary in summaries)
            found.append(f"{count:,} of {total:,} tokens are of logits that {what}")
    return found


def across_pages(
    cells: Sequence[cells_lib.Cell], rows: Sequence[suite.Row]
) -> list[str]:
    """Returns sentences on prompts whose decoded bits depend on pages, as none may: one
    for each choice of `exact_cells.BIT_AXES` with such prompts."""
    bits_of = {cell.name: tuple(cell.bits.items()) for cell in cells}
    seen: dict[tuple, dict[int, set]] = {}
    for row in rows:
        by_prompt = seen.setdefault(bits_of[row["cell"]], {})
        hashes = tuple(row["plain_sha256"][what] for what in evidence.WHATS)
        by_prompt.setdefault(row["index"], set()).add(hashes)
    found = []
    for bits, by_prompt in seen.items():
        count = sum(len(hashes) > 1 for hashes in by_prompt.values())
        if count:
            told = ", ".join(f"{axis} {value}" for axis, value in bits)
            words = f"prompts of decoding ({told}) have other bits on other pages"
            found.append(f"{count} {words}")
    return found


def write(path: pathlib.Path, certificate: Mapping[str, Any]) -> None:
    """Writes a certificate as indented JSON."""
    path.write_text(json.dumps(certificate, indent=1, allow_nan=False) + "\n")


def read(path: pathlib.Path) -> dict[str, Any]:
    """Reads a certificate; its cells lack the axes of `REMOVED`, and `left_out` counts
    cells with other values of these axes, which no code runs any more.

    Raises:
      ValueError: no regular file, no certificate, one of another version, or one whose
        content does not match its own hash.
    """
    try:
        certificate = json.loads(files.read(path))
    except ValueError as error:
        raise ValueError(f"{path}: no JSON, and so no certificate ({error})") from None
    if not isinstance(certificate, dict) or certificate.get("format") != FORMAT:
        raise ValueError(
            f"{path}: no certificate; exactness.py --certificate FILE writes one"
        )
    if certificate.get("version") != VERSION:
        raise ValueError(
            f"{path}: a certificate of version {certificate.get('version')}, and this "
            f"code reads version {VERSION}; verify it with the code that wrote it"
            f"{_commit(certificate)}"
        )
    body = {name: value for name, value in certificate.items() if name != "sha256"}
    if certificate.get("sha256") != sha256_of(body):
        raise ValueError(
            f"{path}: was edited: its content has SHA-256 "
            f"{sha256_of(body)[:12]}.., and it says "
            f"{str(certificate.get('sha256'))[:12]}.."
        )
    for entry in certificate["cells"]:
        items = (REMOVED | entry["cell"]).items()
        entry["cell"] = {k: x for k, x in items if REMOVED.get(k) != x}
    kept = [one for one in certificate["cells"] if not REMOVED.keys() & one["cell"]]
    left_out = len(certificate["cells"]) - len(kept)
    return certificate | {"cells": kept, "left_out": left_out}


def _commit(certificate: Mapping[str, Any]) -> str:
    commit = certificate.get("environment", {}).get("git_commit")
    return f" (commit {commit})" if commit else ""


def cells_of(certificate: Mapping[str, Any]) -> list[cells_lib.Cell]:
    """Returns a certificate's cells.

    Raises:
      ValueError: cells with an axis that this code does not know.
    """
    cells = [entry["cell"] for entry in certificate["cells"]]
    unknown = sorted({axis for cell in cells for axis in cell} - {*cells_lib.AXES})
    if unknown:
        raise ValueError(
            f"the certificate has cells of {', '.join(unknown)}, which this code does "
            f"not know; verify it with the code that wrote it{_commit(certificate)}"
        )
    return [cells_lib.Cell(**cell) for cell in cells]


def agreement(
    certificate: Mapping[str, Any], made: Mapping[str, Any]
) -> list[dict[str, int]]:
    """Returns how many prompts of each cell have each result of the certificate.

    A prompt counts if the results of decoding and of the rounds are both equal.

    Args:
      made: the certificate of a run of its cells, for its first prompts or all.
    """

    def hashes(of: Mapping[str, Any], cell: suite.Row, what: str) -> Iterator[tuple]:
        return zip(*(of["lists"][cell[kind][what]] for kind in KINDS), strict=True)

    equal = lambda then, now, what: sum(
        map(operator.eq, hashes(certificate, then, what), hashes(made, now, what))
    )
    cells = zip(certificate["cells"], made["cells"], strict=True)
    return [{what: equal(*both, what) for what in evidence.WHATS} for both in cells]


def changes(
    certificate: Mapping[str, Any], environment: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Returns facts of the environment that differ: name, value then, value now."""
    then = certificate["environment"]
    both = [(name, then.get(name), environment.get(name))
            for name in sorted({*then, *environment})]  # fmt: skip
    return [one for one in both if one[1] != one[2]]
