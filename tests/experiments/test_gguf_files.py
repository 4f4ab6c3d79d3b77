"""Models as GGUF files: read back, their weights and tokens are the model's."""

import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny_pair
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from experiments.lib import gguf_files
from spec_jax import loading
from spec_jax.model import gguf_tokenizer, load, tokenizer


gguf = pytest.importorskip("gguf")

TEXT = "def first(x):\n    return 'caf\u00e9', [x for x in range(10)]\n\n\n# \u2192"

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Hugging Face's names and GGUF's, written from both formats."""


def gguf_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if name.startswith("model.layers."):
        number, _, part = name.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{NAMES[part]}.weight"
    return f"{NAMES[name]}.weight"


def written(path, folder):
    """What `folder`'s model is as a GGUF file: its fields and its tensors."""
    config, params = load.load(folder)
    gguf_files.write(path, config, params, tokenizer.load(folder))
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return config, fields, {tensor.name: tensor for tensor in reader.tensors}


def assert_same_tensors(folder, tensors):
    """Bit for bit those of the folder's file, norms widened."""
    held = safetensors.numpy.load_file(folder / "model.safetensors")
    assert {gguf_name(name) for name in held} == set(tensors)
    for name, array in held.items():
        found = tensors[gguf_name(name)]
        assert list(found.shape) == [*reversed(array.shape)]
        wanted = array.astype(np.float32) if array.ndim == 1 else array
        kind = "F32" if wanted.itemsize == 4 else "BF16"
        assert found.tensor_type.name == kind
        bits = [np.ascontiguousarray(x).view(np.uint8) for x in (found.data, wanted)]
        assert np.array_equal(*(x.reshape(-1) for x in bits)), name


def test_the_embedded_draft_is_read_back(tmp_path):
    """Fails if a bit, a size, a token or a merge is another."""
    folder = loading.EMBEDDED_DRAFT
    config, fields, tensors = written(tmp_path / "draft.gguf", folder)
    assert_same_tensors(folder, tensors)
    wanted = {
        "general.architecture": "qwen3",
        "qwen3.block_count": config.num_layers,
        "qwen3.embedding_length": config.hidden_size,
        "qwen3.feed_forward_length": config.intermediate_size,
        "qwen3.attention.head_count": config.num_heads,
        "qwen3.attention.head_count_kv": config.num_kv_heads,
        "qwen3.attention.key_length": config.head_dim,
        "qwen3.attention.value_length": config.head_dim,
        "qwen3.context_length": config.max_position_embeddings,
        "qwen3.rope.freq_base": config.rope_theta,
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": 0,
    }
    assert {name: fields[name] for name in wanted} == wanted
    eps = fields["qwen3.attention.layer_norm_rms_epsilon"]
    assert eps == np.float32(config.rms_norm_eps)
    ours = tokenizer.load(folder)
    rebuilt = rebuild(fields)
    assert rebuilt.encode(TEXT).ids == ours.encode(TEXT)
    assert len(ours.encode(TEXT)) < len(TEXT.encode()) / 2
    # Negative control: without the last merges other tokens come out.
    fields["tokenizer.ggml.merges"] = fields["tokenizer.ggml.merges"][:40]
    assert rebuild(fields).encode(TEXT).ids != ours.encode(TEXT)


def rebuild(fields) -> tokenizers.Tokenizer:
    """A tokenizer of what a file says, as llama.cpp understands "gpt-2"."""
    vocab = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def test_float32_and_rows_without_a_token(tmp_path, folders):
    config, fields, tensors = written(tmp_path / "target.gguf", folders[0])
    assert config.dtype == "float32"
    assert_same_tensors(folders[0], tensors)
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == tiny_pair.VOCAB_SIZE == len(set(tokens))
    assert kinds[0] == gguf.TokenType.CONTROL and tokens[0] == tiny_pair.END_OF_TEXT
    assert set(kinds[1:257]) == {gguf.TokenType.NORMAL}
    assert set(kinds[257:]) == {gguf.TokenType.UNUSED}


def test_a_changed_weight_is_seen(tmp_path, folders):
    """Negative control of the comparison of bits."""
    _, _, tensors = written(tmp_path / "target.gguf", folders[0])
    config, params = load.load(folders[0])
    # One bit of one weight.
    layers = list(params.layers)
    bits = np.array(layers[1].down).view(np.uint32)
    bits[3, 4] ^= 1
    layers[1] = layers[1].replace(down=jax.numpy.asarray(bits.view(np.float32)))
    changed = tmp_path / "changed"
    load.save(changed, config, params.replace(layers=tuple(layers)))
    with pytest.raises(AssertionError, match=r"model.layers.1.mlp.down_proj"):
        assert_same_tensors(changed, tensors)


def of_qwen(pattern=gguf_tokenizer.PATTERNS["qwen2"], **changes):
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    split |= {"invert": False} | changes
    last = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    steps = {"type": "Sequence", "pretokenizers": [split, last]}
    return {"normalizer": {"type": "NFC"}, "pre_tokenizer": steps}


def with_digits(*others) -> dict:
    digits = {"type": "Digits", "individual_digits": True}
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, *others]}}


def test_pre_tokenizers():
    assert gguf_files.pre_tokenizer(of_qwen(), "x") == "qwen2"
    plain = {"pre_tokenizer": {"type": "ByteLevel", "use_regex": True}}
    assert gguf_files.pre_tokenizer(plain, "x") == "gpt-2"
    assert gguf_files.pre_tokenizer(with_digits(plain["pre_tokenizer"]), "x") == "smollm"


@pytest.mark.parametrize(
    "raw",
    [
        of_qwen(pattern=r"\w+"),
        of_qwen() | {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}},
        with_digits(),
        with_digits(*of_qwen()["pre_tokenizer"]["pretokenizers"]),
    ],
)
def test_other_pre_tokenizers_are_refused(raw):
    """Fails if a text would be cut into other words there than here."""
    with pytest.raises(ValueError, match="x: a pre-tokenizer that is not known"):
        gguf_files.pre_tokenizer(raw, "x")
