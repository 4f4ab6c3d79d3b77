"""The terminal, or what stands in its place: values as text, how far a script is.

Knows nothing of what is shown.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich import console as rich_console, progress as rich_progress


def console() -> rich_console.Console:
    """Returns standard output."""
    return rich_console.Console()


def format_value(value: Any, form: str) -> str:
    """The value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return " ".join(format_value(entry, form) for entry in value) or "-"
    return format(value, form)


class _Bar(rich_progress.Progress):
    """Redraws when it advances, and has no thread that redraws in between.

    Such a thread would take processor time from whatever is being measured.
    """

    def advance(self, task_id: rich_progress.TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self.refresh()


def progress() -> rich_progress.Progress:
    """A progress bar on standard error, where that is a terminal."""
    console = rich_console.Console(stderr=True)
    return _Bar(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
        # Standard output may be a pipe: what is printed there stays there.
        redirect_stdout=False,
        disable=not console.is_terminal,
    )


@contextlib.contextmanager
def counted(name: str, *, total: int) -> Iterator[Callable[[], None]]:
    """Shows a progress bar, and yields what advances it by one."""
    with progress() as bar:
        task = bar.add_task(name, total=total)
        yield lambda: bar.advance(task)
