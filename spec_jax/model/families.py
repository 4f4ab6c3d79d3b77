"""Holds the table of the families of models, and what the module of each must have.

All families share slabs of rows, prompts and caches (`decoder`), whole sequences
(`sequence`), files (`load`) and everything above them. Each family has a module for
the differences, which is imported when a model of the family is loaded.
"""

import functools
import importlib
import logging
import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast


if TYPE_CHECKING:  # These modules import this one.
    import jax

    from spec_jax.model import config as config_lib, params as params_lib


MODULES: Mapping[str, tuple[str, str]] = {
    "gpt_neox": ("GPTNeoXForCausalLM", "spec_jax.model.gpt_neox"),
    "llama": ("LlamaForCausalLM", "spec_jax.model.llama"),
    "qwen2": ("Qwen2ForCausalLM", "spec_jax.model.qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "spec_jax.model.qwen3"),
}
"""The entry in `architectures` and the module of each `model_type`."""


class Family(Protocol):
    """The contents of a module of `MODULES`."""

    IMPLS: tuple[str, ...]
    """Implementations that run the family (`ops.dispatch`), other than "auto"."""

    AUTO: tuple[str, ...]
    """The subset of `IMPLS` that "auto" may choose."""

    LM_HEAD: str
    """The name of the output projection in checkpoints."""

    IGNORED: str
    """A regular expression of old checkpoints' tensors that nothing reads."""

    KEEPS_PADDING: bool
    """Whether rows of the vocabulary without a token are loaded if both models of a
    pair have equally many. If false they are left out: they could be drawn."""

    CHAIN_IMPLS: tuple[str, ...]
    """The subset of `IMPLS` that has `run_chains`."""

    def read_config(
        self, raw: Mapping[str, Any], *, dtype: str | None
    ) -> "config_lib.ModelConfig":
        """Reads `config.json`; `dtype` takes the place of its own."""

    def write_config(self, config: Any) -> dict[str, Any]:
        """Returns the keys that `read_config` reads, without the family's names."""

    def shapes(self, config: Any) -> "params_lib.Params":
        """Returns the weights as `jax.ShapeDtypeStruct`s."""

    def tensors(self, config: Any) -> "params_lib.Params":
        """Returns a tree like `shapes`, of `params.Parts`: checkpoint tensors."""

    def rope_table(self, config: Any) -> tuple[Any, float]:
        """Returns inverse frequencies `[H/2]` and the scale of cos and sin."""

    def forward_rows(self, params: Any, config: Any, rows: Any, kv: Any, **how: Any):
        """Runs a slab of rows: `decoder.run_rows` with the family's functions."""

    def run_chains(self, params: Any, config: Any, kv: Any, **how: Any):
        """Continues texts greedily in one call, as `qwen3.run_chains`."""

    def sequence_layer(
        self, layer: Any, config: Any, x: "jax.Array", positions: "jax.Array"
    ) -> "tuple[jax.Array, jax.Array, jax.Array]":
        """Returns the residual `[B, T, D]` after a layer, its keys and its values."""

    def sequence_norm(
        self, params: "params_lib.Params", config: Any, x: "jax.Array"
    ) -> "jax.Array":
        """Returns the residual after the final norm."""


def of(config: "config_lib.ModelConfig") -> Family:
    """Returns the module of a config's family."""
    return _module(config.model_type)


def named(raw: Mapping[str, Any]) -> Family:
    """Returns the module of the family that a `config.json` names.

    Raises:
      ValueError: a family that is not in the table, or two that contradict each other.
    """
    architectures = raw.get("architectures") or []
    for model_type, (architecture, _) in MODULES.items():
        is_named = raw.get("model_type", model_type) == model_type
        if architectures == [architecture] and is_named:
            return _module(model_type)
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
      is_named: whether it was asked for by name; otherwise one of `AUTO`, or "xla".

    Raises:
      NotImplementedError: a named implementation without kernels for the family.
    """
    known = of(config).IMPLS
    if resolved in (known if is_named else of(config).AUTO):
        return resolved
    if not is_named:
        _say_xla_runs(config.model_type, resolved)
        return "xla"
    raise NotImplementedError(
        f"impl={resolved!r} has no kernels for {config.model_type} models; take "
        f"{' or '.join(repr(name) for name in known)}, or 'auto', which chooses"
    )


@functools.cache
def _say_xla_runs(model_type: str, resolved: str) -> None:
    """Warns once, by `model_type` and `resolved`, that "auto" takes XLA."""
    logging.getLogger(__name__).warning(
        "impl='auto' takes 'xla' and not %r for %s models here: rows of a verification "
        "may have other bits than decoding; check_lossless compares them",
        resolved,
        model_type,
    )


def _module(model_type: str) -> Family:
    return cast(Family, importlib.import_module(MODULES[model_type][1]))
