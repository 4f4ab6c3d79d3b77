"""Reports: every number is shown, and tokens are told apart in colour and without."""

import io
import json
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from rich import console as rich_console

from experiments.lib import results, samples, tables, terminal
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


def strip_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_fields_are_the_names_of_the_metrics():
    assert [field.name for field in tables.FIELDS] == [*SUMMARY, "disturbed"]
    assert list(tables.to_row(SUMMARY)) == list(SUMMARY)


def test_table_shows_every_number_with_its_unit():
    console = make_console(coloured=False)
    tables.print_table(SUMMARY, console)
    lines = {}
    for line in printed(console).splitlines():
        if line.startswith("  ") and line.strip():
            name, value = line.split(maxsplit=1)
            lines[name] = value
    # Of other designs alone.
    zero = {"commit_decode_steps", "mirror_decode_steps", "correction_steps"}
    assert list(lines) == [name for name in SUMMARY if name not in zero]
    assert lines["tokens"].startswith("1,234 ")
    assert lines["acceptance_rate"].startswith("0.529 ")
    assert lines["conditional_acceptance"].startswith("0.72 0.46 ")
    assert lines["accepted_hist"].startswith("165 235 200 ")
    assert lines["repetition"].startswith("0.250 ")
    assert lines["tercile_acceptance_rate"].startswith("0.529 ")
    assert lines["matched"].startswith("true ")
    assert lines["spec_decode_tok_s"].split()[:2] == ["617.0", "tokens/s"]
    assert lines["speedup_e2e_p90"].split()[:2] == ["1.00", "x"]


def test_table_shows_none_as_a_dash_and_failure_in_red():
    bad = SUMMARY | dict(matched=False, verify_decode_mismatches=3, speedup_e2e=None)
    bad["nonfinite_logits"] = 4
    console = make_console(coloured=True)
    tables.print_table(bad, console)
    text = printed(console)
    assert re.search(r"\x1b\[1;31m *false\x1b", text)
    assert re.search(r"\x1b\[1;31m *3\x1b", text)
    assert re.search(r"\x1b\[1;31m *4\x1b", text)
    assert re.search(r"speedup_e2e +- ", strip_colours(text))
    console = make_console(coloured=True)
    tables.print_table(SUMMARY, console)
    assert "\x1b[1;31m" not in printed(console)


def test_part_of_the_metrics_can_be_shown_but_no_unknown_name():
    console = make_console(coloured=False)
    tables.print_table({"tokens": np.int64(5), "matched": None}, console)
    assert "tokens" in printed(console) and "rounds" not in printed(console)
    with pytest.raises(ValueError, match="no field says how to show tokenz"):
        tables.print_table({"tokenz": 5}, console)
    with pytest.raises(ValueError, match="no field says how to show tokenz"):
        tables.to_row({"tokenz": 5})
    own = tables.Field(name="tokenz", group="g", form="d", unit="", meaning="")
    tables.print_table({"tokenz": 5}, console, fields=(*tables.FIELDS, own))
    assert tables.to_row({"tokenz": 5}, fields=(own,)) == {"tokenz": 5}


def test_row_is_json_and_refuses_nan():
    json.dumps(tables.to_row(SUMMARY | {"tokens": np.int32(3)}), allow_nan=False)
    with pytest.raises(ValueError, match="acceptance_rate=nan"):
        tables.to_row(SUMMARY | {"acceptance_rate": np.float32("nan")})


PIECES = ["def f", "(x):", "\n    ", "return", " x", "[0]", "\n"]
ORIGINS = [P, P, A, C, A, B, C]


def test_colours():
    legend, text = show(PIECES, ORIGINS, coloured=True)
    assert "\x1b[32maccepted" in legend and "\x1b[1;31mcorrection" in legend
    assert "\x1b[2mdef f" in text
    assert "\x1b[1;31mreturn" in text
    assert "\x1b[32m x" in text
    assert "\x1b[34m[0]" in text
    # A line end of the target's own would have no colour: it gets a sign.
    assert strip_colours(text) == "def f(x):\n    return x[0]\u21b5\n"


def test_spaces_of_the_targets_own_are_visible_in_colour():
    assert "\x1b[1;7;31m    " in show(["    "], [C], coloured=True)[1]


def test_marks():
    legend, text = show(PIECES, ORIGINS, coloured=False)
    assert legend == "prompt ▶ accepted  ⟦correction⟧  ⟪bonus⟫"
    assert text == "def f(x):▶\n    ⟦return⟧ x⟪[0]⟫⟦\n⟧"


@pytest.mark.parametrize(
    "keywords",
    [
        dict(coloured=False),
        dict(coloured=True, no_color=True),
        dict(coloured=True, color_system=None),
    ],
)
def test_marks_where_colour_is_off(keywords):
    assert "⟦return⟧" in show(PIECES, ORIGINS, **keywords)[1]


def test_marks_of_a_console_that_prints_ascii_only():
    pieces, origins = ["x", " = ", "1", "\n"], [P, A, C, B]
    legend, text = show(pieces, origins, coloured=False, encoding="ascii")
    assert legend == "prompt [|] accepted  [-correction-]  {+bonus+}"
    assert text == "x[|] = [-1-]{+\n+}"
    # `[-` is Python: other marks are taken where it occurs.
    _, text = show(["x", "[-", "1]"], [P, A, C], coloured=False, encoding="ascii")
    assert text == "x<#|#>[-<#!1]!#>"


def test_markup_links_and_emoji_codes_are_left_alone():
    pieces = ["[bold]", "x[/]", ":smile:", " [link=http://a]", " 'b' 12 None"]
    for coloured in (True, False):
        _, text = show(pieces, [P, A, C, B, A], coloured=coloured)
        text = strip_colours(text)
        for mark in samples.MARKS[0].all():
            text = text.replace(mark, "")
        assert text == "".join(pieces)


def test_control_characters_are_spelled_out():
    for coloured in (True, False):
        _, text = show(["a\x1b[2J", "\r\x07", "\x9b"], [P, A, A], coloured=coloured)
        text = strip_colours(text).replace(samples.MARKS[0].start, "")
        assert text == r"a\x1b[2J\x0d\x07\x9b"


def test_long_lines_are_not_broken():
    long = "x = " + "a + " * 100
    for coloured in (True, False):
        _, text = show([long, "b"], [P, A], coloured=coloured)
        assert "\n" not in text


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


def test_wrong_lengths_and_unknown_origins_are_refused():
    with pytest.raises(ValueError, match="2 pieces but 1 origins"):
        show(["a", "b"], [0], coloured=False)
    with pytest.raises(ValueError, match="4 is not a valid Origin"):
        show(["a"], [4], coloured=False)
    assert show(["a"], np.array([0]), coloured=False)[1] == "a"


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


def test_no_name_and_no_value_is_cut_on_a_narrow_console():
    """Fails if the column of values is dropped, or a name or a number is split."""
    row = tables.to_row(SUMMARY | {"correction_steps": 7})
    for width in (30, 40, 60, 80, 200):
        console = rich_console.Console(file=io.StringIO(), width=width)
        tables.print_table(SUMMARY | {"correction_steps": 7}, console)
        words = console.file.getvalue().split()
        for field in tables.FIELDS:
            if field.name in row and not field.name.endswith("decode_steps"):
                assert width < 60 or field.name in words, (width, field.name)
                for word in terminal.format_value(row[field.name], field.form).split():
                    assert word in words, (width, field.name)
        assert all(len(line) <= width for line in console.file.getvalue().splitlines())
