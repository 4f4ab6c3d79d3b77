"""The terminal, or what stands in its place: values as text, how far a script is.

Knows nothing of what is shown.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tqdm
from rich import console as rich_console


Console = rich_console.Console

INTERVAL_S = 10.0
"""Between two states of progress where there is no terminal for a bar."""


def console() -> Console:
    """Returns standard output; numbers in lines look as the words beside them."""
    return rich_console.Console(highlight=False)


def format_value(value: Any, form: str) -> str:
    """The value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return " ".join(format_value(entry, form) for entry in value) or "-"
    return format(value, form)


@contextlib.contextmanager
def counted(name: str, *, total: int, done: int = 0) -> Iterator[Callable[[], Any]]:
    """Shows a progress bar on standard error, and yields what advances it by one.

    Nothing is drawn in between: a thread that does would take processor time from
    whatever is being measured.
    """
    tqdm.tqdm.monitor_interval = 0
    interval = 0.1 if sys.stderr.isatty() else INTERVAL_S
    how = {"mininterval": interval, "miniters": 1, "leave": False}
    with tqdm.tqdm(desc=name, total=total, initial=done, **how) as bar:
        yield bar.update
