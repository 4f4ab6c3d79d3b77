"""The rows of `experiments/results`, from which tables of README and docs are made."""

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.lib import files, terminal


ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"

Row = Mapping[str, Any]
Lines = Iterator[Sequence[str]]
"""The cells of each line of a table, the heading first."""


def rows_of(pattern: str, kind: str) -> list[Row]:
    """The rows of a kind, of the files of results of that name, in order."""
    return [
        row
        for path in sorted(RESULTS.glob(pattern))
        for row in files.read_rows(path).values()
        if row.get("kind") == kind
    ]


def repeated(row: Row) -> str:
    """How far a row's texts repeat themselves; rows of earlier versions do not say."""
    return terminal.format_value(row.get("repetition"), ".0%")


def drawn(row: Row) -> str:
    """The flags by which tokens are drawn, and kept."""
    flags = f" --temperature {row['temperature']:g}" if row["temperature"] else ""
    return flags if row["rule"] == "coupled" else f"{flags} --rule {row['rule']}"
