"""What the figures of sweeps and of the theory show: rows -> curves. Draws nothing."""

import pathlib
from collections.abc import Sequence

from experiments.support import figure_data, sweep_rows


Row = figure_data.Row
Curve = figure_data.Curve

_AXES = ("prompt_source", "temperature", "drafter", "gamma_policy")
"""What sets one curve apart from another, beside gamma."""


def is_cell(row: Row) -> bool:
    """Whether the row is a finished cell of `sweep.py`."""
    return row.get("kind") == "sweep"


def has_category(row: Row) -> bool:
    """Whether it is one of prompts of a category."""
    return is_cell(row) and row.get("category") is not None


def by_gamma(rows: Sequence[Row]) -> list[Curve]:
    """Curves over gamma, of all categories together.

    Raises:
      ValueError: a cell that is there twice, more curves than can be told apart, or
        no gamma beside another.
    """
    _check_once(rows)
    totals = _shortened(sweep_rows.totals(rows))
    if len({row["gamma"] for row in totals}) < 2:
        raise ValueError(
            "no cells of two gammas; run sweep.py with another --gamma on the same file"
        )
    return figure_data.labelled(
        figure_data.group_by(totals, _AXES), _AXES, sort_by="gamma", otherwise="drafter"
    )


def by_category(rows: Sequence[Row]) -> tuple[list[str], list[Curve]]:
    """The names of the categories, and curves over them at the largest gamma.

    Raises:
      ValueError: as `by_gamma`, but for the last.
    """
    _check_once(rows)
    largest = max(row["gamma"] for row in rows)
    chosen = _shortened([row for row in rows if row["gamma"] == largest])
    curves = figure_data.labelled(
        figure_data.group_by(chosen, _AXES), _AXES, otherwise="drafter"
    )
    return list(dict.fromkeys(row["category"] for row in chosen)), curves


def improvements(rows: Sequence[Row]) -> list[Curve]:
    """A curve over gamma for each acceptance and cost, of `theory.improvement_rows`."""
    names = ("acceptance", "cost")
    return [
        Curve(label="", rows=tuple(sorted(of_pair, key=lambda row: row["gamma"])))
        for of_pair in figure_data.group_by(rows, names).values()
    ]


def _shortened(rows: Sequence[Row]) -> list[Row]:
    """The rows, with the name of a file of prompts in the place of its path."""
    return [
        {**row, "prompt_source": pathlib.PurePath(row["prompt_source"]).name}
        for row in rows
    ]


def _check_once(rows: Sequence[Row]) -> None:
    cells = [sweep_rows.cell_of(row) for row in rows]
    twice = {cell for cell in cells if cells.count(cell) > 1}
    if twice:
        cell = min(twice, key=str)
        raise ValueError(
            f"{cell} is there {cells.count(cell)} times; name the file of one sweep"
        )
