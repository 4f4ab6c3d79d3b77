"""The `config.json` of published EAGLE-3 heads, in three dialects.

midlayer      SafeAILab, SpecForge, AngelSlim: a flat config, no embedding
speculators   vLLM and Red Hat: the layer's config is nested
deepspec      DeepSeek: Qwen3's config, its norms of queries and keys, and copies of
              the target's embedding and head
"""

import json
import pathlib
import reprlib
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

from spec_jax.model import (
    checkpoint_files as files,
    config as config_lib,
    eagle3_params,
)


Dialect = Literal["midlayer", "speculators", "deepspec"]
DIALECTS: tuple[str, ...] = get_args(Dialect)

ARCHITECTURES: dict[str, Dialect] = {
    "LlamaForCausalLMEagle3": "midlayer",
    "Eagle3LlamaForCausalLM": "midlayer",
    "Eagle3Speculator": "speculators",
    "Eagle3DraftModel": "speculators",
    "Qwen3Eagle3Model": "deepspec",
}

_FLAGS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
BIASES = ("bias", "qkv_bias", "attention_bias", "mlp_bias")
_AUX = "eagle_aux_hidden_state_layer_ids"


def read_config(
    path: pathlib.Path,
    target: config_lib.ModelConfig,
    *,
    dtype: str | None = None,
) -> tuple[Dialect, eagle3_params.Eagle3Config]:
    """Reads a head's `config.json`.

    Args:
      target: the model that the head is for: which features are read follows from its
        layers, unless the file says so.
      dtype: of the weights; the target's if None.

    Raises:
      CheckpointError: the file cannot be read, is of an unknown dialect, asks for what
        is not supported, or is of a head for another target.
    """
    raw = read_object(path)
    try:
        dialect, config = _from_dict(raw, target, dtype or target.dtype)
        config.validate().check_target(target)
    except ValueError as error:
        raise files.CheckpointError(f"{path}: {error}") from None
    return dialect, config


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object that a file holds; raises `CheckpointError`."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise files.CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise files.CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise files.CheckpointError(f"{path}: not a JSON object")
    return raw


def _from_dict(
    raw: dict[str, Any], target: config_lib.ModelConfig, dtype: str
) -> tuple[Dialect, eagle3_params.Eagle3Config]:
    """`read_config` of what the file holds."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"architectures={reprlib.repr(names)} is no dialect of EAGLE-3 that is "
            f"known: {', '.join(ARCHITECTURES)}"
        )
    dialect = ARCHITECTURES[name]
    stated = raw.get("transformer_layer_config") if dialect == "speculators" else raw
    if not isinstance(stated, dict):
        raise ValueError("transformer_layer_config is not an object")
    for key in BIASES:
        if raw.get(key) or stated.get(key):
            raise ValueError(f"{key} is true: heads with biases are not supported")
    layer = layer_config(stated, dtype)
    has_head_norms = dialect == "deepspec"
    if dialect == "speculators":
        has_head_norms = stated.get("model_type") == "qwen3"
    flags = {key: raw.get(key) or False for key in _FLAGS}
    for key, flag in flags.items():
        if type(flag) is not bool:
            raise ValueError(f"{key}={reprlib.repr(flag)} must be true or false")
    if dialect == "deepspec":
        if any(flags.values()):
            raise ValueError(f"{', '.join(f for f in flags if flags[f])}: not of heads")
        draft_vocab_size = layer.vocab_size
    else:
        draft_vocab_size = raw.get("draft_vocab_size") or layer.vocab_size
    width = raw.get("target_hidden_size") or layer.hidden_size
    for key, size in (("draft_vocab_size", draft_vocab_size), ("target_hidden", width)):
        if type(size) is not int:
            raise ValueError(f"{key}={reprlib.repr(size)} must be a whole number")
    return dialect, eagle3_params.Eagle3Config(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=width,
        taps=_taps(raw, dialect, target),
        has_head_norms=has_head_norms,
        **flags,
    )


def layer_config(stated: Mapping[str, Any], dtype: str) -> config_lib.Qwen3Config:
    """Returns what the layers of a head have in common with a Qwen3 model.

    `tie_word_embeddings` is not used: heads with an output projection of their own
    state it too.
    """
    raw = dict(stated) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": False,
    }
    if raw.get("head_dim") is None:  # As Llama has it.
        width, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
        if not (type(width) is type(heads) is int and heads > 0 and not width % heads):
            raise ValueError(
                f"no head_dim, and hidden_size={reprlib.repr(width)} is no multiple of "
                f"num_attention_heads={reprlib.repr(heads)}; state head_dim"
            )
        raw["head_dim"] = width // heads
    return cast(config_lib.Qwen3Config, config_lib.from_dict(raw, dtype=dtype))


def _taps(
    raw: Mapping[str, Any], dialect: Dialect, target: config_lib.ModelConfig
) -> tuple[int, ...]:
    """The `hidden_states` indices that a config names, in any of its spellings."""
    if dialect == "deepspec":
        # Numbers of layers, whose outputs are the features; -1 is the embedding.
        key, ids, shift = "target_layer_ids", raw.get("target_layer_ids"), 1
    else:
        nested = raw.get("eagle_config") or {}
        key, ids, shift = _AUX, raw.get(_AUX) or nested.get(_AUX), 0
        if ids is None:
            return eagle3_params.default_taps(target.num_layers)
    return layer_ids(key, ids, shift=shift)


def layer_ids(key: str, ids: Any, *, shift: int) -> tuple[int, ...]:
    """Returns `hidden_states` indices, of numbers that are `shift` below them.

    Raises:
      ValueError: no list of whole numbers.
    """
    if not isinstance(ids, list) or not all(type(number) is int for number in ids):
        raise ValueError(f"{key}={reprlib.repr(ids)} must be a list of layers")
    return tuple(number + shift for number in ids)


def check_config(config: eagle3_params.Eagle3Config, dialect: Dialect) -> None:
    """Passes if a dialect can describe the head.

    Raises:
      ValueError: no such dialect, or a head that it has no words for.
    """
    if dialect not in DIALECTS:
        raise ValueError(f"{dialect=} is not one of {', '.join(DIALECTS)}")
    config.validate()
    if dialect == "midlayer" and config.has_head_norms:
        raise ValueError(
            "norms of queries and keys: not of midlayer, but of the others"
        )
    if dialect == "deepspec":
        if not config.has_head_norms or any(getattr(config, flag) for flag in _FLAGS):
            raise ValueError(
                "deepspec has norms of queries and keys, and no others; choose "
                "speculators"
            )
        if config.draft_vocab_size != config.layer.vocab_size:
            raise ValueError("deepspec has the whole vocabulary; choose speculators")


def to_dict(config: eagle3_params.Eagle3Config, dialect: Dialect) -> dict[str, Any]:
    """Returns the `config.json` that `read_config` reads back."""
    layer = config_lib.to_dict(config.layer)
    if not config.has_head_norms:
        layer |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if dialect == "deepspec":
        return layer | {
            "architectures": ["Qwen3Eagle3Model"],
            "target_layer_ids": [tap - 1 for tap in config.taps],
            "target_hidden_size": config.target_hidden_size,
            "tie_word_embeddings": False,
        }
    own = {key: getattr(config, key) for key in _FLAGS}
    own |= {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
    }
    taps = list(config.taps)
    if dialect == "midlayer":
        eagle = {"use_aux_hidden_state": True, _AUX: taps}
        architectures = ["LlamaForCausalLMEagle3"]
        return layer | own | {"architectures": architectures, "eagle_config": eagle}
    return own | {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        _AUX: taps,
        "torch_dtype": config.layer.dtype,
    }
