"""Reports: every number is shown, and tokens are told apart in colour and without."""

import io
import json
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
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


def make_console(
    *, coloured: bool, encoding: str = "utf-8", **keywords
) -> rich_console.Console:
    """A console that writes into memory."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    colour = dict(force_terminal=True, color_system="standard", legacy_windows=False)
    plain = dict(force_terminal=False)
    return rich_console.Console(
        file=file,
        _environ={},
        **({"width": 100} | (colour if coloured else plain) | keywords),
    )


def printed(console: rich_console.Console) -> str:
    console.file.flush()
    return console.file.buffer.getvalue().decode(console.encoding)


def show(pieces, origins, **keywords) -> tuple[str, str]:
    """What `print_text` prints: the legend's line, and the text."""
    console = make_console(**keywords)
    samples.print_text(pieces, origins, console)
    legend, _, text = printed(console).partition("\n")
    return legend, text.removesuffix("\n")


def test_fields_are_the_names_of_the_metrics():
    assert [field.name for field in tables.FIELDS] == [*SUMMARY, "disturbed"]
    assert list(tables.to_row(SUMMARY)) == list(SUMMARY)


def test_row_is_json_and_refuses_nan():
    json.dumps(tables.to_row(SUMMARY | {"tokens": np.int32(3)}), allow_nan=False)
    with pytest.raises(ValueError, match="acceptance_rate=nan"):
        tables.to_row(SUMMARY | {"acceptance_rate": np.float32("nan")})


PIECES = ["def f", "(x):", "\n    ", "return", " x", "[0]", "\n"]
ORIGINS = [P, P, A, C, A, B, C]


TOKENS = st.lists(
    st.tuples(
        st.one_of(
            st.text(alphabet="ab []{}()<>#!|+-\n", max_size=5),
            st.sampled_from(samples.MARKS[0].all() + ("⟦", "é", "\U0001f600", "[/]")),
        ),
        st.sampled_from(samples.Origin),
    ),
    max_size=12,
)


@hypothesis.settings(deadline=None)
@hypothesis.given(tokens=TOKENS, encoding=st.sampled_from(["utf-8", "ascii"]))
def test_without_its_marks_the_text_is_the_text(tokens, encoding):
    """Fails if a mark can be mistaken for the text, or a token is lost or moved."""
    if encoding == "ascii":
        tokens = [(piece, origin) for piece, origin in tokens if piece.isascii()]
    pieces, origins = [list(x) for x in zip(*tokens, strict=True)] or ([], [])
    legend, text = show(pieces, origins, coloured=False, encoding=encoding)
    (marks,) = [marks for marks in samples.MARKS if f"prompt {marks.start} " in legend]
    # Text that takes from every set of marks cannot be told from them.
    hypothesis.assume(marks != samples.MARKS[-1])
    any_mark = "|".join(map(re.escape, marks.all()))
    assert re.sub(any_mark, "", text) == "".join(pieces)
    for origin, (before, after) in ((C, marks.correction), (B, marks.bonus)):
        marked = re.findall(f"{re.escape(before)}(.*?){re.escape(after)}", text, re.S)
        shown = [re.sub(any_mark, "", piece) for piece in marked]
        assert shown == [p for p, o in zip(pieces, origins, strict=True) if o == origin]


def test_the_check_above_notices_a_lost_mark_and_a_lost_token():
    _, text = show(PIECES, ORIGINS, coloured=False)
    any_mark = "|".join(map(re.escape, samples.MARKS[0].all()))
    assert re.sub(any_mark, "", text) == "".join(PIECES)
    assert re.sub(any_mark, "", text.replace("⟦", "[", 1)) != "".join(PIECES)
    _, short = show(PIECES[1:], ORIGINS[1:], coloured=False)
    assert re.sub(any_mark, "", short) != "".join(PIECES)


def test_a_speed_up_above_the_tokens_per_step_means_nothing():
    """Fails if what a busy machine shows is printed as any other."""
    fine, tokens = SUMMARY, SUMMARY["tokens_per_target_step"]
    for name in tables.SPEEDUPS:
        busy = results.mark_disturbed(fine | {name: 1.01 * tokens})
        console = make_console(coloured=False, width=300)
        tables.print_table(busy, console)
        text = printed(console)
        assert re.search(r"\n  disturbed +true", text)
        assert f"{1.01 * tokens:.2f} x at {tokens:.2f} tokens per step cannot" in text
        assert tables.to_row(busy)["disturbed"] is True
    for summary in (fine, fine | dict.fromkeys(tables.SPEEDUPS)):
        quiet = results.mark_disturbed(summary)
        assert quiet == summary | {"disturbed": False}
        console = make_console(coloured=False)
        tables.print_table(quiet, console)
        assert "disturbed" not in printed(console)
    assert "disturbed" not in results.without_decode_times(busy)
