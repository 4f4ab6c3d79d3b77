"""Finds the tensors that a folder holds in safetensors files, and writes such files.

Knows headers and shards, not models. The `safetensors` package checks that a file is
whole; `tensor_values` reads the values, so that each tensor goes straight into a slice
of the caller's buffer. Tensors are written one by one.

Every failure is a `CheckpointError` that names the file.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from spec_jax import regular_files


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
WHOLE_DTYPES = {
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""Dtypes of tables of numbers; U8 is also that of blocks of weights."""
STORED = {
    "q8_0": np.dtype([("scale", "<f2"), ("values", "i1", (32,))]),
    "q4_1": np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("values", "u1", (16,))]),
}
"""The dtype of a block of weights of eight or four bits, as a file holds it."""
_DTYPE_NAMES = {dtype: name for name, dtype in (DTYPES | WHOLE_DTYPES).items()}
AGAIN = "download it again"


class CheckpointError(ValueError):
    """A model folder cannot be read or written; the message is one line."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """A tensor of a file. Its values have not been read.

    `mapped` maps it into memory: what is used of it is read. With `unpack`, its last
    axis is the bytes of a row, and `unpack` makes values of `dtype` of some rows.
    """

    name: str
    path: pathlib.Path
    kind: str  # the file's name of the dtype
    shape: tuple[int, ...]
    dtype: np.dtype
    mapped: Callable[[], np.ndarray]  # its first axes may be rows in another order
    unpack: Callable[[np.ndarray], np.ndarray] | None = None
    stored: "Entry | None" = None  # the same as blocks of `STORED`, if it has them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pending:
    """A tensor to be written; `fetch` is called once, when its turn comes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's values."""
        return math.prod(self.shape) * self.dtype.itemsize


def find(
    folder: pathlib.Path, *, dtypes: Mapping[str, np.dtype] = DTYPES
) -> dict[str, Entry]:
    """Finds a folder's tensors by name, in one file or in an index's shards.

    Reads every header and no tensor.

    Args:
      dtypes: the dtypes that tensors may have, by the format's names.

    Raises:
      CheckpointError: neither the file nor an index, or both; a missing shard, a
        malformed or truncated file, an index that disagrees with its shards.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    has_single, has_index = os.path.exists(single), os.path.exists(index)
    if has_single and has_index:
        raise CheckpointError(
            f"{folder}: holds both {SINGLE_FILE} and {INDEX_FILE}; remove one of them"
        )
    if has_single:
        return read_header(single, dtypes=dtypes)
    if not has_index:
        raise CheckpointError(
            f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; {AGAIN}"
        )
    weight_map = _read_weight_map(index)
    entries: dict[str, Entry] = {}
    for file_name in sorted(set(weight_map.values())):
        held = read_header(folder / file_name, dtypes=dtypes)
        told = {name for name, file in weight_map.items() if file == file_name}
        if other := told ^ held.keys():
            raise CheckpointError(
                f"{folder / file_name}: holds other tensors than {INDEX_FILE} says: "
                f"{some(sorted(other))}; {AGAIN}"
            )
        entries |= held
    return entries


def _read_weight_map(index: pathlib.Path) -> dict[str, str]:
    """Reads an index's `weight_map`: the file beside it that holds each tensor."""
    try:
        weight_map = regular_files.read_object(index).get("weight_map")
    except OSError as error:
        raise CheckpointError(f"{index}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{error}; {AGAIN}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map; {AGAIN}")
    for name, file_name in weight_map.items():
        # A shard lies beside its index: a path that leads elsewhere is not followed.
        plain = isinstance(file_name, str) and pathlib.PurePath(file_name).name
        if not plain or plain != file_name:
            raise CheckpointError(
                f"{index}: {name} is placed in {file_name!r}, which is no file name; "
                f"{AGAIN}"
            )
    return weight_map


def read_header(
    path: pathlib.Path, *, dtypes: Mapping[str, np.dtype] = DTYPES
) -> dict[str, Entry]:
    """Reads the tensors of one file by name; refuses a file that is not whole."""
    try:
        with path.open("rb") as file, safetensors.safe_open(path, "numpy") as opened:
            position = 8 + int.from_bytes(file.read(8), "little")
            # In the order of their offsets; the package refuses gaps between them.
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror or error}; make it readable, or {AGAIN}"
        ) from None
    except safetensors.SafetensorError as error:
        reason = " ".join(str(error).split())  # It may hold the name of a tensor.
        raise CheckpointError(
            f"{path}: not a whole safetensors file ({reason}); {AGAIN}"
        ) from None
    entries = {}
    for name, tensor in slices.items():
        dtype = tensor.get_dtype()
        if dtype not in dtypes:
            raise CheckpointError(
                f"{path}: {name} is {dtype}, not one of {', '.join(dtypes)} "
                "(quantised checkpoints are not supported)"
            )
        shape = tuple(tensor.get_shape())
        entries[name] = Entry(
            name=name,
            path=path,
            kind=dtype,
            shape=shape,
            dtype=dtypes[dtype],
            mapped=functools.partial(
                np.memmap, path, dtypes[dtype], "r", position, shape
            ),
        )
        position += math.prod(shape) * dtypes[dtype].itemsize
    return entries


def write(
    path: pathlib.Path,
    tensors: Sequence[Pending],
    *,
    metadata: Mapping[str, str],
) -> None:
    """Writes one file and fetches one tensor at a time."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for tensor in tensors:
        end = position + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Padded, so that the tensors start at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            array = np.asarray(tensor.fetch(), order="C")
            if (array.dtype, array.shape) != (tensor.dtype, tensor.shape):
                raise ValueError(
                    f"{tensor.name} is {array.dtype} {array.shape}, "
                    f"not {tensor.dtype} {tensor.shape}"
                )
            file.write(array.reshape(-1).view(np.uint8).data)


def check_names(
    folder: pathlib.Path,
    entries: Mapping[str, Entry],
    *,
    required: Iterable[str],
    known: Mapping[str, tuple[int, ...]],
    source: str = "config.json",
) -> None:
    """Raises `CheckpointError` unless tensors are complete, known and of known shapes.

    Args:
      known: shapes of all tensors that may be there.
      source: where these shapes come from, for the message.
    """
    missing = [name for name in required if name not in entries]
    if missing:
        raise CheckpointError(
            f"{folder}: missing tensors: {some(missing)}; {AGAIN}, or correct "
            "config.json"
        )
    unexpected = sorted(set(entries) - set(known))
    if unexpected:
        raise CheckpointError(f"{folder}: unexpected tensors: {some(unexpected)}")
    for name, entry in entries.items():
        if entry.shape != known[name]:
            raise CheckpointError(
                f"{entry.path}: {name} has shape {list(entry.shape)}, {source} asks "
                f"for {list(known[name])}"
            )


def some(names: Iterable[str]) -> str:
    """Lists the first few of many names, and how many there are."""
    names = list(names)
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
