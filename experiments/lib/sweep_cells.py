"""Cells of a sweep: results of a cell -> a line, and lines -> totals.

A cell is the prompts of one category of one file, at one temperature, with one drafter,
gamma and gamma policy. Its line holds what was counted and timed, so that the total
over categories is computed as if they had been run as one.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.lib import flags, results as results_lib, summaries, tables
from spec_jax.analysis import metrics


Row = Mapping[str, Any]

ALL = "all"
"""The category of a total."""

NO_TREE = flags.NO_TREE

FIXED = "fixed"
"""The gamma policy that asks for the same gamma in each round."""


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """A place in the grid."""

    drafter: str
    temperature: float
    prompt_source: str
    gamma_policy: str
    gamma: int  # tokens drafted a round; with an adaptive policy at most
    category: str | None  # of the prompts; None of those that have none
    # `NO_TREE`, or what is drafted in place of chains; `gamma` is the number of nodes
    tree: str = NO_TREE

    def to_row(self) -> dict[str, Any]:
        """Returns the fields, in a JSON row: without a tree as before there were
        any."""
        row = dataclasses.asdict(self)
        if self.tree == NO_TREE:
            del row["tree"]
        return row

    def __str__(self) -> str:
        """The cell in a few words."""
        drafted = f"gamma {self.gamma}"
        if self.tree != NO_TREE:
            drafted = f"tree {self.tree}"
        words = [self.prompt_source, self.category, self.drafter, drafted]
        if self.gamma_policy != FIXED:
            words.append(self.gamma_policy)
        if self.temperature:
            words.append(f"T {self.temperature:g}")
        return ", ".join(word for word in words if word is not None)


KEYS = tuple(field.name for field in dataclasses.fields(Cell))


def cell_of(row: Row) -> Cell:
    """Where a row belongs.

    Raises:
      ValueError: a row that is no cell of a sweep.
    """
    row = {"tree": NO_TREE, **row}
    missing = [name for name in KEYS if name not in row]
    if missing:
        raise ValueError(f"a row lacks {', '.join(missing)}: it is no cell of a sweep")
    return Cell(**{name: row[name] for name in KEYS})


def row_of(cell: Cell, results: Sequence[results_lib.PromptResult]) -> dict[str, Any]:
    """The line of a finished cell; raises as `summaries.summarise`."""
    counters = metrics.total(result.spec[0].counters for result in results)
    return {
        "kind": "sweep",
        **cell.to_row(),
        **tables.to_row(results_lib.summarise(results)),
        "counters": dataclasses.asdict(counters),
        "texts": [dataclasses.asdict(result.text) for result in results],
        "plain_timings": _timings([result.plain for result in results]),
        "spec_timings": _timings([result.spec for result in results]),
    }


def total(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows of several categories as one, of category `ALL`.

    A published row is a total already, without what it was made of, and stays as it is.

    Raises:
      IdentityError: rows that contradict themselves.
      ValueError: rows of different cells, of another number of repeats, or several of
        which one is a total already.
    """
    made_of = ("counters", "texts", "plain_timings", "spec_timings")
    if any(name not in row for row in rows for name in made_of):
        if len(rows) == 1 and rows[0]["category"] == ALL:
            return dict(rows[0])
        raise ValueError(
            f"{cell_of(rows[0])}: rows without {', '.join(made_of)} have no total"
        )
    cells = {dataclasses.replace(cell_of(row), category=ALL) for row in rows}
    if len(cells) != 1:
        raise ValueError(f"{len(cells)} cells have no total: give the rows of one")
    (cell,) = cells
    counters = metrics.total(_counters(row) for row in rows)
    mismatches = [row["verify_decode_mismatches"] for row in rows]
    summary = summaries.summarise(
        counters,
        prompts=sum(row["prompts"] for row in rows),
        texts=[summaries.TextCounts(**text) for row in rows for text in row["texts"]],
        baseline=_joined([row["plain_timings"] for row in rows]),
        spec=_joined([row["spec_timings"] for row in rows]),
        matched=results_lib.all_matched([row["matched"] for row in rows]),
        verify_decode_mismatches=None if None in mismatches else sum(mismatches),
    )
    return {
        "kind": "sweep",
        **cell.to_row(),
        **tables.to_row(results_lib.mark_disturbed(summary)),
    }


def totals(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """A total of each cell over its categories, in the order of the rows."""
    grouped: dict[Cell, list[Row]] = {}
    for row in rows:
        cell = dataclasses.replace(cell_of(row), category=ALL)
        grouped.setdefault(cell, []).append(row)
    return [total(of_cell) for of_cell in grouped.values()]


def _counters(row: Row) -> metrics.Counters:
    """The counters of a line; lists are tuples again."""
    return metrics.Counters(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in row["counters"].items()
        }
    )


def _timings(runs: Sequence[Sequence[Any]]) -> list[list[list[float]]]:
    """`[prompt][repeat]` runs as `[repeat][prompt]` of the fields of a `Timing`."""
    return [
        [list(dataclasses.astuple(run.timing)) for run in repeat]
        for repeat in zip(*runs, strict=True)
    ]


def _joined(timings: Sequence[list]) -> list[list[summaries.Timing]]:
    """The timings of several lines, repeat by repeat."""
    return [
        [
            summaries.Timing(prefill_s=prefill_s, decode_s=decode_s, tokens=tokens)
            for of_line in repeat
            for prefill_s, decode_s, tokens in of_line
        ]
        for repeat in zip(*timings, strict=True)
    ]
