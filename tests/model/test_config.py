"""Configs: both spellings are read, nothing is derived, nothing is guessed."""

import dataclasses
import json
import pathlib

import pytest

from spec_jax.model import config as config_lib, params as params_lib


RELEASED = (
    pathlib.Path(__file__).parents[2].parent / "shared" / "data" / "configs" / "qwen3"
)

OLD = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
NEW = {
    key: value
    for key, value in OLD.items()
    if key not in ("rope_theta", "rope_scaling", "torch_dtype")
} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    "dtype": "bfloat16",
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}


def without(raw: dict, *keys: str) -> dict:
    return {key: value for key, value in raw.items() if key not in keys}


def test_old_and_new_spelling_agree():
    assert config_lib.from_dict(OLD) == config_lib.from_dict(NEW)
    assert config_lib.from_dict(OLD).rope_theta == 1e6


def test_new_rope_spelling_wins():
    raw = OLD | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
    assert config_lib.from_dict(raw).rope_theta == 5e6


@pytest.mark.parametrize(
    "raw",
    [
        OLD | {"rope_scaling": YARN},
        OLD | {"rope_scaling": without(YARN, "rope_type") | {"type": "yarn"}},
        OLD | {"rope_scaling": YARN | {"type": "yarn", "beta_fast": None}},
        NEW | {"rope_parameters": YARN | {"rope_theta": 1000000}},
    ],
    ids=["old", "older", "nulls", "new"],
)
def test_yarn(raw):
    yarn = config_lib.YarnScaling(factor=4.0, original_max_position_embeddings=32768)
    config = config_lib.from_dict(raw)
    assert config.yarn == yarn
    assert (yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (32.0, 1.0, True)
    assert config.rope_theta == 1e6
    assert config_lib.from_dict(config_lib.to_dict(config)) == config


def test_yarn_takes_its_length_from_the_config():
    raw = OLD | {"rope_scaling": without(YARN, "original_max_position_embeddings")}
    assert config_lib.from_dict(raw).yarn.original_max_position_embeddings == 40960


def test_head_dim_is_never_derived():
    """Fails if `hidden_size / num_heads` (64 here) stands in for what is stated."""
    config = config_lib.from_dict(OLD)
    assert config.head_dim == 128
    assert config.attention_size == 2048 != config.hidden_size
    assert config.qkv_size == (16 + 2 * 8) * 128
    with pytest.raises(ValueError, match="missing keys: head_dim"):
        config_lib.from_dict(without(OLD, "head_dim"))


@pytest.mark.parametrize("key", ["vocab_size", "num_hidden_layers", "hidden_size"])
def test_missing_keys(key):
    with pytest.raises(ValueError, match=f"missing keys: {key}"):
        config_lib.from_dict(without(OLD, key))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "only dense Qwen3ForCausalLM"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"model_type": "qwen2"}, "model_type='qwen2'"),
        ({"architectures": None}, r"architectures=\[\]"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"num_attention_heads": 15}, "num_attention_heads=15 must be a multiple"),
        ({"head_dim": 127}, "head_dim=127 must be even"),
        ({"hidden_size": 0}, "hidden_size=0 must be a positive integer"),
        ({"hidden_size": 1024.0}, "hidden_size=1024.0 must be a positive integer"),
        ({"num_hidden_layers": True}, "num_layers=True must be a positive integer"),
        ({"torch_dtype": "float16"}, "dtype='float16' is not one of"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope type 'llama3'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "needs a factor"),
        ({"rope_scaling": YARN | {"wavelength": 1}}, "needs a factor and only"),
    ],
)
def test_refused(change, message):
    with pytest.raises(ValueError, match=message):
        config_lib.from_dict(OLD | change)


def test_dtype_override():
    """Also of a dtype that could not be used as it stands."""
    raw = OLD | {"torch_dtype": "float16"}
    assert config_lib.from_dict(raw, dtype="float32").dtype == "float32"
    with pytest.raises(ValueError, match="dtype='int8'"):
        config_lib.from_dict(OLD, dtype="int8")


def test_config_is_static():
    """Configs are hashed as jit's static arguments: fails on a list or dict field."""
    config = config_lib.from_dict(OLD | {"rope_scaling": YARN})
    assert hash(config) == hash(dataclasses.replace(config))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json: not valid JSON"),
        ("[]", "config.json: not a JSON object"),
        ("{}", "config.json: architectures="),
        (json.dumps(OLD | {"rope_scaling": 3}), "config.json: "),
        (json.dumps(OLD | {"rms_norm_eps": []}), "config.json: "),
    ],
)
def test_errors_name_the_file(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        config_lib.read(path)


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match="config.json: no such file"):
        config_lib.read(tmp_path / "config.json")


@pytest.mark.skipif(not RELEASED.exists(), reason=f"{RELEASED.name} configs not here")
@pytest.mark.parametrize(
    ("size", "num_bytes", "tied"),
    [
        ("0.6B", 1_192_099_840, True),
        ("1.7B", 3_441_149_952, True),
        ("4B", 8_044_936_192, True),
        ("8B", 16_381_470_720, False),
    ],
)
def test_released_configs(size, num_bytes, tied):
    """The bytes are those of the published files: fails on any wrong shape."""
    path = RELEASED / f"Qwen3-{size}.config.json"
    config = config_lib.read(path)
    assert config.tie_word_embeddings is tied
    assert config.dtype == "bfloat16"
    assert params_lib.num_bytes(params_lib.shapes(config)) == num_bytes
    assert config_lib.from_dict(config_lib.to_dict(config)) == config
    stated = json.loads(path.read_text())
    written = config_lib.to_dict(config)
    assert written == {key: stated[key] for key in written}
