"""Safetensors files: which tensors a folder holds, and writing them.

Knows headers and shards, not models; `tensor_values` reads the values. The format is an
8-byte little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`
and the tensors, back to back. It is read here, and not by the `safetensors` package, so
that a tensor goes straight into a slice of the caller's buffer.

Every failure is a `CheckpointError` that names the file.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from spec_jax import regular_files


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Longest accepted header, as in the reference implementation of the format.
MAX_HEADER_BYTES = 100_000_000

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
"""Dtypes of tables of numbers, which are not weights."""
_DTYPE_NAMES = {dtype: name for name, dtype in (DTYPES | WHOLE_DTYPES).items()}
AGAIN = "download it again"


class CheckpointError(ValueError):
    """A model folder that cannot be read or written, in one line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a file: where its bytes are. Nothing has been read yet."""

    name: str
    path: pathlib.Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # of the first byte, from the start of the file

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedEntry(Entry):
    """A tensor whose values are unpacked where they are read, in whole units."""

    unit_values: int
    unit_bytes: int
    unpack: Callable[[np.ndarray], np.ndarray]  # uint8 of units -> flat, of `dtype`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pending:
    """One tensor to be written; `fetch` is called once, when its turn comes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def find(
    folder: pathlib.Path, *, dtypes: Mapping[str, np.dtype] = DTYPES
) -> dict[str, Entry]:
    """Finds a folder's tensors by name, in one file or in an index and its shards.

    Reads every header and no tensor.

    Args:
      dtypes: what tensors may be, by the names of the format.

    Raises:
      CheckpointError: nothing or two things to read, a missing shard, a malformed
        or truncated file, an index that disagrees with its shards.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    has_single, has_index = _exists(single), _exists(index)
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
        path = folder / file_name
        if not _exists(path):
            raise CheckpointError(f"{path}: no such shard; {AGAIN}")
        for name, entry in read_header(path, dtypes=dtypes).items():
            if weight_map.get(name) != file_name:
                raise CheckpointError(
                    f"{path}: holds {name}, which {INDEX_FILE} places in "
                    f"{weight_map.get(name, 'no file')}; {AGAIN}"
                )
            entries[name] = entry
    missing = [name for name in weight_map if name not in entries]
    if missing:
        raise CheckpointError(
            f"{folder / weight_map[missing[0]]}: does not hold {some(missing)}, as "
            f"{INDEX_FILE} says; {AGAIN}"
        )
    return entries


def _exists(path: pathlib.Path) -> bool:
    """Returns whether a file exists; raises where that cannot be found out."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    return True


def _read_weight_map(index: pathlib.Path) -> dict[str, str]:
    """Reads an index's `weight_map`: from a tensor's name to a file's beside it."""
    try:
        data = regular_files.read(index)
    except FileNotFoundError as error:
        raise CheckpointError(f"{index}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: not valid JSON ({error}); {AGAIN}") from None
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
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
    """Reads the tensors of one file by name; checks that they fill it exactly."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: truncated or not a safetensors file ({size} bytes, "
                    f"of which the header would take {length}); {AGAIN}"
                )
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    try:
        raw = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: malformed header ({error}); {AGAIN}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: malformed header (not an object); {AGAIN}")
    raw.pop("__metadata__", None)
    start = 8 + length
    entries = {
        name: _entry(path, name, item, start, dtypes) for name, item in raw.items()
    }
    _check_layout(path, entries.values(), start, size)
    return entries


def _entry(
    path: pathlib.Path,
    name: str,
    raw: Any,
    start: int,
    dtypes: Mapping[str, np.dtype],
) -> Entry:
    """Reads one item of a header; checks its types and its size."""
    try:
        dtype_name, shape, (begin, end) = (
            raw["dtype"],
            raw["shape"],
            raw["data_offsets"],
        )
        well_formed = isinstance(dtype_name, str) and all(
            type(number) is int and number >= 0 for number in (*shape, begin, end)
        )
    except (KeyError, TypeError, ValueError):
        well_formed = False
    if not well_formed:
        raise CheckpointError(f"{path}: malformed header at {name}; {AGAIN}")
    if dtype_name not in dtypes:
        raise CheckpointError(
            f"{path}: {name} is {dtype_name}, not one of {', '.join(dtypes)} "
            "(quantised checkpoints are not supported)"
        )
    entry = Entry(
        name=name,
        path=path,
        dtype=dtypes[dtype_name],
        shape=tuple(shape),
        offset=start + begin,
    )
    if end - begin != entry.num_bytes:
        raise CheckpointError(
            f"{path}: malformed header at {name}: {dtype_name} {list(shape)} takes "
            f"{entry.num_bytes} bytes, not {end - begin}; {AGAIN}"
        )
    return entry


def _check_layout(
    path: pathlib.Path, entries: Iterable[Entry], start: int, size: int
) -> None:
    """Refuses holes, overlaps, bytes that are missing and bytes too many."""
    position = start
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset != position:
            raise CheckpointError(
                f"{path}: malformed header: {entry.name} does not start where the "
                f"tensor before it ends; {AGAIN}"
            )
        position += entry.num_bytes
    if position > size:
        raise CheckpointError(
            f"{path}: truncated: the header tells of {position} bytes, the file has "
            f"{size}; {AGAIN}"
        )
    if position < size:
        raise CheckpointError(
            f"{path}: {size - position} bytes more than its header tells of; {AGAIN}"
        )


def write(
    path: pathlib.Path,
    tensors: Sequence[Pending],
    *,
    metadata: Mapping[str, str],
) -> None:
    """Writes one file, fetching one tensor at a time."""
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
    """Raises unless all that is required is there, as it is known, and no other.

    Args:
      known: shapes of all tensors that may be there.
      source: of these, for the message.
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
