"""Safetensors files: what another hand wrote is read, what is broken is refused."""

import json
import pathlib
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from spec_jax.model import checkpoint_files as files, tensor_values


SHARDS = ("part-a.safetensors", "part-b.safetensors")


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
    weight_map = {name: SHARDS[i % 2] for i, name in enumerate(tensors())}
    for shard in SHARDS:
        held = {k: v for k, v in tensors().items() if weight_map[k] == shard}
        safetensors.numpy.save_file(held, tmp_path / shard)
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    (tmp_path / files.INDEX_FILE).write_text(text)
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


@pytest.mark.parametrize("block_bytes", [1, 8, 100, tensor_values.BLOCK_BYTES])
def test_same_values(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(tensor_values, "BLOCK_BYTES", block_bytes)
    matrix = tensors()["matrix"]
    last = matrix.copy()
    last[-1, -1] += 1
    held = {"a": matrix, "b": matrix.copy(), "last": last, "flat": matrix.reshape(-1)}
    safetensors.numpy.save_file(held, tmp_path / files.SINGLE_FILE)
    entries = files.find(tmp_path)
    assert tensor_values.same_values(entries["a"], entries["b"])
    assert not tensor_values.same_values(entries["a"], entries["last"])
    assert not tensor_values.same_values(entries["a"], entries["flat"])


@pytest.mark.parametrize("other", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("block_bytes", [1, 100, tensor_values.BLOCK_BYTES])
def test_same_values_in_two_dtypes(tmp_path, monkeypatch, block_bytes, other):
    monkeypatch.setattr(tensor_values, "BLOCK_BYTES", block_bytes)
    short = tensors()["matrix"].astype(other)
    last, zero = short.astype(np.float32), np.zeros((2,), np.float32)
    last[-1, -1] *= 1 + 2**-20
    held = {
        "short": short,
        "long": short.astype(np.float32),
        "last": last,
        "zero": zero,
        "minus": -zero.astype(other),
    }
    safetensors.numpy.save_file(held, tmp_path / files.SINGLE_FILE)
    entries = files.find(tmp_path)
    assert tensor_values.same_values(entries["short"], entries["long"])
    assert tensor_values.same_values(entries["long"], entries["short"])
    assert not tensor_values.same_values(entries["short"], entries["last"])
    assert not tensor_values.same_values(entries["zero"], entries["minus"])


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


def test_a_folder_that_cannot_be_looked_into(tmp_path):
    """Fails if an `OSError` escapes: such a name is too long for any folder."""
    with pytest.raises(files.CheckpointError, match="File name too long"):
        files.find(tmp_path / ("x" * 300))


def test_no_weights(tmp_path):
    with pytest.raises(files.CheckpointError, match="neither model.safetensors nor"):
        files.find(tmp_path)


def test_two_checkpoints_in_one_folder(sharded):
    safetensors.numpy.save_file(tensors(), sharded / files.SINGLE_FILE)
    with pytest.raises(files.CheckpointError, match="holds both"):
        files.find(sharded)


def test_missing_shard(sharded):
    (sharded / SHARDS[1]).unlink()
    with pytest.raises(
        files.CheckpointError, match=f"{SHARDS[1]}: no such shard; download it again"
    ):
        files.find(sharded)


@pytest.mark.parametrize("size", [0, 5, 8, 100])
def test_file_ends_inside_its_header(folder, size):
    path = folder / files.SINGLE_FILE
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(
        files.CheckpointError,
        match="model.safetensors: (truncated|malformed).*download it again",
    ):
        files.find(folder)


@pytest.mark.parametrize("lost", [1, 200])
def test_file_ends_inside_its_tensors(folder, lost):
    path = folder / files.SINGLE_FILE
    raw = path.read_bytes()
    path.write_bytes(raw[:-lost])
    with pytest.raises(
        files.CheckpointError,
        match=f"tells of {len(raw)} bytes, the file has {len(raw) - lost}; download",
    ):
        files.find(folder)


def test_file_shrinks_after_its_header_was_read(folder):
    entries = files.find(folder)
    entry = max(entries.values(), key=lambda entry: entry.offset)
    path = folder / files.SINGLE_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(files.CheckpointError, match=f"ends inside {entry.name}"):
        tensor_values.read_into(entry, np.empty(entry.shape, entry.dtype))


def test_file_is_something_else(folder):
    (folder / files.SINGLE_FILE).write_text("version https://git-lfs.github.com/spec")
    with pytest.raises(files.CheckpointError, match="not a safetensors file"):
        files.find(folder)


def test_file_is_a_folder(tmp_path):
    (tmp_path / files.SINGLE_FILE).mkdir()
    with pytest.raises(files.CheckpointError, match="Is a directory"):
        files.find(tmp_path)


def test_file_has_bytes_too_many(folder):
    path = folder / files.SINGLE_FILE
    path.write_bytes(path.read_bytes() + b"12345")
    with pytest.raises(files.CheckpointError, match="5 bytes more than its header"):
        files.find(folder)


ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        b"\xff\xfe\xfd",
        b"[" * 100_000,
        b"[]",
        b'{"x": 3}',
        b'{"x": {"dtype": "F32", "shape": [1]}}',
        json.dumps({"x": ONE | {"dtype": 3}}).encode(),
        json.dumps({"x": ONE | {"shape": [-1]}}).encode(),
        json.dumps({"x": ONE | {"shape": [1.0]}}).encode(),
        json.dumps({"x": ONE | {"shape": 1}}).encode(),
        json.dumps({"x": ONE | {"data_offsets": [0]}}).encode(),
        json.dumps({"x": ONE | {"data_offsets": [4, 0]}}).encode(),
        json.dumps({"x": ONE | {"data_offsets": [0, 8]}}).encode(),
        json.dumps({"x": ONE, "y": ONE}).encode(),  # Overlap.
        json.dumps({"x": ONE | {"data_offsets": [4, 8]}}).encode(),  # A hole.
    ],
    ids=range(15),
)
def test_malformed_header(tmp_path, header):
    raw = len(header).to_bytes(8, "little") + header + bytes(8)
    (tmp_path / files.SINGLE_FILE).write_bytes(raw)
    with pytest.raises(
        files.CheckpointError, match="malformed header.*download it again"
    ):
        files.find(tmp_path)


def test_unsupported_dtype(tmp_path):
    path = tmp_path / files.SINGLE_FILE
    safetensors.numpy.save_file({"x": np.ones(3, np.int8)}, path)
    with pytest.raises(files.CheckpointError, match="x is I8, not one of F32"):
        files.find(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON.*download it again"),
        ("[]", "has no weight_map; download it again"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"x": 3}}', "which is no file name"),
        ('{"weight_map": {"x": "../x"}}', "which is no file name"),
        ('{"weight_map": {"x": "/x"}}', "which is no file name"),
        ('{"weight_map": {"x": ".."}}', "Is a directory"),
    ],
)
def test_malformed_index(sharded, text, message):
    (sharded / files.INDEX_FILE).write_text(text)
    with pytest.raises(files.CheckpointError, match=message):
        files.find(sharded)


def change_weight_map(folder: pathlib.Path, change: Callable[[dict], None]) -> None:
    path = folder / files.INDEX_FILE
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


OTHER_MAPS = {
    f"{SHARDS[1]}: does not hold ghost": lambda names: names.update(ghost=SHARDS[1]),
    "holds matrix, which .* in no file": lambda names: names.pop("matrix"),
    f"holds matrix, which .* in {SHARDS[1]}": lambda names: names.update(
        matrix=SHARDS[1]
    ),
}


@pytest.mark.parametrize("message", OTHER_MAPS)
def test_an_index_of_other_shards(sharded, message):
    change_weight_map(sharded, OTHER_MAPS[message])
    with pytest.raises(files.CheckpointError, match=message):
        files.find(sharded)
