"""Tables that show the results of an experiment, and their JSON row.

`GROUPS` gives every number its place, format and unit, in the printed table and in the
JSON row. Functions here handle names and values, and compute none of them.
"""

import itertools
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import measure as rich_measure, table as rich_table, text as rich_text

from experiments.lib import records, terminal


Row = Mapping[str, Any]

GROUPS: Mapping[str, Mapping[str, tuple[str, str, str]]] = {
    "counts": {
        "prompts": (",d", "", "prompts run"),
        "tokens": (",d", "tokens", "generated after the prompts"),
        "rounds": (",d", "", "propose, verify, commit"),
        "target_steps": (",d", "forwards", "of the target, prefill not counted"),
        "verify_steps": (",d", "forwards", "of the target that verified a window"),
        "proposed": (",d", "tokens", "drafted and sent to verification"),
        "accepted": (",d", "tokens", "drafted and kept"),
    },
    "acceptance": {
        "acceptance_rate": (".3f", "", "accepted / proposed"),
        "conditional_acceptance": (".2f", "", "P(position kept, if all before were)"),
        "mean_accepted_length": (".3f", "tokens/round", "cut tokens included"),
        "cut": (",d", "tokens", "after a stop"),
        "tokens_per_target_step": (".3f", "tokens", "after stop tokens cut"),
        "accepted_hist": ("d", "rounds", "that kept 0, 1, 2, ... drafted tokens"),
        "rows_per_round": (".2f", "rows", "of a target forward"),
        "kept_by_rank": ("d", "rounds", "that kept their 1st, 2nd, ... draft"),
        "repetition": (".3f", "", "share of repeated 4-grams in the texts"),
        "tercile_prompts": ("d", "prompts", "thirds of them, least repetition first"),
        "tercile_repetition": (".3f", "", "of each third"),
        "tercile_acceptance_rate": (".3f", "", "of each third"),
    },
    "losslessness": {
        "matched": ("", "", "every token equals autoregressive decoding"),
        "verify_decode_mismatches": (",d", "positions", "with another argmax"),
        "nonfinite_logits": (",d", "tokens", "chosen from NaN or infinity"),
    },
    "autoregressive decoding": {
        "baseline_e2e_tpot_ms": (".3f", "ms/token", "prefill included"),
        "baseline_e2e_tok_s": (",.1f", "tokens/s", "prefill included"),
        "baseline_decode_tpot_ms": (".3f", "ms/token", "prefill excluded"),
        "baseline_decode_tok_s": (",.1f", "tokens/s", "prefill excluded"),
    },
    "speculative decoding": {
        "spec_e2e_tpot_ms": (".3f", "ms/token", "prefill included"),
        "spec_e2e_tok_s": (",.1f", "tokens/s", "prefill included"),
        "spec_decode_tpot_ms": (".3f", "ms/token", "prefill excluded"),
        "spec_decode_tok_s": (",.1f", "tokens/s", "prefill excluded"),
    },
    "speed-up": {
        "speedup_e2e": (".2f", "x", "autoregressive / speculative, with prefill"),
        "speedup_e2e_p10": (".2f", "x", "10th percentile"),
        "speedup_e2e_p90": (".2f", "x", "90th percentile"),
        "speedup_decode": (".2f", "x", "autoregressive / speculative, decoding alone"),
        "speedup_decode_p10": (".2f", "x", "10th percentile"),
        "speedup_decode_p90": (".2f", "x", "90th percentile"),
        "disturbed": ("", "", "above the tokens per step: the figures mean nothing"),
    },
}
"""Headings, and the numbers under each: format (of each entry, if the value is a list),
unit (empty for pure numbers) and meaning, in the order in which they are shown."""

FIELDS = {name: field for group in GROUPS.values() for name, field in group.items()}
"""Fields of the metrics of `analysis.metrics` and `results.mark_disturbed`."""

_FAULTS = ("verify_decode_mismatches", "nonfinite_logits", "disturbed")
"""Numbers that must be 0."""


def to_row(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics as a JSON row: plain values, in the order of `FIELDS`.

    Raises:
      ValueError: a number that JSON lacks.
    """
    return records.to_json({name: metrics[name] for name in FIELDS if name in metrics})


def print_table(metrics: Mapping[str, Any]) -> None:
    """Prints the metrics in groups, with units; a number not measured shows as `-`.

    On a narrow console meanings are left out; `disturbed` is shown where it is true.
    """
    row, lines = to_row(metrics), []
    columns = dict.fromkeys(("metric", "value", "unit", "meaning"), "")
    for group, fields in GROUPS.items():
        lines.append(columns | {"metric": group})
        for name, (form, unit, meaning) in fields.items():
            if name not in row or (name == "disturbed" and not row[name]):
                continue
            is_wrong = name in _FAULTS and bool(row[name])
            is_wrong |= name == "matched" and row[name] is False
            value = wrong(terminal.format_value(row[name], form), is_wrong)
            told = {"value": value, "unit": unit, "meaning": meaning}
            lines.append({"metric": f"  {name}"} | told)
    columns |= {"value": lambda line: line["value"]}
    if terminal.console().width < _WIDE:
        del columns["meaning"]
    print_rows(lines, columns)
    print_disturbed([row])


_WIDE = 110
"""Least characters in a line of a console that has room for meanings."""


def print_disturbed(rows: Sequence[Row]) -> None:
    """Prints for each row with `disturbed` that its speed-up means nothing."""
    for row in rows:
        if row.get("disturbed"):
            most = max(row[name] for name in SPEEDUPS if row.get(name) is not None)
            tokens = row["tokens_per_target_step"]
            words = (
                f"disturbed: a speed-up of {most:.2f} x at {tokens:.2f} tokens per "
                "step cannot be: the machine did other work while it was timed, and "
                "the figure means nothing; run it again on an idle one"
            )
            terminal.console().print(words, style="bold red")


SPEEDUPS = ("speedup_e2e", "speedup_decode")

Cell = str | rich_text.Text
Column = str | tuple[str, str] | Callable[[Row], Cell]
"""The format of the field that the heading names; or a field's name and format; or a
function from row to cell. An empty format is that of a text; None shows as a dash."""


def print_rows(
    rows: Sequence[Row],
    columns: Mapping[str, Column],
    *,
    title: str | None = None,
) -> None:
    """Prints one line a row, without cuts; texts to the left, others to the right.

    On a narrow console lines wrap. Columns are by their headings.
    """
    console = terminal.console()
    # As narrow as possible: a terminal may have eighty columns.
    table = rich_table.Table(
        box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold"
    )
    for i, (heading, column) in enumerate(columns.items()):
        form = column[1] if isinstance(column, tuple) else column
        is_text = not i or form == ""
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not i)
    for row in rows:
        table.add_row(*(_cell(row, *both) for both in columns.items()))
    if title is not None:
        console.print(title, style="italic")
    # The width that the table has on a console without end.
    endless = console.options.update(width=1000)
    table.width = rich_measure.Measurement.get(console, endless, table).maximum
    console.print(table, crop=False)


def _cell(row: Row, heading: str, column: Column) -> Cell:
    if callable(column):
        return column(row)
    name, form = (heading, column) if isinstance(column, str) else column
    # As `Text`, because brackets in ids are no markup.
    return rich_text.Text(terminal.format_value(row[name], form))


def wrong(text: str, is_wrong: bool) -> rich_text.Text:
    """Returns a cell, red where its value is wrong."""
    return rich_text.Text(text, style="bold red" if is_wrong else "")


def print_note(text: str) -> None:
    """Prints a note on the columns of a table."""
    terminal.console().print(text, style="dim")


class Report:
    """A writer of rows and of their tables, which notes whether anything failed.

    Args:
      columns: columns of the table of each kind of rows.
    """

    def __init__(
        self,
        out: records.JsonLines,
        columns: Mapping[str, Mapping[str, Column]],
    ):
        self._out, self.failed = out, False
        self._columns = {"error": {"item": "", "error": ""}} | columns

    def add(
        self,
        name: str,
        work: Callable[[], list[dict]],
        *,
        raises: tuple[type[Exception], ...] = (),
    ) -> None:
        """Writes and prints the rows of `work`, or a row of its error.

        A row with an error, unequal bits, or a fault that was missed is a failure.
        Interrupts, errors of files and `raises` are raised as they are.
        """
        try:
            rows = work()
        except (OSError, *raises):
            raise
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0][:500]
            lines = "".join(traceback.format_exception(error)).splitlines()[-12:]
            told = {"error": f"{type(error).__name__}: {first}", "traceback": lines}
            rows = [{"kind": "error", "item": name} | told]
        for row in self._out.write_all(rows):
            is_wrong = False in (row.get("equal"), row.get("seen"))
            self.failed |= is_wrong or row["kind"] == "error"
        for kind, group in itertools.groupby(rows, key=lambda row: row["kind"]):
            print_rows(list(group), self._columns[kind])


AXES = {
    "category": "category",
    "temperature": "T",
    "drafter": "drafter",
    "gamma_policy": "policy",
    "tree": "tree",
    "gamma": "gamma",
}
"""Columns that tell the cells of a prompt set apart; an axis of one value is left out,
but for the drafter, its tree and its gamma."""


NUMBERS = {
    "n": ("prompts", "d"),
    "kept": ("acceptance_rate", ".3f"),
    "rep": ("repetition", ".3f"),
    "len": ("mean_accepted_length", ".2f"),
    "rows": ("rows_per_round", ".1f"),
    "e2e": ("speedup_e2e", ".2f"),
    "p10": ("speedup_e2e_p10", ".2f"),
    "p90": ("speedup_e2e_p90", ".2f"),
    "decode": ("speedup_decode", ".2f"),
}


def _match(row: Row) -> Cell:
    if row["matched"] is None:
        return "-"
    is_wrong = not row["matched"] or bool(row["verify_decode_mismatches"])
    words = f"no, {row['verify_decode_mismatches']}" if is_wrong else "yes"
    return wrong(words, is_wrong)


CELLS_NOTE = (
    "n: prompts; kept: of proposed drafts; rep: repeated 4-grams in the texts; len: "
    "tokens a round, the target's own counted; rows: of the target a round; e2e: "
    "speed-up over autoregressive decoding, prefill included, with p10 and p90 over "
    "repeats, or with one repeat over prompts; decode: of decoding alone; match: all "
    "tokens are those of autoregressive decoding, else how many choices differ"
)
"""Meanings of the columns of `print_cells`."""


def print_cells(rows: Sequence[Row], *, title: str) -> None:
    """Prints one line a cell, of a sweep or of a category, with the axes that tell it
    from others."""
    # Not every cell has a tree, and no batch has a speed-up of decoding alone.
    rows = [dict.fromkeys((*AXES, "speedup_decode")) | row for row in rows]
    columns: dict[str, Column] = {}
    for name, heading in AXES.items():
        values = {row[name] for row in rows}
        is_shown = name in ("drafter", "tree", "gamma") or len(values) > 1
        if values != {None} and is_shown:
            columns[heading] = (name, "")
    print_rows(rows, columns | NUMBERS | {"match": _match}, title=title)
    print_disturbed(rows)
    terminal.show()
