"""Published rows as lines of a table: one line a row, or a line of many rows."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from experiments.lib import files
from spec_jax.debug import evidence


ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"

Row = Mapping[str, Any]
Lines = Iterator[Sequence[str]]
"""The cells of each line of a table, the heading first."""

QUARTILES = "{speedup:.2f} ({speedup_q1:.2f} to {speedup_q3:.2f})"
RATIO = "{ratio:.2f} ({ratio_p10:.2f} to {ratio_p90:.2f})"
"""Formats of a number and its spread."""

Cell = str | Callable[[Row], str]
"""A format of a row's values by their names, or what makes the text of a row."""


def rows_of(pattern: str, *kinds: str) -> list[Row]:
    """The rows of some kinds, of the files of results of that name, in order."""
    return [
        row
        for path in sorted(RESULTS.glob(pattern))
        for row in files.read_rows(path).values()
        if row.get("kind") in kinds
    ]


def is_equal(row: Row) -> bool:
    """Whether all that a cell of `constrained.py --table` compares is equal."""
    equal = {row[what] for what in evidence.WHATS}
    return not row["nonfinite"] and equal == {row["prompts"]}


def text_of(cell: Cell, row: Row) -> str:
    """The text of a cell for a row."""
    return cell.format_map(row) if isinstance(cell, str) else cell(row)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of one line a row.

    Attributes:
      sources: patterns of files, each with the kinds of rows that are taken.
      columns: what stands under each heading.
      keep: which rows are shown; all by default.
    """

    sources: Sequence[Sequence[str]]
    columns: Mapping[str, Cell]
    keep: Callable[[Row], bool] = lambda row: True

    def rows(self) -> list[Row]:
        """The rows that are shown."""
        found = [row for source in self.sources for row in rows_of(*source)]
        return [row for row in found if self.keep(row)]

    def __call__(self) -> Lines:
        """Yields the lines."""
        yield [*self.columns]
        for row in self.rows():
            yield [text_of(cell, row) for cell in self.columns.values()]


@dataclasses.dataclass(frozen=True)
class Pivot:
    """A table whose lines and columns are values of the rows.

    Attributes:
      heading: of the first column.
      sources, keep: as those of `Table`.
      line, column: what names a row's line, and its column.
      cell: what is shown of a row; rows of one place are shown one after the other.
      order: lines in their order; that of the rows by default.
      ends: further columns, of all rows of a line.
    """

    heading: str
    sources: Sequence[Sequence[str]]
    line: Cell
    column: Cell
    cell: Cell
    keep: Callable[[Row], bool] = lambda row: True
    order: Sequence[str] = ()
    ends: Mapping[str, Callable[[list[Row]], str]] = dataclasses.field(
        default_factory=dict
    )

    def __call__(self) -> Lines:
        """Yields the lines."""
        found: dict[str, dict[str, list[Row]]] = {name: {} for name in self.order}
        columns: dict[str, None] = {}
        for row in Table(self.sources, {}, self.keep).rows():
            line, column = text_of(self.line, row), text_of(self.column, row)
            found.setdefault(line, {}).setdefault(column, []).append(row)
            columns[column] = None
        yield self.heading, *columns, *self.ends
        for line, cells in found.items():
            shown = (
                " ".join(text_of(self.cell, row) for row in cells.get(column, ()))
                for column in columns
            )
            every = [row for rows in cells.values() for row in rows]
            yield line, *shown, *(end(every) for end in self.ends.values())


def steps(command: str, *patterns: str, keep: str = "") -> Table:
    """Times of steps, and each beside another one.

    Args:
      keep: what the names of the steps that are shown have in them.
    """
    left_out = ("new cache", "1 active row", "read of 256 MiB")
    context = lambda row: "" if row["context"] is None else f"{row['context']:,}"
    return Table(
        [(pattern, "step") for pattern in patterns],
        {
            command: "{target}: {step}",
            "context": context,
            "ms (p10 to p90)": "{ms:.3f} ({ms_p10:.3f} to {ms_p90:.3f})",
            "times (p10 to p90)": RATIO.replace(".2f", ".3f"),
            "of": "{ratio_to}",
        },
        keep=lambda row: keep in row["step"] and row["step"] not in left_out,
    )
