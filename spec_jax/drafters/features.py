"""The target's features that a drafter has not taken in yet, of every slot.

For a slot with committed tokens `x[0, n)`:

    drafter K/V   [0, m)       made of features that were taken in
    ring          [m, n - 1)   of committed rows, in order; position p at place p % F

A commit adds a few rows, at the cost of a copy; a proposal takes all of them in. A slot
that drafts nothing waits until the ring would overflow.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax import pytree


class FeatureRing(pytree.Node):
    """Features of positions `[first, end)` of each slot."""

    features: jax.Array  # [B, F, taps * D]
    first: jax.Array  # [B] int32
    end: jax.Array  # [B] int32

    @property
    def size(self) -> int:
        """Features of a slot that there is room for, `F`."""
        return self.features.shape[1]


def empty(num_slots: int, *, size: int, width: int, dtype: str) -> FeatureRing:
    """Returns rings of `size` features of `width` values, with nothing in them."""
    return FeatureRing(
        features=jnp.zeros((num_slots, size, width), dtype),
        first=jnp.zeros((num_slots,), jnp.int32),
        end=jnp.zeros((num_slots,), jnp.int32),
    )


def append(
    ring: FeatureRing,
    features: Float[Array, "B A width"],
    end: Int[Array, " B"],
    *,
    asked: Bool[Array, " B"],
) -> FeatureRing:
    """Adds the leading features, which are of positions from `ring.end` to `end`.

    There must be room for them: `overflows`.
    """
    num_slots, most = features.shape[:2]
    end = jnp.where(asked, jnp.clip(end, ring.end, ring.end + most), ring.end)
    positions = ring.end[:, None] + jnp.arange(most, dtype=jnp.int32)[None]
    # Past the end, and so dropped.
    at = jnp.where(positions < end[:, None], positions % ring.size, ring.size)
    slots = jnp.arange(num_slots, dtype=jnp.int32)[:, None]
    written = ring.features.at[slots, at].set(features, mode="drop")
    return ring.replace(features=written, end=end)


def read(
    ring: FeatureRing, start: Int[Array, " B"], *, count: int
) -> Float[Array, "B {count} width"]:
    """Returns `count` features of each slot from position `start` on."""
    positions = start[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    slots = jnp.arange(start.shape[0], dtype=jnp.int32)[:, None]
    return ring.features[slots, positions % ring.size]


def truncate(
    ring: FeatureRing, end: Int[Array, " B"], *, asked: Bool[Array, " B"]
) -> FeatureRing:
    """Forgets positions from `end` on, in the slots that are asked."""
    cut = lambda bound: jnp.where(asked, jnp.minimum(bound, end), bound)
    return ring.replace(first=cut(ring.first), end=cut(ring.end))


def overflows(ring: FeatureRing, *, most: int) -> Bool[Array, " B"]:
    """Returns where there is no room for `most` more features."""
    return ring.end - ring.first + most > ring.size
