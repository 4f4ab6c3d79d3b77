"""PyTorch's zip files of tensors (`pytorch_model.bin`): where each tensor's bytes are.

The archive stores each tensor's bytes uncompressed, and a pickle that names them. A
pickle is a program: here it may build dictionaries of tensors, and call nothing else.
`checkpoint_files` reads the bytes.
"""

import io
import math
import pathlib
import pickle
import zipfile
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from spec_jax.model import checkpoint_files as files


FILE = "pytorch_model.bin"
_MAX_PICKLE_BYTES = 100_000_000

_STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
_AGAIN = "download it again, or take the head's safetensors"


class _Tensor(NamedTuple):
    """The pickle's description of one tensor."""

    storage: Any  # as `persistent_load` returns it
    offset: Any  # elements
    shape: Any
    strides: Any


class _Names(dict):
    """In the place of `collections.OrderedDict`."""


def _rebuild(storage, offset, shape, strides, *_ignored) -> _Tensor:
    """Takes the place of `torch._utils._rebuild_tensor_v2`."""
    return _Tensor(storage, offset, shape, strides)


class _Unpickler(pickle.Unpickler):
    """Knows the names of which dictionaries of tensors are made, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _Names
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]  # A dtype: it cannot be called.
        raise pickle.UnpicklingError(
            f"it asks for {module}.{name}, which is no part of a tensor"
        )

    def persistent_load(self, pid: Any) -> Any:
        """Returns the dtype, the name and the size of a storage."""
        kind, dtype, key, _device, size = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise pickle.UnpicklingError(f"{kind!r} is no storage of a tensor")
        return dtype, key, size


def read_header(path: pathlib.Path) -> dict[str, files.Entry]:
    """Returns the tensors of a file, by name; runs nothing that the file holds.

    Raises:
      CheckpointError: not a zip file of PyTorch's, truncated, tensors that are not
        contiguous, or a pickle that holds anything besides tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            return _entries(path, archive, file)
    except zipfile.BadZipFile as error:
        raise files.CheckpointError(
            f"{path}: truncated, or not of PyTorch's zip format ({error}); {_AGAIN}"
        ) from None
    except OSError as error:
        raise files.CheckpointError(f"{path}: {error.strerror}") from None


def _entries(path, archive, file) -> dict[str, files.Entry]:
    pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(pickles) != 1 or "/" in pickles[0].removesuffix("/data.pkl"):
        raise files.CheckpointError(f"{path}: holds no data.pkl of PyTorch's; {_AGAIN}")
    prefix = pickles[0].removesuffix("data.pkl")
    order = prefix + "byteorder"
    if order in archive.namelist() and archive.read(order) != b"little":
        raise files.CheckpointError(f"{path}: not little-endian; {_AGAIN}")
    if archive.getinfo(pickles[0]).file_size > _MAX_PICKLE_BYTES:
        raise files.CheckpointError(f"{path}: its data.pkl is too large; {_AGAIN}")
    try:
        held = _Unpickler(io.BytesIO(archive.read(pickles[0]))).load()
    except Exception as error:  # A malformed pickle raises anything.
        raise files.CheckpointError(
            f"{path}: refused: {error or type(error).__name__}; only tensors are read "
            f"from a pickle; {_AGAIN}"
        ) from None
    if not isinstance(held, dict):
        raise files.CheckpointError(f"{path}: holds no tensors by name; {_AGAIN}")
    return {
        name: _entry(path, archive, file, prefix, name, tensor)
        for name, tensor in held.items()
    }


def _entry(path, archive, file, prefix, name, tensor) -> files.Entry:
    """Reads one tensor of the pickle, with everything that it says checked."""
    where = f"{path}: malformed at {name!r}"
    if not isinstance(name, str) or not isinstance(tensor, _Tensor):
        raise files.CheckpointError(f"{where}: not a tensor by name; {_AGAIN}")
    storage, first, shape, strides = tensor
    sizes = (first, *_numbers(shape), *_numbers(strides))
    if not isinstance(storage, tuple) or not all(
        type(size) is int and size >= 0 for size in sizes
    ):
        raise files.CheckpointError(f"{where}: not a tensor's sizes; {_AGAIN}")
    dtype, key, _ = storage
    try:
        member = archive.getinfo(f"{prefix}data/{key}")
    except KeyError:
        raise files.CheckpointError(
            f"{where}: data/{key} is missing; {_AGAIN}"
        ) from None
    dense = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    moves = [axis for axis, size in enumerate(shape) if size > 1]
    if len(strides) != len(shape) or any(strides[i] != dense[i] for i in moves):
        raise files.CheckpointError(
            f"{where}: strides {list(strides)} of {list(shape)} are not contiguous; "
            "save it again with tensor.contiguous()"
        )
    start, size = first * dtype.itemsize, math.prod(shape) * dtype.itemsize
    stored = member.compress_type == zipfile.ZIP_STORED
    if not stored or start + size > member.file_size:
        raise files.CheckpointError(
            f"{where}: {dtype} {list(shape)} takes {size} bytes from {start} on, and "
            f"data/{key} holds {member.file_size}, uncompressed: {stored}; {_AGAIN}"
        )
    return files.Entry(
        name=name,
        path=path,
        dtype=dtype,
        shape=tuple(shape),
        offset=_data_offset(file, member) + start,
    )


def _numbers(sizes: Any) -> tuple:
    return sizes if isinstance(sizes, tuple) else (None,)


def _data_offset(file, member: zipfile.ZipInfo) -> int:
    """Returns where a member's bytes begin: after its local header, read anew."""
    file.seek(member.header_offset)
    header = file.read(30)
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return member.header_offset + len(header) + name + extra
