"""Files that scripts read and write; errors of unusable files take one line."""

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from spec_jax import regular_files


read = regular_files.read


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path whose file replaces `path` at the end, so that it is never half."""
    part = path.with_name(f"part_{path.name}")
    yield part
    part.replace(path)


def sha256(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal; raises as `read`."""
    return hashlib.sha256(read(path)).hexdigest()


def read_rows(path: pathlib.Path, *, hint: str = "") -> list[dict[str, Any]]:
    """Reads JSON objects, one a line; blank lines are skipped.

    A file that ends in `.json` holds one object over many lines.

    Args:
      hint: ends the message of a file that cannot be used.

    Raises:
      ValueError: no readable file, or a line that is no JSON object, with its number.
    """
    try:
        text = read(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: cannot be read ({reason}){hint}") from None
    lines = [text] if path.suffix == ".json" else text.split("\n")
    return [row for _, row in rows_of_lines(path, lines, hint=hint)]


def rows_of_lines(
    path: pathlib.Path, lines: Iterable[str], *, hint: str = ""
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number of each line that is not blank, and its JSON object.

    Raises:
      ValueError: another line, when it is reached; see `read_rows`.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = f"no JSON ({error})"
            raise ValueError(f"{path}, line {number}: {why}{hint}") from None
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise ValueError(
                f"{path}, line {number}: not a JSON object but a {kind}{hint}"
            )
        yield number, row
