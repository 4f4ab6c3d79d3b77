"""Writes the `config.json` of block drafters, as each layout's own code does.

`block_dialects` reads it back.
"""

from collections.abc import Mapping
from typing import Any

from spec_jax.model import (
    block_dialects as dialects,
    block_params,
    config as config_lib,
    head_dialects,
)


def _layer(head: block_params.BlockConfig) -> dict[str, Any]:
    """Returns the config of a model of the drafter's layers."""
    windows = [head.attention_of(i).window for i in range(head.layer.num_layers)]
    return config_lib.to_dict(head.layer) | head_dialects.window_keys(windows)


def _unusual(dialect: dialects.Dialect) -> Any:
    """Makes a function of a head: None for the layout's default slots, else a flag."""
    return lambda head, _: (
        None if head.slots == dialects.SLOTS[dialect] else head.slots == "anchor-first"
    )


def _attention(head: block_params.BlockConfig, origin: Any) -> str:
    return "mha" if head.layer.num_heads == head.layer.num_kv_heads else "gqa"


_FLAT: head_dialects.Keys = {
    "num_target_layers": lambda _, origin: origin.target.num_layers,
    "block_size": lambda head, _: head.block_size,
    "tie_word_embeddings": False,
}
_INNER: head_dialects.Keys = {
    "mask_token_id": lambda head, _: head.mask_token_id,
    "target_layer_ids": lambda head, _: [tap - 1 for tap in head.taps],
}
_HEADS: head_dialects.Keys = {
    "markov_rank": lambda head, _: head.markov_rank,
    "markov_head_type": lambda head, _: head.head if head.markov_rank else None,
    "enable_confidence_head": lambda head, _: head.has_confidence,
    "confidence_head_with_markov": lambda head, _: (
        head.confidence_with_markov if head.has_confidence else None
    ),
}


_DFLASH2_KEYS: head_dialects.Keys = {
    "conv_kernel_size": dialects.CONV_TAPS,
    "conv_group_size": lambda head, _: head.conv_group,
    "selector_rank": lambda head, _: head.markov_rank,
    "selector_top_k": lambda head, _: head.top_k,
}


def _nested(dialect: dialects.Dialect, keys: head_dialects.Keys) -> head_dialects.Keys:
    """Returns a layout with `dflash_config`; llama.cpp reads the flag beside it."""
    flag: head_dialects.Keys = {"sample_from_anchor": _unusual(dialect)}
    causal: head_dialects.Keys = {
        "causal": lambda head, _: dialects.causal_flag(head),
        "causal_head": lambda head, _: dialects.causal_flag(head) or None,
    }
    inner = keys | _INNER | flag | causal
    return (
        _FLAT | flag | {"dflash_config": lambda *told: head_dialects.fill(inner, *told)}
    )


def _speculators(kind: str, keys: head_dialects.Keys) -> head_dialects.Keys:
    return keys | {
        dialects.TYPE: kind,
        "speculators_config": lambda head, origin: head_dialects.speculators_config(
            kind, head.num_drafts, origin
        ),
        "transformer_layer_config": lambda head, _: _layer(head),
        "draft_vocab_size": lambda head, _: head.draft_vocab_size,
        "block_size": _FLAT["block_size"],
        "mask_token_id": _INNER["mask_token_id"],
        "aux_hidden_state_layer_ids": lambda head, _: list(head.taps),
        "sample_from_anchor": lambda head, _: head.slots == "anchor-first",
        "sliding_window_non_causal": lambda head, _: (
            (dialects.causal_flag(head) is False)
            or (False if kind == "dflash2" else None)
        ),
        "torch_dtype": lambda head, _: head.layer.dtype,
    }


_KEYS: Mapping[str, head_dialects.Keys] = {
    # No `auto_map`, which names a file of code that is not written.
    "DFlashDraftModel": _nested("z-lab", {}),
    "DSparkDraftModel": _nested(
        "specforge",
        _HEADS
        | {
            "attention_mode": _attention,
            "confidence_head_alpha": lambda head, _: float(head.has_confidence),
            "projector_type": "dspark",
        },
    ),
    "Qwen3DSparkModel": {
        **_FLAT,
        **_INNER,
        **_HEADS,
        "num_anchors": lambda _, origin: origin.num_anchors,
        "is_causal": lambda head, _: dialects.causal_flag(head),
    },
    "DFlashSpeculator": _speculators("dflash", {}),
    "DSparkSpeculator": _speculators("dspark", _HEADS),
    f"z-lab {dialects.DFLASH2}": _nested("z-lab", _DFLASH2_KEYS),
    f"speculators {dialects.DFLASH2}": _speculators("dflash2", _DFLASH2_KEYS),
}
"""Keys that each layout's own code writes beside the layers' keys, by architecture."""


def to_dict(
    config: block_params.BlockConfig,
    dialect: dialects.Dialect,
    origin: head_dialects.Origin,
) -> dict[str, Any]:
    """Returns the `config.json` that `read_config` reads back."""
    names = [
        name
        for name, known in dialects.ARCHITECTURES.items()
        if known == dialect and name != dialects.DFLASH2
    ]
    name = names[-1 if config.has_dspark_heads else 0]  # Speculators has two.
    table = _KEYS[name]
    if config.head == "selector":
        name, table = dialects.DFLASH2, _KEYS[f"{dialect} {dialects.DFLASH2}"]
    layer = {} if dialect == "speculators" else _layer(config)
    scalings = {key: list(getattr(config, key)) or None for key in dialects.SCALINGS}
    keys = {"architectures": [name], **table, **scalings}
    return layer | head_dialects.fill(keys, config, origin)
