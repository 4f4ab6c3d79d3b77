"""A draft model that keeps no K/V over rounds: each builds its cache anew.

Measured next to `drafters.draft_model`, which keeps that of committed tokens.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spec_jax.drafters import draft_model, draft_slots, hybrid
from spec_jax.engine import protocols
from spec_jax.model import params as params_lib
from spec_jax.paging import cache as paged


class RoundLocal(draft_model.DraftModel):
    """A `DraftModel` whose cache is built again in each round."""

    def for_slots(self, num_slots: int) -> "SlotRoundLocal":
        """Returns the draft model for `num_slots` sequences."""
        return SlotRoundLocal(drafter=self, num_slots=num_slots)


class SlotRoundLocal(draft_slots.SlotDraftModel):
    """A `RoundLocal` for `num_slots` sequences."""

    def commit(
        self,
        params: params_lib.Params,
        memory: paged.PagedKV,
        length: Int[Array, " B"],
        *,
        asked: Bool[Array, " B"],
    ) -> paged.PagedKV:
        """Forgets everything."""
        return super().commit(params, memory, jnp.ones_like(length), asked=asked)


def of(drafter: protocols.Drafter) -> protocols.Drafter:
    """Returns the drafter with a draft model that is `RoundLocal`.

    Raises:
      ValueError: a drafter without a draft model.
    """
    if isinstance(drafter, hybrid.Hybrid):
        return dataclasses.replace(drafter, draft=of(drafter.draft))
    if type(drafter) is not draft_model.DraftModel:  # Not of a kind with features.
        raise ValueError(
            f"{type(drafter).__name__} has no draft model, and so no draft cache to "
            "build again in each round: leave --draft-cache out"
        )
    names = [field.name for field in dataclasses.fields(drafter)]
    return RoundLocal(**{name: getattr(drafter, name) for name in names})
