"""Tables of a comparison with Hugging Face: speeds, tokens, memory.

Knows names and formats; measures nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import console as rich_console

from experiments.support import latency_report, report


Rows = Sequence[Mapping[str, Any]]


def _columns(*columns: tuple[str, str]) -> tuple[report.Field, ...]:
    return tuple(
        report.Field(name=name, group="", form=form, unit="", meaning="")
        for name, form in columns
    )


RUN_COLUMNS = _columns(
    ("run", ""),
    ("K", "d"),
    ("tok/s", ",.1f"),
    ("p10", ",.1f"),
    ("p90", ",.1f"),
    ("vs HF", ".2f"),
    ("accepted", ".3f"),
    ("same", "d"),
)
GREEDY_COLUMNS = _columns(
    ("length", ""),
    ("prompt", ""),
    ("first at", "d"),
    ("our token", "d"),
    ("theirs", "d"),
    ("our margin", ".2e"),
    ("their margin", ".2e"),
)
MEMORY_COLUMNS = _columns(
    ("side", ""), ("stage", ""), ("host_mib", ",.0f"), ("device_mib", ",.0f")
)


def print_all(
    console: rich_console.Console,
    compared: Rows,
    greedy: Rows,
    memory: Rows,
    summary: Mapping[str, Any],
) -> None:
    """Everything, in the order of the questions: how fast, the same, how large."""
    for length in dict.fromkeys(row["length"] for row in compared):
        of_length = [row for row in compared if row["length"] == length]
        tokens = " and ".join(map(str, sorted(set(of_length[0]["prompt_tokens"]))))
        heading = f"{length}: {of_length[0]['prompts']} x {tokens} tokens"
        console.print(heading, style="bold", highlight=False)
        shown = [_shown(row) for row in of_length]
        latency_report.print_rows(shown, console, columns=RUN_COLUMNS)
        console.print()
    different = [row for row in greedy if row["first_difference"] is not None]
    if different:
        console.print("Other tokens than Hugging Face's in float32:", style="bold red")
        shown = [_shown_difference(row) for row in different]
        latency_report.print_rows(shown, console, columns=GREEDY_COLUMNS)
        console.print()
    if memory:
        in_mib = [row | _mib(row) for row in memory]
        latency_report.print_rows(in_mib, console, columns=MEMORY_COLUMNS)
        console.print()
    console.print(
        "tok/s: prefill included, median and percentiles over the turns; vs HF: times "
        "Hugging Face's plain decoding; accepted: of the proposed; same: prompts of "
        "which every token is that of Hugging Face's plain decoding in this dtype.\n"
        f"float32: {summary['greedy_identical']} of {summary['prompts']} prompts as "
        f"Hugging Face's greedy decoding; drafted as plain decoding: "
        f"{str(summary['matched']).lower()}; drafted and accepted as many tokens as "
        f"Hugging Face in {summary['same_drafts']} of {summary['drafted_runs']} "
        f"drafted runs; loading {summary['load_s']:.0f} s, "
        f"compiling and warming up {summary['warm_up_s']:.0f} s, all "
        f"{summary['total_s']:.0f} s.",
        highlight=False,
    )


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row under the short names of `RUN_COLUMNS`."""
    return {
        "run": f"{row['side']} {row['method']}",
        "K": row["gamma"],
        "tok/s": row["tok_s"],
        "p10": row["tok_s_p10"],
        "p90": row["tok_s_p90"],
        "vs HF": row["vs_hf"],
        "accepted": row["acceptance_rate"],
        "same": row["identical"],
    }


def _shown_difference(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row under the short names of `GREEDY_COLUMNS`."""
    return {
        "length": row["length"],
        "prompt": row["id"],
        "first at": row["first_difference"],
        "our token": row["our_token"],
        "theirs": row["their_token"],
        "our margin": row["our_margin"],
        "their margin": row["their_margin"],
    }


def _mib(row: Mapping[str, Any]) -> dict[str, float | None]:
    """The row's bytes in MiB."""
    return {
        f"{where}_mib": None
        if row[f"{where}_bytes"] is None
        else row[f"{where}_bytes"] / 2**20
        for where in ("host", "device")
    }
