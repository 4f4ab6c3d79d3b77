"""Scripts in a process that is watched by one that holds no GPU.

A fault of a kernel can spoil its process's GPU context, and a fault of a compiler can
end it: a process of its own gives back all memory when it ends, and is ended when its
time is over. Knows processes and files; knows no scripts, and imports JAX in that
process alone.
"""

import contextlib
import dataclasses
import gc
import importlib
import multiprocessing
import os
import pathlib
import platform
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from multiprocessing import connection
from typing import Any


ROOT = pathlib.Path(__file__).resolve().parents[2]
_START_S = 30.0  # of a process, and for the programs of its first request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a request ended."""

    # "done", "failed" (it says so), "died" (its process did) or "ended" (its time was
    # over)
    status: str
    exit_status: int | None
    seconds: float  # that it ran


def python_path() -> str:
    """Returns the value of PYTHONPATH with which a process finds this checkout."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def usable_cores() -> int:
    """Returns how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Worker:
    """A process that runs scripts, one after the other; when it ended, a new one."""

    def __init__(self, output: pathlib.Path, set_up: Callable[[], None]):
        """Starts nothing yet.

        Args:
          output: what the process prints besides its scripts is added to this file.
          set_up: called in the process first, before JAX is imported; can be pickled.
        """
        self._begin = output, set_up
        self._process: multiprocessing.context.SpawnProcess | None = None

    def run(self, *request: Any, limit_s: float) -> Outcome:
        """Returns how `run_here(*request)` went there; ends the process if it takes
        longer."""
        started = time.monotonic()
        if self._process is None or not self._process.is_alive():
            context, limit_s = multiprocessing.get_context("spawn"), limit_s + _START_S
            self._pipe, other = context.Pipe()
            given = (other, *self._begin)
            self._process = context.Process(target=_serve, args=given, daemon=True)
            self._process.start()
            other.close()  # So that its end is the end of what can be read.
        status = "died"
        with contextlib.suppress(EOFError, OSError):
            self._pipe.send(request)
            if self._pipe.poll(max(limit_s, 0.1)):
                return self._pipe.recv()
            status = "ended"
        self.end()
        seconds = round(time.monotonic() - started, 1)
        return Outcome(
            status=status, exit_status=self._process.exitcode, seconds=seconds
        )

    def end(self) -> None:
        """Ends the process, if there is one: it has nothing to tidy up."""
        if self._process is not None:
            self._process.kill()
            self._process.join()


def _serve(
    pipe: connection.Connection, output: pathlib.Path, set_up: Callable[[], None]
) -> None:
    """Answers requests; ends when there are no more, or the device does not answer."""
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    set_up()
    with contextlib.suppress(EOFError):
        while True:
            outcome = run_here(*pipe.recv())
            gc.collect()
            if outcome.status != "done":
                # A fault of a kernel spoils the process's hold on the GPU: without an
                # answer it ends, and what follows is given to another.
                import jax.numpy as jnp

                jnp.ones((8,)).sum().block_until_ready()
            pipe.send(outcome)


def run_here(module: str, arguments: Sequence[str], output: pathlib.Path) -> Outcome:
    """Calls the script's `main` in this process: the imports are paid for once.

    What it raises is in `output`, and counts as a failure.
    """
    started = time.monotonic()
    with (
        output.open("w", buffering=1) as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        try:
            exit_status = importlib.import_module(module).main(arguments)
        except SystemExit as exit_:
            exit_status = exit_.code
        except Exception:
            traceback.print_exc()
            exit_status = 1
    seconds = round(time.monotonic() - started, 1)
    status = "failed" if exit_status else "done"
    return Outcome(status=status, exit_status=exit_status, seconds=seconds)


def nvidia_smi(query: str) -> str | None:
    """One line of `nvidia-smi --query-gpu`; None where there is no such program."""
    return _line("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")


def versions() -> dict[str, Any]:
    """Where the programs are that XLA may call, their versions, and the packages'."""
    found: dict[str, Any] = {
        "gpu": nvidia_smi("name,driver_version,memory.total,clocks.max.sm"),
        "python": platform.python_version(),
    }
    for name in ("ptxas", "nvidia-smi"):
        path = shutil.which(name)
        found[name] = path and f"{path}: {_line(path, '--version')}"
    known = ("jax", "nvidia", "torch", "transformers", "numpy")
    packages = {each.name: each.version for each in metadata.distributions()}
    return found | {n: v for n, v in packages.items() if n.startswith(known)}


def _line(*command: str) -> str | None:
    """The last line that a program writes."""
    how = {"capture_output": True, "text": True, "timeout": 20, "check": True}
    try:
        lines = subprocess.run(command, **how).stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[-1] if lines else None
