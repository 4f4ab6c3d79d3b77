"""Reads and writes published folders of DFlash, DSpark and DFlash2.

Knows the tensors' names, and writes `config.json` as each layout's own code does;
`block_dialects` reads it back.
"""

from typing import Any

from spec_jax.model import (
    block_dialects as dialects,
    block_params,
    config as config_lib,
    head_dialects,
    head_files,
    params as params_lib,
)


_NAMES = {
    **head_files.NAMES,
    **params_lib.layer_names("layers.{0}."),
    "hidden_norm": "hidden_norm",
    "markov.embed": "markov_head.markov_w1",
    "markov.out": "markov_head.markov_w2",
    "confidence": "confidence_head.proj",
    "confidence_bias": "confidence_head.proj.bias",
    **{
        f"layers.{x}_conv.{field}": f"layers.{{0}}.{x}_conv.{name}"
        for x in ("attention", "mlp")
        for field, name in (("base", "base_kernel"), ("kernels", "kernel_projection"))
    },
}
_SELECTOR = {
    "markov.embed": "candidate_selector.predecessor_codebook",
    "markov.out": "candidate_selector.successor_codebook",
    "markov.mix": "candidate_selector.hidden_projection",
}
_MIXES = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}


def _parts(
    config: block_params.BlockConfig, dialect: str, shapes: block_params.BlockParams
) -> block_params.BlockParams:
    """Implements `head_files.Family.names`: all layouts have the same."""
    del dialect
    mix = _MIXES.get(config.head, "")
    names = _NAMES | {"markov.mix": mix, "markov.mix_bias": f"{mix}.bias"}
    names |= _SELECTOR if config.head == "selector" else {}
    return params_lib.parts(shapes, names, config.layer)


def _causal(head: block_params.BlockConfig) -> bool | None:
    """Returns whether layers are causal; None: those with a window are."""
    is_usual = all(each.is_causal == (each.window > 0) for each in head.attention)
    return None if is_usual else head.attention[0].is_causal


def _of_heads(
    head: block_params.BlockConfig, dialect: dialects.Dialect, is_selector: bool
) -> dict[str, Any]:
    """Returns the keys of what chooses the tokens of slots."""
    if is_selector:
        return {
            "conv_kernel_size": dialects.CONV_TAPS,
            "conv_group_size": head.conv_group,
            "selector_rank": head.markov_rank,
            "selector_top_k": head.top_k,
        }
    if dialect == "z-lab" or (dialect == "speculators" and not head.has_dspark_heads):
        return {}  # DFlash's: the other layouts state that there are no heads.
    with_markov = head.confidence_with_markov
    keys: dict[str, Any] = {
        "markov_rank": head.markov_rank,
        "markov_head_type": head.head if head.markov_rank else None,
        "enable_confidence_head": head.has_confidence,
        "confidence_head_with_markov": with_markov if head.has_confidence else None,
    }
    if dialect == "specforge":
        is_mha = head.layer.num_heads == head.layer.num_kv_heads
        keys |= {
            "attention_mode": "mha" if is_mha else "gqa",
            "confidence_head_alpha": float(head.has_confidence),
            "projector_type": "dspark",
        }
    return keys


def to_dict(
    head: block_params.BlockConfig,
    dialect: dialects.Dialect,
    origin: head_dialects.Origin,
) -> dict[str, Any]:
    """Returns the `config.json` that `block_dialects.from_dict` reads back."""
    kind = "dspark" if head.has_dspark_heads else "dflash"
    kind = "dflash2" if head.head == "selector" else kind
    name = head_dialects.architecture_of(dialect, kind, dialects.ARCHITECTURES)
    is_selector = name == dialects.DFLASH2
    of_heads = _of_heads(head, dialect, is_selector)
    flat = {
        "num_target_layers": origin.target.num_layers,
        "block_size": head.block_size,
        "tie_word_embeddings": False,
    }
    inner = {
        "mask_token_id": head.mask_token_id,
        "target_layer_ids": [tap - 1 for tap in head.taps],
    }
    causal, is_first = _causal(head), head.slots == "anchor-first"
    windows = [head.attention_of(i).window for i in range(head.layer.num_layers)]
    layer = config_lib.to_dict(head.layer) | head_dialects.window_keys(windows)
    own: dict[str, Any] = {"architectures": [name]}
    if dialect == "speculators":
        about = head_dialects.speculators_config(kind, head.num_drafts, origin)
        own |= of_heads | {
            head_dialects.TYPE: kind,
            "speculators_config": about,
            "transformer_layer_config": layer,
            "draft_vocab_size": head.draft_vocab_size,
            "block_size": head.block_size,
            "mask_token_id": head.mask_token_id,
            "aux_hidden_state_layer_ids": list(head.taps),
            "sample_from_anchor": is_first,
            "sliding_window_non_causal": (
                causal is False or (False if is_selector else None)
            ),
            "torch_dtype": head.layer.dtype,
        }
        layer = {}
    elif dialect == "deepspec":
        own |= flat | inner | of_heads
        own |= {"num_anchors": origin.num_anchors, "is_causal": causal}
    else:
        # Left out where it is the layout's default; llama.cpp reads the outer one.
        is_usual = head.slots == dialects.SLOTS[dialect]
        flag = {"sample_from_anchor": None if is_usual else is_first}
        nested = of_heads | inner | flag
        nested |= {"causal": causal, "causal_head": causal or None}
        # No `auto_map`, which names a file of code that is not written.
        own |= flat | flag | {"dflash_config": head_dialects.stated(nested)}
    own |= {key: list(getattr(head, key)) or None for key in dialects.SCALINGS}
    return layer | head_dialects.stated(own)


FAMILY = head_files.Family(
    dialects=dialects.DIALECTS,
    whole=dialects.WHOLE,
    from_dict=dialects.from_dict,
    to_dict=to_dict,
    names=_parts,
    copies=("deepspec",),
    is_targets=True,
    zeros=("confidence_bias",),
)
load, save = FAMILY.load, FAMILY.save
