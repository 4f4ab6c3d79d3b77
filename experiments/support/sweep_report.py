"""The tables of a sweep: one line a cell, over all categories and by category.

Knows rows; measures nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import console as rich_console, table as rich_table, text as rich_text

from experiments.lib import terminal
from experiments.support import sweep_rows


Row = Mapping[str, Any]

AXES = {
    "category": "category",
    "temperature": "T",
    "drafter": "drafter",
    "gamma_policy": "policy",
    "gamma": "gamma",
}
"""Columns that tell the cells of a prompt set apart; an axis of one value is left out,
but for the drafter and its gamma."""

NUMBERS = {
    "prompts": ("n", "d"),
    "acceptance_rate": ("kept", ".3f"),
    "repetition": ("rep", ".3f"),
    "mean_accepted_length": ("len", ".2f"),
    "speedup_e2e": ("e2e", ".2f"),
    "speedup_e2e_p10": ("p10", ".2f"),
    "speedup_e2e_p90": ("p90", ".2f"),
    "speedup_decode": ("decode", ".2f"),
}


def print_sets(rows: Sequence[Row], console: rich_console.Console) -> None:
    """A table of each prompt set, and before it one by category, where it has several.

    Args:
      rows: of single categories.
    """
    for source in dict.fromkeys(row["prompt_source"] for row in rows):
        of_set = [row for row in rows if row["prompt_source"] == source]
        if len({row["category"] for row in of_set}) > 1:
            by_category = sorted(of_set, key=lambda row: row["category"] or "")
            title = f"{source}, by category"
            _print(by_category, console, axes=_axes(by_category), title=title)
        totals = sweep_rows.totals(of_set)
        _print(totals, console, axes=_axes(totals), title=source)
    _explain(console)


def print_categories(
    summaries: Mapping[str, Row], console: rich_console.Console
) -> None:
    """Prints one line a category, for `prompt_runs.by_category`."""
    rows = [{"category": name, **row} for name, row in summaries.items()]
    _print(rows, console, axes=["category"], title="by category")
    _explain(console)


def _explain(console: rich_console.Console) -> None:
    """Prints what the columns are."""
    console.print(
        "n: prompts; kept: of proposed drafts; rep: repeated 4-grams in the texts; "
        "len: tokens a round, the target's own counted; "
        "e2e: speed-up over plain decoding, prefill included, with p10 and p90 over "
        "repeats, or with one repeat over prompts; decode: of decoding alone; match: "
        "all tokens are those of plain decoding, else how many choices differ",
        style="dim",
    )


def _axes(rows: Sequence[Row]) -> list[str]:
    """The columns that tell these rows apart."""
    return [
        name
        for name in AXES
        if name in ("drafter", "gamma") or len({row[name] for row in rows}) > 1
    ]


def _print(
    rows: Sequence[Row],
    console: rich_console.Console,
    *,
    axes: Sequence[str],
    title: str,
) -> None:
    table = rich_table.Table(
        box=None,
        # As narrow as it gets: a terminal has eighty columns.
        padding=(0, 1, 0, 0),
        header_style="bold",
        title=title,
        title_justify="left",
    )
    for name in axes:
        table.add_column(AXES[name], no_wrap=True)
    for heading, _ in NUMBERS.values():
        table.add_column(heading, justify="right")
    table.add_column("match", justify="right")
    for row in rows:
        table.add_row(
            *("-" if row[name] is None else str(row[name]) for name in axes),
            *(
                terminal.format_value(row.get(n), form)
                for n, (_, form) in NUMBERS.items()
            ),
            _match(row),
        )
    console.print(table)
    console.print()


def _match(row: Row) -> rich_text.Text:
    if row["matched"] and not row["verify_decode_mismatches"]:
        return rich_text.Text("yes")
    return rich_text.Text(f"no, {row['verify_decode_mismatches']}", style="bold red")
