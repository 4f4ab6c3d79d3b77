"""Llama: Qwen3 without the norms of queries and keys.

Touvron et al. (2023), https://arxiv.org/abs/2302.13971.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self, TypeVar

from spec_jax.model import config as config_lib, decoder, params as params_lib, qwen3


IMPLS = qwen3.IMPLS
AUTO = qwen3.AUTO
CHAIN_IMPLS: tuple[str, ...] = ()
LM_HEAD = qwen3.LM_HEAD
IGNORED = r"\.rotary_emb\.inv_freq$"
KEEPS_PADDING = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(config_lib.ModelConfig):
    """A dense Llama model."""

    model_type = "llama"

    rms_norm_eps: float = 1e-6
    scaling: config_lib.Scaling | None = None

    def validate(self) -> Self:
        """Implements `ModelConfig.validate`."""
        super().validate()
        config_lib.positive("rms_norm_eps", self.rms_norm_eps)
        if self.scaling is not None:
            self.scaling.validate(self.rope_theta)
        return self


_Config = TypeVar("_Config", bound=LlamaConfig)


def read_config(raw: Mapping[str, Any], *, dtype: str | None) -> LlamaConfig:
    """Implements `families.Family.read_config`."""
    no_biases = {"attention_bias": (False, None), "mlp_bias": (False, None)}
    return read_as(LlamaConfig, raw, no_biases, dtype=dtype)


def read_as(
    kind: type[_Config],
    raw: Mapping[str, Any],
    allowed: Mapping[str, tuple],
    *,
    dtype: str | None,
) -> _Config:
    """Reads a config of this kind. Old configs leave the two sizes of heads out.

    Args:
      allowed: values of keys, as `config.check_features` takes them, beside those of
        every Llama.
    """
    every = {"hidden_act": ("silu",), "partial_rotary_factor": (1, None)}
    config_lib.check_features(raw, {**allowed, **every})
    raw = dict(raw)
    for key in ("hidden_size", "num_attention_heads"):
        config_lib.check_size(key, raw.get(key))
    heads = raw["num_attention_heads"]
    if raw.get("head_dim") is None:
        raw["head_dim"] = raw["hidden_size"] // heads
    if raw.get("num_key_value_heads") is None:
        raw["num_key_value_heads"] = heads
    return qwen3.read_plain(kind, raw, dtype=dtype)


write_config = qwen3.write_plain


def shapes(config: LlamaConfig) -> params_lib.Params:
    """Implements `families.Family.shapes`: those of Qwen3 without two norms."""
    params = qwen3.shapes(config)
    layers = (layer.replace(q_norm=None, k_norm=None) for layer in params.layers)
    return params.replace(layers=tuple(layers))


def tensors(config: LlamaConfig) -> params_lib.Params:
    """Implements `families.Family.tensors`."""
    return params_lib.parts(shapes(config), qwen3.NAMES, config)


def forward_rows(
    params, config, rows, kv, *, impl, taps=(), with_logits=True, observe=None
):
    """Runs a slab of rows through the model, as `qwen3.forward_rows` does."""
    return decoder.run_rows(
        params_lib.prepare(params, impl), config, rows, kv,
        impl=impl, taps=taps, with_logits=with_logits, observe=observe,
        run_layer=qwen3.run_layer, run_head=qwen3.run_head,
    )  # fmt: skip


rope_table = qwen3.rope_table
sequence_layer = qwen3.sequence_layer
sequence_norm = qwen3.sequence_norm
