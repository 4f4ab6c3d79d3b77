"""Tables of a comparison with Hugging Face: speeds, tokens, memory.

Knows names and formats; measures nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import console as rich_console

from experiments.lib import terminal


Rows = Sequence[Mapping[str, Any]]

# Title, name in the row, format.
_RUN = (
    ("K", "gamma", "d"),
    ("tok/s", "tok_s", ",.1f"),
    ("p10", "tok_s_p10", ",.1f"),
    ("p90", "tok_s_p90", ",.1f"),
    ("vs plain", "vs_plain", ".2f"),
    ("vs HF", "vs_hf", ".2f"),
    ("accepted", "acceptance_rate", ".3f"),
    ("same", "identical", "d"),
)
_GREEDY = (
    ("length", "length", ""),
    ("prompt", "id", ""),
    ("first at", "first_difference", "d"),
    ("our token", "our_token", "d"),
    ("theirs", "their_token", "d"),
    ("our margin", "our_margin", ".2e"),
    ("their margin", "their_margin", ".2e"),
)
_MEMORY = (
    ("side", "side", ""),
    ("stage", "stage", ""),
    ("host_mib", "host_bytes", ",.0f"),
    ("device_mib", "device_bytes", ",.0f"),
)


def print_all(
    console: rich_console.Console,
    compared: Rows,
    greedy: Rows,
    memory: Rows,
    summary: Mapping[str, Any],
) -> None:
    """Prints everything: how fast, the same, how large."""
    for length in dict.fromkeys(row["length"] for row in compared):
        of_length = [row for row in compared if row["length"] == length]
        tokens = " and ".join(map(str, sorted(set(of_length[0]["prompt_tokens"]))))
        heading = f"{length}: {of_length[0]['prompts']} x {tokens} tokens"
        console.print(heading, style="bold", highlight=False)
        named = [row | {"run": f"{row['side']} {row['method']}"} for row in of_length]
        _print(named, (("run", "run", ""), *_RUN), console)
    different = [row for row in greedy if row["first_difference"] is not None]
    if different:
        console.print(
            f"Other tokens than Hugging Face's in {summary['compared_dtype']}:",
            style="bold red",
        )
        _print(different, _GREEDY, console)
    if memory:
        in_mib = [
            {k: v / 2**20 if k.endswith("_bytes") and v else v for k, v in row.items()}
            for row in memory
        ]
        _print(in_mib, _MEMORY, console)
    console.print(
        "tok/s: prefill included, median and percentiles over the turns; vs plain, HF: "
        "times plain decoding of that side, and Hugging Face's; accepted: of the "
        "proposed; same: prompts of which every token is that of Hugging Face's plain "
        "decoding in this dtype.\n"
        f"{summary['compared_dtype']}: {summary['greedy_identical']} of "
        f"{summary['prompts']} prompts as Hugging Face's greedy decoding; drafted as "
        f"plain decoding: {str(summary['matched']).lower()}; drafted and accepted as "
        f"many tokens as Hugging Face in {summary['same_drafts']} of "
        f"{summary['drafted_runs']} drafted runs; loading {summary['load_s']:.0f} s, "
        f"compiling and warming up {summary['warm_up_s']:.0f} s, all "
        f"{summary['total_s']:.0f} s.",
        highlight=False,
    )


def _print(rows: Rows, columns: Sequence[tuple], console: rich_console.Console) -> None:
    shown = [{title: row[name] for title, name, _ in columns} for row in rows]
    forms = {title: form for title, _, form in columns}
    terminal.print_rows(shown, forms, console)
    console.print()
