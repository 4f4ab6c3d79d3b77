"""The rows of `experiments/results`, from which tables of README and docs are made."""

import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


Cell = str | Callable[[Row], str]
"""A format of a row's values by their names, or what makes the text of a row."""


def table(columns: Mapping[str, Cell], rows: Iterable[Row]) -> Lines:
    """Yields the lines of a table of one line a row.

    Args:
      columns: what stands under each heading.
    """
    yield [*columns]
    for row in rows:
        yield [
            cell.format_map(row) if isinstance(cell, str) else cell(row)
            for cell in columns.values()
        ]


SPREAD = "{speedup_e2e:.2f} ({speedup_e2e_p10:.2f} to {speedup_e2e_p90:.2f})"


def of_files(names: Iterable[str], kind: str = "summary") -> list[Row]:
    """Returns the rows of a kind of several files, in their order."""
    return [row for name in names for row in rows_of(name, kind)]


def repeated(row: Row) -> str:
    """How far a row's texts repeat themselves; rows of earlier versions do not say."""
    return terminal.format_value(row.get("repetition"), ".0%")


def drawn(row: Row) -> str:
    """The flags by which tokens are drawn, and kept."""
    flags = f" --temperature {row['temperature']:g}" if row["temperature"] else ""
    return flags if row["rule"] == "coupled" else f"{flags} --rule {row['rule']}"


def matched(row: Row) -> str:
    """Returns "-" where a rule that keeps the distribution has texts of its own."""
    return "-" if row["matched"] is None else "yes" if row["matched"] else "no"
