"""The token that each row draws, and what it is drawn from, by kernels of our own.

Their meaning is that of `rules.sampling`, whose functions run where an implementation
has no kernels for it:

    draw          argmax(log weights of the tokens that the filters keep + noise of seed
                  and position)
    distribution  softmax(log weights), for the rules that compare distributions

Sums over a vocabulary are the kernels', in an order that depends on its size alone.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from spec_jax.native import draws as native
from spec_jax.ops import argmax, dispatch
from spec_jax.typing import typed


def has_kernels(impl: str) -> bool:
    """Returns whether an implementation has kernels for every function here."""
    return impl in dispatch.PALLAS


def can_draw(impl: str) -> bool:
    """Returns whether an implementation has kernels that draw tokens."""
    return impl == "native" or has_kernels(impl)


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
    if impl == "native":
        how = native.Draws(settings, positions, logits.shape[1], independent=False)
        return native.draw(logits.astype(jnp.float32), how, asked=draws)
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
    """Returns what `draw` takes the highest of; rows that do not draw are unspecified.

    Args:
      settings: `sampling.SamplingSettings` with leaves `[R]`.
      positions: of the tokens to be drawn.
    """
    at = _highest(logits, impl)
    return _weights(logits, at, settings, positions, draws, impl, with_noise=True)


@typed
def log_weights(
    logits: Float[Array, "R V"], settings: Any, *, impl: str
) -> Float32[Array, "R V"]:
    """Returns `sampling.log_weights` of each row.

    Args: as in `noisy_weights`.
    """
    at, is_greedy = _highest(logits, impl), settings.temperature == 0
    weights = _weights(
        logits, at, settings, jnp.zeros_like(at), ~is_greedy, impl, with_noise=False
    )
    is_best = jnp.arange(logits.shape[1], dtype=jnp.int32)[None] == at[:, None]
    best = jnp.where(is_best, jnp.float32(0), -jnp.inf)
    return jnp.where(is_greedy[:, None], best, weights)


@typed
def distribution(
    logits: Float[Array, "R V"], settings: Any, *, impl: str
) -> Float32[Array, "R V"]:
    """Returns `sampling.distribution` of each row.

    Args: as in `noisy_weights`, or with scalar leaves.
    """
    each = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, logits.shape[:1]), settings)
    # The highest token has weight 1, so no sum is 0.
    weights = jnp.exp(log_weights(logits, each, impl=impl))
    return weights / row_sums(weights, impl=impl)[:, None]


@typed
def log_softmax(
    x: Float32[Array, "*rows V"], *, impl: str
) -> Float32[Array, "*rows V"]:
    """Returns the log-softmax of each row."""
    shifted = x - jnp.max(x, axis=-1, keepdims=True)
    return shifted - jnp.log(row_sums(jnp.exp(shifted), impl=impl))[..., None]


@typed
def row_sums(x: Float32[Array, "*rows V"], *, impl: str) -> Float32[Array, "*rows"]:
    """Returns the sum of each row."""
    rows = x.reshape(-1, x.shape[-1])
    return dispatch.kernel("row_sums", impl)(rows).reshape(x.shape[:-1])


def _weights(logits, at, settings, positions, draws, impl, *, with_noise):
    """Computes log weights of rows that draw, whose highest logits are `at [R]`."""
    highest = jnp.take_along_axis(logits, at[:, None], axis=1)[:, 0]
    kernel = dispatch.kernel("noisy_weights", impl)
    given = logits, highest, settings, positions, draws
    return kernel(*given, with_noise=with_noise)


def _highest(logits, impl):
    """Returns the argmax of each row."""
    num_active = jnp.int32(logits.shape[0])
    return argmax.argmax(logits, num_active=num_active, impl=impl)
