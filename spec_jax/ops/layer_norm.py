"""LayerNorm (Ba et al. 2016, https://arxiv.org/abs/1607.06450)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spec_jax.typing import typed


@typed
def layer_norm(
    x: Float[Array, "*rows D"],
    weight: Float[Array, " D"],
    bias: Float[Array, " D"],
    *,
    eps: float,
) -> Float[Array, "*rows D"]:
    """Normalises the last axis in float32, and rounds once, as PyTorch does."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + eps)
    scale, shift = (
        jnp.broadcast_to(each.astype(jnp.float32), x.shape) for each in (weight, bias)
    )
    return (normed * scale + shift).astype(x.dtype)
