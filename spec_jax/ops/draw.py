"""The token that each row draws, by kernels of our own.

Its meaning is `rules.sampling.sample_each`, which is what draws where an implementation
has no kernels for it:

    argmax(log weights of the tokens that the filters keep + noise of seed and position)
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

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

    Args: as in `noisy_weights`.
    """
    noisy = noisy_weights(logits, settings, positions=positions, draws=draws, impl=impl)
    return jnp.where(draws, _highest(noisy, impl), 0)


@typed
def noisy_weights(
    logits: Float[Array, "R V"],
    settings: Any,
    *,
    positions: Int[Array, " R"],
    draws: Bool[Array, " R"],
    impl: str,
) -> Float32[Array, "R V"]:
    """Returns what `draw` takes the highest of; of rows that do not draw, anything.

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
    at = _highest(logits, impl)[:, None]
    highest = jnp.take_along_axis(logits, at, axis=1)[:, 0]
    kept = filters.first_tokens(
        logits, highest, top_k=settings.top_k, top_p=settings.top_p, **shared
    )
    return noise.noisy_weights(
        logits,
        highest,
        kept,
        min_p=settings.min_p,
        seeds=settings.seed,
        positions=positions,
        **shared,
    )


def _highest(logits, impl):
    """The argmax of each row."""
    num_active = jnp.int32(logits.shape[0])
    return argmax.argmax(logits, num_active=num_active, impl=impl)
