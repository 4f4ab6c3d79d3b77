"""Reads, rounds and writes matrices of eight or four bits, as files hold them.

In a GGUF file and in a folder that `save.save` writes, a row is a sequence of blocks,
each of a dtype of `checkpoint_files.STORED`.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from spec_jax.model import (
    checkpoint_files as files,
    params as params_lib,
    tensor_values,
)
from spec_jax.native import blocks
from spec_jax.ops import weights


_TAKEN = {"q8_0": ("Q8_0",), "q4_1": ("Q4_1", "Q4_0")}  # GGUF's kinds, taken exactly
_PARTS = ("values", "scale", "minimum")


def stored_shape(K: int, form: str) -> tuple[int, int]:
    """Returns the shape of a row of `K` values in a file: blocks, bytes of a block."""
    return blocks.num_blocks(K), files.STORED[form].itemsize


def num_bytes(leaf: jax.ShapeDtypeStruct, form: str) -> int:
    """Returns the bytes of a weight of `leaf`'s shape, in blocks unless it is dense."""
    if form == "dense":
        return params_lib.num_bytes(leaf)
    N, K = leaf.shape
    return N * math.prod(stored_shape(K, form))


def of_folder(
    entries: Mapping[str, files.Entry], known: Mapping[str, tuple[int, ...]]
) -> dict[str, files.Entry]:
    """Returns a folder's tensors; those of blocks get the shapes of their matrices.

    Args:
      known: shapes of all tensors; a tensor of bytes that fits none stays as it is.
    """

    def one(name: str, entry: files.Entry) -> files.Entry:
        if entry.dtype != np.uint8 or len(known.get(name, ())) != 2:
            return entry
        N, K = known[name]
        forms = [x for x in files.STORED if entry.shape == (N, *stored_shape(K, x))]
        if not forms:
            return entry
        dtype = files.STORED[forms[0]]
        stored = dataclasses.replace(
            entry,
            dtype=dtype,
            shape=entry.shape[:2],
            mapped=lambda: entry.mapped().view(dtype)[..., 0],
        )
        return dataclasses.replace(entry, shape=(N, K), stored=stored)

    return {name: one(name, entry) for name, entry in entries.items()}


def assemble(
    leaf: jax.ShapeDtypeStruct,
    sources: params_lib.Parts,
    entries: Mapping[str, files.Entry],
    form: str,
) -> weights.Blocks:
    """Reads one matrix of the shape of `leaf`, with its values checked.

    Blocks of the form are taken unchanged; other tensors are rounded as they are read,
    from the values of their file.

    Raises:
      CheckpointError: as `load_shards.read_rows`; a value beyond the largest scale.
    """
    N, K = leaf.shape
    read = np.empty((N, blocks.num_blocks(K)), files.STORED[form])
    start = 0
    for name, shape in sources.parts:
        entry, part = entries[name], read[start : start + shape[0]]
        if entry.stored is not None and entry.stored.dtype == read.dtype:
            tensor_values.read_into(entry.stored, part)
        else:
            _round(entry, form, part)
        for number in _PARTS[1 : len(read.dtype)]:
            tensor_values.check_finite(entry, np.ascontiguousarray(part[number]))
        start += shape[0]
    if sources.order is not None:
        read = read[sources.order.reshape(-1)]
    parts = [jax.numpy.array(read[x], copy=True) for x in _PARTS[: len(read.dtype)]]
    return blocks.of_parts(parts, (N, K), np.dtype(leaf.dtype).name)


def _round(entry: files.Entry, form: str, out: np.ndarray) -> None:
    """Fills blocks with the rounded values of a tensor."""
    source = entry
    make: Callable[[np.ndarray], Sequence[np.ndarray]]
    make = lambda some: blocks.QUANTISE[form](some.astype(np.float32))
    if form == "q8_0" and entry.stored and entry.stored.dtype == files.STORED["q4_1"]:
        source = entry.stored
        make = lambda some: blocks.widen(*(some[name] for name in _PARTS))
    values = np.empty((len(out), *source.shape[1:]), source.dtype)
    tensor_values.read_into(source, values)
    if source is entry:  # `assemble` checks the scales of blocks.
        tensor_values.check_finite(entry, values)
    rows = max(1, tensor_values.BLOCK_BYTES // (4 * blocks.BLOCK * out.shape[1]))
    for first in range(0, len(values), rows):
        some = slice(first, first + rows)
        for name, part in zip(_PARTS, make(values[some]), strict=False):
            out[name][some] = part


def to_store(w: weights.Weight, rows: slice | np.ndarray) -> np.ndarray:
    """Returns rows of a matrix as files hold them, uint8 `[rows, blocks, bytes]`."""
    dtype, w = files.STORED[weights.form(w)], weights.unpacked(w)
    parts = [np.asarray(part[rows]) for part in jax.tree.leaves(w)]
    stored = np.empty(parts[1].shape, dtype)
    for name, part in zip(_PARTS, parts, strict=False):
        stored[name] = part
    return stored.view(np.uint8).reshape(*stored.shape, dtype.itemsize)


def say_converted(path: object, kinds: Mapping[str, set[str]]) -> None:
    """Warns of quantised weights of a file that were converted to another form.

    Args:
      kinds: for each form, the kinds of the tensors that it was made of.
    """
    own = {*files.DTYPES, *files.WHOLE_DTYPES}
    for form, held in kinds.items():
        if others := sorted(held - own.union(_TAKEN[form])):
            logging.getLogger(__name__).warning(
                "%s: weights of %s are converted to %s",
                *(path, ", ".join(others), form.upper()),
            )
