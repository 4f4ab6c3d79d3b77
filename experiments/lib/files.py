"""Files that scripts read and write; what cannot be used is refused in one line."""

import hashlib
import json
import pathlib
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
