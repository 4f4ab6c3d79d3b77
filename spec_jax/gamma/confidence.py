"""When a drafter stops within its own proposal."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from spec_jax.typing import typed


@typed
def confident(
    logits: Float[Array, "*rows V"], *, threshold: Float[Array, ""]
) -> Bool[Array, "*rows"]:
    """Whether the most probable token has at least the probability `threshold`.

    A drafter ends its proposal before the first token that it is not confident of: a
    draft that is likely to be rejected is neither verified nor followed. It asks
    before it draws, so that the rule never depends on the draft itself, and sampled
    output keeps its distribution. Threshold 0 never stops; logits with NaN always do.
    """
    logits = logits.astype(jnp.float32)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    # The largest probability is `1 / sum exp(logits - largest)`.
    return threshold * jnp.sum(jnp.exp(logits - largest), axis=-1) <= 1.0
