"""GGUF files: weights, configs and tokens are read as written, or refused in a line."""

import dataclasses
import json
import struct
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from slow_cases import slow, slow_but

import spec_jax as sj
from spec_jax import loading, testing
from spec_jax.model import (
    config as config_lib,
    gguf_file,
    gguf_tokenizer,
    llama,
    load,
    params as params_lib,
    qwen2,
    qwen3,
    save as save_lib,
    sequence,
    tensor_values,
    tokenizer,
)
from spec_jax.ops import weights


gguf = pytest.importorskip("gguf")
gguf_writer = pytest.importorskip("gguf_writer")

SIZES = {
    # 256 values are a block of the largest kind of quantisation.
    "hidden_size": 256, "intermediate_size": 256,
    "vocab_size": 4096, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 64, "max_position_embeddings": 128, "rope_theta": 20_000.0,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "dtype": "float32",
}  # fmt: skip
KINDS_OF_MODELS = (llama.LlamaConfig, qwen2.Qwen2Config, config_lib.Qwen3Config)
CONFIGS = {kind.model_type: kind(**SIZES) for kind in KINDS_OF_MODELS}
# transformers does not read the size of Qwen3's heads, and assumes 128.
CONFIGS["qwen3"] = dataclasses.replace(CONFIGS["qwen3"], head_dim=128)
TEXT = "def first(x):\n    return 'caf\u00e9', [x for x in range(10)]\n\n\n# \u2192"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


def random_bytes(kind: str, shape, rng) -> np.ndarray:
    """Draws blocks of finite values, for kinds that the package cannot quantise to."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // values, size), np.uint8)
    is_q6 = kind == "Q6_K"
    scale = np.array([2e-5 if is_q6 else 2e-4], np.float16).view(np.uint8)
    for first in (208,) if is_q6 else (0, 2):
        blocks[..., first : first + 2] = scale
    return blocks.reshape(*shape[:-1], -1)


def write(path, config, params=None, *, kind="F32", change=None, is_random=False):
    """Writes a whole model to a file, its matrices in blocks of one kind; without
    params, with random weights."""
    arch = config.model_type
    if params is None:
        params = params_lib.init(jax.random.key(0), config, stddev=0.1)
    writer = gguf.GGUFWriter(path, arch)
    gguf_writer.add_config(writer, config)
    words = tokenizer.load(loading.EMBEDDED_DRAFT)
    gguf_writer.add_tokenizer(writer, words, config.vocab_size)
    writer.add_chat_template(TEMPLATE)
    writer.add_bos_token_id(1)
    if change is not None:
        change(writer)
    number = gguf.MODEL_ARCH[arch.upper()]
    names = gguf.get_tensor_name_map(number, config.num_layers)
    rng = np.random.default_rng(0)
    for tensor in save_lib.pending(params, params_lib.tensors(config)):
        array = np.asarray(tensor.fetch(), np.float32)
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        for part, count in heads.items():
            if part in tensor.name and arch == "llama":  # llama.cpp rotates pairs.
                halves = array.reshape(count, 2, -1, array.shape[1])
                array = halves.swapaxes(1, 2).reshape(array.shape)
        name = names.get_name(tensor.name, try_suffixes=(".weight", ".bias"))
        if array.ndim == 1 or kind == "F32":
            writer.add_tensor(name, array)
            continue
        raw = gguf.GGMLQuantizationType[kind]
        if kind.endswith("_K") or is_random:
            packed = random_bytes(kind, array.shape, rng)
        else:
            packed = gguf.quants.quantize(array, raw)
        writer.add_tensor(name, packed, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    """Returns a config and random weights."""
    config = CONFIGS[request.param]
    params = params_lib.init(jax.random.key(0), config, stddev=0.1)
    if request.param == "qwen2":
        bias = 0.1 * jax.random.normal(jax.random.key(1), (config.qkv_size,))
        layers = (layer.replace(qkv_bias=bias) for layer in params.layers)
        params = params.replace(layers=tuple(layers))
    return config, params


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Writes a file of the Llama model; returns its path."""
    return write(tmp_path_factory.mktemp("gguf") / "plain.gguf", CONFIGS["llama"])


@pytest.mark.parametrize("model", slow_but(CONFIGS, "llama"), indirect=True)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F32"])
@pytest.mark.parametrize("form", ["q8_0", "q4_1"])
def test_weights_of_blocks(model, kind, form, tmp_path, caplog):
    """Fails if blocks of a form are rounded once more, or others without a warning.

    Blocks of four bits become blocks of eight nearly without a loss (`blocks.widen`).
    """
    config, params = model
    path, is_eight = tmp_path / "a.gguf", form == "q8_0"
    is_random = (kind == "Q8_0") == is_eight and kind != "F32"
    write(path, config, params, kind=kind, is_random=is_random)
    _, dense = load.load(path, dtype="float32")
    found, made = load.load(path, dtype="float32", weights=form)
    assert found.is_bytes and weights.form(made.layers[1].qkv) == form
    # A model of four bits has an embedding of eight.
    of_layers = lambda x: x if is_eight else x.layers
    forms = params_lib.map_matrices(weights.matrix, made), made
    others = dense, params_lib.to_bytes(dense, form)
    if is_eight and kind[:2] == "Q4":
        squares = lambda x, y: float(jnp.square(x - y).sum())
        loss = lambda x: sum(jax.tree.leaves(jax.tree.map(squares, x, dense)))
        rounded = params_lib.map_matrices(weights.matrix, others[1])
        assert loss(forms[0]) < loss(rounded) / 4
    else:
        same = 0 if is_random else 1  # as they are, or rounded
        testing.assert_same_bits(*(of_layers(x[same]) for x in (forms, others)))
        with pytest.raises(AssertionError, match="elements differ"):
            testing.assert_same_bits(*(of_layers(x[1 - same]) for x in (forms, others)))
    if not is_eight and kind[:2] != "Q4":
        testing.assert_same_bits(made.embed, params_lib.to_bytes(dense).embed)
    for is_wanted, text in (
        (kind[:2] == "Q4", f"weights of {kind} are converted to Q8_0"),
        (kind == "Q8_0" and not is_eight, "weights of Q8_0 are converted to Q4_1"),
    ):
        assert (text in caplog.text) == is_wanted, caplog.text


def test_config_and_weights_are_those_that_were_written(model, tmp_path):
    """Fails if a size, a bit or the order of rows of queries and keys differs."""
    config, params = model
    path = write(tmp_path / "a.gguf", config, params)
    found, weights = load.load(path)
    assert found == dataclasses.replace(config, rms_norm_eps=found.rms_norm_eps)
    assert found.rms_norm_eps == np.float32(config.rms_norm_eps)
    testing.assert_same_bits(weights, params)
    # Negative control: the file has a Llama's rows in another order.
    entries = gguf_file.find(path)
    entry = entries["model.layers.0.self_attn.q_proj.weight"]
    own = np.empty(entry.shape, np.float32)
    stored = gguf_file.header(path).tensors["blk.0.attn_q.weight"].mapped()
    tensor_values.read_into(entry, own)
    is_moved = not np.array_equal(stored, own)
    assert is_moved == (config.model_type == "llama")


def test_the_tokenizer_is_that_of_the_folder(plain):
    """Fails if a token, a merge, a stop token or the template differs."""
    ours, theirs = tokenizer.load(plain), tokenizer.load(loading.EMBEDDED_DRAFT)
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert ours.decode(ours.encode(TEXT)) == TEXT
    assert ours.stop_ids == theirs.stop_ids
    assert ours.special_tokens["bos_token"] == theirs.backend.id_to_token(1)
    assert ours.apply_chat("hi") == ours.special_tokens["bos_token"] + "hi"
    assert ours.encode("hi", begins=True) == ours.encode("hi")


@pytest.mark.parametrize(
    ("name", "digits"),
    [
        ("gpt-2", ["\u01202024", "\u010a", "\u010a"]),
        ("smollm", ["\u0120", *"2024", *"\u010a\u010a"]),
        ("llama-bpe", ["\u0120", "202", "4", "\u010a\u010a"]),
        ("qwen2", ["\u0120", *"2024", "\u010a\u010a"]),
        ("deepseek-r1-qwen", ["\u0120", *"2024", "\u010a\u010a"]),
    ],
)
def test_how_a_text_is_cut(name, digits, plain):
    """Fails if digits or lines are cut as for another model."""
    fields = dict(gguf_file.header(plain).fields)
    fields["tokenizer.ggml.pre"] = name
    found = gguf_tokenizer.documents(plain, fields, 4096)["tokenizer.json"]
    raw = tokenizers.Tokenizer.from_str(json.dumps(found))
    cut = raw.pre_tokenizer.pre_tokenize_str("It's year 2024\n\nx")
    assert [piece for piece, _ in cut] == ["It", "'s", "\u0120year", *digits, "x"]


def scaled(path, config, change):
    return config_lib.read(write(path, config, change=change) / "config.json")


def test_scalings_of_rope(tmp_path):
    """Fails if RoPE's scaling in the metadata or its tensor of factors is not read."""

    def yarn(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    expected = config_lib.YarnScaling(factor=4.0, original_max_position_embeddings=32)
    for name, config in CONFIGS.items():
        assert scaled(tmp_path / f"{name}.gguf", config, yarn).scaling == expected
    wanted = config_lib.Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )  # fmt: skip
    base = dataclasses.replace(CONFIGS["llama"], rope_theta=500_000.0)
    table, _ = qwen3.rope_table(base)
    slowed, _ = qwen3.rope_table(dataclasses.replace(base, scaling=wanted))

    def by(factors):
        factors = factors.astype(np.float32)
        return lambda writer: writer.add_tensor("rope_freqs.weight", factors)

    found = scaled(tmp_path / "c.gguf", base, by(table / slowed))
    assert found.scaling == wanted
    with pytest.raises(ValueError, match="d.gguf: rope_freqs.weight is not the sc"):
        scaled(tmp_path / "d.gguf", base, by(table / table * 2))


def field(name: str, value) -> bytes:
    """Encodes a field of metadata: text, or a whole number of 32 bits."""
    text = name.encode()
    head = struct.pack("<Q", len(text)) + text
    if isinstance(value, int):
        return head + struct.pack("<II", 4, value)
    return head + struct.pack("<IQ", 8, len(value)) + value.encode()


def header(*fields: bytes, tensors: int = 0, num_fields: int | None = None) -> bytes:
    count = len(fields) if num_fields is None else num_fields
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + b"".join(fields)


ARCH = "general.architecture"


def tensor(kind: int, size: int) -> bytes:
    """Encodes a header of one tensor `x`, a row of `size` values."""
    return header(tensors=1) + struct.pack("<Q1sIQIQ", 1, b"x", 1, size, kind, 0)


HOSTILE = {
    "nothing": (b"", "not a whole GGUF file"),
    "an old version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 "),
    "endless fields": (header(num_fields=2**60), "buffer is smaller"),
    "an endless name": (
        header(struct.pack("<Q", 2**63), num_fields=1), "int too large to convert"),
    "an endless array of numbers": (
        header(struct.pack("<Q1sIIQ", 1, b"x", 9, 4, 2**62)), "buffer is smaller"),
    "endless arrays of arrays": (
        header(struct.pack("<Q1sI", 1, b"x", 9) + struct.pack("<IQ", 9, 1) * 3000),
        "maximum recursion"),
    "a name that is no text": (header(field("ab", 1).replace(b"b", b"\xff")), "utf-8"),
    "a field twice": (header(field("a", 1), field("a", 2)), "Duplicate a "),
    "an alignment of 0": (header(field("general.alignment", 0)), "Invalid alignment"),
    "another family": (
        header(field(ARCH, "phi3")),
        "general.architecture='phi3', and llama, qwen2, qwen3 are read; take a model"),
    "no sizes": (header(field(ARCH, "llama")), "has no llama.context_length"),
    "a tensor of no kind": (
        tensor(16, 256) + bytes(128), "x is IQ2_XXS, and F32, F16"),
    "a tensor past the end": (tensor(0, 2**40), "not a whole GGUF file"),
    "blocks that are cut": (tensor(8, 33), "row size .33. is not a multiple of Q8_0"),
}  # fmt: skip


def assert_refused(path, words):
    """Fails unless loading raises an error of one line that names the file."""
    with pytest.raises(ValueError, match=f"a.gguf.*{words}") as error:
        sj.load(path, drafter="ngram")
    assert "\n" not in str(error.value)


def test_files_that_are_none_get_one_line(plain, tmp_path):
    whole, path = plain.read_bytes(), tmp_path / "a.gguf"
    cut = [(whole[: int(x * len(whole))], "buffer is smaller") for x in (0.1, 0.999)]
    for contents, words in (*HOSTILE.values(), *cut):
        path.write_bytes(contents)
        assert_refused(path, words)


def remove(name):
    return lambda writer: writer.kv_data[0].pop(name)


def state(name, value, kind="UINT32"):
    def change(writer):
        writer.kv_data[0].pop(name, None)
        writer.add_key_value(name, value, gguf.GGUFValueType[kind])

    return change


GGML = "tokenizer.ggml."
CHANGES = {
    "no tokenizer": (state(GGML + "model", "llama", "STRING"), "kind 'llama' with pre"),
    "another way to cut": (state(GGML + "pre", "tekken", "STRING"), "'tekken', and"),
    "no tokens": (remove(GGML + "tokens"), "no tokens, types and merges"),
    "an unknown stop token": (
        state(GGML + "eos_token_id", 4096), "eos_token_id=4096 of 4096 tokens"),
    "experts": (state("llama.expert_count", 8), "llama.expert_count=8 may change"),
    "more layers than weights": (state("llama.block_count", 3), "weights .* 2 layers"),
    "a tensor more": (
        lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(4, np.float32)),
        "unexpected tensors: model.layers.0.self_attn.q_proj.bias"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_files_that_contradict_themselves_get_one_line(name, tmp_path):
    change, words = CHANGES[name]
    assert_refused(write(tmp_path / "a.gguf", CONFIGS["llama"], change=change), words)


def test_without_the_package_one_line_names_the_extra(plain, monkeypatch):
    gguf_file._parse.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"gguf is not installed.*spec_jax\[gguf\]"):
        load.load(plain)


@pytest.mark.parametrize(
    ("model", "kind"),
    [("llama", "Q8_0"), slow("qwen3", "Q4_K"), slow("qwen2", "BF16")],
    indirect=["model"],
)
def test_parity_with_transformers(kind, model, tmp_path):
    """Fails if transformers gets other logits, tokens or ids from the same file."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)  # The models are too small for more.
    config, params = model
    path = write(tmp_path / "a.gguf", config, params, kind=kind)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    ).eval()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    lm = sj.load(path, drafter="ngram", dtype="float32")
    ids = lm.tokenizer.encode(TEXT)
    assert ids == words(TEXT, add_special_tokens=False).input_ids
    _, weights = load.load(path, dtype="float32")
    text = list(ids)
    with torch.no_grad():
        for _ in range(16):
            logits = oracle(torch.tensor([text])).logits[0]
            text.append(int(logits[-1].argmax()))
    ours = sequence.logits(weights, lm.target.config, jnp.asarray([text[:-1]]))[0]
    assert np.abs(np.asarray(ours) - logits.numpy()).max() < 1e-4
    found = sj.decode(lm, ids, max_tokens=16, stop=[4095])
    assert found.tokens == text[len(ids) :][: len(found.tokens)]
    assert len(found.tokens) == 16 or found.tokens[-1] == 4095
    # Negative control: another RoPE moves the logits by far more.
    other = dataclasses.replace(lm.target.config, rope_theta=100.0)
    moved = sequence.logits(weights, other, jnp.asarray([text[:-1]]))[0]
    assert np.abs(np.asarray(moved) - logits.numpy()).max() > 1e-3
