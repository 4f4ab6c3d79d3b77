"""Tables: how the results of an experiment are shown, and their JSON row.

One list, `FIELDS`, gives every number its place, format and unit, in the printed table
and in the JSON row. Functions here know names and values; they compute none of them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import (
    console as rich_console,
    table as rich_table,
    text as rich_text,
)

from experiments.lib import records, terminal


Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """How one number is shown.

    Attributes:
      name: as in the metric dictionary and in the JSON row.
      group: the heading it stands under.
      form: format specification; of each entry, if the value is a list.
      unit: what one of it is; empty for pure numbers.
      meaning: one line for the reader.
    """

    name: str
    group: str
    form: str
    unit: str
    meaning: str


def _group(group: str, *rows: tuple[str, str, str, str]) -> tuple[Field, ...]:
    return tuple(
        Field(group=group, name=name, form=form, unit=unit, meaning=meaning)
        for name, form, unit, meaning in rows
    )


FIELDS: tuple[Field, ...] = (
    *_group(
        "counts",
        ("prompts", ",d", "", "prompts run"),
        ("tokens", ",d", "tokens", "generated after the prompts"),
        ("rounds", ",d", "", "propose, verify, commit"),
        ("target_steps", ",d", "forwards", "of the target, prefill not counted"),
        ("verify_steps", ",d", "forwards", "of the target that verified a window"),
        ("commit_decode_steps", ",d", "forwards", "of decoding that decided tokens"),
        ("mirror_decode_steps", ",d", "forwards", "of decoding for the verify cache"),
        ("correction_steps", ",d", "forwards", "of commit that fed a correction"),
        ("proposed", ",d", "tokens", "drafted and sent to verification"),
        ("accepted", ",d", "tokens", "drafted and kept"),
    ),
    *_group(
        "acceptance",
        ("acceptance_rate", ".3f", "", "accepted / proposed"),
        ("conditional_acceptance", ".2f", "", "P(position kept, if all before were)"),
        ("mean_accepted_length", ".3f", "tokens/round", "with the target's own token"),
        ("tokens_per_target_step", ".3f", "tokens", "after stop tokens cut"),
        ("accepted_hist", "d", "rounds", "that kept 0, 1, 2, ... drafted tokens"),
        ("repetition", ".3f", "", "share of repeated 4-grams in the texts"),
        ("tercile_prompts", "d", "prompts", "thirds of them, least repetition first"),
        ("tercile_repetition", ".3f", "", "of each third"),
        ("tercile_acceptance_rate", ".3f", "", "of each third"),
    ),
    *_group(
        "losslessness",
        ("matched", "", "", "every token equals plain decoding"),
        ("verify_decode_mismatches", ",d", "positions", "with another argmax"),
        ("nonfinite_logits", ",d", "tokens", "chosen from NaN or infinity"),
    ),
    *_group(
        "plain decoding",
        ("baseline_e2e_tpot_ms", ".3f", "ms/token", "prefill included"),
        ("baseline_e2e_tok_s", ",.1f", "tokens/s", "prefill included"),
        ("baseline_decode_tpot_ms", ".3f", "ms/token", "prefill excluded"),
        ("baseline_decode_tok_s", ",.1f", "tokens/s", "prefill excluded"),
    ),
    *_group(
        "speculative decoding",
        ("spec_e2e_tpot_ms", ".3f", "ms/token", "prefill included"),
        ("spec_e2e_tok_s", ",.1f", "tokens/s", "prefill included"),
        ("spec_decode_tpot_ms", ".3f", "ms/token", "prefill excluded"),
        ("spec_decode_tok_s", ",.1f", "tokens/s", "prefill excluded"),
    ),
    *_group(
        "speed-up",
        ("speedup_e2e", ".2f", "x", "plain / speculative, prefill included"),
        ("speedup_e2e_p10", ".2f", "x", "10th percentile"),
        ("speedup_e2e_p90", ".2f", "x", "90th percentile"),
        ("speedup_decode", ".2f", "x", "plain / speculative, prefill excluded"),
        ("speedup_decode_p10", ".2f", "x", "10th percentile"),
        ("speedup_decode_p90", ".2f", "x", "90th percentile"),
    ),
)
"""The dictionary of `analysis.metrics`, in the order in which it is shown."""


def to_row(
    metrics: Mapping[str, Any], *, fields: Sequence[Field] = FIELDS
) -> dict[str, Any]:
    """The metrics as a JSON row: plain values, in the order of `fields`.

    Raises:
      ValueError: a name that `fields` lacks, or a number that JSON lacks.
    """
    _check_names(metrics, fields)
    return {
        field.name: records.to_json(metrics[field.name], field.name)
        for field in fields
        if field.name in metrics
    }


def print_table(
    metrics: Mapping[str, Any],
    console: rich_console.Console,
    *,
    fields: Sequence[Field] = FIELDS,
) -> None:
    """Prints the metrics in groups, with units; what was not measured shows as `-`.

    Where the console is narrow, meanings are left out, and then units stand below the
    values; no value is cut.

    Raises:
      ValueError: a name that `fields` lacks.
    """
    row = to_row(metrics, fields=fields)
    shown = [field for field in fields if field.name in row]
    texts = {
        field.name: terminal.format_value(row[field.name], field.form)
        for field in shown
    }
    table, columns = _table_that_fits(shown, texts, console.width)
    group = None
    for field in shown:
        if field.group != group:
            if group is not None:
                table.add_row()
            group = field.group
            table.add_row(rich_text.Text(group, style="bold"))
        text, unit = texts[field.name], field.unit
        if "unit" not in columns:
            text = f"{text} {unit}".rstrip()
        cells = {
            "metric": rich_text.Text("  " + field.name),
            "value": rich_text.Text(text, style=_value_style(field, row[field.name])),
            "unit": unit,
            "meaning": field.meaning,
        }
        table.add_row(*(cells[column] for column in columns))
    console.print(table)


_MEANING_WIDTH = 16
"""The least in which a meaning can be read."""


def _table_that_fits(
    fields: Sequence[Field], texts: Mapping[str, str], width: int
) -> tuple[rich_table.Table, tuple[str, ...]]:
    """An empty table of metrics, and the names of its columns."""
    words = ["value", *(word for text in texts.values() for word in text.split())]
    name = 2 + max((len(field.name) for field in fields), default=0)
    unit = max((len(field.unit) for field in fields), default=0)
    value, gap = max(map(len, words)), 2
    columns = ("metric", "value")
    if width >= name + gap + value + gap + unit:
        columns += ("unit",)
    if width >= name + gap + value + gap + unit + gap + _MEANING_WIDTH:
        columns += ("meaning",)
    table = rich_table.Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("metric", no_wrap=width >= name + gap + value, overflow="fold")
    table.add_column("value", justify="right", min_width=value)
    if "unit" in columns:
        table.add_column("unit", no_wrap=True)
    if "meaning" in columns:
        table.add_column("meaning", style="dim")
    return table, columns


def _value_style(field: Field, value: Any) -> str:
    """Red for what may not happen."""
    wrong = {
        "matched": value is False,
        "verify_decode_mismatches": bool(value),
        "nonfinite_logits": bool(value),
    }
    return "bold red" if wrong.get(field.name) else ""


def _check_names(metrics: Mapping[str, Any], fields: Sequence[Field]) -> None:
    unknown = sorted(set(metrics) - {field.name for field in fields})
    if unknown:
        raise ValueError(f"no field says how to show {', '.join(unknown)}")


def plain(*names: str, title: str | None = None) -> rich_table.Table:
    """Returns an empty table, whose first column is text and whose others are not."""
    table = rich_table.Table(
        box=None,
        # As narrow as it gets: a terminal has eighty columns.
        padding=(0, 1, 0, 0),
        header_style="bold",
        title=title,
        title_justify="left",
    )
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left", no_wrap=not i)
    return table


Column = tuple[str, str] | Callable[[Row], str | rich_text.Text]
"""A name of a row and the format of its value, or what makes the cell of a row."""


def print_rows(
    rows: Sequence[Row], columns: Mapping[str, Column], console: rich_console.Console
) -> None:
    """Prints one line a row, of which nothing is cut.

    Args:
      columns: by their headings; the first is text.
    """
    table = plain(*columns)
    for row in rows:
        table.add_row(*(_cell(row, column) for column in columns.values()))
    terminal.print_whole(table, console)


def _cell(row: Row, column: Column) -> str | rich_text.Text:
    if callable(column):
        return column(row)
    name, form = column
    return terminal.format_value(row[name], form)


def wrong(text: str, is_wrong: bool) -> rich_text.Text:
    """Returns a cell, red where it may not be."""
    return rich_text.Text(text, style="bold red" if is_wrong else "")


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


def print_cells(
    rows: Sequence[Row], console: rich_console.Console, *, title: str
) -> None:
    """Prints one line a cell: of a sweep, or of a category."""
    axes = [
        name
        for name in AXES
        if any(name in row for row in rows)
        and (name in ("drafter", "gamma") or len({row[name] for row in rows}) > 1)
    ]
    headings = [heading for heading, _ in NUMBERS.values()]
    table = plain(*(AXES[name] for name in axes), *headings, "match", title=title)
    for column in table.columns[: len(axes)]:
        column.justify, column.no_wrap = "left", True
    for row in rows:
        numbers = (
            terminal.format_value(row.get(n), form) for n, (_, form) in NUMBERS.items()
        )
        table.add_row(
            *("-" if row[name] is None else str(row[name]) for name in axes),
            *numbers,
            _match(row),
        )
    console.print(table)
    console.print()


def _match(row: Row) -> rich_text.Text:
    if row["matched"] is None:
        return rich_text.Text("-")
    is_wrong = not row["matched"] or bool(row["verify_decode_mismatches"])
    return wrong(
        f"no, {row['verify_decode_mismatches']}" if is_wrong else "yes", is_wrong
    )


def explain_cells(console: rich_console.Console) -> None:
    """Prints what the columns of `print_cells` are."""
    console.print(
        "n: prompts; kept: of proposed drafts; rep: repeated 4-grams in the texts; "
        "len: tokens a round, the target's own counted; "
        "e2e: speed-up over plain decoding, prefill included, with p10 and p90 over "
        "repeats, or with one repeat over prompts; decode: of decoding alone; match: "
        "all tokens are those of plain decoding, else how many choices differ",
        style="dim",
    )


def print_categories(
    summaries: Mapping[str, Row], console: rich_console.Console
) -> None:
    """Prints one line a category, for `results.by_category`; none without any."""
    if not summaries:
        return
    console.print()
    rows = [{"category": name, **row} for name, row in summaries.items()]
    print_cells(rows, console, title="by category")
    explain_cells(console)
