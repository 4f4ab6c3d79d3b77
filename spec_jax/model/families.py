"""Holds the table of the families of models, and what each has of its own.

All families share slabs of rows, prompts and caches (`decoder`), whole sequences
(`sequence`), files (`load`) and everything above them. Each family has a module for
the differences, which is imported when a model of the family is loaded.
"""

import dataclasses
import functools
import importlib
import logging
import reprlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from spec_jax.typing import IMPLS


if TYPE_CHECKING:  # It imports this module.
    from spec_jax.model import config as config_lib


MODULES: Mapping[str, tuple[str, str]] = {
    "gpt_neox": ("GPTNeoXForCausalLM", "spec_jax.model.gpt_neox"),
    "llama": ("LlamaForCausalLM", "spec_jax.model.llama"),
    "qwen2": ("Qwen2ForCausalLM", "spec_jax.model.qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "spec_jax.model.qwen3"),
}
"""The entry in `architectures` and the module of each `model_type`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family's own part, `FAMILY` of its module.

    Attributes:
      read_config: takes `config.json`, and a `dtype` in the place of its own or None;
        returns a `config.ModelConfig`.
      write_config: takes one; returns the keys that `read_config` reads, without the
        family's names.
      shapes: takes a config; returns the weights as `jax.ShapeDtypeStruct`s.
      names: the tensors of each field, for `params.parts`.
      orders: takes a config; returns `params.Parts.order` of fields that have one.
      rope_table: takes a config; returns inverse frequencies `[H/2]`, and the scale of
        cos and sin.
      run_layer, run_head: for `decoder.forward_rows`, as those of `qwen3`.
      sequence_layer: takes a layer, the config, a residual `[B, T, D]` and positions;
        returns the residual after the layer, its keys and its values.
      sequence_norm: takes the weights, the config and a residual; returns it after the
        final norm.
      auto: the implementations (`ops.dispatch`) that "auto" may choose: those whose
        rows were tested on the device. For others it takes "xla", and warns.
      fused: the implementations with a kernel for a whole step, and for chains.
      ignored: a regular expression of old checkpoints' tensors that nothing reads.
      keeps_padding: whether rows of the vocabulary without a token are loaded if both
        models of a pair have equally many. If false they are left out: they could be
        drawn.
    """

    read_config: Callable[..., Any]
    write_config: Callable[[Any], dict[str, Any]]
    shapes: Callable[[Any], Any]
    names: Mapping[str, str]
    orders: Callable[[Any], Mapping[str, np.ndarray]] = lambda config: {}
    rope_table: Callable[[Any], tuple[np.ndarray, float]]
    run_layer: Callable
    run_head: Callable
    sequence_layer: Callable
    sequence_norm: Callable
    auto: tuple[str, ...] = IMPLS[1:]
    fused: tuple[str, ...] = ()
    ignored: str = r"(?!)"  # Nothing.
    keeps_padding: bool = False


def of(config: "config_lib.ModelConfig") -> Family:
    """Returns the family of a config."""
    return _load(config.model_type)


def named(raw: Mapping[str, Any]) -> Family:
    """Returns the family that a `config.json` names.

    Raises:
      ValueError: a family that is not in the table, or two that contradict each other.
    """
    architectures = raw.get("architectures") or []
    for model_type, (architecture, _) in MODULES.items():
        is_named = raw.get("model_type", model_type) == model_type
        if architectures == [architecture] and is_named:
            return _load(model_type)
    known = (f"{name} ({kind})" for kind, (name, _) in MODULES.items())
    raise ValueError(
        f"architectures={reprlib.repr(architectures)}, "
        f"model_type={reprlib.repr(raw.get('model_type'))}: the supported families are "
        f"{', '.join(known)}; take a dense model of one of them"
    )


def runnable(
    config: "config_lib.ModelConfig", resolved: str, *, is_named: bool = True
) -> str:
    """Returns a resolved implementation that runs a model.

    Args:
      resolved: from `ops.dispatch.resolve`.
      is_named: whether it was asked for by name; otherwise one of `auto`, or "xla".
    """
    if is_named or resolved in of(config).auto:
        return resolved
    _say_xla_runs(config.model_type, resolved)
    return "xla"


@functools.cache
def _say_xla_runs(model_type: str, resolved: str) -> None:
    """Warns once, by `model_type` and `resolved`, that "auto" takes XLA."""
    logging.getLogger(__name__).warning(
        "impl='auto' takes 'xla' and not %r for %s models here: rows of a verification "
        "may have other bits than decoding; check_lossless compares them",
        resolved,
        model_type,
    )


def _load(model_type: str) -> Family:
    return importlib.import_module(MODULES[model_type][1]).FAMILY
