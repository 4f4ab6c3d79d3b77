"""A draft whose K/V does not outlive its round: every round takes in the whole text.

The design before the persistent draft cache, for any drafter with a memory.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spec_jax.drafters import each
from spec_jax.engine import protocols


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundCache:
    """Drafts as `drafter` does, which forgets its text after every round."""

    drafter: protocols.Drafter

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "drafter":
            raise AttributeError(name)
        return getattr(self.drafter, name)

    def for_rule(self, rule: str) -> "RoundCache":
        """Returns the drafter for that rule of acceptance."""
        if not hasattr(self.drafter, "for_rule"):
            return self
        return RoundCache(drafter=self.drafter.for_rule(rule))

    def for_slots(self, num_slots: int) -> "SlotRoundCache":
        """Returns the drafter for `num_slots` sequences."""
        return SlotRoundCache(inner=each.lift(self.drafter, num_slots))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotRoundCache:
    """A `RoundCache` for slots."""

    inner: protocols.SlotDrafter

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def commit(
        self,
        params: protocols.Params,
        memory: protocols.Memory,
        length: Int[Array, " B"],
        *,
        asked: Bool[Array, " B"],
    ) -> protocols.Memory:
        """Forgets everything, in the slots that are asked."""
        return self.inner.commit(params, memory, jnp.ones_like(length), asked=asked)
