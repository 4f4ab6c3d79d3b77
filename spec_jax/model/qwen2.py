"""Qwen2: Llama with biases of queries, keys and values.

Yang et al. (2024), https://arxiv.org/abs/2407.10671. Qwen2.5 is of this family, and so
is DeepSeek-R1-Distill-Qwen.
"""

import dataclasses
import functools

from spec_jax.model import config as config_lib, llama, qwen3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(config_lib.GatedConfig):
    """A dense Qwen2 model."""

    model_type = "qwen2"
    has_biases = True


# Every Qwen2 has biases, unstated.
_ALLOWED = {"attention_bias": (True, None), "use_sliding_window": (False, None)}

FAMILY = dataclasses.replace(
    llama.FAMILY,
    read_config=functools.partial(
        qwen3.read_as, Qwen2Config, _ALLOWED, fills_heads=True
    ),
    write_config=functools.partial(qwen3.write, use_sliding_window=False),
)
