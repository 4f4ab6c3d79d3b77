"""The tables of a plan: predicted beside measured, one line a drafter and gamma.

Knows rows; measures nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import console as rich_console, table as rich_table, text as rich_text

from experiments.lib import terminal


Row = Mapping[str, Any]


def mark_best(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows, with the best gamma of each drafter marked, predicted and measured.

    Of equals the smallest gamma is the best.
    """
    best = {}
    for name in ("predicted_speedup", "measured_speedup"):
        for drafter in {row["drafter"] for row in rows}:
            known = [
                row
                for row in rows
                if row["drafter"] == drafter and row[name] is not None
            ]
            if known:
                first = min(known, key=lambda row: (-row[name], row["gamma"]))
                best[name, drafter] = first["gamma"]
    return [
        {
            **row,
            "is_best_predicted": best.get(("predicted_speedup", row["drafter"]))
            == row["gamma"],
            "is_best_measured": best.get(("measured_speedup", row["drafter"]))
            == row["gamma"],
        }
        for row in rows
    ]


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """How far the prediction lies above what was measured, as a share of that."""
    if predicted is None or not measured:
        return None
    return predicted / measured - 1


def print_costs(rows: Sequence[Row], console: rich_console.Console) -> None:
    """One line a part of the round."""
    table = _table("cost", "ms", "p10", "p90", "plain steps")
    for row in rows:
        values = [row["ms"], row["ms_p10"], row["ms_p90"]]
        table.add_row(
            row["cost"],
            *(terminal.format_value(value, ".3f") for value in values),
            terminal.format_value(row["ratio"], ".2f"),
        )
    terminal.print_whole(table, console)


def print_acceptance(rows: Sequence[Row], console: rich_console.Console) -> None:
    """One line a drafter: the shares by position."""
    table = _table(
        "drafter", "windows", "repetition", "drafted", "kept, if all before were"
    )
    for row in rows:
        table.add_row(
            row["drafter"],
            f"{row['windows']:,d}",
            terminal.format_value(row["repetition"], ".3f"),
            terminal.format_value(list(row["drafted"]), ".2f"),
            terminal.format_value(list(row["kept"]), ".2f"),
        )
    terminal.print_whole(table, console)


def print_plan(rows: Sequence[Row], console: rich_console.Console) -> None:
    """Predicted beside measured; the best gamma of a drafter has an asterisk."""
    table = _table(
        *("drafter", "gamma", "predicted", "measured", "p10-p90", "error"),
        *("tokens", "matched"),
    )
    for row in rows:
        error = row["relative_error"]
        table.add_row(
            row["drafter"],
            str(row["gamma"]),
            _speedup(row["predicted_speedup"], is_best=row["is_best_predicted"]),
            _speedup(row["measured_speedup"], is_best=row["is_best_measured"]),
            _both(row["measured_speedup_p10"], row["measured_speedup_p90"], "-"),
            "-" if error is None else f"{100 * error:+.0f}%",
            _both(row["predicted_tokens_per_round"], row["mean_accepted_length"], "/"),
            rich_text.Text(
                str(row["matched"]).lower(), style="" if row["matched"] else "bold red"
            ),
        )
    terminal.print_whole(table, console)
    console.print(
        "speed-up of decoding over plain decoding, prefill excluded; * the best gamma "
        "of its drafter; error: predicted / measured - 1; tokens: per round, predicted/"
        "measured",
        style="dim",
    )


def _speedup(value: float | None, *, is_best: bool) -> str:
    shown = "-" if value is None else f"{value:.2f}x"
    return shown + ("*" if is_best else " ")


def _both(one: float | None, other: float | None, between: str) -> str:
    return between.join(terminal.format_value(value, ".2f") for value in (one, other))


def _table(*names: str) -> rich_table.Table:
    """A plain table, whose first column is text."""
    table = rich_table.Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left")
    return table
