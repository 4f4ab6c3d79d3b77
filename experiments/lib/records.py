"""Records: rows of results as they are written, and where they come from.

This module handles JSON, files and this machine, but not the meaning of numbers.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jaxlib
import numpy as np

import spec_jax
from experiments.lib import cli, files, processes
from spec_jax import compilation


RESULTS = pathlib.Path(__file__).parents[1] / "results"
"""Folder of committed rows, made from a clean tree unless they say otherwise."""


def script(
    name: str,
    parse: cli.Parse,
    work: Callable[[argparse.Namespace, "JsonLines"], bool | None],
    **options: Any,
) -> Callable[..., int]:
    """Returns the `main` of a script that writes rows: that of `cli.script`, with a
    `work` that also gets the file of `--out`."""

    @functools.wraps(work)
    def run(args: argparse.Namespace) -> bool | None:
        with JsonLines(args.out, allow_dirty=args.allow_dirty) as out:
            return work(args, out)

    return cli.script(name, parse, run, **options)


def resume(
    out: "JsonLines", description: Mapping[str, Any], *, behind: str | None = None
) -> list[dict[str, Any]]:
    """Keeps the rows that an earlier run left in the file, and returns them.

    Half a line at the end, which an interrupted write leaves, is dropped.

    Args:
      description: fields that each row of this run has besides its numbers.
      behind: a kind of rows. The first row alone is then the description, a header that
        a new file gets; rows of this kind after it are kept, up to the first other one.

    Raises:
      ValueError: rows of another script, or of other settings; the message names them.
    """
    is_there = out.path is not None and out.path.exists()
    text = files.read(out.path) if is_there else b""
    lines = text[: text.rfind(b"\n") + 1].splitlines(keepends=True)
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
    """Returns a line's row, whose fields must be those wanted; raises as `resume`."""
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


class JsonLines(contextlib.AbstractContextManager):
    """A file of JSON rows, each written at once: an interrupted run leaves its rows.

    The file is opened at once, so that a path that cannot be written is found before
    the work. Its old rows are replaced when the first row comes, so that a run that
    fails before its first result destroys none.
    """

    def __init__(self, path: str | os.PathLike | None, *, allow_dirty: bool = False):
        """Opens the file; without a path, rows go nowhere.

        A file below `RESULTS` needs code of a commit, unless changes are allowed.
        """
        self.path = None if path is None else pathlib.Path(path)
        # Fields that every row that follows gets, too
        self.common: Mapping[str, Any] = {}
        # Bytes of the old file that are kept; None once the first row is written
        self.kept: int | None = 0
        self._file = None
        if self.path is not None:
            if RESULTS in self.path.resolve().parents and not allow_dirty:
                check_clean("a row of experiments/results")
            self._file = self.path.open("ab", buffering=0)

    def __exit__(self, *exc_info) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one row, with the fields of `common` that it lacks; on return the
        operating system has it.

        Raises:
          ValueError: a value that JSON lacks; the file is left as it was.
        """
        whole = {**row, **self.common, **row}  # Its own fields come first.
        line = json.dumps(to_json(whole))
        if self._file is None:
            return
        if self.kept is not None and self.path.is_file():  # Not a pipe or a device.
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


def to_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row in JSON's own types; arrays and scalars of NumPy and JAX, too.

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
    """Returns the value in types that `json` can write."""
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return np.asarray(value).tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def provenance() -> dict[str, Any]:
    """Returns the code, libraries and machine that this process's numbers are from."""
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
    """Raises `ValueError`, about `what`, unless the code that runs is the commit's."""
    why = _unclean()
    if why:
        raise ValueError(
            f"{what} names the commit of its code, and {why}; --allow-dirty makes one "
            "that is marked so"
        )


def _unclean() -> str:
    """Returns why the code that runs is not that of the commit; empty where it is."""
    here, library = (
        pathlib.Path(file).resolve().parents[depth]
        for file, depth in ((__file__, 2), (spec_jax.__file__, 1))
    )
    if library != here:
        return f"spec_jax comes from {library}, not from this checkout"
    if _git("rev-parse", "HEAD") is None:
        return "this is no git checkout, or it has no commit"
    # Results are no code: several may be written without a commit in between.
    changes = _git(
        *("status", "--porcelain", "--untracked-files=no", "--"),
        *(":/", ":(top,exclude)experiments/results"),
    )
    names = [line[3:] for line in (changes or "").splitlines()]
    more = ", ..." * (len(names) > 2)
    told = f"there are changes without a commit ({', '.join(names[:2])}{more})"
    return told if names else ""


def _git(*arguments: str) -> str | None:
    """Returns git's output in the checkout of this file; None outside of one."""
    command = ("git", "--no-optional-locks", *arguments)
    return processes.output(*command, cwd=pathlib.Path(__file__).parent)


def _cpu_name() -> str | None:
    """Returns the processor's model name, from Linux where that has it."""
    about = pathlib.Path("/proc/cpuinfo")
    found = about.exists() and re.search(r"model name\s*: (.+)", about.read_text())
    return found[1].strip() if found else platform.processor() or None
