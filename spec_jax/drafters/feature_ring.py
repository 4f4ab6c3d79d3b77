"""The target's features that a drafter has not taken in yet, for every slot.

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
from spec_jax.ops import bits


class FeatureRing(pytree.Node):
    """Features of positions `[first, end)` of each slot."""

    features: jax.Array  # [B, F, taps * D]
    first: jax.Array  # [B] int32
    end: jax.Array  # [B] int32

    @property
    def size(self) -> int:
        """Features of a slot that there is room for, `F`."""
        return self.features.shape[1]

    def append(
        self,
        features: Float[Array, "B A width"],
        end: Int[Array, " B"],
        *,
        asked: Bool[Array, " B"],
    ) -> "FeatureRing":
        """Adds the leading features, which are of positions from `self.end` to `end`.

        There must be room for them.
        """
        num_slots, most = features.shape[:2]
        end = jnp.where(asked, jnp.clip(end, self.end, self.end + most), self.end)
        positions = self.end[:, None] + jnp.arange(most, dtype=jnp.int32)[None]
        # Other features get a place past the end, and are dropped.
        at = jnp.where(positions < end[:, None], positions % self.size, self.size)
        slots = jnp.arange(num_slots, dtype=jnp.int32)[:, None]
        dtype = self.features.dtype
        added = bits.to_bits(features.astype(dtype))
        written = bits.to_bits(self.features).at[slots, at].set(added, mode="drop")
        return self.replace(features=bits.from_bits(written, dtype), end=end)

    def read(
        self, start: Int[Array, " B"], *, count: int
    ) -> Float[Array, "B {count} width"]:
        """Returns `count` features of each slot from position `start` on."""
        positions = start[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        slots = jnp.arange(start.shape[0], dtype=jnp.int32)[:, None]
        found = bits.to_bits(self.features)[slots, positions % self.size]
        return bits.from_bits(found, self.features.dtype)

    def truncate(
        self, end: Int[Array, " B"], *, asked: Bool[Array, " B"]
    ) -> "FeatureRing":
        """Forgets positions from `end` on, in the slots that are asked."""
        cut = lambda bound: jnp.where(asked, jnp.minimum(bound, end), bound)
        return self.replace(first=cut(self.first), end=cut(self.end))


def empty(num_slots: int, *, size: int, width: int, dtype: str) -> FeatureRing:
    """Returns rings of `size` features of `width` values, with nothing in them."""
    return FeatureRing(
        features=jnp.zeros((num_slots, size, width), dtype),
        first=jnp.zeros((num_slots,), jnp.int32),
        end=jnp.zeros((num_slots,), jnp.int32),
    )
