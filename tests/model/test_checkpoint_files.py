"""Safetensors files: files of other programs are read, broken files are refused."""

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
    """Returns tensors of all supported dtypes, with a scalar and an empty tensor."""
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
    """Writes a good file by the `safetensors` package; returns its folder."""
    safetensors.numpy.save_file(tensors(), tmp_path / files.SINGLE_FILE)
    return tmp_path


@pytest.fixture
def sharded(tmp_path) -> pathlib.Path:
    """Writes the same tensors to two files, interleaved; returns their folder."""
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
    message = r"model.safetensors: not a whole safetensors file \(.*\); download it ag"
    with pytest.raises(files.CheckpointError, match=message):
        files.find(folder)


def test_unsupported_dtype(tmp_path):
    path = tmp_path / files.SINGLE_FILE
    safetensors.numpy.save_file({"x": np.ones(3, np.int8)}, path)
    with pytest.raises(files.CheckpointError, match="x is I8, not one of F32"):
        files.find(tmp_path)
