"""Llama: Qwen3 without the norms of queries and keys.

Touvron et al. (2023), https://arxiv.org/abs/2302.13971.
"""

import dataclasses
import functools

from spec_jax.model import config as config_lib, qwen3


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(config_lib.GatedConfig):
    """A dense Llama model."""

    model_type = "llama"


_NO_BIASES = {"attention_bias": (False, None), "mlp_bias": (False, None)}

FAMILY = dataclasses.replace(
    qwen3.FAMILY,
    read_config=functools.partial(
        qwen3.read_as, LlamaConfig, _NO_BIASES, fills_heads=True
    ),
    write_config=qwen3.write,
    fused=(),
    ignored=r"\.rotary_emb\.inv_freq$",
    keeps_padding=False,
)
