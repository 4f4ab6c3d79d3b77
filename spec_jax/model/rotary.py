"""The rotary frequencies that a config asks for."""

import numpy as np

from spec_jax.model import config as config_lib
from spec_jax.ops import rope


def rope_table(config: config_lib.Qwen3Config) -> tuple[np.ndarray, float]:
    """Inverse frequencies `[H/2]` and the scale of cos and sin for `config`."""
    if config.yarn is None:
        return rope.inverse_frequencies(config.head_dim, config.rope_theta), 1.0
    yarn = config.yarn
    frequencies = rope.yarn_inverse_frequencies(
        config.head_dim,
        config.rope_theta,
        factor=yarn.factor,
        original_length=yarn.original_max_position_embeddings,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
        truncate=yarn.truncate,
    )
    scale = yarn.attention_factor
    if scale is None:
        scale = rope.yarn_attention_factor(
            yarn.factor, yarn.mscale, yarn.mscale_all_dim
        )
    return frequencies, scale
