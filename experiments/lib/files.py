"""Files that scripts read and write; what cannot be used is refused in one line."""

import hashlib
import io
import json
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from spec_jax import regular_files


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


def open_output(path: pathlib.Path) -> io.FileIO:
    """Opens a file for appending, without a buffer."""
    if path.is_dir():
        raise ValueError(
            f"{path}: is a directory; name a file, such as {path / 'results.jsonl'}"
        )
    if not path.parent.is_dir():
        raise ValueError(
            f"{path}: the directory {path.parent} does not exist; make it first"
        )
    try:
        return path.open("ab", buffering=0)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written ({error.strerror}); name another file"
        ) from None


def check_output(path: pathlib.Path) -> None:
    """Raises `ValueError` unless the file can be written; leaves it as it is."""
    is_new = not os.path.lexists(path)
    if not is_new and not path.is_dir() and not path.is_file():
        return  # A pipe or a device.
    open_output(path).close()
    if is_new:
        path.unlink()


def check_folder(path: pathlib.Path) -> None:
    """Makes the folder if it is missing; raises `ValueError` if it is not writable."""
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
        if other is not None and folder.resolve() == other.resolve():
            raise ValueError(
                f"{flag} {folder} would replace what {reader} reads: name another "
                "folder"
            )
