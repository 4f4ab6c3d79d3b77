"""Gamma by expected tokens per second, from measured times and running acceptance.

`Goodput` is for chains, and `RankGoodput` for trees: their gamma is a number of nodes.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spec_jax import pytree
from spec_jax.gamma import policy, theory


class GoodputState(pytree.Node):
    """The state of `Goodput`."""

    gamma: jax.Array  # [] int32, the best by what is known; 0 is off
    reached: jax.Array  # [gamma_max] float32, discounted rounds that came to draft i
    kept: jax.Array  # [gamma_max] float32, discounted rounds that kept draft i
    round_s: jax.Array  # [gamma_max + 1] float32, seconds of a round; data
    probe: policy.ProbeState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goodput(policy.GammaPolicy):
    """Chooses the gamma of most expected tokens per second.

    `theory.goodput` of measured times and of the running conditional acceptance (Liu
    et al., 2024, https://arxiv.org/abs/2406.14066, there with one acceptance for all
    positions). Draft `i`'s chance is a discounted count,

        conditional[i] = (kept[i] + prior_weight * conditional[i-1])
                         / (reached[i] + prior_weight),

    whose prior is the draft before it, and for the first one `prior`. So a position
    that was not tried lately counts as good as the last one that was: a policy that
    drafts little climbs as soon as these drafts are kept, and probes are due at gamma 0
    alone. A probe that is kept there contradicts the counts, which are therefore
    forgotten.

    Attributes:
      decay: factor of old counts per verified round; `1 / (1 - decay)` rounds count.
      prior: the first draft's chance before anything is known.
      prior_weight: how many rounds a prior is worth.

    Raises:
      ValueError: gamma_max below 1, decay outside `(0, 1)`, a prior outside `[0, 1]`,
        or a prior weight that is not above 0.
    """

    gamma_max: int
    decay: float = 0.96875
    prior: float = 0.5
    prior_weight: float = 2.0
    probing: policy.Probing = policy.Probing()

    keeps_state = True
    """Counts of one text are the best guess for the next."""

    def __post_init__(self):
        if self.gamma_max < 1:
            raise ValueError(f"gamma_max={self.gamma_max} must be at least 1")
        if not 0 < self.decay < 1:
            raise ValueError(f"decay={self.decay} must lie between 0 and 1")
        if not 0 <= self.prior <= 1:
            raise ValueError(f"prior={self.prior} is no probability")
        if not 0 < self.prior_weight < math.inf:
            raise ValueError(f"prior_weight={self.prior_weight} must be above 0")

    def init(self, round_s: np.ndarray) -> GoodputState:
        """Returns the first state, from the seconds of a round by gamma; no counts.

        Raises:
          ValueError: not one time for each gamma, or one that is not above 0.
        """
        times = np.asarray(round_s, np.float32)
        if times.shape != (self.gamma_max + 1,):
            raise ValueError(
                f"round_s has shape {times.shape}, and gamma 0 .. {self.gamma_max} "
                f"need ({self.gamma_max + 1},): one time each"
            )
        if not (np.isfinite(times) & (times > 0)).all():
            raise ValueError(f"round_s={times} must be finite and above 0")
        state = self._state(
            gamma=jnp.int32(0),
            reached=jnp.zeros((self.gamma_max,), jnp.float32),
            kept=jnp.zeros((self.gamma_max,), jnp.float32),
            round_s=jnp.array(times),
            probe=self.probing.init(added=float(times[1] / times[0]) - 1),
        )
        return state.replace(gamma=self._best(state))

    def _state(self, **fields: Any) -> GoodputState:
        return GoodputState(**fields)

    def chances(self, state: GoodputState) -> Float[Array, " gamma_max"]:
        """Returns the chance to keep each draft: if all before it are kept; of a tree
        (`RankGoodput`), in any round that verifies the node."""
        return chances(
            state.reached, state.kept, prior=self.prior, weight=self.prior_weight
        )

    def _goodput(self, state: GoodputState) -> Float[theory.AnyArray, " gamma_max+1"]:
        return theory.goodput(self.chances(state), state.round_s)

    def _best(self, state: GoodputState) -> jax.Array:
        return jnp.argmax(self._goodput(state)).astype(jnp.int32)

    def _counts(
        self,
        num_verified: Int[Array, ""],
        num_accepted: Int[Array, ""],
        kept: Bool[Array, " gamma_max"] | None,
    ) -> tuple[Bool[Array, " gamma_max"], Bool[Array, " gamma_max"]]:
        """Returns which drafts a round came to, and which were kept."""
        drafts = jnp.arange(self.gamma_max, dtype=jnp.int32)
        is_reached = (drafts < num_verified) & (drafts <= num_accepted)
        return is_reached, drafts < num_accepted

    def _forgets(self, state: GoodputState) -> Bool[Array, ""] | bool:
        """Returns whether a probe that is kept contradicts the counts."""
        return True

    def choose(self, state: GoodputState) -> Int[Array, ""]:
        """Returns the best gamma; where that is 0, 1 if a probe is due."""
        return policy.or_probe(state.gamma, state.probe)

    def _remembered(self, state, is_verified, reached, kept) -> GoodputState:
        """Returns the state with a round among what other texts begin with."""
        return state

    def update(self, state, *, gamma, num_drafted, num_accepted, kept=None):
        """Counts the drafts that were verified, and finds the best gamma again."""
        is_off = state.gamma == 0
        num_verified = self.probing.count_verified(gamma, num_drafted)
        is_verified = num_verified > 0
        is_kept_probe = is_off & is_verified & (num_accepted > 0)
        counts = self._counts(num_verified, num_accepted, kept)
        reached, kept = (each.astype(jnp.float32) for each in counts)
        state = self._remembered(state, is_verified, reached, kept)
        fade = jnp.where(is_verified, self.decay, 1.0)
        fade = jnp.where(is_kept_probe & self._forgets(state), 0.0, fade)
        updated = state.replace(
            reached=fade * state.reached + reached,
            kept=fade * state.kept + kept,
            probe=self.probing.update(
                state.probe,
                is_off=is_off,
                num_verified=num_verified,
                num_accepted=num_accepted,
            ),
        )
        # Off stays off until a probe is kept, also where faded counts hope for more.
        decides = is_verified & (~is_off | is_kept_probe)
        best = jnp.where(decides, self._best(updated), state.gamma)
        return updated.replace(gamma=best)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankGoodput(Goodput):
    """Chooses how many nodes of a tree to verify: of most expected tokens per second.

    Nodes come best first, and any leading ones are a tree. The chance that the `i`-th
    node is on the kept path is counted by its rank, in every round that verified it, as
    `Goodput` counts a position's; so `w` nodes commit `1 + chance[0] + .. +
    chance[w-1]` tokens. With a smaller gamma the drafter looks less deep: its search
    ends where no deeper node can be among the best. A chain's ranks are positions.
    """

    reads_ranks = True
    """`update` is told which nodes were kept, as `kept`."""

    def _goodput(self, state: GoodputState) -> Float[theory.AnyArray, " gamma_max+1"]:
        kept = jnp.pad(self.chances(state), (1, 0), constant_values=1.0)
        return jnp.cumsum(kept) / state.round_s

    def _counts(self, num_verified, num_accepted, kept):
        drafts = jnp.arange(self.gamma_max, dtype=jnp.int32)
        return drafts < num_verified, kept


def chances(
    reached: Float[Array, " gamma_max"],
    kept: Float[Array, " gamma_max"],
    *,
    prior: float,
    weight: float,
) -> Float[Array, " gamma_max"]:
    """Returns `kept / reached` of each draft, with a prior worth `weight` rounds.

    The prior of a draft is the chance of the one before it, as `Goodput` says.
    """

    def step(before, counts):
        reached, kept = counts
        chance = (kept + weight * before) / (reached + weight)
        return chance, chance

    return jax.lax.scan(step, jnp.float32(prior), (reached, kept))[1]
