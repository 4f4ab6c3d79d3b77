"""The table of replays: one line for a drafter, a gamma and a policy.

Knows names and formats; computes nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import console as rich_console, table as rich_table, text as rich_text

from experiments.lib import terminal


COLUMNS = (
    ("drafter", "drafter", ""),
    ("policy", "gamma_policy", ""),
    ("gamma", "gamma", "d"),
    ("acceptance", "acceptance_rate", ".3f"),
    ("repetition", "repetition", ".3f"),
    ("tokens a round", "mean_accepted_length", ".2f"),
    ("rounds", "rounds", ",d"),
    ("tokens a step", "tokens_per_target_step", ".2f"),
    ("expected tokens/s", "expected_tok_s", ",.1f"),
    ("expected speed-up", "expected_speedup", ".2f"),
)
"""Heading, name in the row, and format."""

DULL = {
    "gamma_policy": "fixed",
    "expected_tok_s": None,
    "expected_speedup": None,
}
"""Columns that are left out where every row has this."""


def print_rows(
    rows: Sequence[Mapping[str, Any]], console: rich_console.Console
) -> None:
    """Prints the table, and behind it what differs live."""
    columns = [
        (heading, name, form)
        for heading, name, form in COLUMNS
        if name not in DULL or any(row[name] != DULL[name] for row in rows)
    ]
    is_checked = any(row["checked"] is not None for row in rows)
    table = rich_table.Table(box=None, pad_edge=False, header_style="bold")
    for heading, _, form in columns:
        table.add_column(heading, justify="right" if form else "left")
    if is_checked:
        table.add_column("equal live", justify="right")
    for row in rows:
        cells = [terminal.format_value(row[name], form) for _, name, form in columns]
        table.add_row(*cells, *([_equal_live(row)] if is_checked else []))
    console.print(table)
    for row in rows:
        for prompt in row["differing"]:
            line = (
                f"{row['drafter']}, {row['gamma_policy']} gamma {row['gamma']}, prompt "
                f"{prompt['id']} differs: {'; '.join(prompt['differs'])}"
            )
            # `Text`: ids are no markup.
            console.print(rich_text.Text(line, style="bold red"), soft_wrap=True)


def _equal_live(row: Mapping[str, Any]) -> rich_text.Text:
    """Prompts whose live rounds have the same counters and tokens; red unless all."""
    if row["checked"] is None:
        return rich_text.Text("-")
    equal = row["checked"] - len(row["differing"])
    style = "bold red" if row["differing"] else ""
    return rich_text.Text(f"{equal}/{row['checked']}", style=style)
