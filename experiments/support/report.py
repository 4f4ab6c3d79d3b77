"""Reports: how the results of an experiment are shown.

One list, `FIELDS`, gives every number its place, format and unit, in the printed table
and in the JSON row. Functions here know names and values; they compute none of them.
"""

import dataclasses
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from rich import (
    console as rich_console,
    table as rich_table,
    text as rich_text,
)

from experiments.lib import records, terminal
from spec_jax import rounds


Origin = rounds.Origin


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
"""The metric dictionary of `spec_jax.metrics`, in the order in which it is shown."""


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


def sample_text(
    pieces: Sequence[str], origins: Sequence[int], console: rich_console.Console
) -> None:
    """Prints a text whose tokens are told apart by where they came from.

    By colour or, where the console shows none, by marks that cannot be taken for the
    text: without them, what is printed is the text. (Tabs are shown as spaces, and
    control characters are spelled out.)

    Args:
      pieces: the text of each token.
      origins: the `Origin` of each token.
      console: where to print.
    """
    if len(pieces) != len(origins):
        raise ValueError(f"{len(pieces)} pieces but {len(origins)} origins")
    origins = [Origin(origin) for origin in origins]
    is_coloured = console.is_terminal and console.color_system and not console.no_color
    if is_coloured:
        line_end = "\u21b5" if _can_print("\u21b5", console) else "\\n"
        legend, text = _coloured(pieces, origins, line_end)
    else:
        legend, text = _marked_clearly(pieces, origins, console)
    # `Text`, because brackets in source code are no markup; and soft-wrapped, because
    # a line of source code is one line.
    console.print(legend, soft_wrap=True, highlight=False)
    console.print(text, soft_wrap=True, highlight=False)


_STYLES = {
    Origin.PROMPT: "dim",
    Origin.ACCEPTED: "green",
    Origin.CORRECTION: "bold red",
    Origin.BONUS: "blue",
}
_TARGETS_OWN = (Origin.CORRECTION, Origin.BONUS)


def _coloured(
    pieces: Sequence[str], origins: Sequence[Origin], line_end: str
) -> tuple[rich_text.Text, rich_text.Text]:
    """Legend and text in colours; white space of the target's own is made visible."""
    legend = rich_text.Text()
    for origin, style in _STYLES.items():
        legend.append(origin.name.lower(), style=style).append("  ")
    legend.append(f"({line_end} a line end in that colour)", style="dim")
    text = rich_text.Text()
    for piece, origin in zip(pieces, origins, strict=True):
        style, piece = _STYLES[origin], _without_controls(piece)
        if origin in _TARGETS_OWN:
            piece = piece.replace("\n", line_end + "\n")
            if piece.isspace():
                style += " reverse"
        text.append(piece, style=style)
    return legend, text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marks:
    """Plain marks: what stands around corrections and bonus tokens.

    Attributes:
      start: stands where the prompt ends.
      correction: before and after the token.
      bonus: before and after the token.
    """

    start: str
    correction: tuple[str, str]
    bonus: tuple[str, str]

    def all(self) -> tuple[str, ...]:
        """Every mark."""
        return (self.start, *self.correction, *self.bonus)


MARKS = (
    # White brackets and triangles, which no programming language uses.
    Marks(start="\u25b6", correction=("\u27e6", "\u27e7"), bonus=("\u27ea", "\u27eb")),
    Marks(start="[|]", correction=("[-", "-]"), bonus=("{+", "+}")),
    Marks(start="<#|#>", correction=("<#!", "!#>"), bonus=("<#+", "+#>")),
)
"""In order of preference: the first that can be printed and cannot be mistaken."""


def _marked_clearly(
    pieces: Sequence[str], origins: Sequence[Origin], console: rich_console.Console
) -> tuple[rich_text.Text, rich_text.Text]:
    """Legend and text, with the first marks that occur where they were put only."""
    num_corrections = origins.count(Origin.CORRECTION)
    num_bonus = origins.count(Origin.BONUS)
    has_start = any(origin != Origin.PROMPT for origin in origins)
    times = (has_start, *[num_corrections] * 2, *[num_bonus] * 2)
    for marks in MARKS:
        legend, text = _marked(pieces, origins, marks)
        # Counted with the marks in place: a mark can also arise where the text meets
        # another one.
        found = tuple(text.plain.count(mark) for mark in marks.all())
        if found == times and _can_print("".join(marks.all()), console):
            break
    return legend, text


def _marked(
    pieces: Sequence[str], origins: Sequence[Origin], marks: Marks
) -> tuple[rich_text.Text, rich_text.Text]:
    """Legend and text with plain marks."""
    around = {
        Origin.PROMPT: ("", ""),
        Origin.ACCEPTED: ("", ""),
        Origin.CORRECTION: marks.correction,
        Origin.BONUS: marks.bonus,
    }
    legend = (
        f"prompt {marks.start} accepted  {'correction'.join(marks.correction)}  "
        f"{'bonus'.join(marks.bonus)}"
    )
    text, has_started = rich_text.Text(), False
    for piece, origin in zip(pieces, origins, strict=True):
        if origin != Origin.PROMPT and not has_started:
            text.append(marks.start)
            has_started = True
        text.append(_without_controls(piece).join(around[origin]))
    return rich_text.Text(legend), text


def _without_controls(piece: str) -> str:
    """Spells out control characters, which would act on the terminal."""
    return "".join(
        f"\\x{ord(char):02x}"
        if unicodedata.category(char) == "Cc" and char not in "\n\t"
        else char
        for char in piece
    )


def _can_print(text: str, console: rich_console.Console) -> bool:
    try:
        text.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
