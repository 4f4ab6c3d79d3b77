"""How the exactness suite shows its results: one row a cell, and where to look closer.

Knows names and numbers; decides nothing.
"""

import pathlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import console as rich_console

from experiments.lib import exact_cells as cells_lib, suite, tables
from spec_jax.debug import evidence


WHAT_NAMES = {"log_probs": "log-probs", "kv": "K/V"}
MOST_SHOWN = 10
PARITY = "python experiments/parity.py"


def print_plan(
    plan: suite.Plan, kept: Sequence[suite.Row], console: rich_console.Console
) -> None:
    """What will be run."""
    console.print(
        f"{len(plan.cells)} cells x {len(plan.prompts)} prompts x "
        f"{plan.settings.gen_tokens} tokens"
        + (f"; {len(suite.of_prompts(kept))} are there already" if kept else "")
    )
    console.print(f"base: {plan.cells[0].name}", soft_wrap=True, highlight=False)


def print_cells(
    summaries: Sequence[suite.CellSummary], console: rich_console.Console
) -> None:
    """One row for each cell: counts, and prompts that equal autoregressive decoding."""
    rows = [
        {
            "cell": cells_lib.label(one.cell, summaries[0].cell),
            "prompts": one.prompts,
            "texts": one.texts,
            "accepted": one.accepted / max(one.proposed, 1),
            **one.equal,
        }
        for one in summaries
    ]
    columns = {"cell": "", "prompts": ",d", "texts": ",d", "accepted": ".3f"}
    tables.print_rows(rows, columns | EQUAL, console)
    print_warnings(suite.warnings(summaries), console)


def print_agreement(
    plan: suite.Plan,
    agreement: Mapping[str, Mapping[str, int | str]],
    changes: Sequence[tuple[str, Any, Any]],
    *,
    is_dirty: bool,
    console: rich_console.Console,
) -> None:
    """One row for each cell: prompts whose results are the certificate's.

    Args:
      is_dirty: the certificate's code was not that of its commit.
    """
    rows = [
        {"cell": cells_lib.label(cell, plan.cells[0]), "prompts": len(plan.prompts)}
        | agreement[cell.name]
        for cell in plan.cells
    ]
    tables.print_rows(rows, {"cell": "", "prompts": ",d"} | EQUAL, console)
    if any(evidence.NOT_COMPARED in cell.values() for cell in agreement.values()):
        console.print("-: not in the certificate, made before batches were recorded")
    if is_dirty:
        console.print("made of changed code: its commit does not say which code it was")
    if not changes:
        console.print("the environment is that of the certificate")
    for name, then, now in changes:
        console.print(f"{name}: {then}, now {now}", soft_wrap=True, highlight=False)


def print_warnings(warnings: Iterable[str], console: rich_console.Console) -> None:
    """What makes equality say less than it seems to."""
    for warning in warnings:
        console.print(warning, style="bold red", soft_wrap=True, highlight=False)


def _equal(row: tables.Row, what: str) -> tables.Cell:
    """How many are equal; red where not all are, a dash where nothing was compared."""
    if row[what] == evidence.NOT_COMPARED:
        return "-"
    different = row["prompts"] - row[what]
    return tables.wrong(f"{different} differ" if different else "equal", different > 0)


EQUAL: dict[str, tables.Column] = {
    WHAT_NAMES.get(what, what): lambda row, what=what: _equal(row, what)
    for what in evidence.WHATS
}
"""Columns of what was compared."""


def print_differences(
    rows: Sequence[suite.Row],
    out: pathlib.Path | None,
    *,
    num_before: int,
    console: rich_console.Console,
) -> None:
    """The first differences, one by one, each with a command that looks closer.

    Args:
      rows: in the order in which they stand in `out`.
      num_before: lines of `out` before them.
    """
    numbers = [number for number, row in enumerate(rows) if row.get("differences")]
    for number in numbers[:MOST_SHOWN]:
        row, following = rows[number], rows[number + 1 : number + 2]
        lines = [f"{row['cell']}, prompt {row['id']!r}:"]
        lines += [f"  {evidence.describe(found)}" for found in row["differences"]]
        if " tree " in row["cell"]:
            lines.append("  the window was a tree: parity.py looks into chains alone")
        elif not following or following[0]["kind"] != "mismatch":
            lines.append("  the prompt's own K/V differ: look at the prefill")
        elif out is None:
            lines.append("  look closer: give --out, and its line to parity.py")
        else:
            spec = shlex.quote(f"{out}:{num_before + number + 2}")
            lines.append(f"  look closer: {PARITY} --mismatch {spec}")
        console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)
    if len(numbers) > MOST_SHOWN:
        console.print(f"and {len(numbers) - MOST_SHOWN} prompts more")


def print_across(
    across: Sequence[tuple[dict[str, Any], int]], console: rich_console.Console
) -> None:
    """Plain bits that changed with page size, kind of cache or order of pages."""
    for bits, count in across:
        where = ", ".join(f"{axis} {value}" for axis, value in bits.items())
        console.print(
            f"{count} prompts of decoding ({where}) have other bits on other pages",
            style="bold red",
        )
