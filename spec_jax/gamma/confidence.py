"""A drafter's confidence: when to stop drafting, and each draft's chance."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from spec_jax.typing import typed


@typed
def confident(
    logits: Float[Array, "*rows V"], *, threshold: Float[Array, ""]
) -> Bool[Array, "*rows"]:
    """Returns whether the likeliest token is at least as probable as `threshold`.

    A drafter ends its proposal before the first token that it is not confident of: a
    draft that is likely to be rejected is neither verified nor followed. It asks
    before it draws, so that the rule never depends on the draft itself, and sampled
    output keeps its distribution. Threshold 0 never stops; logits with NaN always do.
    """
    logits = logits.astype(jnp.float32)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    # The largest probability is `1 / sum exp(logits - largest)`.
    return threshold * jnp.sum(jnp.exp(logits - largest), axis=-1) <= 1.0


@typed
def highest(logits: Float[Array, "*rows V"]) -> Float32[Array, "*rows"]:
    """Returns the probability of the most probable token; NaN where logits have it.

    It estimates the chance that a draft is kept from the draft's distribution alone,
    and not from the token that is drawn from it.
    """
    logits = logits.astype(jnp.float32)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    return 1.0 / jnp.sum(jnp.exp(logits - largest), axis=-1)


@typed
def logits_of(survival: Float32[Array, "*rows W"]) -> Float32[Array, "*rows W"]:
    """Returns the logit of each draft's own chance, if those before it are kept.

    `survival` holds the products of these chances. Logits lie within `[-15, 15]`.
    """
    before = jnp.concatenate(
        [jnp.ones_like(survival[..., :1]), survival[..., :-1]], axis=-1
    )
    chance = survival / jnp.maximum(before, jnp.finfo(jnp.float32).tiny)
    return jnp.clip(jnp.log(chance) - jnp.log1p(-jnp.minimum(chance, 1.0)), -15.0, 15.0)


@typed
def recalibrated(
    survival: Float32[Array, "*rows W"],
    temperatures: Float32[Array, " W"],
    shifts: Float32[Array, " W"],
) -> Float32[Array, "*rows W"]:
    """Returns the survival with each draft's logit divided by its temperature, and its
    shift added."""
    one = (1,) * (survival.ndim - 1) + (-1,)
    logits = logits_of(survival) / temperatures.reshape(one) + shifts.reshape(one)
    return jnp.cumprod(jax.nn.sigmoid(logits), axis=-1)
