"""Figures of results: SVG from the JSON rows that the other scripts write.

Measures nothing. The kind of a row decides which figure it is for. Exit status: 0
drawn, 1 the input was unusable; a figure whose rows are missing is not drawn, unless it
was asked for by name.
"""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

from experiments.lib import cli, files


Row = dict[str, Any]


def _is_round(row: Row) -> bool:
    """Returns whether a row of `spec_round.py` sums up speculative runs of chains."""
    is_summary = row.get("kind") == "summary" and {"gamma", "accepted_hist"} <= set(row)
    return is_summary and not row.get("tree")


def _is_cell(row: Row) -> bool:
    """Returns whether a row is a finished cell of `sweep.py` that drafted chains."""
    return row.get("kind") == "sweep" and "tree" not in row


FIGURES: dict[str, Callable[[Row], bool]] = {
    "speedup": _is_round,
    "step_cost": lambda row: str(row.get("step")).endswith(
        (" active row", " active rows")
    ),
    "divergence": lambda row: row.get("kind") == "parity",
    "sweep_positions": _is_cell,
    "sweep_contexts": lambda row: (
        _is_cell(row) and str(row.get("category")).isdecimal()
    ),
    "drift": lambda row: row.get("kind") == "reinforce",
}
"""Whether a row belongs to a figure, by its function in `lib/figures.py`."""


def _condition(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"{text!r} is not NAME=VALUE, as in gamma=4")
    return name, value


FLAGS = """
    files FILE+  JSON lines of spec_round.py, latency.py, parity.py, sweep.py or
        rollouts.py --steps
    --figure NAME  draw this one only (default: all that there are rows for)
    --out DIR=.  folder of the figures; made if it is not there
    --where FIELD*  leave out rows that have another value, as in gamma=4
    """
KINDS = {"FILE": pathlib.Path, "NAME": tuple(FIGURES), "FIELD": _condition}
parse_args = cli.parser(__doc__, FLAGS, **KINDS)


def run(args: argparse.Namespace) -> None:
    """Reads rows, draws figures, and prints the files written.

    Raises:
      ValueError: there are no rows, or a figure is not drawn; the others are.
    """
    cli.require("plot")
    from experiments.lib import figures

    rows = [row for path in args.files for row in files.read_rows(path)]
    for name, value in args.where:
        rows = [row for row in rows if str(row.get(name, value)) == value]
    names = [args.figure] if args.figure else list(FIGURES)
    found = {name: [row for row in rows if FIGURES[name](row)] for name in names}
    if not any(found.values()):
        kinds = ", ".join(sorted({str(row.get("kind")) for row in rows})) or "none"
        raise ValueError(
            f"no rows for {' or '.join(names)}; the rows there are of kind {kinds}"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    wrong = []
    for name, of_figure in found.items():
        path = args.out / f"{name}.svg"
        try:
            if of_figure:
                figures.draw(getattr(figures, name), of_figure, path)
                print(path)
        except ValueError as error:
            wrong.append(f"{name} is not drawn: {error}")
    if wrong:
        raise ValueError("; ".join(wrong))


main = cli.script("plot.py", parse_args, run, kept="", uses_jax=False)
