"""Qwen2: Llama with biases of queries, keys and values.

Yang et al. (2024), https://arxiv.org/abs/2407.10671. Qwen2.5 is of this family, and so
is DeepSeek-R1-Distill-Qwen.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from spec_jax.model import llama, params as params_lib, qwen3


IMPLS, AUTO = llama.IMPLS, llama.AUTO
CHAIN_IMPLS = llama.CHAIN_IMPLS
LM_HEAD = llama.LM_HEAD
IGNORED = llama.IGNORED
KEEPS_PADDING = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(llama.LlamaConfig):
    """A dense Qwen2 model."""

    model_type = "qwen2"


def read_config(raw: Mapping[str, Any], *, dtype: str | None) -> Qwen2Config:
    """Implements `families.Family.read_config`: every Qwen2 has biases, unstated."""
    allowed = {"attention_bias": (True, None), "use_sliding_window": (False, None)}
    return llama.read_as(Qwen2Config, raw, allowed, dtype=dtype)


def write_config(config: Qwen2Config) -> dict[str, Any]:
    """Implements `families.Family.write_config`."""
    return llama.write_config(config) | {"use_sliding_window": False}


def shapes(config: Qwen2Config) -> params_lib.Params:
    """Implements `families.Family.shapes`."""
    params = llama.shapes(config)

    def with_bias(layer: Any) -> Any:
        bias = jax.ShapeDtypeStruct(layer.qkv.shape[:1], layer.qkv.dtype)
        return layer.replace(qkv_bias=bias)

    return params.replace(layers=tuple(map(with_bias, params.layers)))


def tensors(config: Qwen2Config) -> params_lib.Params:
    """Implements `families.Family.tensors`."""
    return params_lib.parts(shapes(config), qwen3.NAMES, config)


forward_rows = llama.forward_rows
rope_table = llama.rope_table
sequence_layer = llama.sequence_layer
sequence_norm = llama.sequence_norm
