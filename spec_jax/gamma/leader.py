"""Gamma by what the texts before this one kept, and by what this one keeps.

`Leader` is for chains, and `RankLeader` for trees, as in `goodput`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from spec_jax.gamma import goodput, policy


class LeaderState(goodput.GoodputState):
    """The state of `Leader`; `reached` and `kept` are of this text."""

    all_reached: jax.Array  # [gamma_max] float32, of all texts, faded more slowly
    all_kept: jax.Array  # [gamma_max] float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leader(goodput.Goodput):
    """Follows the gamma that leads by the rounds of this text and of those before it.

    `Goodput`, with another prior: a round shows for every gamma what it would have
    brought, up to the first draft that was not kept, and all texts of a slot count as
    alike until they differ. So a text begins with the leader of all texts, whose
    chances count as `text_weight` rounds, and is soon judged by itself. The first text
    begins with a high prior. Where the leader is gamma 0, drafts are tried as `probing`
    says, from text to text ever more rarely.

    The drafts of a text that is not like the others cost some rounds. A `Budget` bounds
    that cost, and allows an expensive first draft only after enough plain rounds.

    Attributes:
      text_weight: how many rounds the chances of all texts are worth in each.
      all_decay: factor of their counts per verified round.

    Raises:
      ValueError: as `Goodput`; a text weight not above 0, a decay outside `(0, 1)`.
    """

    prior: float = 0.7
    prior_weight: float = 4.0
    probing: policy.Probing = policy.Probing(every=8, bound=0.1)
    text_weight: float = 6.0
    all_decay: float = 0.998

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.text_weight < math.inf:
            raise ValueError(f"text_weight={self.text_weight} must be above 0")
        if not 0 < self.all_decay < 1:
            raise ValueError(f"all_decay={self.all_decay} must lie between 0 and 1")

    def _state(self, **fields: Any) -> LeaderState:
        zeros = lambda: jnp.zeros((self.gamma_max,), jnp.float32)
        return LeaderState(**fields, all_reached=zeros(), all_kept=zeros())

    def chances(self, state: policy.State) -> Float[Array, " gamma_max"]:
        """Returns the chance to keep each draft, in the sense of `Goodput.chances`."""
        of_all = {"reached": state.all_reached, "kept": state.all_kept}
        own = state.kept + self.text_weight * super().chances(state.replace(**of_all))
        return own / (state.reached + self.text_weight)

    def _remembered(self, state, is_verified, reached, kept) -> policy.State:
        """Counts the drafts of a round among those of all texts."""
        fade = jnp.where(is_verified, self.all_decay, 1.0)
        return state.replace(
            all_reached=fade * state.all_reached + reached,
            all_kept=fade * state.all_kept + kept,
        )

    def _forgets(self, state: policy.State) -> Bool[Array, ""]:
        """Returns whether the text has seen a first draft that was not kept.

        Probes that are kept add up, until they outweigh the other texts.
        """
        return state.kept[0] < state.reached[0]

    def renew(self, state: policy.State) -> policy.State:
        """Returns the state of ONE slot where another text begins: with the leader."""
        zeros = jnp.zeros_like
        state = state.replace(reached=zeros(state.reached), kept=zeros(state.kept))
        return state.replace(gamma=self._best(state))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankLeader(Leader, goodput.RankGoodput):
    """Follows the number of nodes of a tree that leads, as `Leader` does of drafts."""
