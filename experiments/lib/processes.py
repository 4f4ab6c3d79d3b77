"""Scripts in processes that are watched by one that holds no GPU.

A fault of a kernel can spoil its process's GPU context, and a fault of a compiler can
end it: a process of its own gives back all memory when it ends, and is ended when its
time is over. Knows processes and files; knows no scripts, and never imports JAX.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any


ROOT = pathlib.Path(__file__).resolve().parents[2]
_TOOLS = ("ptxas", "nvidia-smi")
_PACKAGES = ("jax", "jaxlib", "torch", "transformers", "numpy")
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a process ended."""

    # "done", "failed" (it says so), "died" (by a signal, or without a word) or "ended"
    # (its time was over)
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


def environment(
    *, compiled: pathlib.Path, xla_flags: str = "", memory_share: float = 0.9
) -> dict[str, str]:
    """Variables of a process that runs JAX.

    Args:
      compiled: the folder of compiled programs, unless the user has one of their own.
      xla_flags: besides those that are set.
      memory_share: of a GPU's memory that JAX may take; a small one is not taken before
        it is needed.
    """
    variables = {**os.environ, "PYTHONPATH": python_path()}
    for name, value in {
        "JAX_COMPILATION_CACHE_DIR": compiled,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0,
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": -1,
        # Warnings of XLA would bury the rows; errors remain.
        "TF_CPP_MIN_LOG_LEVEL": 2,
    }.items():
        variables.setdefault(name, str(value))
    variables["XLA_FLAGS"] = f"{variables.get('XLA_FLAGS', '')} {xla_flags}".strip()
    # jaxlib refuses the older name next to the newer.
    variables.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
    variables["XLA_CLIENT_MEM_FRACTION"] = f"{memory_share:.2f}"
    if memory_share < 0.5:
        variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    return variables


class Worker:
    """A process that answers requests: each a line of JSON, and so is its answer."""

    def __init__(
        self,
        module: str,
        *,
        output: pathlib.Path,
        variables: Mapping[str, str],
        niceness: int = 0,
    ):
        """Starts `python -m module`.

        Args:
          output: what it prints besides its answers is added to this file.
          niceness: how much the process gives way to others.
        """
        nice = ["nice", "-n", str(niceness)] if niceness else []
        with output.open("ab") as file:
            self.process = subprocess.Popen(
                [*nice, sys.executable, "-m", module],
                cwd=ROOT,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")  # It ended.

    def ask(self, request: Mapping[str, Any], *, limit_s: float) -> Outcome:
        """Returns how the request went; a process that ended has ended for good."""
        started = time.monotonic()
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = self._answers.get(timeout=max(limit_s, 0.1))
            if answer:
                return Outcome(**json.loads(answer))
            status = "died"
        except OSError:
            status = "died"
        except queue.Empty:
            status = "ended"
        self.end()
        seconds = round(time.monotonic() - started, 1)
        exit_status = self.process.returncode
        return Outcome(status=status, exit_status=exit_status, seconds=seconds)

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self.process.poll() is None

    def end(self) -> None:
        """Ends the process, which has nothing to tidy up."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        with contextlib.suppress(OSError):  # What it did not read.
            self.process.stdin.close()


def run_here(module: str, arguments: Sequence[str], *, output: pathlib.Path) -> Outcome:
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


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a file that may end in the middle of one, or not exist."""
    rows = []
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return rows
    for line in lines:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def nvidia_smi(query: str) -> str | None:
    """One line of `nvidia-smi --query-gpu`; None where there is no such program."""
    return _line("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")


def versions() -> dict[str, Any]:
    """Where the programs are that XLA may call, their versions, and the packages'."""
    found: dict[str, Any] = {
        "gpu": nvidia_smi("name,driver_version,memory.total,clocks.max.sm"),
        "python": sys.version.split()[0],
    }
    for name in _TOOLS:
        path = shutil.which(name)
        found[name] = path and f"{path}: {_line(path, '--version')}"
    for name in (*_PACKAGES, *_PLUGINS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _line(*command: str) -> str | None:
    """The last line that a program writes."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.strip().splitlines() or [None])[-1]
