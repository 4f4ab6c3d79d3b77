"""Files that scripts read and write; what cannot be used is refused in one line."""

import dataclasses
import errno
import fcntl
import hashlib
import io
import json
import os
import pathlib
import stat
import sys
import tempfile
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from spec_jax import regular_files


T = TypeVar("T")

read = regular_files.read


def sha256(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal; raises as `read`."""
    return hashlib.sha256(read(path)).hexdigest()


def read_rows(path: pathlib.Path, *, hint: str = "") -> dict[int, dict[str, Any]]:
    """Reads JSON objects, by the number of their line; blank lines are skipped.

    A file that ends in `.json` holds one object over many lines.

    Args:
      hint: ends the message where there are none.

    Raises:
      ValueError: no file, or no JSON objects in it; with the line.
    """
    try:
        text = read(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: cannot be read ({reason}){hint}") from None
    rows = {}
    lines = [text] if path.suffix == ".json" else text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows[number] = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number}: no JSON ({error}){hint}"
            ) from None
        if not isinstance(rows[number], dict):
            kind = type(rows[number]).__name__
            raise ValueError(f"{path}, line {number}: not a JSON object but a {kind}")
    return rows


def checked(row: Mapping[str, Any], kind: type[T], where: str) -> T:
    """Makes a dataclass of a JSON row, whose other keys are left alone.

    Args:
      kind: its fields are of JSON's types, of None, or lists and tuples of integers.

    Raises:
      ValueError: a field that is missing, or of another type; `where` says whose.
    """
    values = {}
    for field in dataclasses.fields(kind):
        name, wanted = field.name, field.type
        if name not in row:
            raise ValueError(f"{where}: lacks {name!r}; write it again")
        value = row[name]
        if not _is_a(value, wanted):
            named = getattr(wanted, "__name__", wanted)
            shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:12]}..."
            raise ValueError(f"{where}: {name}={shown} is no {named}; write it again")
        values[name] = tuple(value) if typing.get_origin(wanted) is tuple else value
    return kind(**values)


def _is_a(value: Any, wanted: Any) -> bool:
    """Whether a JSON value is of a field's type; a bool is no number."""
    if typing.get_origin(wanted) in (list, tuple):
        return isinstance(value, list) and all(type(entry) is int for entry in value)
    if isinstance(wanted, types.UnionType):
        return any(_is_a(value, one) for one in wanted.__args__)
    return type(value) is wanted or (wanted is float and type(value) is int)


def open_output(path: pathlib.Path) -> io.FileIO:
    """Opens for appending, without a buffer that could hold half a line.

    A regular file is locked until it is closed: a second process that writes to it is
    refused.
    """
    _check_name(path, "written")
    try:
        if path.is_dir():
            raise ValueError(
                f"{path}: is a directory; name a file, such as {path / 'results.jsonl'}"
            )
        if not path.parent.is_dir():
            raise ValueError(
                f"{path}: the directory {path.parent} does not exist; make it first"
            )
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written ({error.strerror}); name another file"
        ) from None
    try:
        _lock(file, path)
    except BaseException:
        file.close()
        raise
    return file


def check_output(path: pathlib.Path) -> None:
    """Raises `ValueError` unless the file can be written; leaves it as it is."""
    _check_name(path, "written")
    if os.path.lexists(path) and not path.is_dir() and not path.is_file():
        # The reader of a pipe would take its closing for the end.
        if not os.access(path, os.W_OK):
            raise ValueError(f"{path}: cannot be written; name another file")
        return
    is_new = not os.path.lexists(path)
    open_output(path).close()
    if is_new:
        path.unlink()


def check_folder(path: pathlib.Path) -> None:
    """Makes the folder if it is missing; raises `ValueError` if it is not writable."""
    _check_name(path, "written")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"{path}: no folder that can be written to ({error.strerror}); name another"
        ) from None


def check_apart(
    flag: str, folder: pathlib.Path, others: Mapping[str, pathlib.Path | None]
) -> None:
    """Raises `ValueError` where writing to a folder would replace what is read.

    Args:
      flag: that named the folder.
      others: folders that are read, by their flags.
    """
    for reader, other in others.items():
        if other is None:
            continue
        if is_same(folder, other) or _identities(folder) & _identities(other):
            raise ValueError(
                f"{flag} {folder} would replace what {reader} reads: name another "
                "folder"
            )


def _identities(folder: pathlib.Path) -> set[tuple[int, int]]:
    """What stands for each file and folder in a folder, whatever it is called."""
    if not folder.is_dir():
        return set()
    found = [path.stat() for path in folder.iterdir() if path.exists()]
    return {(status.st_dev, status.st_ino) for status in found}


def is_same(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Whether both name one file, through links too, or would once it is written."""
    try:
        return os.path.samefile(one, other)
    except OSError:  # One of them is not there yet.
        return os.path.realpath(one) == os.path.realpath(other)


def _check_name(path: pathlib.Path, what: str) -> None:
    if "\0" in str(path):
        raise ValueError(f"{path}: cannot be {what} (null character in its name)")


def _lock(file: io.FileIO, path: pathlib.Path) -> None:
    """Locks a regular file until it is closed; the end of the process does that too."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{path}: another process is writing to it; wait until that ends, or "
            "name another file"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        print(
            f"{path}: its file system has no locks ({error.strerror}); no other "
            "process may write to it",
            file=sys.stderr,
        )
