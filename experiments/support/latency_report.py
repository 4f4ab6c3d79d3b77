"""Tables of latencies: one row a step or a run, and what follows from them.

Knows names and formats; measures nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import console as rich_console, table as rich_table

from experiments.lib import terminal
from experiments.support import report


def _columns(*columns: tuple[str, str]) -> tuple[report.Field, ...]:
    return tuple(
        report.Field(name=name, group="", form=form, unit="", meaning="")
        for name, form in columns
    )


STEP_COLUMNS = _columns(
    ("step", ""),
    ("context", ",d"),
    ("ms", ".3f"),
    ("ms_p10", ".3f"),
    ("ms_p90", ".3f"),
    ("ratio", ".2f"),
    ("ratio_to", ""),
)
RUN_COLUMNS = _columns(
    ("run", ""),
    ("tok_s", ",.1f"),
    ("tok_s_p10", ",.1f"),
    ("tok_s_p90", ",.1f"),
    ("tpot_ms", ".3f"),
    ("warm_up_s", ".1f"),
)


def _group(group: str, *rows: tuple[str, str, str, str]) -> tuple[report.Field, ...]:
    return tuple(
        report.Field(group=group, name=name, form=form, unit=unit, meaning=meaning)
        for name, form, unit, meaning in rows
    )


def _speedup(name: str, meaning: str) -> tuple[tuple[str, str, str, str], ...]:
    return (
        (name, ".2f", "x", meaning),
        (f"{name}_p10", ".2f", "x", "10th percentile"),
        (f"{name}_p90", ".2f", "x", "90th percentile"),
    )


SUMMARY_FIELDS = (
    *_group(
        "compilation",
        ("steps_warm_up_s", ".1f", "s", "first call of every step, compiled there"),
        ("runs_warm_up_s", ".1f", "s", "first whole runs of every prompt"),
    ),
    *_group(
        "bandwidth",
        ("step_bytes", ",d", "bytes", "of weights that a step reads"),
        ("last_level_cache_bytes", ",d", "bytes", "of the last-level cache"),
        ("fits_in_cache", "", "", "whether the weights fit into it"),
        ("read_gb_s", ".1f", "GB/s", "plain read of as many bytes, median"),
        ("read_best_gb_s", ".1f", "GB/s", "plain read of as many bytes, fastest"),
        ("memory_gb_s", ".1f", "GB/s", "plain read of memory, median"),
        ("achieved_gb_s", ".1f", "GB/s", "weights read by a plain step"),
        ("bandwidth_share", ".2f", "", "achieved / read"),
    ),
    *_group(
        "whole runs",
        ("prompts", ",d", "", "prompts run"),
        ("gen_tokens", ",d", "tokens", "generated per prompt"),
        ("matched", "", "", "speculative tokens equal plain ones"),
        ("acceptance_rate", ".3f", "", "accepted / proposed"),
        ("hf_equal_tokens", "d", "tokens", "leading, equal to HF's, by prompt"),
    ),
    *_group(
        "speed-up",
        *_speedup("plain_vs_hf", "plain / HF generate"),
        *_speedup("spec_vs_hf", "speculative / HF generate"),
        *_speedup("spec_vs_hf_assisted", "speculative / HF assisted"),
        *_speedup("spec_vs_plain", "speculative / plain"),
        *_speedup("hf_assisted_vs_hf", "HF assisted / HF generate"),
    ),
)
"""The summary, in the order in which it is shown."""


def print_rows(
    rows: Sequence[Mapping[str, Any]],
    console: rich_console.Console,
    *,
    columns: Sequence[report.Field],
) -> None:
    """Prints one line a row; texts to the left, numbers to the right."""
    table = rich_table.Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.name, justify="right" if column.form else "left")
    for row in rows:
        values = [report.format_value(row[c.name], c.form) for c in columns]
        table.add_row(*values)
    terminal.print_whole(table, console)
