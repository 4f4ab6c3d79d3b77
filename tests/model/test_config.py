"""Configs: old and new spellings are read; missing values are refused, not guessed."""

import json
import math
import os

import numpy as np
import pytest

from spec_jax.model import (
    checkpoint_files,
    config as config_lib,
    families,
    params as params_lib,
)


OLD = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "hidden_act": "silu",
    "attention_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "rope_scaling": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}  # fmt: skip
NEW = OLD | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    "dtype": "bfloat16",
}
for key in ("rope_theta", "rope_scaling", "torch_dtype"):
    del NEW[key]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def without(raw: dict, *keys: str) -> dict:
    return {key: value for key, value in raw.items() if key not in keys}


def test_old_and_new_spelling_agree():
    assert config_lib.from_dict(OLD) == config_lib.from_dict(NEW)
    assert config_lib.from_dict(OLD).rope_theta == 1e6


def test_the_smallest_released_model_has_its_size():
    """Fails if a shape is wrong: the bytes must be as many as in the published file."""
    shapes = params_lib.shapes(config_lib.from_dict(OLD))
    assert params_lib.num_bytes(shapes) == 1_192_099_840


def test_head_dim_is_never_derived():
    """Fails if `hidden_size / num_heads` (64 here) replaces the stated `head_dim`."""
    config = config_lib.from_dict(OLD)
    assert config.head_dim == 128
    assert config.attention_size == 2048 != config.hidden_size
    assert config.qkv_size == (16 + 2 * 8) * 128
    with pytest.raises(ValueError, match="missing keys: head_dim"):
        config_lib.from_dict(without(OLD, "head_dim"))


REFUSED = [
    ({"architectures": ["LlamaForCausalLM"]}, "families are GPTNeoX.*Qwen3ForCaus"),
    ({"model_type": "qwen2"}, "model_type='qwen2'"),
    ({"architectures": None}, r"architectures=\[\]"),
    ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
    ({"num_attention_heads": 15}, "num_attention_heads=15 must be a multiple"),
    ({"head_dim": 127}, "head_dim=127 must be even"),
    ({"hidden_size": 1024.0}, "hidden_size=1024.0 must be a positive integer"),
    ({"num_hidden_layers": True}, "num_hidden_layers=True must be a positive int"),
    ({"vocab_size": 2**31}, "vocab_size=2147483648 must be .* at most 2147483647"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan must be a positive number"),
    ({"rope_theta": 10**400}, "rope_theta=.* must be a positive number"),
    ({"rope_theta": 1e39}, r"rope_theta=1e\+39 must be .* range of float32"),
    ({"rope_scaling": YARN, "rope_theta": 1}, "rope_theta=1.0 must be above 1"),
    ({"rope_scaling": "yarn"}, "rope_scaling='yarn' must be an object or null"),
    ({"rope_scaling": YARN | {"factor": math.nan}}, "yarn factor=nan must be a p"),
    ({"rope_scaling": YARN | {"truncate": None}}, "yarn truncate=None must be tr"),
    ({"rope_scaling": YARN | {"wavelength": 1}}, "has wavelength: yarn needs a"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "has no factor: yarn needs a fac"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear'"),
    ({"rope_scaling": {"full_attention": YARN}}, r"rope_scaling has .*\(full_atten"),
    ({"eos_token_id": [5, -1]}, r"eos_token_id=\[5, -1\] must be token ids"),
    ({"quantization_config": {"bits": 4}}, "quantised weights are not supported; take"),
    ({"torch_dtype": "float16"}, "dtype='float16' is not one of"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refused(change, message):
    with pytest.raises(ValueError, match=message):
        config_lib.from_dict(OLD | change)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        (json.dumps(OLD | {"rope_scaling": 3}), "rope_scaling=3"),
    ],
)
def test_errors_name_the_file(tmp_path, text, message):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        config_lib.read(path)


DEFAULT = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}
BOTH = DEFAULT | {"rope_scaling": YARN}


@pytest.mark.parametrize(
    "stated",
    [
        BOTH,
        DEFAULT | {"rope_scaling": None},
        BOTH | {"rope_theta": 700.0},
        BOTH | {"rope_scaling": YARN | {"rope_theta": 300.0}, "rope_theta": 700.0},
        {"rope_parameters": YARN | {"rope_theta": 5e3},
         "rope_scaling": {"rope_type": "default"}, "rope_theta": 700.0},
        {"rope_scaling": YARN, "original_max_position_embeddings": 16384},
        {"rope_scaling": {"type": "yarn", "factor": 2}},
        {"rope_scaling": YARN | {"truncate": False, "beta_fast": 8, "mscale": 2.0}},
        {"rope_scaling": YARN | {"mscale": 2.0, "mscale_all_dim": 1.5}},
        {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0}},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": YARN | {"factor": 0.5}},
        {"rope_scaling": YARN | {"type": "yarn", "beta_fast": None}},
        {"rope_parameters": YARN | {"rope_theta": 1000000}},
    ],
)  # fmt: skip
def test_rope_is_that_of_hugging_face(tmp_path, stated):
    """Compares the frequencies and their scale, from the same file. Fails if YaRN is
    dropped where both spellings are present, if the base is read from the wrong key, or
    if a config that is written is read as another.
    """
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3 import modeling_qwen3

    base = without(OLD, "rope_theta", "rope_scaling") | {"num_hidden_layers": 1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(base | stated))
    theirs = modeling_qwen3.Qwen3RotaryEmbedding(
        transformers.AutoConfig.from_pretrained(tmp_path)
    )
    config = config_lib.read(path)
    frequencies, scale = families.of(config).rope_table(config)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-12)
    np.testing.assert_allclose(frequencies, theirs.inv_freq.numpy(), rtol=1e-6)
    assert config_lib.from_dict(config_lib.to_dict(config)) == config
    assert hash(config)  # `jit` hashes its static arguments.


def test_dtype_override():
    """Checks that a dtype replaces the file's, even one that is not supported."""
    raw = OLD | {"torch_dtype": "float16"}
    assert config_lib.from_dict(raw, dtype="float32").dtype == "float32"
    with pytest.raises(ValueError, match="dtype='int8'"):
        config_lib.from_dict(OLD, dtype="int8")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", config_lib.read),
        (checkpoint_files.INDEX_FILE, lambda path: checkpoint_files.find(path.parent)),
    ],
)
def test_devices_and_pipes_are_not_read(tmp_path, name, read):
    """Fails, by never ending, if a device is read or a pipe is waited for."""
    path = tmp_path / name
    for make in (lambda: path.symlink_to("/dev/zero"), lambda: os.mkfifo(path)):
        make()
        with pytest.raises(ValueError, match=f"{name}: is a device or a pipe"):
            read(path)
        path.unlink()
