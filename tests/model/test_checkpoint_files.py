"""Safetensors files: what another hand wrote is read, what is broken is refused."""

import json
import pathlib
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from spec_jax.model import checkpoint_files as files, tensor_values


SHARDS = A, B = "part-a.safetensors", "part-b.safetensors"
PLACES = {"matrix": A, "half": B, "brain": A, "scalar": B, "empty": A}


def tensors() -> dict[str, np.ndarray]:
    """All supported dtypes; a scalar and an empty tensor among them."""
    rng = np.random.default_rng(3)
    return {
        "matrix": rng.normal(size=(6, 10)).astype(np.float32),
        "half": rng.normal(size=(3, 4)).astype(np.float16),
        "brain": rng.normal(size=(5,)).astype(ml_dtypes.bfloat16),
        "scalar": np.full((), 2.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    """A good file, written by the `safetensors` package."""
    safetensors.numpy.save_file(tensors(), tmp_path / files.SINGLE_FILE)
    return tmp_path


@pytest.fixture
def sharded(tmp_path) -> pathlib.Path:
    """The same tensors in two files, which take turns."""
    for shard in SHARDS:
        held = {k: v for k, v in tensors().items() if PLACES[k] == shard}
        safetensors.numpy.save_file(held, tmp_path / shard)
    index(PLACES)(tmp_path)
    return tmp_path


@pytest.mark.parametrize("layout", ["folder", "sharded"])
def test_reads_what_safetensors_wrote(layout, request):
    entries = files.find(request.getfixturevalue(layout))
    expected = tensors()
    assert set(entries) == set(expected)
    for name, array in expected.items():
        entry = entries[name]
        assert (entry.shape, entry.dtype) == (array.shape, array.dtype)
        out = np.empty(entry.shape, entry.dtype)
        tensor_values.read_into(entry, out)
        assert out.tobytes() == array.tobytes(), name


def test_writes_what_safetensors_reads(tmp_path):
    path = tmp_path / "x.safetensors"
    pending = [
        files.Pending(
            name=name,
            dtype=array.dtype,
            shape=array.shape,
            fetch=lambda array=array: array,
        )
        for name, array in tensors().items()
    ]
    files.write(path, pending, metadata={"format": "pt"})
    expected = tensors()
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(expected)
    for name, array in safetensors.numpy.load_file(path).items():
        assert array.shape == expected[name].shape
        assert array.tobytes() == expected[name].tobytes(), name


def test_reads_into_rows_of_a_buffer(folder):
    """Only there: fails if the neighbours are touched."""
    entry = files.find(folder)["matrix"]
    buffer = np.full((10, 10), 7, np.float32)
    tensor_values.read_into(entry, buffer[2:8])
    np.testing.assert_array_equal(buffer[2:8], tensors()["matrix"])
    assert (buffer[:2] == 7).all() and (buffer[8:] == 7).all()


def test_refuses_buffers_that_do_not_fit(folder):
    entry = files.find(folder)["matrix"]
    with pytest.raises(ValueError, match=r"matrix is \(6, 10\), the buffer is \(10"):
        tensor_values.read_into(entry, np.empty((10, 6), np.float32))
    with pytest.raises(ValueError, match="not contiguous"):
        tensor_values.read_into(entry, np.empty((10, 6), np.float32).T)


@pytest.mark.parametrize("other", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("block_bytes", [1, 8, 100, tensor_values.BLOCK_BYTES])
def test_same_values(tmp_path, monkeypatch, block_bytes, other):
    """In two dtypes, or in one."""
    monkeypatch.setattr(tensor_values, "BLOCK_BYTES", block_bytes)
    short = tensors()["matrix"].astype(other)
    last, zero = short.astype(np.float32), np.zeros((2,), np.float32)
    last[-1, -1] *= 1 + 2**-20
    held = {
        "short": short,
        "long": short.astype(np.float32),
        "flat": short.reshape(-1),
        "last": last,
        "zero": zero,
        "minus": -zero.astype(other),
    }
    safetensors.numpy.save_file(held, tmp_path / files.SINGLE_FILE)
    entries = files.find(tmp_path)
    assert tensor_values.same_values(entries["short"], entries["long"])
    assert tensor_values.same_values(entries["long"], entries["short"])
    for left, right in (("short", "last"), ("short", "flat"), ("zero", "minus")):
        assert not tensor_values.same_values(entries[left], entries[right])


@pytest.mark.parametrize("dtype", files.DTYPES.values(), ids=str)
@pytest.mark.parametrize("test_bytes", [4, 28, 2**18])
def test_first_value_that_is_not_finite(monkeypatch, dtype, test_bytes):
    """In a view of larger storage, as a part of an array is, and in every place."""
    monkeypatch.setattr(tensor_values, "_TEST_BYTES", test_bytes)
    largest = float(np.finfo(dtype).max) if dtype != files.DTYPES["BF16"] else 3.38e38
    values = np.full((4, 3, 5), largest, dtype)
    for index in np.ndindex(2, 3, 5):
        for value in (np.nan, np.inf, -np.inf):
            spoilt = values.copy()
            spoilt[1:][index] = value
            spoilt[3] = np.nan
            assert tensor_values.first_non_finite(spoilt[1:]) == index
    assert tensor_values.first_non_finite(values) is None
    assert tensor_values.first_non_finite(-values) is None
    assert tensor_values.first_non_finite(np.zeros((0, 4), dtype)) is None
    assert tensor_values.first_non_finite(np.array(np.nan, dtype)) == ()


def index(content) -> Callable:
    """Returns a function that writes an index."""
    text = content if isinstance(content, str) else json.dumps({"weight_map": content})
    return lambda folder: (folder / files.INDEX_FILE).write_text(text)


BAD_FOLDERS = {
    "neither model.safetensors nor": lambda at: (at / files.INDEX_FILE).unlink(),
    "holds both .*; remove one": lambda at: (at / files.SINGLE_FILE).touch(),
    f"{B}: No such file .*download it again": lambda at: (at / B).unlink(),
    "safetensors: Is a directory; make it readable": lambda at: (
        (at / files.INDEX_FILE).unlink(),
        (at / files.SINGLE_FILE).mkdir(),
    ),
    "not valid JSON.*download it again": index("{"),
    "not a JSON object; download it again": index("[]"),
    "json: has no weight_map; download it again": index("{}"),
    "has no weight_map": index({}),
    "x is placed in 3, which is no file name": index({"x": 3}),
    "'../x', which is no file name": index({"x": "../x"}),
    "'/x', which is no file name": index({"x": "/x"}),
    r"\.\.: Is a directory": index({"x": ".."}),
    f"{B}: holds other .* says: ghost; download": index(PLACES | {"ghost": B}),
    f"{A}: holds other .* says: empty, matrix;": index({"half": B, "brain": A}),
    f"{A}: holds other .* says: matrix;": index(PLACES | {"matrix": B}),
}


@pytest.mark.parametrize("message", BAD_FOLDERS)
def test_a_bad_folder(sharded, message):
    BAD_FOLDERS[message](sharded)
    with pytest.raises(files.CheckpointError, match=message):
        files.find(sharded)


def test_a_folder_that_cannot_be_looked_into(tmp_path):
    """Fails if an `OSError` escapes: such a name is too long for any folder."""
    with pytest.raises(files.CheckpointError, match="File name too long"):
        files.find(tmp_path / ("x" * 300))


def as_file(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(8)


def of_items(**items: dict) -> bytes:
    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    return as_file(
        json.dumps({name: one | item for name, item in items.items()}).encode()
    )


NOT_WHOLE = {
    "empty": lambda whole: b"",
    "ends inside its header": lambda whole: whole[:100],
    "ends inside its tensors": lambda whole: whole[:-1],
    "a byte too many": lambda whole: whole + b"1",
    "something else": lambda whole: b"version https://git-lfs.github.com/spec",
    "no JSON": lambda whole: as_file(b"{not json"),
    "deep JSON": lambda whole: as_file(b'{"x":' * 100_000),
    "a negative size": lambda whole: of_items(x={"shape": [-1]}),
    "another size": lambda whole: of_items(x={"data_offsets": [0, 8]}),
    "an overlap": lambda whole: of_items(x={}, y={"data_offsets": [0, 8]}),
    "a hole": lambda whole: of_items(x={"data_offsets": [4, 8]}),
    "a name of two lines": lambda whole: of_items(**{"x\n\n": {}, "y": {}}),
}


@pytest.mark.parametrize("fault", NOT_WHOLE)
def test_a_file_that_is_not_whole(folder, fault):
    path = folder / files.SINGLE_FILE
    path.write_bytes(NOT_WHOLE[fault](path.read_bytes()))
    message = (
        r"model.safetensors: not a whole safetensors file \(.*\); download it again"
    )
    with pytest.raises(files.CheckpointError, match=message):
        files.find(folder)


def test_a_header_in_another_spelling(tmp_path):
    """Fails if the header is taken for what Python makes of it: the package reads an
    item that is a list."""
    header = as_file(b'{"y":["F32",[1],[4,8]],"x":["F32",[1],[0,4]]}')
    (tmp_path / files.SINGLE_FILE).write_bytes(header[:-4] + np.float32(3).tobytes())
    entries, out = files.find(tmp_path), np.empty(1, np.float32)
    for name, value in {"x": 0, "y": 3}.items():
        tensor_values.read_into(entries[name], out)
        assert out == value


def test_file_shrinks_after_its_header_was_read(folder):
    entries = files.find(folder)
    entry = max(entries.values(), key=lambda entry: entry.offset)
    path = folder / files.SINGLE_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(files.CheckpointError, match=f"ends inside {entry.name}"):
        tensor_values.read_into(entry, np.empty(entry.shape, entry.dtype))


def test_unsupported_dtype(tmp_path):
    path = tmp_path / files.SINGLE_FILE
    safetensors.numpy.save_file({"x": np.ones(3, np.int8)}, path)
    with pytest.raises(files.CheckpointError, match="x is I8, not one of F32"):
        files.find(tmp_path)
