"""GELU (Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spec_jax.typing import typed


@typed
def gelu(x: Float[Array, "*rows F"], *, approximate: bool) -> Float[Array, "*rows F"]:
    """Returns `x * normal_cdf(x)`, in float32 and rounded once.

    Args:
      approximate: by the paper's tanh; otherwise exact, by erf.
    """
    wide = jax.nn.gelu(x.astype(jnp.float32), approximate=approximate)
    return wide.astype(x.dtype)
