"""Folders of models: they are loaded bit for bit as saved, and refused if broken; files
of other programs are read."""

import dataclasses
import json
import pathlib
import re
import types
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import psutil
import pytest
import safetensors.numpy

from spec_jax import testing
from spec_jax.model import (
    checkpoint_files as files,
    config as config_lib,
    load as load_lib,
    params as params_lib,
    save as save_lib,
    tensor_values,
)


CONFIG = config_lib.Qwen3Config(
    vocab_size=40, hidden_size=24, intermediate_size=56, num_heads=6, num_kv_heads=2,
    head_dim=10, max_position_embeddings=64, tie_word_embeddings=True, dtype="float32",
    num_layers=11,  # Two digits: as strings, layer 10 comes before layer 2.
)  # fmt: skip
UNTIED = dataclasses.replace(CONFIG, tie_word_embeddings=False)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
EMBED = "model.embed_tokens.weight"


def random_params(config: config_lib.Qwen3Config) -> params_lib.Params:
    """Returns noise for all arrays, norms too: two arrays that are swapped differ."""
    rng = np.random.default_rng(7)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape).astype(leaf.dtype)),
        params_lib.shapes(config),
    )


def write_tensors(folder: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes tensors by the `safetensors` package instead of our own code."""
    path = folder / files.SINGLE_FILE
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})


def read_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / files.SINGLE_FILE)


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    """Saves a good single-file checkpoint of the tied `CONFIG`; returns its folder."""
    save_lib.save(tmp_path, CONFIG, random_params(CONFIG))
    return tmp_path


@pytest.fixture
def sharded(tmp_path) -> pathlib.Path:
    """Saves a good sharded checkpoint of the tied `CONFIG`; returns its folder."""
    save_lib.save(tmp_path, CONFIG, random_params(CONFIG), max_shard_bytes=20_000)
    return tmp_path


@pytest.fixture
def no_reads(monkeypatch):
    """Fails the test if a weight is read."""

    def refuse(entry, out, at=...):
        raise AssertionError(f"{entry.name} was read")

    monkeypatch.setattr(tensor_values, "read_into", refuse)


def assert_refused(folder: pathlib.Path, message: str, **options) -> None:
    with pytest.raises(load_lib.CheckpointError, match=message):
        load_lib.load(folder, **options)


def test_saved_files_are_what_safetensors_reads(tmp_path):
    """Fails if negative zeros, denormals or the largest numbers change when saved.
    `test_families` checks that names and splits are Hugging Face's."""
    config = dataclasses.replace(UNTIED, dtype="bfloat16")
    bits = np.arange(CONFIG.vocab_size * CONFIG.hidden_size, dtype=np.uint16) * 67
    bits[(bits & 0x7F80) == 0x7F80] ^= 0x0080
    embed = bits.view(ml_dtypes.bfloat16).reshape(CONFIG.vocab_size, -1)
    params = random_params(config).replace(embed=jnp.asarray(embed))
    save_lib.save(tmp_path, config, params)
    path = tmp_path / files.SINGLE_FILE
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        testing.assert_same_bits(file.get_tensor(EMBED), embed)
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0  # aligned
    loaded = np.asarray(load_lib.load(tmp_path)[1].embed)
    np.testing.assert_array_equal(loaded.view(np.uint16), embed.view(np.uint16))


def test_a_new_checkpoint_replaces_an_old_one(tmp_path):
    """Fails if a bit is lost, or if old shards or an old index stay, and would be read
    with the new ones."""
    (tmp_path / "model-card.md").write_text("kept")
    narrow = dataclasses.replace(CONFIG, dtype="bfloat16")
    untied = ((UNTIED, size) for size in (None, 4_000, 20_000, None))
    for config, shard_bytes in (*untied, (narrow, 1), (CONFIG, None)):
        params = random_params(config)
        save_lib.save(tmp_path, config, params, max_shard_bytes=shard_bytes)
        loaded_config, loaded = load_lib.load(tmp_path)
        assert loaded_config == config
        testing.assert_same_bits(loaded, params)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "model-card.md", "model.safetensors"]


def test_a_save_that_fails_leaves_the_old_checkpoint(folder, monkeypatch):
    _, old = load_lib.load(folder)

    def full_disk(path, tensors, *, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write", full_disk)
    with pytest.raises(load_lib.CheckpointError, match="No space left on device"):
        save_lib.save(folder, CONFIG, random_params(CONFIG))
    chex.assert_trees_all_equal(load_lib.load(folder)[1], old)
    assert len(list(folder.iterdir())) == 2


def test_save_refuses_params_of_another_config(tmp_path):
    params = random_params(CONFIG)
    for change, message in (
        ({"tie_word_embeddings": False}, "no lm_head"),
        ({"num_layers": 3}, "11 layers"),
        ({"vocab_size": 41}, r"params.embed is float32 \[40, 24\]"),
        ({"dtype": "bfloat16"}, "the config says bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            save_lib.save(tmp_path, dataclasses.replace(CONFIG, **change), params)
    with pytest.raises(ValueError, match="max_shard_bytes=0"):
        save_lib.save(tmp_path, CONFIG, params, max_shard_bytes=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (np.float32, "bfloat16"),
        (np.float16, "bfloat16"),
        (ml_dtypes.bfloat16, "float32"),
    ],
)
def test_conversions_round_to_nearest(tmp_path, source, target):
    wide = dataclasses.replace(CONFIG, num_layers=2)
    config, params = dataclasses.replace(wide, dtype=target), random_params(wide)
    save_lib.save(tmp_path, wide, params)
    tensors = read_tensors(tmp_path)
    write_tensors(tmp_path, {k: v.astype(source) for k, v in tensors.items()})
    loaded_config, loaded = load_lib.load(tmp_path, dtype=target)
    assert loaded_config == config
    # XLA casts here; the loader casts by NumPy.
    expected = jax.tree.map(lambda leaf: leaf.astype(source).astype(target), params)
    testing.assert_same_bits(loaded, expected)


@pytest.mark.parametrize(
    ("name", "place", "dtype", "value"),
    [
        (Q_PROJ, (7, 5), "float32", np.nan),
        (Q_PROJ, (7, 5), "bfloat16", np.inf),
        (Q_PROJ.replace("q_proj", "v_proj"), (7, 5), "float32", -np.inf),
        # This one is finite in the file, but not once it is rounded.
        ("model.norm.weight", (3,), "bfloat16", np.finfo(np.float32).max),
    ],
)
def test_weights_that_are_not_finite(folder, name, place, dtype, value):
    """Fails if a model with one such weight is loaded, or the line does not name it,
    even in a part that is not the first of its array (`v_proj`).
    """
    tensors = read_tensors(folder)
    tensors[name][place] = value
    write_tensors(folder, tensors)
    if np.isfinite(value):
        load_lib.load(folder)
    rounded = jnp.float32(value).astype(dtype)
    told = re.escape(f"{name}{list(place)} is {rounded} in {dtype}")
    assert_refused(folder, f"model.safetensors: {told}: .*download", dtype=dtype)


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("source", [np.float32, ml_dtypes.bfloat16])
def test_a_tied_lm_head_in_the_file(folder, source, equal, monkeypatch):
    """Fails if an equal head is refused for its dtype, or if a head is accepted that
    differs in its last value only, by less than bfloat16's rounding."""
    monkeypatch.setattr(tensor_values, "BLOCK_BYTES", 7 * 8 * CONFIG.hidden_size)
    tensors = read_tensors(folder)
    head = tensors[EMBED].astype(source)
    tensors |= {EMBED: head.astype(np.float32), "lm_head.weight": head}
    tensors[EMBED][-1, -1] *= 1 if equal else 1 + 2**-20
    write_tensors(folder, tensors)
    if not equal:
        return assert_refused(folder, "lm_head.weight differs from")
    config, params = load_lib.load(folder)
    assert config.tie_word_embeddings and params.lm_head is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # To list the names and shapes of so many layers would take hours.
        ({"num_layers": 10**8}, "json: num_hidden_layers=100000000, .* of 11 layers"),
        ({"tie_word_embeddings": False}, "missing tensors: lm_head.weight"),
    ],
)
def test_a_config_of_another_model(folder, change, message):
    stated = config_lib.to_dict(dataclasses.replace(CONFIG, **change))
    (folder / "config.json").write_text(json.dumps(stated))
    assert_refused(folder, message)


Q_BIAS = "model.layers.0.self_attn.q_proj.bias"
LAYER_11 = "model.layers.11.down"
MORE = np.ones(3, np.float32)
UP_OF_FIVE = re.compile("model.layers.[0-4].mlp.up_proj")
OTHER_TENSORS = {
    "missing tensors: model.layers.0.mlp.up_proj.weight, .* and 2 more":
        lambda held: {k: v for k, v in held.items() if not UP_OF_FIVE.match(k)},
    f"unexpected tensors: {Q_BIAS}$": lambda held: held | {Q_BIAS: MORE},
    f"unexpected tensors: {LAYER_11}$": lambda held: held | {LAYER_11: MORE},
    # This shape has the right number of values.
    rf"{Q_PROJ} has shape \[24, 60\], config.json asks for \[60, 24\]":
        lambda held: held | {Q_PROJ: np.ascontiguousarray(held[Q_PROJ].T)},
}  # fmt: skip


@pytest.mark.parametrize("message", OTHER_TENSORS)
def test_tensors_of_another_model_are_named(folder, message):
    write_tensors(folder, OTHER_TENSORS[message](read_tensors(folder)))
    assert_refused(folder, message)


def test_headers_are_checked_before_any_weight_is_read(sharded, no_reads):
    """Fails if the first shard's weights are read although the last shard is broken."""
    last = sorted(sharded.glob("model-*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    assert_refused(sharded, f"{last.name}: not a whole")


def test_memory_is_checked_before_any_weight_is_read(folder, no_reads, monkeypatch):
    required = sum(load_lib.required_bytes(CONFIG))
    free = types.SimpleNamespace(available=required - 1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(load_lib.InsufficientMemoryError, match="GiB are free"):
        load_lib.load(folder)
    free.available = required
    with pytest.raises(AssertionError, match="was read"):
        load_lib.load(folder)


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
def one_file(tmp_path) -> pathlib.Path:
    """Writes a good file by the `safetensors` package; returns its folder."""
    safetensors.numpy.save_file(tensors(), tmp_path / files.SINGLE_FILE)
    return tmp_path


@pytest.fixture
def two_files(tmp_path) -> pathlib.Path:
    """Writes the same tensors to two files, interleaved; returns their folder."""
    for shard in SHARDS:
        held = {k: v for k, v in tensors().items() if PLACES[k] == shard}
        safetensors.numpy.save_file(held, tmp_path / shard)
    index(PLACES)(tmp_path)
    return tmp_path


@pytest.mark.parametrize("layout", ["one_file", "two_files"])
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
    entries["matrix"].path.write_bytes(b"")
    with pytest.raises(files.CheckpointError, match="matrix is not to be read"):
        tensor_values.read_into(entries["matrix"], np.empty((6, 10), np.float32))


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
def test_a_bad_folder(two_files, message):
    BAD_FOLDERS[message](two_files)
    with pytest.raises(files.CheckpointError, match=message):
        files.find(two_files)


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
def test_a_file_that_is_not_whole(one_file, fault):
    path = one_file / files.SINGLE_FILE
    path.write_bytes(NOT_WHOLE[fault](path.read_bytes()))
    message = r"model.safetensors: not a whole safetensors file \(.*\); download it ag"
    with pytest.raises(files.CheckpointError, match=message):
        files.find(one_file)


def test_unsupported_dtype(tmp_path):
    path = tmp_path / files.SINGLE_FILE
    safetensors.numpy.save_file({"x": np.ones(3, np.int8)}, path)
    with pytest.raises(files.CheckpointError, match="x is I8, not one of F32"):
        files.find(tmp_path)
