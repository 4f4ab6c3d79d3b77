"""A drafter that drafts nothing, and keeps the target's features of each text."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spec_jax.drafters import features as features_lib
from spec_jax.engine import protocols, state as states
from spec_jax.ops import bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorder(protocols.Drafter):
    """A `SlotDrafter` whose memory holds the features of all rows of each slot.

    Attributes:
      taps: the features that are kept.
      feature_size: the width of one.
      dtype: the target's.
    """

    taps: tuple[int, ...]
    feature_size: int
    dtype: str
    num_slots: int
    gamma_max: int = 0

    def init(self, *, capacity: int, **pages: Any) -> features_lib.FeatureRing:
        """Allocates `capacity` features for each slot, which are held as bits."""
        del pages
        width = len(self.taps) * self.feature_size
        held = bits.to_bits(jnp.zeros((), self.dtype)).dtype
        return features_lib.empty(
            self.num_slots, size=capacity, width=width, dtype=held.name
        )

    def prefill(  # type: ignore[override]
        self,
        params: None,
        memory: features_lib.FeatureRing,
        prompt: list[int],
        *,
        slot: int,
        features: Float[Array, "T taps D"] | None = None,
    ) -> features_lib.FeatureRing:
        """Keeps the features of a prompt without its last token; None: there are no
        taps."""
        del params
        if features is None:
            return memory
        return _filled(memory, features, np.int32(slot), np.int32(len(prompt) - 1))

    def propose(  # type: ignore[override]
        self,
        params: None,
        memory: features_lib.FeatureRing,
        *,
        length: Int[Array, " B"],
        **others: Any,
    ) -> tuple[features_lib.FeatureRing, protocols.Proposal]:
        """Drafts nothing."""
        del params, others
        return memory, protocols.Proposal(
            tokens=jnp.zeros((self.num_slots, self.gamma_max), jnp.int32),
            num_drafted=jnp.zeros_like(length),
        )

    def commit(  # type: ignore[override]
        self,
        params: None,
        memory: features_lib.FeatureRing,
        length: Int[Array, " B"],
        *,
        asked: Bool[Array, " B"],
        features: Float[Array, "B A taps D"] | None = None,
    ) -> features_lib.FeatureRing:
        """Adds features of committed rows, and cuts slots to `length - 1` features."""
        del params
        if features is not None:
            # As bits: as floats, the whole memory would be converted for each row.
            flat = bits.to_bits(features.reshape(*features.shape[:2], -1))
            memory = features_lib.append(memory, flat, length - 1, asked=asked)
        return features_lib.truncate(memory, length - 1, asked=asked)

    def rows(self, state: states.State, slot: int) -> np.ndarray:
        """Returns the features of a slot's text without its last token, `[T - 1, taps,
        D]`."""
        flat, end = jax.device_get(_of_slot(state.memory, np.int32(slot)))
        flat = flat[:end].view(jnp.dtype(self.dtype))
        return flat.reshape(end, len(self.taps), self.feature_size)


@jax.jit
def _of_slot(memory: features_lib.FeatureRing, slot: Any) -> Any:
    return memory.features[slot], memory.end[slot]


@functools.partial(jax.jit, donate_argnums=0)
def _filled(
    memory: features_lib.FeatureRing, features: Any, slot: Any, end: Any
) -> Any:
    size = memory.size
    flat = bits.to_bits(features.reshape(len(features), -1)[:size])
    held = jax.lax.dynamic_update_slice(
        memory.features, flat[None], (slot, jnp.int32(0), jnp.int32(0))
    )
    return memory.replace(features=held, end=memory.end.at[slot].set(end))
