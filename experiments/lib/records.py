"""Records: rows of results as they are written, and where they come from.

Knows JSON, files and this machine. Knows nothing of what the numbers mean.
"""

import argparse
import json
import os
import pathlib
import platform
import re
import subprocess
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np

import spec_jax
from experiments.lib import cli, files, terminal
from spec_jax import compilation


RESULTS = pathlib.Path(__file__).parents[1] / "results"
"""Rows that are committed: those of a clean tree, unless they say otherwise."""


def open_out(args: argparse.Namespace) -> "JsonLines":
    """Opens what `--out` names."""
    return JsonLines(args.out, allow_dirty=args.allow_dirty)


def script(
    name: str,
    parse: Callable[[Sequence[str] | None], argparse.Namespace],
    work: Callable[[argparse.Namespace, "JsonLines", terminal.Console], int],
    **options: Any,
) -> Callable[..., int]:
    """Returns the `main` of a script that writes rows: `cli.script` of a function that
    is given what `--out` names, too, and standard output."""

    def run(args: argparse.Namespace) -> int:
        with open_out(args) as out:
            return work(args, out, terminal.console())

    return cli.script(name, parse, run, **options)


def resume(
    out: "JsonLines", description: Mapping[str, Any], *, behind: str | None = None
) -> list[dict[str, Any]]:
    """Keeps the rows that an earlier run left in the file, and returns them.

    Half a line at the end, of a machine that stopped while it was written, is dropped.

    Args:
      description: what each row of this run says besides its numbers.
      behind: the first row alone says it, a header, which a new file gets; the rows of
        this kind behind it are returned, and all others are written anew.

    Raises:
      ValueError: rows of something else, or measured otherwise; one line says how.
    """
    is_there = out.path is not None and out.path.exists()
    lines = files.read(out.path).splitlines(keepends=True) if is_there else []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    rows, wanted = [], to_json(description)
    for number, line in enumerate(lines, 1):
        row = _row_of(line, f"{out.path}, line {number}", wanted)
        if behind and rows and row.get("kind") != behind:
            break
        rows.append(row)
        wanted = {} if behind else wanted
    out.kept = sum(map(len, lines[: len(rows)]))
    if behind and not rows:
        out.write(description)
    return rows[1:] if behind else rows


def _row_of(line: bytes, where: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row of a line, which says what is wanted; raises as `resume`."""
    try:
        row = json.loads(line)
        other = [f"{name} is {row[name]!r} there and {value!r} here"
                 for name, value in wanted.items() if row[name] != value]  # fmt: skip
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{where}: no row of this script; name another file") from None
    if other:
        words = "Give the same settings, or name another file"
        raise ValueError(f"{where}: {'; '.join(other)}. {words}")
    return row


class JsonLines:
    """A file of JSON rows, each written at once: an interrupted run leaves its rows.

    The file is opened at once, so that a path that cannot be written is found before
    the work. What it held is replaced when the first row comes, so that a run that
    fails before its first result destroys none.
    """

    def __init__(self, path: str | os.PathLike | None, *, allow_dirty: bool = False):
        """Opens the file; without a path, rows go nowhere.

        One below `RESULTS` is for code of a commit, unless changes are allowed.
        """
        self.path = None if path is None else pathlib.Path(path)
        # What every row that follows has besides its own
        self.common: Mapping[str, Any] = {}
        # Bytes that the file begins with and keeps, until the first row is written
        self.kept: int | None = 0
        self._file = None
        if self.path is not None:
            if RESULTS in self.path.resolve().parents and not allow_dirty:
                check_clean("a row of experiments/results")
            self._file = self.path.open("ab", buffering=0)

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *exc_info) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one row, and of `common` what it does not say itself; it is with the
        operating system on return.

        Raises:
          ValueError: a value that JSON lacks; the file is left as it was.
        """
        whole = {**row, **self.common, **row}  # In the order of a row, then of all.
        line = json.dumps(to_json(whole))
        if self._file is None:
            return
        if self.kept is not None and self.path.is_file():  # No pipe, and no device.
            self._file.truncate(self.kept)
        self.kept = None
        self._file.write(f"{line}\n".encode())

    def write_all(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Appends rows, each as it comes, and returns them."""
        written = []
        for row in rows:
            self.write(row)
            written.append(row)
        return written


def guarded(
    item: str,
    work: Callable[[], list[dict[str, Any]]],
    *,
    raises: tuple[type[Exception], ...] = (),
) -> list[dict[str, Any]]:
    """The rows of `work`, or one that says how it failed: what follows is still done.

    An interrupt, what files raise and `raises` are raised as they are.
    """
    try:
        return work()
    except (OSError, *raises):
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0][:500]
        lines = "".join(traceback.format_exception(error)).splitlines()[-12:]
        text = f"{type(error).__name__}: {first}"
        return [{"kind": "error", "item": item, "error": text, "traceback": lines}]


def is_failure(row: Mapping[str, Any]) -> bool:
    """Whether a row says that something failed, or that bits differ."""
    return row["kind"] == "error" or False in (row.get("equal"), row.get("seen"))


def line(row: Mapping[str, Any]) -> str:
    """A row in short, for the console: its kind, then what is not None."""
    shown = []
    for name, value in row.items():
        if name in ("kind", "traceback") or value is None:
            continue
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        shown.append(f"{name}={text if len(text) <= 60 else text[:57] + '...'}")
    return f"{row['kind']}: {' '.join(shown)}"


def to_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row in JSON's own types; NumPy and JAX scalars and arrays are converted.

    Raises:
      ValueError: NaN or an infinity, which JSON lacks.
      TypeError: a value of another type.
    """
    plain = {}
    for name, value in row.items():
        try:
            text = json.dumps(value, allow_nan=False, default=_plain)
        except ValueError:
            raise ValueError(
                f"{name}={value} is no JSON number; write None instead"
            ) from None
        plain[name] = json.loads(text)
    return plain


def _plain(value: Any) -> Any:
    """The value in types that `json` knows."""
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return np.asarray(value).tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def provenance() -> dict[str, Any]:
    """Which code, libraries and machine the numbers of this process come from."""
    device = jax.devices()[0]
    commit = _git("rev-parse", "HEAD")
    return {
        "git_commit": commit,
        # Numbers of changed code are not those of the commit.
        "git_dirty": None if commit is None else bool(_unclean()),
        "spec_jax_version": spec_jax.__version__,
        "jax_version": jax.__version__,
        "jaxlib_version": jaxlib.__version__,
        "python_version": platform.python_version(),
        "device_kind": device.device_kind,
        "platform": device.platform,
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        **compilation.describe(),
    }


def check_clean(what: str) -> None:
    """Raises `ValueError` unless the commit that `what` names says which code runs."""
    why = _unclean()
    if why:
        raise ValueError(
            f"{what} names the commit of its code, and {why}; --allow-dirty makes one "
            "that is marked so"
        )


def _unclean() -> str:
    """Why the code that runs is not that of the commit; empty where it is."""
    here, library = (
        pathlib.Path(file).resolve().parents[depth]
        for file, depth in ((__file__, 2), (spec_jax.__file__, 1))
    )
    if library != here:
        return f"spec_jax comes from {library}, not from this checkout"
    if _git("rev-parse", "HEAD") is None:
        return "this is no git checkout, or it has no commit"
    # Results are no code: one may be written after another without a commit between.
    changes = _git(
        *("status", "--porcelain", "--untracked-files=no", "--"),
        *(":/", ":(top,exclude)experiments/results"),
    )
    names = [line[3:] for line in (changes or "").splitlines()]
    more = ", ..." * (len(names) > 2)
    told = f"there are changes without a commit ({', '.join(names[:2])}{more})"
    return told if names else ""


def _git(*arguments: str) -> str | None:
    """What git says about the checkout of this file; `None` outside of one."""
    command = ("git", "--no-optional-locks", *arguments)
    here = pathlib.Path(__file__).parent
    try:
        done = subprocess.run(
            command, cwd=here, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.rstrip()


def _cpu_name() -> str | None:
    """The processor's model name, from Linux where it can be had."""
    about = pathlib.Path("/proc/cpuinfo")
    found = about.exists() and re.search(r"model name\s*: (.+)", about.read_text())
    return found[1].strip() if found else platform.processor() or None
