"""Reads whole files: regular ones, of a bounded size."""

import json
import pathlib
import stat
from typing import Any


MAX_BYTES = 2**28
"""256 MiB: more than a configuration, or a file of prompts, rows or traces, has."""


def read(path: pathlib.Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Reads a regular file whole.

    A device or a pipe is refused, since it may have no end.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a file that cannot be read, is not regular, or is too large.
      MemoryError: a file that does not fit into memory.
    """
    if "\0" in str(path):
        raise ValueError(f"{path}: cannot be read (null character in its name)")
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{path}: is a directory; name a file")
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(
                f"{path}: is a device or a pipe, which may have no end; name a "
                "regular file"
            )
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(*error.args) from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except MemoryError:
        raise MemoryError(
            f"{path}: no memory for its {status.st_size:,} bytes; make the file smaller"
        ) from None
    if len(data) > max_bytes:
        size = max(status.st_size, len(data))
        raise ValueError(
            f"{path}: has {size:,} bytes, and {max_bytes:,} are the most that are "
            "read; make the file smaller"
        )
    return data


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Reads a regular file that holds a JSON object.

    Raises:
      FileNotFoundError, ValueError, MemoryError: as `read`; ValueError also for a file
        that holds something else.
    """
    data = read(path)
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: not a JSON object")
    return raw
