"""Keys that the `config.json` of all heads that read features have in common.

This module reads files and the keys of layers; the keys that only one family of heads
has are in `eagle3_files` and `block_dialects`.
"""

import dataclasses
import pathlib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from spec_jax.model import checkpoint_files as files, config as config_lib, families


_Value = TypeVar("_Value", int, bool)
_BIASES = ("bias", "qkv_bias", "attention_bias", "mlp_bias")

TYPE = "speculators_model_type"
"""The key by which speculators names a kind of head."""

Architecture = tuple[str | None, str | None, str | None]
"""A kind of head, which `TYPE` names, and the dialects of configs with and without
`TYPE`; None: there are none such."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """States which target a head is for and how it was trained, for its `config.json`.

    Readers of some dialects refuse a file without it; nothing here reads it back.

    Attributes:
      target: the model that the head is for.
      target_name: its folder or its id on a hub, as others find it.
      num_anchors: blocks of a text that a step trained.
      ttt_length: drafting steps that were trained.
      step_loss_decay: weight of a step's loss, relative to that of the step before.
    """

    target: config_lib.ModelConfig
    target_name: str | None = None
    num_anchors: int = 32
    ttt_length: int = 7
    step_loss_decay: float = 0.8


def stated(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a config that have a value."""
    return {key: value for key, value in keys.items() if value is not None}


def speculators_config(algorithm: str, num_drafts: int, origin: Origin) -> dict:
    """Returns what speculators states of drafting and of the target, its verifier."""
    architecture, _ = families.MODULES[origin.target.model_type]
    greedy = {"proposal_type": "greedy", "speculative_tokens": num_drafts}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            greedy | {"accept_tolerance": 0.0, "verifier_accept_k": 1}
        ],
        "verifier": {
            "architectures": [architecture],
            "name_or_path": origin.target_name,
        },
    }


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object that a file holds; raises `CheckpointError`."""
    try:
        return config_lib.read_object(path)
    except OSError as error:
        raise files.CheckpointError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise files.CheckpointError(str(error)) from None


def dialect_of(
    raw: Mapping[str, Any], known: Mapping[str, Architecture], what: str
) -> tuple[Any, str | None]:
    """Returns the dialect of a config, and the kind of its head.

    Args:
      what: a noun for the known architectures, for the message.

    Raises:
      ValueError: no architecture, several, one that is not known, or another's type.
    """
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or name not in known:
        raise ValueError(
            f"architectures={reprlib.repr(names)} is no {what} that is known: "
            f"{', '.join(known)}"
        )
    (kind, typed, bare), found = known[name], raw.get(TYPE)
    dialect = bare if found is None else typed
    if found not in (None, kind) or dialect is None:
        raise ValueError(
            f"{TYPE}={reprlib.repr(found)} with architectures={[name]}, of type {kind}"
        )
    return dialect, kind


def architecture_of(dialect: str, kind: str, known: Mapping[str, Architecture]) -> str:
    """Returns the architecture that is written for a kind of head: the first that a
    dialect has for it, or for any where it has none."""
    names = [name for name, (_, *found) in known.items() if dialect in found]
    return next((name for name in names if known[name][0] == kind), names[0])


def value(
    raw: Mapping[str, Any], key: str, kind: type[_Value], *, default: _Value | None
) -> _Value:
    """Returns a value of its type, or the default where it is missing or null."""
    found = default if raw.get(key) is None else raw[key]
    if type(found) is not kind:
        what = {int: "a whole number", bool: "true or false"}[kind]
        raise ValueError(f"{key}={reprlib.repr(found)} must be {what}")
    return found


def agreed(raw: Mapping[str, Any], keys: Iterable[str], kind: type[_Value]) -> Any:
    """Returns the value that keys of one meaning have, None where all are null.

    Raises:
      ValueError: keys that contradict each other, or a value of another type.
    """
    found = {key: raw[key] for key in keys if raw.get(key) is not None}
    if len({value(found, key, kind, default=None) for key in found}) > 1:
        shown = ", ".join(f"{key}={found[key]}" for key in found)
        raise ValueError(f"{shown} contradict each other: remove the wrong one")
    return next(iter(found.values()), None)


def sizes(
    raw: Mapping[str, Any],
    dialect: str,
    target: config_lib.ModelConfig,
    dtype: str,
    *,
    is_whole: bool,
) -> tuple[Mapping[str, Any], config_lib.Qwen3Config, int, int]:
    """Returns what a config states of the layers, their config, Vd and Dt.

    Args:
      is_whole: whether heads of the dialect draft every token of the target's.

    Raises:
      ValueError: something is missing, not supported, or of another target.
    """
    is_nested = dialect == "speculators"
    stated = raw.get("transformer_layer_config") if is_nested else raw
    if not isinstance(stated, dict):
        raise ValueError("transformer_layer_config is not an object")
    for key in _BIASES:
        if raw.get(key) or stated.get(key):
            raise ValueError(f"{key} is true: heads with biases are not supported")
    layers = raw.get("num_target_layers")
    if layers not in (None, target.num_layers):
        raise ValueError(
            f"num_target_layers={reprlib.repr(layers)}, the target has "
            f"{target.num_layers}: it is a drafter for another target"
        )
    layer = _layer_config(stated, dtype)
    Vd = value(
        {} if is_whole else raw, "draft_vocab_size", int, default=layer.vocab_size
    )
    Dt = value(raw, "target_hidden_size", int, default=layer.hidden_size)
    return stated, layer, Vd, Dt


def _layer_config(stated: Mapping[str, Any], dtype: str) -> config_lib.Qwen3Config:
    """Returns what the layers of a head have in common with a Qwen3 model.

    `tie_word_embeddings` is not used: heads with an output projection of their own
    state it too.
    """
    raw = dict(stated) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "use_sliding_window": False,  # See `windows`.
    }
    for key in ("rope_is_neox_style", "is_neox_style"):
        if raw.get(key) not in (None, True):
            raise ValueError(
                f"{key}={reprlib.repr(raw[key])} is not supported: RoPE turns the "
                "halves of a head, not neighbours"
            )
    if raw.get("head_dim") is None:  # As Llama has it.
        width, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
        if not (type(width) is type(heads) is int and heads > 0 and not width % heads):
            raise ValueError(
                f"no head_dim, and hidden_size={reprlib.repr(width)} is no multiple of "
                f"num_attention_heads={reprlib.repr(heads)}; state head_dim"
            )
        raw["head_dim"] = width // heads
    return cast(config_lib.Qwen3Config, config_lib.from_dict(raw, dtype=dtype))


_KINDS = ("full_attention", "sliding_attention")
_QWEN3_WINDOW = 4096
"""transformers' default, which a config that was written by it leaves out."""


def windows(
    stated: Mapping[str, Any],
    num_layers: int,
    *,
    slides: bool = False,
    window: int | None = None,
) -> tuple[int, ...]:
    """Returns how many keys the rows of each layer see, 0 for all; empty: all see all.

    Layers are named by `layer_types`; without it, those from `max_window_layers` on
    slide if `use_sliding_window` says so, as in transformers.

    Args:
      stated: what a config says of the layers.
      slides: whether all layers slide where none is named.
      window: keys that sliding layers see; None: as `sliding_window` in `stated` says.

    Raises:
      ValueError: unknown or contradicting kinds, or sliding layers without a window.
    """
    kinds, uses = stated.get("layer_types"), stated.get("use_sliding_window")
    if kinds is None:
        first = stated.get("max_window_layers", 28) if uses else num_layers
        if type(first) is not int:
            raise ValueError(
                f"max_window_layers={reprlib.repr(first)} must be a number"
            )
        kinds = [_KINDS[layer >= first] for layer in range(num_layers)]
    if not isinstance(kinds, list) or any(kind not in _KINDS for kind in kinds):
        raise ValueError(
            f"layer_types={reprlib.repr(kinds)}: each layer is one of "
            f"{', '.join(_KINDS)}"
        )
    is_sliding = [kind == _KINDS[1] for kind in kinds]
    if any(is_sliding):
        if len(kinds) != num_layers:
            raise ValueError(
                f"layer_types={reprlib.repr(kinds)} of {num_layers} layers: name each"
            )
        if uses is False:
            raise ValueError(
                f"layer_types={reprlib.repr(kinds)}, but use_sliding_window is false: "
                "remove the wrong one"
            )
    elif slides:
        is_sliding = [True] * num_layers
    else:
        return ()
    if window is None:
        default = _QWEN3_WINDOW if stated.get("model_type") == "qwen3" else None
        window = value(stated, "sliding_window", int, default=default)
    config_lib.check_size("sliding_window", window)
    return tuple(window * slides for slides in is_sliding)


def window_keys(sizes: Sequence[int]) -> dict[str, Any]:
    """Returns the keys from which `windows` reads the windows of all layers back, which
    are of one size."""
    window, kinds = max(sizes), [_KINDS[size > 0] for size in sizes]
    used = {"sliding_window": window, "use_sliding_window": True} if window else {}
    return {"layer_types": kinds} | used


def layer_ids(key: str, ids: Any, *, shift: int) -> tuple[int, ...]:
    """Returns `hidden_states` indices: the numbers of a config plus `shift`.

    Raises:
      ValueError: no list of whole numbers.
    """
    if not isinstance(ids, list) or not all(type(number) is int for number in ids):
        raise ValueError(f"{key}={reprlib.repr(ids)} must be a list of layers")
    return tuple(number + shift for number in ids)
