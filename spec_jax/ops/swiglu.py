"""SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spec_jax.typing import typed


@typed
def swiglu(gate_up: Float[Array, "*rows F2"]) -> Float[Array, "*rows F"]:
    """Returns `silu(gate) * up`; gate is the first half of the last axis.

    The activation is float32 and rounded to the input's dtype before the product, as
    in Hugging Face.
    """
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate.astype(jnp.float32)).astype(gate.dtype) * up
