"""Reports: every number is shown, and tokens are told apart in colour and without."""

import io
import json

import numpy as np
import pytest
from rich import console as rich_console

from experiments.lib import results, samples, tables
from spec_jax.analysis import metrics


COUNTERS = metrics.Counters(
    tokens=1234,
    rounds=600,
    proposed=1200,
    accepted=635,
    cut=1,
    accepted_hist=(165, 235, 200),
    proposed_at=(600, 600 - 165),
    accepted_at=(435, 200),
)
TIMES = [[metrics.Timing(prefill_s=0.5, decode_s=2.0, tokens=1234)]] * 3
SUMMARY = metrics.summarise(
    COUNTERS,
    prompts=1,
    texts=[
        metrics.TextCounts(tokens=1234, repetition=0.25, proposed=1200, accepted=635)
    ],
    baseline=TIMES,
    spec=TIMES,
    matched=True,
    verify_decode_mismatches=0,
)
P, A, C, B = samples.Origin


def shown(show, *arguments, width: int = 100) -> str:
    """What a function prints on a console without colours."""
    file = io.StringIO()
    console = rich_console.Console(file=file, width=width, _environ={})
    show(*arguments, console)
    return file.getvalue()


def test_fields_are_the_names_of_the_metrics():
    assert [field.name for field in tables.FIELDS] == [*SUMMARY, "disturbed"]
    assert list(tables.to_row(SUMMARY)) == list(SUMMARY)


def test_row_is_json_and_refuses_nan():
    json.dumps(tables.to_row(SUMMARY | {"tokens": np.int32(3)}), allow_nan=False)
    with pytest.raises(ValueError, match="acceptance_rate=nan"):
        tables.to_row(SUMMARY | {"acceptance_rate": np.float32("nan")})


def test_tokens_are_told_apart():
    """Fails if a token is lost or moved, or a mark is around another."""
    pieces = ["def f", "(x):", "\n ", "return", " [0]", "[/]\x07", "\n"]
    said = shown(samples.print_text, pieces, [P, P, A, C, A, B, C])
    legend, _, text = said.partition("\n")
    assert legend == "prompt \u25b6 accepted  \u27e6correction\u27e7  \u27eabonus\u27eb"
    marked = (
        "def f(x):\u25b6\n \u27e6return\u27e7 [0]\u27ea[/]\\x07\u27eb\u27e6\n\u27e7\n"
    )
    assert text == marked


def test_the_table_has_every_number():
    for width in (80, 120):
        said = shown(tables.print_table, SUMMARY | {"matched": None}, width=width)
        rows = {
            line.split()[0]: line.split()[1:]
            for line in said.splitlines()
            if line.strip()
        }
        assert rows["tokens"][:2] == ["1,234", "tokens"] and rows["matched"][0] == "-"
        assert set(SUMMARY) <= set(rows)


def test_a_speed_up_above_the_tokens_per_step_means_nothing():
    """Fails if what a busy machine shows is printed as any other."""
    tokens = SUMMARY["tokens_per_target_step"]
    for name in tables.SPEEDUPS:
        busy = results.mark_disturbed(SUMMARY | {name: 1.01 * tokens})
        assert tables.to_row(busy)["disturbed"] is True
        assert "tokens per step cannot" in shown(tables.print_table, busy, width=300)
    for summary in (SUMMARY, SUMMARY | dict.fromkeys(tables.SPEEDUPS)):
        assert results.mark_disturbed(summary) == summary | {"disturbed": False}
