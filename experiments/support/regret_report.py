"""The table of regrets: one line a policy, two columns a set. Knows rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import console as rich_console, table as rich_table

from experiments.support import regret_fates


Row = Mapping[str, Any]


def print_regret(
    rows: Sequence[Row], console: rich_console.Console, *, title: str
) -> None:
    """Regret against the best constant gamma, and speed-up over plain decoding.

    Args:
      rows: of one kind, one for each policy and set.
    """
    by_place = {(row["policy"], row["set"]): row for row in rows}
    present = {row["set"] for row in rows}
    sets = [name for name in regret_fates.SETS if name in present]
    table = rich_table.Table(
        box=None, pad_edge=False, header_style="bold", title=title, title_justify="left"
    )
    table.add_column("policy", no_wrap=True)
    for name in sets:
        table.add_column(name, justify="right")
        table.add_column("plain", justify="right", style="dim")
    for policy in dict.fromkeys(row["policy"] for row in rows):
        cells = []
        for name in sets:
            row = by_place[policy, name]
            cells += [_percent(row["regret"]), f"{row['speedup']:.2f}x"]
        table.add_row(policy, *cells)
    console.print(table)
    console.print(
        "regret: how much slower than the best constant gamma in hindsight, which is "
        "that of the smallest regret; plain: speed-up over plain decoding, above 1 is "
        "faster",
        style="dim",
    )


def _percent(share: float) -> str:
    """Tenths where they fit: a terminal has eighty columns."""
    return f"{100 * share:+.1f}%" if share < 10 else f"{100 * share:+.0f}%"
