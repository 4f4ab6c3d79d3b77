"""Processes of the GPU report: one a section, watched by one that holds no GPU.

A fault of a kernel can spoil its process's GPU context, and a fault of a compiler can
end it: each section has a process of its own, gives back all memory when it ends, and
is ended when its time is over. Knows processes and files; knows no sections.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any


ROOT = pathlib.Path(__file__).resolve().parents[2]
_TAIL_CHARACTERS = 3000
_END_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a process ended.

    Attributes:
      status: "done", "failed" (it says so), "died" (by a signal, or without a word)
        or "ended" (its time was over).
      seconds: that it ran.
      errors: the end of what it wrote to its standard error; empty if all went well.
    """

    status: str
    exit_status: int | None
    seconds: float
    errors: str


def environment(
    device: str, *, memory_share: float, compiled: pathlib.Path
) -> dict[str, str]:
    """Variables of a process that runs JAX on `device`.

    Args:
      memory_share: of the GPU's memory that JAX may take.
      compiled: the folder of compiled programs, unless the user has one of their own.
    """
    variables = dict(os.environ)
    paths = [str(ROOT), variables.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    for name, value in {
        "JAX_COMPILATION_CACHE_DIR": compiled,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0,
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": -1,
    }.items():
        variables.setdefault(name, str(value))
    if device == "cpu":
        variables["JAX_PLATFORMS"] = "cpu"
        # Interpreted kernels are compiled once and run a few times.
        flags = variables.get("XLA_FLAGS", "")
        variables["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0".strip()
    else:
        # jaxlib refuses the older name beside the newer.
        variables.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
        variables["XLA_CLIENT_MEM_FRACTION"] = f"{memory_share:.2f}"
        # Warnings of XLA would bury the rows; errors remain.
        variables.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return variables


def run_all(
    commands: Sequence[Sequence[str]], *, variables: Mapping[str, str], limit_s: float
) -> list[Outcome]:
    """Runs Python with each list of arguments, all at once; waits for all.

    Whatever happens here, no process is left behind.
    """
    started = time.monotonic()
    running = []
    try:
        for arguments in commands:
            log = tempfile.TemporaryFile()
            process = subprocess.Popen(
                [sys.executable, *arguments], env=variables, stderr=log
            )
            running.append((process, log))
        outcomes = []
        for process, log in running:
            status = _wait(process, limit_s - (time.monotonic() - started))
            seconds = time.monotonic() - started
            outcomes.append(_outcome(status, process.returncode, seconds, log))
        return outcomes
    finally:
        for process, log in running:
            _end(process)
            log.close()


def _wait(process: subprocess.Popen, limit_s: float) -> str:
    try:
        process.wait(timeout=max(limit_s, 0.1))
    except subprocess.TimeoutExpired:
        _end(process)
        return "ended"
    if process.returncode == 0:
        return "done"
    return "failed" if process.returncode == 1 else "died"


def _end(process: subprocess.Popen) -> None:
    """Ends a process if it still runs: politely first."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _outcome(status: str, exit_status: int, seconds: float, log) -> Outcome:
    log.seek(0)
    text = log.read().decode(errors="replace")
    errors = "" if status == "done" else text[-_TAIL_CHARACTERS:]
    return Outcome(
        status=status, exit_status=exit_status, seconds=seconds, errors=errors
    )


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a file that may end in the middle of one, or not exist."""
    rows = []
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return rows
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
