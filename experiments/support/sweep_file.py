"""A file of finished cells that a later run goes on with. Knows JSON and files.

The first line says under which settings all others were measured. Each further line
is a cell, written whole: what an interrupted run leaves behind is finished cells and,
where the machine itself stopped, half a line, which the next run drops.
"""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from experiments.lib import files, records


HEADER = "sweep_settings"
"""`kind` of the first line."""

Row = dict[str, Any]


class SweepFile:
    """The rows of a sweep, on disk and in memory.

    Attributes:
      rows: the cells, in the order of the file, the header apart.
    """

    def __init__(self, path: pathlib.Path, settings: Mapping[str, Any]):
        """Opens and locks the file, or begins a new one.

        Raises:
          ValueError: a path that cannot be used, a file that another process writes
            to or that no sweep has written, or one of other settings; it is left as
            it is.
        """
        self._path = path
        wanted = {"kind": HEADER, **records.to_json(settings, "settings")}
        # Locked before it is read: what is there now is all there is.
        self._file = files.open_output(path)
        try:
            lines, whole = _whole_lines(path)
            self.rows = _rows(path, lines, wanted)
            # Half a line, of a machine that stopped while it was written.
            self._file.truncate(whole)
            if not lines:
                self._append(wanted)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "SweepFile":
        return self

    def __exit__(self, *exc_info) -> None:
        self._file.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a finished cell; it is with the operating system on return.

        Raises:
          ValueError: a value that JSON lacks, or a file that takes no more.
        """
        row = records.to_json(row, "row")
        self._append(row)
        self.rows.append(row)

    def _append(self, row: Row) -> None:
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        end = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            self._file.truncate(end)
            raise ValueError(
                f"{self._path}: cannot be written ({error.strerror}); the cells before "
                "this one are kept"
            ) from None
        except BaseException:  # An interrupt too: half a line is worse than none.
            self._file.truncate(end)
            raise


def _whole_lines(path: pathlib.Path) -> tuple[list[bytes], int]:
    """The lines that were finished, and their bytes together."""
    data = files.read(path)
    *lines, half = data.split(b"\n")
    start = json.dumps({"kind": HEADER})[:-1].encode()
    if not lines and half[: len(start)] != start[: len(half)]:
        raise ValueError(
            f"{path}: not of a sweep; name a file that a sweep has written, or a new "
            "one"
        )
    return lines, len(data) - len(half)


def _rows(path: pathlib.Path, lines: list[bytes], wanted: Row) -> list[Row]:
    """The cells of the file, whose first line must be `wanted`."""
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: no JSON ({error}); only the last line may be "
                "broken: mend the file, or name another one"
            ) from None
        if not isinstance(row, dict) or (number == 1 and row.get("kind") != HEADER):
            raise ValueError(
                f"{path}, line {number}: not of a sweep; name a file that a sweep has "
                "written, or a new one"
            )
        rows.append(row)
    if rows:
        _check_settings(path, rows[0], wanted)
    return rows[1:]


def _check_settings(path: pathlib.Path, found: Row, wanted: Row) -> None:
    """Raises where the file was measured under other settings."""
    names = dict.fromkeys((*wanted, *found))
    other = [name for name in names if found.get(name) != wanted.get(name)]
    if other:
        differences = "; ".join(
            f"{name} is {found.get(name)!r} there and {wanted.get(name)!r} here"
            for name in other
        )
        raise ValueError(
            f"{path}: holds cells of other settings, beside which new ones would mean "
            f"nothing: {differences}. Give the same settings, or another file"
        )
