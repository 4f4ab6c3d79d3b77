"""How the exactness suite shows its results: one row a cell, and where to look closer.

Knows names and numbers; decides nothing.
"""

import pathlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import console as rich_console, table as rich_table, text as rich_text

from experiments.lib import exact_cells as cells_lib, suite
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
    """One row for each cell: counts, and prompts that equal plain decoding."""
    table = _table("cell", "prompts", "texts", "accepted", *_what_names())
    for summary in summaries:
        rate = summary.accepted / max(summary.proposed, 1)
        table.add_row(
            cells_lib.label(summary.cell, summaries[0].cell),
            f"{summary.prompts:,}",
            f"{summary.texts:,}",
            f"{rate:.3f}",
            *_equal(summary.equal, summary.prompts),
        )
    console.print(table)
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
    table = _table("cell", "prompts", *_what_names())
    for cell in plan.cells:
        table.add_row(
            cells_lib.label(cell, plan.cells[0]),
            f"{len(plan.prompts):,}",
            *_equal(agreement[cell.name], len(plan.prompts)),
        )
    console.print(table)
    _explain_dashes(agreement.values(), console)
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


def _explain_dashes(
    counts: Iterable[Mapping[str, int | str]], console: rich_console.Console
) -> None:
    if any(evidence.NOT_COMPARED in cell.values() for cell in counts):
        console.print("-: not in the certificate, made before batches were recorded")


def _what_names() -> list[str]:
    return [WHAT_NAMES.get(what, what) for what in evidence.WHATS]


def _table(first: str, *others: str) -> rich_table.Table:
    table = rich_table.Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, min_width=20)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _equal(counts: Mapping[str, int | str], prompts: int) -> list[rich_text.Text]:
    """How many are equal; red where not all are, a dash where nothing was compared."""
    return [_equal_cell(counts[what], prompts) for what in evidence.WHATS]


def _equal_cell(count: int | str, prompts: int) -> rich_text.Text:
    if count == evidence.NOT_COMPARED:
        return rich_text.Text("-", style="dim")
    if count == prompts:
        return rich_text.Text("equal")
    return rich_text.Text(f"{prompts - count} differ", style="bold red")


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
        if not following or following[0]["kind"] != "mismatch":
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
            f"{count} prompts of plain decoding ({where}) have other bits on other "
            "pages",
            style="bold red",
        )
