"""The values of tensors in files: read into buffers, compared, checked for NaN.

Functions take at most a few blocks of memory, whatever the size of a tensor. A file
that cannot be used raises a `CheckpointError` that names it.
"""

import contextlib
import io
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from spec_jax.model import checkpoint_files as files


# A conversion or a comparison reads this much of a tensor at a time.
BLOCK_BYTES = 16 * 2**20
# The test for infinity and NaN reads this much at a time, to stay in a core's cache.
_TEST_BYTES = 2**18


def read_into(entry: files.Entry, out: np.ndarray, *, first: int = 0) -> None:
    """Fills the contiguous `out` with a tensor's values, rounding to its dtype.

    Takes no memory where the dtypes agree, and one block where they do not.

    Args:
      first: how many values come before; of units that are unpacked, none.
    """
    flat = out.reshape(-1)
    with _opened(entry) as file:
        file.seek(first * entry.dtype.itemsize, os.SEEK_CUR)
        if entry.dtype == out.dtype and entry.unpack is None:
            _read_exactly(file, entry, flat)
            return
        length = max(1, BLOCK_BYTES // entry.dtype.itemsize)
        for start, block in _blocks(file, entry, flat.size, length):
            flat[start : start + block.size] = block


def read_columns(entry: files.Entry, out: np.ndarray, *, first: int) -> None:
    """Fills `out [rows, width]` with the columns from `first` on, as `read_into`.

    Reads these columns and no others.
    """
    row = np.empty(out.shape[1:], entry.dtype)
    with _opened(entry, buffering=0) as file:
        for number in range(len(out)):
            at = number * entry.shape[1] + first
            file.seek(entry.offset + at * entry.dtype.itemsize)
            _read_exactly(file, entry, row)
            out[number] = row


def check_finite(entry: files.Entry, values: np.ndarray) -> None:
    """Refuses weights with an infinity or NaN, which may make every result NaN.

    Takes less than a block, whatever the size of the contiguous array.
    """
    # Both have all bits of the exponent set. In integers, because NumPy has no fast
    # test for bfloat16.
    bits = values.reshape(-1).view(f"u{values.dtype.itemsize}")
    exponent = np.array(np.inf, values.dtype).view(bits.dtype)
    length = max(1, min(_TEST_BYTES, BLOCK_BYTES) // values.dtype.itemsize)
    scratch = np.empty(min(length, bits.size), bits.dtype)
    for start in range(0, bits.size, length):
        block = bits[start : start + length]
        found = np.bitwise_and(block, exponent, out=scratch[: block.size])
        if found.max() == exponent:
            at = np.unravel_index(start + int(found.argmax()), values.shape)
            raise files.CheckpointError(
                f"{entry.path}: {entry.name}{[*map(int, at)]} is {values[at]} in "
                f"{values.dtype}: a model with such weights has no results; use "
                "another checkpoint, or download it again"
            )


def same_values(left: files.Entry, right: files.Entry) -> bool:
    """Compares two tensors' values, whatever their dtypes; takes two blocks of memory.

    Float32 holds the values of all of them. Zeros of another sign differ, and so does
    NaN with other bits.
    """
    if left.shape != right.shape:
        return False
    # A block and its float32 copy, on either side.
    size, length = math.prod(left.shape), max(1, BLOCK_BYTES // 8)
    with _opened(left) as left_file, _opened(right) as right_file:
        pairs = zip(
            _blocks(left_file, left, size, length),
            _blocks(right_file, right, size, length),
            strict=True,
        )
        bits = lambda block: block.astype(np.float32, copy=False).view(np.uint32)
        return all(np.array_equal(bits(a), bits(b)) for (_, a), (_, b) in pairs)


@contextlib.contextmanager
def _opened(entry: files.Entry, *, buffering: int = -1) -> Iterator[Any]:
    """Opens a file at a tensor's first byte; says in one line what cannot be read."""
    try:
        with entry.path.open("rb", buffering=buffering) as file:
            file.seek(entry.offset)
            yield file
    except OSError as error:
        raise files.CheckpointError(f"{entry.path}: {error.strerror}") from None


def _blocks(
    file: io.BufferedReader, entry: files.Entry, num_values: int, values_per_block: int
) -> Iterable[tuple[int, np.ndarray]]:
    """Yields parts of a flat tensor, in order, and their starts; reuses one buffer."""
    unit = entry.unit_values
    unit_bytes = entry.unit_bytes or entry.dtype.itemsize
    num_units = -(-num_values // unit)
    step = max(1, values_per_block // unit)
    buffer = np.empty(min(step, num_units) * unit_bytes, np.uint8)
    for start in range(0, num_units, step):
        raw = buffer[: (num_units - start) * unit_bytes]
        _read_exactly(file, entry, raw)
        values = raw.view(entry.dtype) if entry.unpack is None else entry.unpack(raw)
        # The last unit may hold more than is wanted.
        yield start * unit, values[: num_values - start * unit]


def _read_exactly(
    file: io.BufferedReader | io.FileIO, entry: files.Entry, flat: np.ndarray
) -> None:
    """Fills `flat`, whose bytes are as those of the file."""
    # As bytes, because the buffer protocol does not know bfloat16.
    raw = flat.view(np.uint8).data
    while raw:
        count = file.readinto(raw)
        if not count:
            raise files.CheckpointError(
                f"{entry.path}: ends inside {entry.name}; {files.AGAIN}"
            )
        raw = raw[count:]
