"""The parts of a decoder layer that rows and whole sequences share.

Functions here know weights and positions; they know neither caches nor pages. The
matrix product is handed in, because rows and sequences use different ones.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.model import config as config_lib, params as params_lib
from spec_jax.ops import rms_norm, rope, swiglu


MatMul = Callable[[jax.Array, jax.Array], jax.Array]
"""`(x [..., K], w [N, K]) -> [..., N]` in the dtype of `x`."""


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


def attention_inputs(
    layer: params_lib.LayerParams,
    config: config_lib.Qwen3Config,
    x: jax.Array,  # [..., D]
    positions: jax.Array,  # [...] int32
    matmul: MatMul,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries `[..., N, H]`, keys and values `[..., K, H]`, normed and rotated."""
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    normed = rms_norm.rms_norm(x, layer.input_norm, eps=config.rms_norm_eps)
    heads = matmul(normed, layer.qkv).reshape(*x.shape[:-1], N + 2 * K, H)
    q, k, v = jnp.split(heads, (N, N + K), axis=-2)
    frequencies, scale = rope_table(config)
    frequencies = jnp.asarray(frequencies)
    q = rms_norm.rms_norm(q, layer.q_norm, eps=config.rms_norm_eps)
    k = rms_norm.rms_norm(k, layer.k_norm, eps=config.rms_norm_eps)
    q = rope.rope(q, positions, frequencies, scale=scale)
    k = rope.rope(k, positions, frequencies, scale=scale)
    return q, k, v


def attention_output(
    layer: params_lib.LayerParams, x: jax.Array, attended: jax.Array, matmul: MatMul
) -> jax.Array:
    """The residual stream after attention; `attended` is `[..., N, H]`."""
    flat = attended.reshape(*x.shape[:-1], -1)
    return x + matmul(flat, layer.attention_out)


def mlp(
    layer: params_lib.LayerParams,
    config: config_lib.Qwen3Config,
    x: jax.Array,
    matmul: MatMul,
) -> jax.Array:
    """The residual stream after the gated MLP."""
    normed = rms_norm.rms_norm(x, layer.mlp_norm, eps=config.rms_norm_eps)
    hidden = swiglu.swiglu(matmul(normed, layer.gate_up))
    return x + matmul(hidden, layer.down)
