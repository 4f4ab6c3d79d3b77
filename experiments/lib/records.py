"""Records: rows of results as they are written, and where they come from.

Knows JSON, files and this machine. Knows nothing of what the numbers mean.
"""

import argparse
import json
import math
import os
import pathlib
import platform
import subprocess
import traceback
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np

import spec_jax
from experiments.lib import cli, files, terminal
from spec_jax import compilation


RESULTS = pathlib.Path(__file__).parents[1] / "results"
"""Rows that are committed: those of a clean tree, unless they say otherwise."""


def open_out(args: argparse.Namespace) -> "JsonLines":
    """Opens what `--out` names; as `open_rows`."""
    return open_rows(args.out, allow_dirty=args.allow_dirty)


def open_rows(
    path: str | os.PathLike | None, *, allow_dirty: bool = False
) -> "JsonLines":
    """Opens a file of rows; one below `RESULTS` is for code of a commit."""
    is_committed = path is not None and RESULTS in pathlib.Path(path).resolve().parents
    if is_committed and not allow_dirty:
        check_clean(what="a row of experiments/results", allow="--allow-dirty")
    return JsonLines(path)


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


def resume(out: "JsonLines", description: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Keeps the rows that an earlier run left in the file, and returns them.

    Half a line at the end, of a machine that stopped while it was written, is dropped.

    Args:
      description: what each row of this run will say besides its numbers.

    Raises:
      ValueError: rows of something else, or measured otherwise; one line says how.
    """
    lines, wanted = _whole_lines(out), to_json(description, "description")
    rows = [
        _same(line, wanted, f"{out.path}, line {number}")
        for number, line in enumerate(lines, 1)
    ]
    out.keep(lines)
    return rows


def resume_behind(
    out: "JsonLines", header: Mapping[str, Any], kinds: Collection[str]
) -> list[dict[str, Any]]:
    """As `resume`, of a file whose first row says what all others are of.

    Returns the rows of these kinds behind it; others are written anew. A new file gets
    the header.
    """
    lines = _whole_lines(out)
    if not lines:
        out.write(header)
        return []
    _same(lines[0], to_json(header, "header"), str(out.path))
    rows = [json.loads(line) for line in lines[1:]]
    count = [*(row.get("kind") in kinds for row in rows), False].index(False)
    out.keep(lines[: 1 + count])
    return rows[:count]


def _whole_lines(out: "JsonLines") -> list[bytes]:
    """The lines that a file has, but for half a one at its end."""
    if out.path is None or not out.path.exists():
        return []
    lines = files.read(out.path).splitlines(keepends=True)
    return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]


def _same(line: bytes, wanted: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The row of a line, which says what is wanted.

    Raises:
      ValueError: no row of this script, or one that says otherwise, and what.
    """
    try:
        row = json.loads(line)
        other = [name for name in wanted if row[name] != wanted[name]]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{where}: no row of this script; name another file") from None
    if other:
        words = (f"{name} is {row[name]!r} there and {wanted[name]!r} here"
                 for name in other)  # fmt: skip
        raise ValueError(
            f"{where}: {'; '.join(words)}. Give the same settings, or name another file"
        )
    return row


class JsonLines:
    """A file of JSON rows, each written at once: an interrupted run leaves its rows.

    The file is opened at once, so that a path that cannot be written is found before
    the work. What it held is replaced when the first row comes, so that a run that
    fails before its first result destroys none.
    """

    # What every row that follows has besides its own
    common: Mapping[str, Any] = types.MappingProxyType({})

    def __init__(self, path: str | os.PathLike | None):
        """Opens the file; without a path, rows go nowhere."""
        self.path = None if path is None else pathlib.Path(path)
        self._is_first, self._kept = True, 0
        self._file = None if self.path is None else self.path.open("ab", buffering=0)

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one row, and of `common` what it does not say itself; it is with the
        operating system on return.

        Raises:
          ValueError: a value that JSON lacks; the file is left as it was.
        """
        whole = {**row, **self.common, **row}  # In the order of a row, then of all.
        line = json.dumps(to_json(whole, "row"), allow_nan=False)
        if self.path is None or self._file is None:
            return
        if self._is_first and self.path.is_file():  # Not of a pipe or a device.
            self._file.truncate(self._kept)
        self._is_first = False
        self._file.write(f"{line}\n".encode())

    def write_all(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends rows."""
        for row in rows:
            self.write(row)

    def keep(self, lines: Sequence[bytes]) -> None:
        """Keeps these lines, which the file begins with, for a run that goes on."""
        self._kept = sum(map(len, lines))

    def close(self) -> None:
        """Closes the file; may be called twice."""
        if self._file is not None:
            self._file.close()


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


def to_json(value: Any, name: str) -> Any:
    """The value in JSON's own types; NumPy and JAX scalars and arrays are converted.

    Args:
      value: what to convert.
      name: what error messages call it.

    Raises:
      ValueError: NaN or an infinity, which JSON lacks.
      TypeError: another type.
    """
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        value = np.asarray(value).tolist()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)  # Enumerations too.
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name}={value} is no JSON number; write None instead")
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return [to_json(entry, f"{name}[{i}]") for i, entry in enumerate(value)]
    if isinstance(value, Mapping):
        return {str(key): to_json(entry, str(key)) for key, entry in value.items()}
    raise TypeError(f"{name} is a {type(value).__name__}, which has no JSON form")


def provenance() -> dict[str, Any]:
    """Which code, libraries and machine the numbers of this process come from."""
    device = jax.devices()[0]
    commit = _git("rev-parse", "HEAD")
    return {
        "git_commit": commit,
        # Numbers of changed code are not those of the commit.
        "git_dirty": None if commit is None else bool(_unclean()),
        "spec_jax_version": _version("spec_jax"),
        "jax_version": jax.__version__,
        "jaxlib_version": _version("jaxlib"),
        "python_version": platform.python_version(),
        "device_kind": device.device_kind,
        "platform": device.platform,
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        **compilation.describe(),
    }


def check_clean(*, what: str, allow: str) -> None:
    """Raises `ValueError` unless the commit says which code runs.

    Args:
      what: is to name the commit, for the message.
      allow: what marks it in the place of refusing it, for the message.
    """
    why = _unclean()
    if _git("rev-parse", "HEAD") is None:
        why = "this is no git checkout, or it has no commit"
    if why:
        raise ValueError(
            f"{what} names the commit of its code, and {why}; {allow} makes one that "
            "is marked so"
        )


def _unclean() -> str:
    """Why the code that runs is not that of the commit; empty where it is."""
    here, library = (
        pathlib.Path(file).resolve().parents[depth]
        for file, depth in ((__file__, 2), (spec_jax.__file__, 1))
    )
    if library != here:
        return f"spec_jax comes from {library}, not from this checkout"
    # Results are no code: one may be written after another without a commit between.
    changes = _git(
        *("status", "--porcelain", "--untracked-files=no", "--"),
        *(":/", ":(top,exclude)experiments/results"),
    )
    names = [line[3:] for line in (changes or "").splitlines()]
    if not names:
        return ""
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"there are changes without a commit ({', '.join(names[:2])}{more})"


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


def _version(package: str) -> str | None:
    """The installed version; `None` where the source is used without installing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str | None:
    """The processor's model name, from Linux where it can be had."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or None
