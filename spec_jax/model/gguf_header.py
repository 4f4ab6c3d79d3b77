"""Parses the header of a GGUF file: metadata, and where its tensors are.

Knows no models. Reads within bounds, so that a hostile file is refused. Every failure
is a `CheckpointError` that names the file.
"""

import dataclasses
import functools
import pathlib
import stat
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from spec_jax.model import checkpoint_files as files


MAX_HEADER_BYTES = 2**28
"""Most bytes of a header; one with a vocabulary of 151,936 tokens has 8 MB."""

# GGML's kinds of tensors by number: name, values of a block, bytes of a block.
_KINDS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of the file; `offset` is in bytes from the start of the file."""

    kind: str
    block: tuple[int, int]  # its values and its bytes
    shape: tuple[int, ...]
    offset: int


@dataclasses.dataclass(frozen=True, eq=False)
class Header:
    """The contents of a file without the values of its tensors."""

    path: pathlib.Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def read(path: pathlib.Path) -> Header:
    """Returns a file's header, parsed anew if the file's time or size has changed."""
    try:
        status = path.stat()
    except OSError as error:
        raise files.CheckpointError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise files.CheckpointError(f"{path}: is no regular file; name a GGUF file")
    return _parse(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=2)
def _parse(path: pathlib.Path, _: int, size: int) -> Header:
    """Reads the header of a file of `size` bytes."""
    try:
        with path.open("rb") as file:
            return _Reader(path, file, size).header()
    except OSError as error:
        raise files.CheckpointError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, struct.error, MemoryError) as error:
        raise files.CheckpointError(
            f"{path}: malformed header ({error}); {files.AGAIN}"
        ) from None


_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Reader:
    """Reads the header of an open file, up to its end or to `MAX_HEADER_BYTES`."""

    def __init__(self, path: pathlib.Path, file: BinaryIO, size: int):
        self.path, self.file, self.size, self.at = path, file, size, 0

    def error(self, what: str) -> files.CheckpointError:
        return files.CheckpointError(f"{self.path}: {what}; {files.AGAIN}")

    def take(self, count: int) -> bytes:
        if count > min(self.size, MAX_HEADER_BYTES) - self.at:
            raise self.error(
                f"truncated or malformed: the header asks for {count:,} bytes at "
                f"{self.at:,} of {self.size:,}"
            )
        self.at += count
        return self.file.read(count)

    def scalar(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode()

    def value(self, kind: int) -> Any:
        """Returns a value of metadata of a GGUF type; arrays as lists."""
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.error(f"metadata of the unknown type {kind}")
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise self.error(f"arrays of the type {kind} are not read")
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def header(self) -> Header:
        """Returns the whole header."""
        if self.size < 24 or self.take(4) != b"GGUF":
            raise self.error("is no GGUF file")
        if (version := self.scalar("I")) not in (2, 3):
            raise self.error(f"GGUF of version {version}, and 2 and 3 are read")
        num_tensors, num_fields = self.scalar("Q"), self.scalar("Q")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self.string()
            if name in fields:
                raise self.error(f"states {name} twice")
            fields[name] = self.value(self.scalar("I"))
        found = {}
        for _ in range(num_tensors):
            name = self.string()
            if name in found:
                raise self.error(f"holds {name} twice")
            found[name] = self.tensor_info(name)
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise self.error(f"general.alignment={alignment!r} is no number of bytes")
        start = -(-self.at // alignment) * alignment
        tensors = {name: self.tensor(name, start, info) for name, info in found.items()}
        return Header(self.path, fields, tensors)

    def tensor_info(self, name: str) -> tuple[tuple[int, ...], int, int]:
        """Returns the stated shape, kind and offset of a tensor."""
        num_dims = self.scalar("I")
        if not 1 <= num_dims <= 4:
            raise self.error(f"{name} has {num_dims} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(num_dims))[::-1]
        return shape, self.scalar("I"), self.scalar("Q")

    def tensor(self, name: str, start: int, info: tuple) -> Tensor:
        """Returns a tensor; raises `CheckpointError` if the file ends before it."""
        shape, kind, offset = info
        if kind not in _KINDS:
            known = ", ".join(name for name, *_ in _KINDS.values())
            raise files.CheckpointError(
                f"{self.path}: {name} is of GGML's type {kind}, and {known} are read; "
                "take a file of another quantisation"
            )
        kind_name, values, size = _KINDS[kind]
        if shape[-1] % values:
            raise self.error(f"{name} has rows of {shape[-1]}, no blocks of {values}")
        num_bytes = size
        for count in (*shape[:-1], shape[-1] // values):
            num_bytes *= count
        if start + offset + num_bytes > self.size:
            raise self.error(
                f"truncated: {name} ends at byte {start + offset + num_bytes:,} of "
                f"{self.size:,}"
            )
        return Tensor(kind_name, (values, size), shape, start + offset)
