"""Figures of results: SVG from the JSON rows that the other scripts write.

Measures nothing. Which rows a figure is made of, their kind decides; --theory adds
those of a formula. Exit status: 0 drawn, 1 the input was unusable; a figure whose rows
are not there is not drawn, unless it was asked for by name.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import collections
import dataclasses
import importlib.util
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from experiments.lib import curves, files
from spec_jax.gamma import theory


DRAWN = 0

INSTALL = "pip install -e '.[plot]'"

Row = dict[str, Any]

THEORY = tuple((a, c) for c in (0.05, 0.3) for a in (0.9, 0.8, 0.6, 0.3))
"""Acceptance and cost of the curves of `--theory`: a cheap draft and a dear one."""

GAMMA_MAX = 12
"""Where those curves end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A figure that can be drawn, by the function of its name in `lib/figures.py`.

    Attributes:
      takes: whether a row belongs to it.
      is_each: whether each row is a figure of its own.
    """

    takes: Callable[[Row], bool]
    is_each: bool = False


def _of_kind(kind: str) -> Callable[[Row], bool]:
    return lambda row: row.get("kind") == kind


FIGURES = {
    "speedup": Kind(takes=curves.is_round_summary),
    "acceptance": Kind(takes=curves.is_round_summary),
    "accepted_lengths": Kind(takes=curves.is_round_summary),
    "step_cost": Kind(takes=curves.is_window_cost),
    "hugging_face": Kind(takes=_of_kind("comparison")),
    "divergence": Kind(takes=_of_kind("parity"), is_each=True),
    "sweep_speedup": Kind(takes=curves.is_cell),
    "sweep_categories": Kind(takes=curves.has_category),
    "improvement": Kind(takes=_of_kind("theory")),
}
"""By the name of `--figure`, which is that of the file too."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; `argparse` itself exits with status 1 on unknown ones."""
    parser = cli.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files",
        nargs="*",
        type=pathlib.Path,
        metavar="FILE",
        help="JSON lines of spec_round.py, latency.py, compare_hf.py, parity.py or "
        "sweep.py",
    )
    parser.add_argument(
        "--theory",
        type=_acceptance_and_cost,
        action="append",
        nargs="*",
        metavar="A,C",
        help="add the expected speed-up over gamma, by theory, for drafts that are "
        "kept with chance A and cost C target steps each; without values, for "
        f"{len(THEORY)} such pairs",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        required=True,
        metavar="DIR",
        help="folder of the figures; made if it is not there",
    )
    parser.add_argument(
        "--figure",
        choices=FIGURES,
        help="draw this one only (default: all that there are rows for)",
    )
    parser.add_argument(
        "--where",
        type=_condition,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="leave out rows that have NAME with another value; may be given often",
    )
    args = parser.parse_args(argv)
    if not args.files and args.theory is None:
        parser.error("nothing to draw: name a file of rows, or give --theory")
    return args


def _acceptance_and_cost(text: str) -> tuple[float, float]:
    try:
        acceptance, cost = map(float, text.split(","))
        theory.walltime_improvement(acceptance, cost, 1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not A,C, a chance and a cost, as in 0.8,0.05 ({error})"
        ) from None
    return acceptance, cost


def _condition(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, as in gamma=4")
    return name, value


def read(path: pathlib.Path) -> list[Row]:
    """The rows of a file: one JSON object a line, or a single one over many lines.

    Raises:
      ValueError: no file, or no JSON objects in it; with the line.
    """
    try:
        text = files.read(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: cannot be read ({reason})") from None
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if path.suffix == ".json":
        lines = [(1, text)]
    rows = []
    for number, line in lines:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: no JSON ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object")
        rows.append(row)
    return rows


def chosen(rows: Sequence[Row], conditions: Sequence[tuple[str, str]]) -> list[Row]:
    """The rows that have no other value under any of the names.

    Raises:
      ValueError: a name that no row has.
    """
    for name, _ in conditions:
        if not any(name in row for row in rows):
            raise ValueError(f"--where {name}=...: no row has {name!r}")
    return [
        row
        for row in rows
        if all(str(row.get(name, value)) == value for name, value in conditions)
    ]


def draw(name: str, rows: Sequence[Row], folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws the figure from the rows that it takes; returns the files.

    Raises:
      ValueError: rows that make no such figure.
    """
    from experiments.lib import figures

    function = getattr(figures, name)
    if not FIGURES[name].is_each:
        path = folder / f"{name}.svg"
        figures.save(function(rows), path, rows=rows)
        return [path]
    paths = []
    for number, row in enumerate(rows, 1):
        suffix = f"_{number}" if len(rows) > 1 else ""
        paths.append(folder / f"{name}{suffix}.svg")
        figures.save(function(row), paths[-1], rows=[row])
    return paths


def check_folder(folder: pathlib.Path | None = None) -> None:
    """Raises `ValueError` where figures could not be drawn, or not into the folder."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"matplotlib is not installed; {INSTALL} brings it")
    if folder is not None:
        files.check_folder(folder)


def run_all(args: argparse.Namespace) -> int:
    """Reads, draws, and says which files it wrote and which rows it left alone."""
    check_folder()
    rows = [row for path in args.files for row in read(path)]
    if args.theory is not None:
        pairs = list(itertools.chain.from_iterable(args.theory)) or THEORY
        rows += theory.improvement_rows(list(dict.fromkeys(pairs)), gamma_max=GAMMA_MAX)
    rows = chosen(rows, args.where)
    names = [args.figure] if args.figure else list(FIGURES)
    taken = {name: [row for row in rows if FIGURES[name].takes(row)] for name in names}
    if not any(taken.values()):
        kinds = ", ".join(sorted({str(row.get("kind")) for row in rows})) or "none"
        raise ValueError(
            f"no rows for {' or '.join(names)}; the rows there are of kind {kinds}"
        )
    check_folder(args.out)
    status = DRAWN
    for name, of_figure in taken.items():
        if not of_figure:
            continue
        try:
            for path in draw(name, of_figure, args.out):
                print(path)
        except ValueError as error:
            # One figure that cannot be drawn takes no other with it.
            print(f"plot.py: error: {name}: {error}", file=sys.stderr)
            status = cli.UNUSABLE
    _report_unused(rows, names)
    return status


def _report_unused(rows: Sequence[Row], names: Sequence[str]) -> None:
    """One line about the rows that are in no figure."""
    unused = collections.Counter(
        str(row.get("kind"))
        for row in rows
        if not any(FIGURES[name].takes(row) for name in names)
    )
    if unused:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(unused.items()))
        print(f"plot.py: rows in no figure, by kind: {kinds}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Draws the figures; returns the exit status."""
    return cli.run(
        "plot.py", lambda: parse_args(argv), run_all, kept=lambda _: "", uses_jax=False
    )


if __name__ == "__main__":
    cli.end(main)
