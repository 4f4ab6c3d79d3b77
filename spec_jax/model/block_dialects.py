"""Reads the `config.json` of published block drafters, in four layouts.

z-lab         DFlash: the drafter's own keys are in `dflash_config`; no embedding
deepspec      DeepSeek's DSpark, and its DFlash of rank 0: a flat config, and copies of
              the target's embedding and output projection
specforge     DSpark: the drafter's own keys are in `dflash_config`
speculators   vLLM and Red Hat, DFlash and DSpark: the layers' config is nested

z-lab and speculators have DFlash2, too, under one name in `architectures`.

A flag such as `sample_from_anchor` says which token a slot predicts; without one it is
the layout's default. DSpark of speculators, published in both kinds, must have a flag.
"""

import functools
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args

from spec_jax.model import block_params, config as config_lib, head_dialects


Dialect = Literal["z-lab", "deepspec", "specforge", "speculators"]
DIALECTS: tuple[str, ...] = get_args(Dialect)

WHOLE: tuple[Dialect, ...] = ("z-lab", "deepspec", "specforge")
"""Layouts whose drafters draft every token of the target's."""

DFLASH2 = "DFlash2DraftModel"
ARCHITECTURES: dict[str, head_dialects.Architecture] = {
    "DFlashSpeculator": ("dflash", "speculators", None),
    "DSparkSpeculator": ("dspark", "speculators", None),
    "DFlashDraftModel": ("dflash", "speculators", "z-lab"),
    "Qwen3DSparkModel": (None, None, "deepspec"),
    "DSparkDraftModel": ("dspark", "speculators", "specforge"),
    DFLASH2: ("dflash2", "speculators", "z-lab"),
}
_WHAT = "layout of DFlash or DSpark"
CONV_TAPS = 2  # of a convolution's kernel

SLOTS: Mapping[str, block_params.Slots] = {
    "z-lab": "fill-in",
    "deepspec": "anchor-first",
    "specforge": "anchor-first",
}
"""Slots of a config without a flag; `_slots` has the defaults of speculators."""

_ANCHOR_FLAGS = ("sample_from_anchor", "query_zero_predicts_next")
SCALINGS = ("confidence_temperatures", "confidence_shifts")
"""Keys of lists with a number for each draft; fields of `BlockConfig`, too."""

_CAUSAL_FLAGS = ("is_causal", "causal", "causal_head")
"""Keys that say whether a row sees no later row of its block: two of vLLM, and one of
JetSpec. Default: layers that slide are, unless `sliding_window_non_causal`."""

_OWN = (
    *_ANCHOR_FLAGS,
    *_CAUSAL_FLAGS,
    "sliding_window_non_causal",
    "swa_window_size",
    "use_swa",
    *SCALINGS,
    "block_size",
    "conv_group_size",
    "conv_kernel_size",
    "confidence_head_with_markov",
    "enable_confidence_head",
    "markov_head_type",
    "markov_rank",
    "mask_token_id",
    "projector_type",
    "selector_rank",
    "selector_top_k",
    "target_hidden_size",
    "target_layer_ids",
)
# Keys in `dflash_config` that only training reads.
_IGNORED = (
    "num_anchors",
    "loss_decay_gamma",
    "ce_loss_alpha",
    "l1_loss_alpha",
    "confidence_head_alpha",
)
_ACCEPTED: Mapping[str, tuple] = {
    "attention_mode": ("gqa", "mha"),  # A label: the numbers of heads decide.
    "rope_is_neox_style": (True,),
    "is_neox_style": (True,),
    "output_multiplier": (1,),
    "input_embedding_scale": (1,),
    "attention_value_scale": (1,),
    "final_logit_softcapping": (0,),
    "shift_label": (False,),
}
"""Values that do not change the computation; others are refused. Every unknown key in
`dflash_config` must be false or null."""


def kind_of(raw: Mapping[str, Any]) -> str:
    """Returns "dspark" for a config with a head of DSpark's, otherwise "dflash".

    Raises:
      ValueError: as `from_dict`.
    """
    said = _own_keys(raw, head_dialects.dialect_of(raw, ARCHITECTURES, _WHAT)[0])
    is_dspark = _head(said)[0] in block_params.DSPARK_HEADS
    is_dspark |= _flag(said, "enable_confidence_head")
    return "dspark" if is_dspark else "dflash"


def _own_keys(raw: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Returns the drafter's own keys, from wherever the layout has them."""
    said = {key: raw[key] for key in _OWN if raw.get(key) is not None}
    # Both places are checked, so that neither hides the other's value.
    stated = [(key, raw[key]) for key in _ACCEPTED if key in raw]
    if dialect in ("z-lab", "specforge"):
        nested = raw.get("dflash_config")
        if not isinstance(nested, dict):
            raise ValueError("dflash_config is missing, or not an object")
        for key in said.keys() & nested.keys():
            if said[key] != nested[key]:
                raise ValueError(
                    f"{key}={said[key]!r}, and in dflash_config {nested[key]!r}: "
                    "remove the wrong one"
                )
        said |= {key: nested[key] for key in _OWN if nested.get(key) is not None}
        stated += [(k, x) for k, x in nested.items() if k not in (*_OWN, *_IGNORED)]
    for key, value in stated:
        if value not in (None, *_ACCEPTED.get(key, (False,))):
            raise ValueError(f"{key}={reprlib.repr(value)} is not supported")
    projector = said.get("projector_type", "dflash")
    allowed = ("dspark",) if dialect == "specforge" else ("dflash",)
    if projector not in (*allowed, "dflash"):
        raise ValueError(
            f"projector_type={reprlib.repr(projector)} is not supported: "
            f"{' or '.join(allowed)}"
        )
    return said


def from_dict(
    raw: dict[str, Any], target: config_lib.ModelConfig, dtype: str
) -> tuple[Dialect, block_params.BlockConfig]:
    """Implements `head_files.Family.from_dict`."""
    dialect, kind = head_dialects.dialect_of(raw, ARCHITECTURES, _WHAT)
    said = _own_keys(raw, dialect)
    stated, layer, draft_vocab_size, width = head_dialects.sizes(
        raw, dialect, target, dtype, is_whole=dialect in WHOLE
    )
    if stated.get("model_type") not in ("qwen3", "dspark"):
        raise ValueError(
            f"model_type={reprlib.repr(stated.get('model_type'))}: layers are Qwen3's"
        )
    width = _whole(said, "target_hidden_size", default=width)
    if width != layer.hidden_size:
        raise ValueError(
            f"target_hidden_size={width} is not the drafter's "
            f"hidden_size={layer.hidden_size}, and it has the target's embedding"
        )
    windows = head_dialects.windows(
        stated,
        layer.num_layers,
        slides=_flag(said, "use_swa"),
        window=said.get("swa_window_size"),
    )
    if kind == "dflash2" and dialect == "speculators":  # The default of its class.
        said.setdefault("sliding_window_non_causal", True)
    head, rank = _head(said)
    if head == "none" and kind == "dflash2":
        raise ValueError(f"{DFLASH2} without selector_rank: state it")
    has_confidence = _flag(said, "enable_confidence_head")
    with_markov = _flag(said, "confidence_head_with_markov", default=rank > 0)
    return dialect, block_params.BlockConfig(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        taps=_taps(raw, said, dialect, target, layer.num_layers),
        block_size=_whole(said, "block_size"),
        slots=_slots(said, dialect, kind),
        mask_token_id=_whole(said, "mask_token_id"),
        head=head,
        markov_rank=rank,
        top_k=_whole(said, "selector_top_k", default=0),
        conv_group=_conv_group(said, head),
        has_confidence=has_confidence,
        confidence_with_markov=has_confidence and with_markov,
        attention=_attention_of(said, dialect, windows or (0,) * layer.num_layers),
        **{key: _numbers(said, key) for key in SCALINGS},
    )


_whole = functools.partial(head_dialects.value, kind=int, default=None)
_flag = functools.partial(head_dialects.value, kind=bool, default=False)


def _attention_of(
    said: Mapping[str, Any], dialect: Dialect, windows: Sequence[int]
) -> tuple[block_params.LayerAttention, ...]:
    """Returns what rows see in layers of these windows; empty: all rows see all.

    A window ends with the row's own key, as in vLLM and transformers. In speculators'
    layout it covers the context only and is the same for all rows of a block, as in
    its trainer.
    """
    flag = head_dialects.agreed(said, _CAUSAL_FLAGS, bool)
    slides_causal = not _flag(said, "sliding_window_non_causal")
    is_causal = lambda window: window > 0 and slides_causal if flag is None else flag
    layers = tuple(
        block_params.LayerAttention(
            window=window,
            is_causal=is_causal(window),
            from_anchor=window > 0 and dialect == "speculators",
        )
        for window in windows
    )
    return layers if set(layers) != {block_params.LayerAttention()} else ()


def _numbers(said: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = said.get(key, [])
    if not isinstance(values, list) or not all(type(x) in (int, float) for x in values):
        raise ValueError(f"{key}={reprlib.repr(values)} must be numbers")
    return tuple(float(value) for value in values)


def _head(said: Mapping[str, Any]) -> tuple[block_params.Head, int]:
    """Returns the sequential head or the selector, and its rank."""
    rank = _whole(said, "markov_rank", default=0)
    selector = _whole(said, "selector_rank", default=0)
    if rank and selector:
        raise ValueError(
            f"markov_rank={rank} and selector_rank={selector}: a drafter has one head"
        )
    if selector:
        return "selector", selector
    head = said.get("markov_head_type", "vanilla") if rank else "none"
    known = block_params.DSPARK_HEADS
    if rank and head not in known:
        raise ValueError(
            f"markov_head_type={reprlib.repr(head)} is not one of {', '.join(known)}"
        )
    return cast(block_params.Head, head), rank


def _conv_group(said: Mapping[str, Any], head: block_params.Head) -> int:
    """Returns the channels of a convolution's group; 0: there are no convolutions."""
    taps = _whole(said, "conv_kernel_size", default=0)
    group = _whole(said, "conv_group_size", default=0)
    expected = CONV_TAPS if head == "selector" else 0
    if taps != expected or (taps > 0) != (group > 0):
        raise ValueError(
            f"conv_kernel_size={taps} and conv_group_size={group} with {head=}: "
            f"convolutions have {CONV_TAPS} taps, and groups; they are published "
            "together with a selector, as DFlash2"
        )
    return group


def _slots(
    said: Mapping[str, Any], dialect: Dialect, kind: str | None
) -> block_params.Slots:
    """Returns which token a slot predicts, by a flag or by the layout."""
    is_first = head_dialects.agreed(said, _ANCHOR_FLAGS, bool)
    if is_first is not None:
        return "anchor-first" if is_first else "fill-in"
    if dialect != "speculators":
        return SLOTS[dialect]
    if kind == "dspark":
        raise ValueError(
            "no sample_from_anchor, and both kinds of DSpark are published so: state "
            "true where slot 0 predicts the token after the anchor"
        )
    return "fill-in"  # DFlash was published so before it had the flag.


def _taps(raw, said, dialect, target, num_layers: int) -> tuple[int, ...]:
    """Returns the `hidden_states` indices that a config names."""
    if dialect == "speculators":
        key = "aux_hidden_state_layer_ids"
        return head_dialects.layer_ids(key, raw.get(key), shift=0)
    key = "target_layer_ids"  # The features are these layers' outputs.
    ids = said.get(key)
    if ids is None and dialect == "z-lab":
        ids = default_layer_ids(target.num_layers, num_layers)
    return head_dialects.layer_ids(key, ids, shift=1)


def default_layer_ids(num_target_layers: int, num_layers: int) -> list[int]:
    """Returns the layers whose outputs a drafter reads if its config names none."""
    if num_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_layers - 1)
    return [round(1 + i * step) for i in range(num_layers)]
