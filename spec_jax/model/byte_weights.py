"""Matrices of eight bits in files: read as they are, made of others, written.

In a GGUF file and in a folder that `load.save` writes, a row's blocks stand one after
the other, each a float16 scale and 32 integers.
"""

import dataclasses
import logging
import math
from collections.abc import Mapping

import jax
import numpy as np

from spec_jax.model import (
    checkpoint_files as files,
    params as params_lib,
    tensor_values,
)
from spec_jax.native import blocks
from spec_jax.ops import weights


def stored_shape(K: int) -> tuple[int, int]:
    """Returns the shape of a row of `K` values in a file, of bytes."""
    return blocks.num_blocks(K), files.STORED.itemsize


def num_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of a matrix of `leaf`'s shape in blocks."""
    N, K = leaf.shape
    return N * math.prod(stored_shape(K))


def of_folder(
    entries: Mapping[str, files.Entry], known: Mapping[str, tuple[int, ...]]
) -> dict[str, files.Entry]:
    """Returns a folder's tensors, those of blocks with the shapes of their matrices.

    Args:
      known: shapes of all tensors; one that is of another is left as it is.
    """

    def one(name: str, entry: files.Entry) -> files.Entry:
        if entry.dtype != np.uint8 or len(known.get(name, ())) != 2:
            return entry
        N, K = known[name]
        if entry.shape != (N, *stored_shape(K)):
            return entry
        stored = dataclasses.replace(entry, dtype=files.STORED, shape=entry.shape[:2])
        return dataclasses.replace(entry, shape=(N, K), stored=stored)

    return {name: one(name, entry) for name, entry in entries.items()}


def assemble(
    leaf: jax.ShapeDtypeStruct,
    sources: params_lib.Parts,
    entries: Mapping[str, files.Entry],
) -> weights.Blocks:
    """Reads one matrix of the shape of `leaf`, with its values checked.

    Blocks are taken as they are; other tensors are rounded as they are read, from the
    values that their file has.

    Raises:
      CheckpointError: as `load.assemble`; a value beyond the largest scale.
    """
    N, K = leaf.shape
    read = np.empty((N, blocks.num_blocks(K)), files.STORED)
    start = 0
    for name, shape in sources.parts:
        entry, part = entries[name], read[start : start + shape[0]]
        if entry.stored is not None:
            # The first rows, if the vocabulary is cut.
            stored = dataclasses.replace(entry.stored, shape=part.shape)
            tensor_values.read_into(stored, part)
        else:
            _round(dataclasses.replace(entry, shape=shape), part)
        tensor_values.check_finite(entry, np.ascontiguousarray(part["scale"]))
        start += shape[0]
    if sources.order is not None:
        read = read[sources.order.reshape(-1)]
    return weights.Blocks(
        values=jax.numpy.array(read["values"], copy=True),
        scales=jax.numpy.array(read["scale"], copy=True),
        shape=(N, K),
        of=np.dtype(leaf.dtype).name,
    )


def _round(entry: files.Entry, out: np.ndarray) -> None:
    """Fills blocks with the rounded values of a tensor."""
    values = np.empty(entry.shape, entry.dtype)
    tensor_values.read_into(entry, values)
    tensor_values.check_finite(entry, values)
    rows = max(1, tensor_values.BLOCK_BYTES // (4 * max(1, entry.shape[1])))
    for first in range(0, len(values), rows):
        some = slice(first, first + rows)
        out["values"][some], out["scale"][some] = blocks.quantise(
            values[some].astype(np.float32)
        )


def to_store(w: weights.Weight, rows: slice | np.ndarray) -> np.ndarray:
    """Returns rows of a matrix as they are written, uint8 `[rows, B, 34]`."""
    w = weights.unpacked(w)
    if not isinstance(w, weights.Blocks):
        raise ValueError(f"a weight of {w.dtype} is not one of eight bits")
    values, scales = np.asarray(w.values[rows]), np.asarray(w.scales[rows])
    stored = np.empty(scales.shape, files.STORED)
    stored["values"], stored["scale"] = values, scales
    return stored.view(np.uint8).reshape(*scales.shape, files.STORED.itemsize)


def say_rounded(path: object, kinds: set[str]) -> None:
    """Warns that a file's weights of fewer bits, or more, are rounded once more."""
    others = sorted(kinds - {"Q8_0", *files.DTYPES})
    if others:
        logging.getLogger(__name__).warning(
            "%s: weights of %s are rounded to Q8_0", path, ", ".join(others)
        )
