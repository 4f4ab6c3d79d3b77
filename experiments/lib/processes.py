"""Scripts in a separate process, watched by a process that holds no GPU.

A faulty kernel can break its process's GPU context, and a faulty compiler can crash the
process. A separate process frees all memory when it ends, and is killed when its time
is over. This module handles processes and files, and no scripts; it imports JAX in the
separate process alone.
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
_START_S = 30.0  # to start a process, and to compile its first request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a request ended."""

    # "done", "failed" (by status or exception), "died" (the process did) or "ended"
    # (its time was over)
    status: str
    exit_status: int | None
    seconds: float  # of its run


def python_path() -> str:
    """Returns the value of PYTHONPATH by which a process finds this checkout."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def usable_cores() -> int:
    """Returns how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Worker:
    """A process that runs scripts, one after the other; replaced when it has ended."""

    def __init__(self, output: pathlib.Path, set_up: Callable[[], None]):
        """Sets up the worker; the first `run` starts the process.

        Args:
          output: file to which the process appends output that is not of its scripts.
          set_up: called in the process first, before JAX is imported; can be pickled.
        """
        self._begin = output, set_up
        self._process: multiprocessing.context.SpawnProcess | None = None

    def run(self, *request: Any, limit_s: float) -> Outcome:
        """Returns the outcome of `run_here(*request)` in the process, which is killed
        if it takes longer than `limit_s`."""
        started = time.monotonic()
        if self._process is None or not self._process.is_alive():
            context, limit_s = multiprocessing.get_context("spawn"), limit_s + _START_S
            self._pipe, other = context.Pipe()
            given = (other, *self._begin)
            self._process = context.Process(target=_serve, args=given, daemon=True)
            self._process.start()
            other.close()  # So that reading fails once the process ends.
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
        """Kills the process, if there is one: it has nothing to clean up."""
        if self._process is not None:
            self._process.kill()
            self._process.join()


def _serve(
    pipe: connection.Connection, output: pathlib.Path, set_up: Callable[[], None]
) -> None:
    """Runs requests until there are no more, or the device does not answer."""
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    set_up()
    with contextlib.suppress(EOFError):
        while True:
            outcome = run_here(*pipe.recv())
            gc.collect()
            if outcome.status != "done":
                # A faulty kernel may have broken the process's GPU context: if so, this
                # ends the process, and another one gets the next request.
                import jax.numpy as jnp

                jnp.ones((8,)).sum().block_until_ready()
            pipe.send(outcome)


def run_here(module: str, arguments: Sequence[str], output: pathlib.Path) -> Outcome:
    """Calls a script's `main` in this process, which imports modules only once.

    An exception is written to `output`, and counts as a failure.
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
    """Returns the last line of `nvidia-smi --query-gpu`; None without that program."""
    return _last("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")


def versions() -> dict[str, Any]:
    """Returns paths and versions of programs that XLA may call, and of packages."""
    found: dict[str, Any] = {
        "gpu": nvidia_smi("name,driver_version,memory.total,clocks.max.sm"),
        "python": platform.python_version(),
    }
    for name in ("ptxas", "nvidia-smi"):
        path = shutil.which(name)
        found[name] = path and f"{path}: {_last(path, '--version')}"
    known = ("jax", "nvidia", "torch", "transformers", "numpy")
    packages = {each.name: each.version for each in metadata.distributions()}
    return found | {n: v for n, v in packages.items() if n.startswith(known)}


def _last(*command: str) -> str | None:
    """Returns the last line of `output`, or None where that has no line."""
    lines = (output(*command) or "").splitlines()
    return lines[-1] if lines else None


def output(*command: str, cwd: pathlib.Path | None = None) -> str | None:
    """Returns what a program writes, without the last line feeds; None if it fails."""
    how = {"capture_output": True, "text": True, "timeout": 20, "check": True}
    try:
        return subprocess.run(command, cwd=cwd, **how).stdout.rstrip()
    except (OSError, subprocess.SubprocessError):
        return None
