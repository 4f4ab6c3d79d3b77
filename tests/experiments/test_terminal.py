"""The terminal, or what stands in its place: whole tables, and progress."""

import io

import pytest
from rich import console as rich_console, table as rich_table, text as rich_text

from experiments.lib import terminal


def make_console(**keywords) -> rich_console.Console:
    """A console that writes into memory."""
    return rich_console.Console(file=io.StringIO(), _environ={}, **keywords)


@pytest.mark.parametrize("width", [10, 30, 100])
def test_a_whole_table_goes_on_where_the_console_ends(width):
    """Fails if a column is cut, or what is red is not."""
    table = rich_table.Table(box=None, pad_edge=False)
    for name in ("a long header", "another header"):
        table.add_column(name)
    table.add_row("value 1", rich_text.Text("false", style="red"))
    plain = make_console(width=width)
    terminal.print_whole(table, plain)
    lines = [line.rstrip() for line in plain.file.getvalue().splitlines()]
    assert lines == ["a long header  another header", "value 1        false"]
    coloured = make_console(width=width, force_terminal=True, color_system="standard")
    terminal.print_whole(table, coloured)
    assert "\x1b[31mfalse" in coloured.file.getvalue()


def test_progress_is_lines_where_no_terminal_is(monkeypatch):
    """Fails if a script under nohup says nothing."""
    monkeypatch.setattr(terminal, "INTERVAL_S", 0.0)
    console = make_console(force_terminal=False)
    with terminal.progress(console) as bar:
        task = bar.add_task("prompts", total=5, completed=2)
        for _ in range(3):
            bar.advance(task)
    lines = console.file.getvalue().splitlines()
    starts = [f"prompts: {done} of 5, " for done in (3, 4, 5)]
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start) and line.endswith(" left")
    assert lines[-1] == "prompts: 5 of 5, 0:00:00 left"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal(is_terminal, monkeypatch):
    """And lines come now and then only."""
    monkeypatch.setattr(terminal, "INTERVAL_S", 1e6)
    console = make_console(force_terminal=is_terminal)
    with terminal.progress(console) as bar:
        task = bar.add_task("prompts", total=3)
        for _ in range(3):
            bar.advance(task)
    assert ("3/3" in console.file.getvalue()) == is_terminal
    assert (console.file.getvalue() == "") == (not is_terminal)


def test_progress_goes_to_standard_error():
    assert terminal.progress().console.stderr
    assert not terminal.progress().live.auto_refresh
