"""Reads and writes published folders of EAGLE-3 heads, in three dialects.

midlayer      SafeAILab, SpecForge, AngelSlim: a flat config, no embedding
speculators   vLLM and Red Hat: the layer's config is nested
deepspec      DeepSeek: Qwen3's config, its norms of queries and keys, and copies of
              the target's embedding and head

midlayer and speculators have parallel heads, too, under one name in `architectures`.
SpecForge's have the names of speculators' tensors, and no key for the mask's token.
"""

import reprlib
from collections.abc import Mapping
from typing import Any, Literal, get_args

from spec_jax.model import (
    config as config_lib,
    eagle3_params,
    head_dialects,
    head_files,
    params as params_lib,
)


Dialect = Literal["midlayer", "speculators", "deepspec"]
DIALECTS: tuple[str, ...] = get_args(Dialect)

WHOLE: tuple[Dialect, ...] = ("deepspec",)
"""Dialects whose heads have the target's whole vocabulary."""

# Parallel heads without speculators' type are SpecForge's, midlayers.
_PARALLEL = ("peagle", "speculators", "midlayer")
ARCHITECTURES: dict[str, head_dialects.Architecture] = {
    "LlamaForCausalLMEagle3": ("eagle3", "midlayer", "midlayer"),
    "Eagle3LlamaForCausalLM": ("eagle3", "midlayer", "midlayer"),
    "Eagle3DraftModel": ("eagle3", "speculators", "speculators"),
    "Eagle3Speculator": ("eagle3", "speculators", "speculators"),
    "Qwen3Eagle3Model": ("eagle3", "deepspec", "deepspec"),
    "PEagleDraftModel": _PARALLEL,
    "PEagleSpeculator": _PARALLEL,
}
_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Keys of the mask's token: one of speculators, two that vLLM reads in flat configs."""

_FLAGS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
_SHARES = "load_lm_head_from_target"
"""SGLang's name for a head without an output projection in its file, which no format of
others states; here one with a draft vocabulary takes its rows."""

_AUX = "eagle_aux_hidden_state_layer_ids"


def _from_dict(
    raw: dict[str, Any], target: config_lib.ModelConfig, dtype: str
) -> tuple[Dialect, eagle3_params.Eagle3Config]:
    """Returns what a file's contents say, of the weights' dtype."""
    what = "dialect of EAGLE-3"
    dialect, kind = head_dialects.dialect_of(raw, ARCHITECTURES, what)
    mask = head_dialects.agreed(raw, _MASKS, int) if kind == "peagle" else None
    if kind == "peagle" and mask is None:
        raise ValueError(
            "no mask_token_id: state the token of the masks that the head was trained "
            "with"
        )
    is_whole = dialect in WHOLE
    stated, layer, draft_vocab_size, width = head_dialects.sizes(
        raw, dialect, target, dtype, is_whole=is_whole
    )
    flags = {key: head_dialects.value(raw, key, bool, default=False) for key in _FLAGS}
    window, *others = set(head_dialects.windows(stated, layer.num_layers)) or {0}
    if others:
        raise ValueError(
            f"layer_types={reprlib.repr(stated.get('layer_types'))}: all layers of a "
            "head slide, or none"
        )
    is_qwen = dialect == "speculators" and stated.get("model_type") == "qwen3"
    return dialect, eagle3_params.Eagle3Config(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=width,
        taps=_taps(raw, dialect, target),
        has_head_norms=is_whole or is_qwen,
        window=window,
        shares_head=head_dialects.value(raw, _SHARES, bool, default=False),
        mask_token_id=mask,
        **flags,
    )


def _taps(
    raw: Mapping[str, Any], dialect: Dialect, target: config_lib.ModelConfig
) -> tuple[int, ...]:
    """Reads the `hidden_states` indices that a config names, in any spelling."""
    if dialect == "deepspec":
        # Indices of layers whose outputs are the features; -1 is the embedding.
        key, ids, shift = "target_layer_ids", raw.get("target_layer_ids"), 1
    else:
        nested = raw.get("eagle_config") or {}
        if not isinstance(nested, dict):
            raise ValueError(
                f"eagle_config={reprlib.repr(nested)} must be an object or null"
            )
        key, ids, shift = _AUX, raw.get(_AUX) or nested.get(_AUX), 0
        if ids and nested.get(_AUX, ids) != ids:
            raise ValueError(
                f"{_AUX}={reprlib.repr(ids)}, and in eagle_config "
                f"{reprlib.repr(nested[_AUX])}: remove the wrong one"
            )
        if ids is None:
            return eagle3_params.default_taps(target.num_layers)
    return head_dialects.layer_ids(key, ids, shift=shift)


def _layer(head: eagle3_params.Eagle3Config) -> dict[str, Any]:
    """Returns the config of a model that has the head's layers."""
    layer = config_lib.to_dict(head.layer)
    if head.window:
        layer |= head_dialects.window_keys([head.window] * head.layer.num_layers)
    if head.has_head_norms:
        return layer
    return layer | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def to_dict(
    head: eagle3_params.Eagle3Config, dialect: Dialect, origin: head_dialects.Origin
) -> dict[str, Any]:
    """Returns the `config.json` that `_from_dict` reads back, with the keys that the
    dialect's own code writes."""
    kind = "peagle" if head.is_parallel else "eagle3"
    name = head_dialects.architecture_of(dialect, kind, ARCHITECTURES)
    flags = {flag: getattr(head, flag) for flag in _FLAGS}
    layer, taps = _layer(head), list(head.taps)
    sizes = {
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": head.target_hidden_size,
        _AUX: taps,
    }
    own: dict[str, Any] = {"architectures": [name]}
    if dialect == "deepspec":
        own |= {
            "num_target_layers": origin.target.num_layers,
            "target_layer_ids": [tap - 1 for tap in taps],
            "target_model_name_or_path": origin.target_name,
            "draft_num_hidden_layers": 1,
            "layer_types": head_dialects.window_keys([head.window])["layer_types"],
            "step_loss_decay": origin.step_loss_decay,
            "ttt_length": origin.ttt_length,
            "tie_word_embeddings": False,
        }
    elif dialect == "midlayer":
        # Left out if false: SpecForge up to 0.2.0 runs no final norm at all where
        # `norm_output` is stated as false.
        shares = {_SHARES: head.shares_head and not head.is_parallel}
        own |= {"mask_token_id": head.mask_token_id, **flags, **shares, **sizes}
        own = {key: None if value is False else value for key, value in own.items()}
        # SGLang and vLLM read the list in here, llama.cpp the one beside it.
        own["eagle_config"] = {"use_aux_hidden_state": True, _AUX: taps}
    else:
        about = head_dialects.speculators_config(kind, origin.ttt_length, origin)
        own |= {
            head_dialects.TYPE: kind,
            "speculators_config": about,
            "mask_token_id": head.mask_token_id,
            "transformer_layer_config": layer,
            **flags,
            **sizes,
            "torch_dtype": head.layer.dtype,
        }
        layer = {}
    return layer | head_dialects.stated(own)


_NAMES = (
    head_files.NAMES
    | {
        "features_norm": "input_norm",
        "fc_norms": "fc_norm.{0}",
        "mask_hidden": "mask_hidden",
    }
    | params_lib.layer_names("layers.{0}.", path="more.")
)


def _parts(
    config: eagle3_params.Eagle3Config, dialect: str, shapes: eagle3_params.Eagle3Params
) -> eagle3_params.Eagle3Params:
    """Implements `head_files.Family.names`."""
    is_middle = dialect == "midlayer" and not config.is_parallel
    prefix = "midlayer." if is_middle else "layers.0."
    names = _NAMES | params_lib.layer_names(prefix, path="")
    # The first layer's fields are the head's own.
    made = params_lib.parts(
        shapes.replace(more=(None, *shapes.more)),
        names | {"hidden_norm": f"{prefix}hidden_norm"},
        config.layer,
    )
    return made.replace(more=made.more[1:])


FAMILY = head_files.Family(
    dialects=DIALECTS,
    whole=WHOLE,
    from_dict=_from_dict,
    to_dict=to_dict,
    names=_parts,
    copies=("speculators", "deepspec"),
)
load, save = FAMILY.load, FAMILY.save
