"""Rows of the exactness suite in a file: written as they come, taken up again.

The first row says what was run, with what, and where; rows of something else are not
taken for rows of this.
"""

import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any


def sha256_of(value: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def header_row(header: Mapping[str, Any]) -> dict[str, Any]:
    """The first row of a file."""
    return {"kind": "header", **header}


def read(
    path: pathlib.Path | None, header: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], int]:
    """Rows of prompts and windows of an earlier run of the same, in order.

    Half a line at the end, of a machine that stopped while it was written, is none.

    Returns:
      The rows, and how many bytes they and the header have: the beginning of the
      file. Summaries behind them are to be written anew.

    Raises:
      ValueError: a file of something else, or of a run with another header; one line
        says what differs.
    """
    if path is None or not path.is_file() or not path.stat().st_size:
        return [], 0
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) > 1 and not lines[-1].endswith(b"\n"):
        lines.pop()
    first, *rows = _parse(path, lines)
    if first.get("kind") != "header":
        raise ValueError(
            f"{path}: holds something else than rows of this script; name another file"
        )
    changes = _changes(first, header)
    if changes:
        raise ValueError(
            f"{path}: holds rows of another run ({'; '.join(changes)}); name another "
            "file, or remove this one"
        )
    is_kept = [row.get("kind") in ("prompt", "mismatch") for row in rows]
    count = [*is_kept, False].index(False)
    return rows[:count], sum(map(len, lines[: 1 + count]))


def _parse(path: pathlib.Path, lines: Sequence[bytes]) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: no JSON ({error}); mend the line or remove it"
            ) from None
        if not isinstance(row, dict):
            raise ValueError(
                f"{path}, line {number}: a JSON {type(row).__name__}, not a row; name "
                "another file"
            )
        rows.append(row)
    return rows


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs, by name; values where they are short."""
    found = []
    for name, value in new.items():
        was = old.get(name)
        if was == value:
            continue
        if isinstance(was, Mapping) and isinstance(value, Mapping):
            found += [f"{name}.{change}" for change in _changes(was, value)]
        else:
            texts = [json.dumps(part) for part in (was, value)]
            short = all(len(text) < 70 for text in texts)
            found.append(f"{name} {texts[0]}, now {texts[1]}" if short else name)
    return found
