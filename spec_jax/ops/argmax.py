"""The token of highest logit, for a slab of rows."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.native import calls
from spec_jax.ops import dispatch
from spec_jax.typing import typed


@typed
def argmax(
    logits: Float[Array, "R V"], *, num_active: Int[Array, ""], impl: str
) -> Int[Array, " R"]:
    """Returns the index of each active row's largest logit; padding is unspecified.

    The first of several equal ones, and the first NaN before any number: every
    implementation gives the same.
    """
    if impl == "native":
        return calls.argmax(logits, num_active=num_active)
    if impl in dispatch.PALLAS:
        return dispatch.kernel("argmax", impl)(logits, num_active=num_active)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
