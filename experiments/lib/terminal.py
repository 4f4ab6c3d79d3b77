"""The terminal, or a file in its place: values as text, and a script's progress.

This module does not depend on what is shown.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tqdm
from rich import console as rich_console


INTERVAL_S = 10.0
"""Seconds between lines of progress where there is no terminal for a bar."""


def console() -> rich_console.Console:
    """Returns a console on standard output; it does not highlight numbers."""
    return rich_console.Console(highlight=False)


def show(text: str = "", *, style: str | None = None) -> None:
    """Prints a line on standard output, however long; no bracket in it is markup."""
    console().out(text, style=style)


def format_value(value: Any, form: str) -> str:
    """Returns the value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return " ".join(format_value(entry, form) for entry in value) or "-"
    return format(value, form)


@contextlib.contextmanager
def counted(name: str, *, total: int, done: int = 0) -> Iterator[Callable[..., Any]]:
    """Shows a progress bar on standard error, and yields a function that advances it
    and writes a few words, if any, behind it.

    No thread draws the bar in between, since it would take processor time from whatever
    is being measured.
    """
    tqdm.tqdm.monitor_interval = 0
    interval = 0.1 if sys.stderr.isatty() else INTERVAL_S
    how = {"mininterval": interval, "miniters": 1, "leave": False}
    with tqdm.tqdm(desc=name, total=total, initial=done, **how) as bar:

        def advance(count: int = 1, *, said: str = "") -> None:
            bar.set_postfix_str(said, refresh=False)
            bar.update(count)

        yield advance
