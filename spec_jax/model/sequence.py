"""Whole sequences through a Qwen3 model, without a cache: training and parity.

Prefill uses it too. It is *not* the row path: its matrix products and its attention
are those of the library, with numerics of their own.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.model import config as config_lib, layers, params as params_lib
from spec_jax.ops import causal_attention, rms_norm
from spec_jax.typing import typed


@flax.struct.dataclass(kw_only=True)
class SequenceOutputs:
    """What a forward pass over `[B, T]` tokens leaves behind."""

    hidden: jax.Array  # [B, T, D], after the final norm
    k: tuple[jax.Array, ...]  # per layer [B, T, K, H], normed and rotated
    v: tuple[jax.Array, ...]  # per layer [B, T, K, H]
    features: jax.Array  # [B, T, taps, D]


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x w^T` accumulated in float32 and rounded to the dtype of `x`."""
    return jnp.einsum("...k,nk->...n", x, w, preferred_element_type=jnp.float32).astype(
        x.dtype
    )


@typed
def forward(
    params: params_lib.Params,
    config: config_lib.Qwen3Config,
    tokens: Int[Array, "B T"],
    *,
    taps: tuple[int, ...] = (),
) -> SequenceOutputs:
    """Runs the decoder over whole sequences that start at position 0.

    Args:
      taps: which residual streams to return as features, by Hugging Face's
        `hidden_states` index: 0 is the embedding, `k` the output of layer `k - 1`.
        The last layer's output is `L`; unlike Hugging Face's it is not normed.
    """
    B, T = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    x = params.embed[tokens]
    keys, values, boundaries = [], [], [x]
    for layer in params.layers:
        q, k, v = layers.attention_inputs(layer, config, x, positions, matmul)
        attended = causal_attention.causal_attention(
            q, k, v, scale=config.head_dim**-0.5
        )
        x = layers.attention_output(layer, x, attended, matmul)
        x = layers.mlp(layer, config, x, matmul)
        keys.append(k)
        values.append(v)
        boundaries.append(x)
    features = jnp.zeros((B, T, 0, config.hidden_size), x.dtype)
    if taps:
        features = jnp.stack([boundaries[tap] for tap in taps], axis=2)
    hidden = rms_norm.rms_norm(x, params.final_norm, eps=config.rms_norm_eps)
    return SequenceOutputs(
        hidden=hidden, k=tuple(keys), v=tuple(values), features=features
    )


@typed
def logits(
    params: params_lib.Params, config: config_lib.Qwen3Config, tokens: Int[Array, "B T"]
) -> Float[Array, "B T V"]:
    """Float32 logits of every position."""
    hidden = forward(params, config, tokens).hidden
    return jnp.einsum(
        "btd,vd->btv", hidden, params.head, preferred_element_type=jnp.float32
    )
