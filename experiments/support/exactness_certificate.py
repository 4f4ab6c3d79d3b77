"""Certificates: what a run of the exactness suite claims, in a form to check it by.

A certificate holds what was run, on what, and SHA-256 of every result of every prompt.
Lists of these hashes stand once, under their own hash: cells with equal bits name the
same list. Knows rows and JSON; runs nothing.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.support import (
    exactness_cells as cells_lib,
    exactness_evidence as evidence,
    exactness_rows as rows_lib,
    exactness_suite as suite,
)


FORMAT = "spec_jax exactness certificate"
VERSION = 1
KINDS = ("plain", "spec")


def make(
    header: Mapping[str, Any],
    cells: Sequence[cells_lib.Cell],
    rows: Sequence[suite.Row],
) -> dict[str, Any]:
    """The certificate of a complete run.

    Args:
      header: as in the run's file of rows: settings, environment, weights, prompts.
      rows: of every cell and prompt.
    """
    lists: dict[str, list[str]] = {}

    def put(hashes: list[str]) -> str:
        if evidence.NOT_COMPARED in hashes:
            return evidence.NOT_COMPARED
        digest = rows_lib.sha256_of(hashes)
        lists[digest] = hashes
        return digest

    entries = []
    for cell in cells:
        own = sorted(
            (row for row in rows if row["cell"] == cell.name),
            key=lambda row: row["index"],
        )
        entries.append(
            suite.summarise(cell, own).to_row()
            | {
                kind: {
                    what: put([row[f"{kind}_sha256"][what] for row in own])
                    for what in evidence.WHATS
                }
                for kind in KINDS
            }
        )
    is_exact = all(entry["exact"] for entry in entries)
    warnings = suite.warnings([suite.summarise(cell, rows) for cell in cells])
    body = {
        "format": FORMAT,
        "version": VERSION,
        **header,
        "exact": is_exact and not suite.across_pages(cells, rows),
        "warnings": warnings,
        "cells": entries,
        "lists": lists,
    }
    return body | {"sha256": rows_lib.sha256_of(body)}


def check_writable(path: pathlib.Path) -> None:
    """Raises `ValueError` for a path that cannot be written, before the work."""
    if path.is_dir():
        raise ValueError(f"{path}: is a directory; name a file, such as run.json")
    if not path.parent.is_dir():
        raise ValueError(
            f"{path}: the directory {path.parent} does not exist; make it first"
        )


def write(path: pathlib.Path, certificate: Mapping[str, Any]) -> None:
    """Writes it as indented JSON."""
    try:
        path.write_text(json.dumps(certificate, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from None


def read(path: pathlib.Path) -> dict[str, Any]:
    """Reads a certificate.

    Raises:
      ValueError: no certificate, one of another version, or one whose content is not
        what its own hash says.
    """
    try:
        certificate = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
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
    if certificate.get("sha256") != rows_lib.sha256_of(body):
        raise ValueError(
            f"{path}: was edited: its content has SHA-256 "
            f"{rows_lib.sha256_of(body)[:12]}.., and it says "
            f"{str(certificate.get('sha256'))[:12]}.."
        )
    return certificate


def _commit(certificate: Mapping[str, Any]) -> str:
    commit = certificate.get("environment", {}).get("git_commit")
    return f" (commit {commit})" if commit else ""


def cells_of(certificate: Mapping[str, Any]) -> list[cells_lib.Cell]:
    """What it certifies.

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
    certificate: Mapping[str, Any], rows: Sequence[suite.Row]
) -> dict[str, dict[str, int | str]]:
    """How many prompts of each cell have each result that the certificate has.

    Both of plain decoding and of the rounds; `evidence.NOT_COMPARED` where the
    certificate has none of the rounds.

    Args:
      rows: of a run of the certificate's cells, of some or all of its prompts.
    """
    found = {}
    for entry, cell in zip(certificate["cells"], cells_of(certificate), strict=True):
        own = [row for row in rows if row["cell"] == cell.name]
        found[cell.name] = {
            what: _num_agreeing(certificate["lists"], entry, own, what)
            for what in evidence.WHATS
        }
    return found


def _num_agreeing(
    lists: Mapping[str, Sequence[str]],
    entry: Mapping[str, Any],
    rows: Sequence[suite.Row],
    what: str,
) -> int | str:
    """How many rows of a cell have its entry's hashes of one of `evidence.WHATS`."""
    if entry["spec"][what] == evidence.NOT_COMPARED:
        return evidence.NOT_COMPARED
    return sum(
        all(
            lists[entry[kind][what]][row["index"]] == row[f"{kind}_sha256"][what]
            for kind in KINDS
        )
        for row in rows
    )


def changes(
    certificate: Mapping[str, Any], environment: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Facts of the environment that differ: name, then, now."""
    then = certificate["environment"]
    names = sorted({*then, *environment})
    return [
        (name, then.get(name), environment.get(name))
        for name in names
        if then.get(name) != environment.get(name)
    ]
