"""The values of tensors in files: read into buffers, compared, checked for NaN.

Functions take at most a few blocks of memory, whatever the size of a tensor. A file
that cannot be used raises a `CheckpointError` that names it.
"""

import math
from typing import Any

import numpy as np

from spec_jax.model import checkpoint_files as files


# A conversion or a comparison reads this much of a tensor at a time.
BLOCK_BYTES = 16 * 2**20
# The test for infinity and NaN reads this much at a time, to stay in a core's cache.
_TEST_BYTES = 2**18


def read_into(entry: files.Entry, out: np.ndarray, at: Any = ...) -> None:
    """Fills the contiguous `out` with a tensor's values, rounding to its dtype.

    Takes no memory, or one block where values are unpacked.

    Args:
      at: the index of the values; of rows, where they are unpacked.
    """
    try:
        raw = np.asarray(entry.mapped())[at]
    except (OSError, ValueError) as error:
        raise files.CheckpointError(
            f"{entry.path}: {entry.name} is not to be read ({error}); {files.AGAIN}"
        ) from None
    out = out.reshape((*raw.shape[:-1], *out.shape[-1:]))
    if entry.unpack is None:
        out[...] = raw
        return
    step = max(1, BLOCK_BYTES // (math.prod(out.shape[1:]) * entry.dtype.itemsize))
    for start in range(0, len(raw), step):
        out[start : start + step] = entry.unpack(raw[start : start + step])


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
    """Compares two tensors' values, whatever their dtypes; takes a block of memory.

    Float32 holds the values of all of them. Zeros of another sign differ, and so does
    NaN with other bits.
    """
    if left.shape != right.shape:
        return False
    # A block is of both.
    step = max(1, BLOCK_BYTES // (8 * math.prod(left.shape[1:])))
    for start in range(0, left.shape[0], step):
        count = min(step, left.shape[0] - start)
        read = np.empty((2, count, *left.shape[1:]), np.float32)
        for entry, out in zip((left, right), read, strict=True):
            read_into(entry, out, np.s_[start : start + count])
        if not np.array_equal(*read.view(np.uint32)):
            return False
    return True
