"""Rows of a target's outputs by text, in a file that grows: what a cache is made of."""

import hashlib
import json
import pathlib
from typing import Any

import numpy as np


_ABOUT, _INDEX, _ROWS = "cache.json", "index.jsonl", "rows.bin"


class Store:
    """Texts and their rows, which are read by memory map.

    A text is added whole or not at all, whenever the process is killed. One process at
    a time writes.

    Attributes:
      folder: created if it does not exist.

    Raises:
      ValueError: `folder` holds rows that are described otherwise.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        described: dict[str, Any],
        width: int,
        dtype: np.dtype,
    ) -> None:
        self.folder, self._width, self._dtype = folder, width, np.dtype(dtype)
        folder.mkdir(parents=True, exist_ok=True)
        about = folder / _ABOUT
        if about.exists():
            _check(about, described)
        else:
            whole = about.with_name(f"{_ABOUT}.partial")
            whole.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
            whole.replace(about)  # Which is never half a file.
        (folder / _ROWS).touch()
        self._spans: dict[str, tuple[int, int]] = {}
        self._end = 0
        for line in _whole_lines(folder / _INDEX):
            key, first, count = json.loads(line)
            self._spans[key] = first, count
            self._end = first + count

    @staticmethod
    def _key(text: np.ndarray) -> str:
        return hashlib.sha256(np.asarray(text, "<i4").tobytes()).hexdigest()[:24]

    def __contains__(self, text: np.ndarray) -> bool:
        return self._key(text) in self._spans

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, text: np.ndarray) -> np.ndarray:
        """Returns the rows `[T, width]` of a text `[T]`."""
        first, count = self._spans[self._key(text)]
        if not count:
            return np.zeros((0, self._width), self._dtype)
        return np.memmap(
            self.folder / _ROWS,
            dtype=self._dtype,
            mode="r",
            offset=first * self._row_bytes,
            shape=(count, self._width),
        )

    def add(self, text: np.ndarray, rows: np.ndarray) -> None:
        """Keeps the rows `[T, width]` of a text `[T]`.

        Raises:
          ValueError: rows of another shape or dtype.
        """
        if rows.shape != (len(text), self._width) or rows.dtype != self._dtype:
            raise ValueError(
                f"{self.folder}: rows {rows.dtype}{list(rows.shape)} of a text of "
                f"{len(text)} tokens must be {self._dtype}[{len(text)}, {self._width}]"
            )
        with (self.folder / _ROWS).open("r+b") as file:
            file.seek(self._end * self._row_bytes)  # Over what a kill left behind.
            file.write(rows.tobytes())
        span = self._end, len(text)
        with (self.folder / _INDEX).open("a", encoding="utf-8") as file:
            file.write(json.dumps([self._key(text), *span]) + "\n")
        self._spans[self._key(text)] = span
        self._end += len(text)

    @property
    def _row_bytes(self) -> int:
        return self._width * self._dtype.itemsize


def _whole_lines(path: pathlib.Path) -> list[str]:
    """Returns the lines of a file, and cuts off half a last one."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return whole.splitlines()


def _check(about: pathlib.Path, described: dict[str, Any]) -> None:
    held = json.loads(about.read_text(encoding="utf-8"))
    differing = [key for key, value in described.items() if held.get(key) != value]
    if differing:
        raise ValueError(
            f"{about}: of another {', '.join(differing)}; delete the folder, or name "
            "another"
        )
