"""The terminal, or what stands in its place: values as text, how far a script is.

Knows nothing of what is shown.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich import console as rich_console, progress as rich_progress


Console = rich_console.Console


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


INTERVAL_S = 10.0
"""Between two lines of progress where there is no terminal for a bar."""


class _Lines(rich_progress.Progress):
    """Redraws when it advances, and has no thread that redraws in between.

    Such a thread would take processor time from whatever is being measured. Where
    there is no terminal, `advance` prints a line now and then.
    """

    _last_line_s = time.monotonic()

    def advance(self, task_id: rich_progress.TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        if not self.disable:
            self.refresh()
        elif time.monotonic() - self._last_line_s >= INTERVAL_S:
            self._last_line_s = time.monotonic()
            task = next(task for task in self.tasks if task.id == task_id)
            line = f"{task.description}: {task.completed:g} of {task.total:g}"
            self.console.print(line, soft_wrap=True, highlight=False)


def progress(console: rich_console.Console | None = None) -> rich_progress.Progress:
    """A progress bar on standard error; a line now and then where that is no terminal.

    It is redrawn by `advance`, or by `update(..., refresh=True)`.
    """
    console = console or rich_console.Console(stderr=True)
    return _Lines(
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
