"""The token that each row draws, by kernels of our own.

Its meaning is `rules.sampling.sample_each`, which is what draws where an implementation
has no kernels for it:

    argmax(log weights of the tokens that the filters keep + noise of seed and position)
"""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax.ops import argmax, dispatch
from spec_jax.typing import typed


def has_kernels(impl: str) -> bool:
    """Whether an implementation has kernels that draw."""
    return impl in dispatch.PALLAS


@typed
def draw(
    logits: Float[Array, "R V"],
    settings: Any,
    *,
    positions: Int[Array, " R"],
    draws: Bool[Array, " R"],
    impl: str,
) -> Int[Array, " R"]:
    """Draws a token from each row that `draws`, int32; the others give 0.

    A token's bits depend on its own row, its position and its settings.

    Args:
      settings: `sampling.SamplingSettings` with leaves `[R]`.
      positions: of the tokens to be drawn.

    Raises:
      NotImplementedError: an implementation without kernels that draw.
    """
    if not has_kernels(impl):
        raise NotImplementedError(
            f"impl={impl!r} has no kernels that draw: use rules.sampling.sample_each"
        )
    filters, interpret = dispatch.kernels("first_tokens", impl)
    noise, _ = dispatch.kernels("noisy_weights", impl)
    shared = {
        "temperature": settings.temperature,
        "draws": draws,
        "interpret": interpret,
    }
    num_active = jnp.int32(draws.shape[0])
    choose = functools.partial(argmax.argmax, num_active=num_active, impl=impl)
    highest = jnp.take_along_axis(logits, choose(logits)[:, None], axis=1)[:, 0]
    kept = filters.first_tokens(
        logits, highest, top_k=settings.top_k, top_p=settings.top_p, **shared
    )
    noisy = noise.noisy_weights(
        logits,
        highest,
        kept,
        min_p=settings.min_p,
        seeds=settings.seed,
        positions=positions,
        **shared,
    )
    return jnp.where(draws, choose(noisy), 0)
