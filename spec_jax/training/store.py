"""Rows of a target's outputs by text, a file each: what a cache is made of."""

import hashlib
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np


class Store:
    """Texts and their rows, which are read by memory map.

    A text is added whole or not at all, whenever the process is killed.

    Attributes:
      folder: created if it does not exist.
      described: what the rows are of, in JSON's types.

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
        self.folder, self.described = folder, described
        self._width, self._dtype = width, np.dtype(dtype)
        folder.mkdir(parents=True, exist_ok=True)
        about = folder / "cache.json"
        if not about.exists():
            text = json.dumps(described, indent=2) + "\n"
            _write_whole(about, text.encode())
        held = json.loads(about.read_text(encoding="utf-8"))
        differing = [key for key, value in described.items() if held.get(key) != value]
        if differing:
            raise ValueError(
                f"{about}: of another {', '.join(differing)}; delete the folder, or "
                "name another"
            )

    def _path(self, text: np.ndarray) -> pathlib.Path:
        digest = hashlib.sha256(np.asarray(text, "<i4").tobytes()).hexdigest()
        return self.folder / f"{digest[:24]}.rows"

    def __contains__(self, text: np.ndarray) -> bool:
        return self._path(text).exists()

    def __getitem__(self, text: np.ndarray) -> np.ndarray:
        """Returns the rows `[T, width]` of a text `[T]`."""
        shape = len(text), self._width
        if not len(text):
            return np.zeros(shape, self._dtype)
        return np.memmap(self._path(text), dtype=self._dtype, mode="r", shape=shape)

    def add(self, text: np.ndarray, rows: np.ndarray) -> None:
        """Keeps the rows `[T, width]` of a text `[T]`."""
        _write_whole(self._path(text), rows.tobytes())


def _write_whole(path: pathlib.Path, data: bytes) -> None:
    """Writes a file, which is never half a file, beside others that write the same."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(data)
    partial.replace(path)


def kept(store: Store | None, text: np.ndarray, make: Callable[[], np.ndarray]) -> Any:
    """Returns the rows of a text, which are made where the store lacks them, and kept.

    Args:
      store: None: they are made.
    """
    if store is None:
        return make()
    if text not in store:
        store.add(text, make())
    return store[text]
