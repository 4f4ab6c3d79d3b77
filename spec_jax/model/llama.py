"""Llama: Qwen3 without the norms of queries and keys.

Touvron et al. (2023), https://arxiv.org/abs/2302.13971.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from spec_jax.model import config as config_lib, qwen3


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(config_lib.GatedConfig):
    """A dense Llama model."""

    model_type = "llama"


def read_as(
    kind: type[config_lib.GatedConfig],
    allowed: Mapping[str, tuple],
    raw: Mapping[str, Any],
    *,
    dtype: str | None,
) -> config_lib.GatedConfig:
    """Reads a config as `qwen3.read_as`. Old ones leave the two sizes of heads out."""
    raw = dict(raw)
    for key in ("hidden_size", "num_attention_heads"):
        config_lib.check_size(key, raw.get(key))
    heads = raw["num_attention_heads"]
    if raw.get("head_dim") is None:
        raw["head_dim"] = raw["hidden_size"] // heads
    if raw.get("num_key_value_heads") is None:
        raw["num_key_value_heads"] = heads
    return qwen3.read_as(kind, allowed, raw, dtype=dtype)


_NO_BIASES = {"attention_bias": (False, None), "mlp_bias": (False, None)}

FAMILY = dataclasses.replace(
    qwen3.FAMILY,
    read_config=functools.partial(read_as, LlamaConfig, _NO_BIASES),
    write_config=qwen3.write,
    fused=(),
    ignored=r"\.rotary_emb\.inv_freq$",
    keeps_padding=False,
)
