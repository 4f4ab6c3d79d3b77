"""RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.ops import dispatch
from spec_jax.typing import typed


@typed
def rms_norm(
    x: Float[Array, "*rows D"],
    weight: Float[Array, " D"],
    *,
    num_active: Int[Array, ""] | None = None,
    eps: float,
    impl: str = "xla",
) -> Float[Array, "*rows D"]:
    """Normalises the last axis in float32, in Hugging Face's order of roundings.

    The normalised value is cast back to `x.dtype` *before* it is multiplied by the
    weight, as `Qwen3RMSNorm` does.

    Args:
      num_active: real rows of a slab; padding rows are unspecified.
      impl: norms a slab by its kernels, if it has any. They sum a row in one order,
        whatever the number of rows; XLA's order may depend on it.
    """
    if impl in dispatch.PALLAS:
        kernel = dispatch.kernel("rms_norm", impl)
        return kernel(x, weight, num_active=num_active, eps=eps)
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = (wide * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype)
    return normed * jnp.broadcast_to(weight, x.shape)
