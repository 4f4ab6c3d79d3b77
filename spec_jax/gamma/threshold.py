"""Gamma by two thresholds on the share of drafts that are kept."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax import pytree
from spec_jax.gamma import policy


class ThresholdState(pytree.Node):
    """The state of `Threshold`."""

    level: jax.Array  # [] int32, index into the ladder; 0 is off
    average: jax.Array  # [] float32, of accepted / drafted, since the last change
    probe: policy.ProbeState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Threshold(policy.GammaPolicy):
    """Climbs and descends a ladder of gammas, by the share of drafts that are kept.

    The share is an exponential moving average of `num_accepted / num_drafted`, over
    rounds. The share differs between gammas (later drafts are kept less often), so the
    average begins anew at every change of gamma, halfway between the thresholds. As it
    starts there, and not at 0, it needs no bias correction.

    The cost of a text on which nothing is kept: each rung takes
    `1 + floor(log(2 lower / (lower + upper)) / log(1 - weight))` rounds, 5 with the
    defaults; after that, what `policy.Probing` says.

    Attributes:
      ladder: gammas, rising from 0.
      lower, upper: the policy descends below the share `lower`, and climbs above
        `upper`. A first draft pays where its chance exceeds `round_s[1] / round_s[0] -
        1`: a good value for `lower`. The default is that of the embedded pair.
      weight: of the newest round in the average.

    Raises:
      ValueError: a ladder that does not rise from 0, thresholds that are not
        `0 < lower < upper < 1`, or a weight outside `(0, 1)`.
    """

    ladder: tuple[int, ...] = (0, 1, 2, 4)
    lower: float = 0.3
    upper: float = 0.5
    weight: float = 0.0625
    probing: policy.Probing = policy.Probing()

    keeps_state = True
    """The rung of one text is the best guess for the next."""

    def __post_init__(self):
        rises = all(a < b for a, b in zip(self.ladder, self.ladder[1:], strict=False))
        if len(self.ladder) < 2 or self.ladder[0] != 0 or not rises:
            raise ValueError(
                f"ladder={self.ladder} must rise from 0 to at least one gamma above it"
            )
        if not 0 < self.lower < self.upper < 1:
            raise ValueError(
                f"lower={self.lower} and upper={self.upper} are not "
                "0 < lower < upper < 1: give shares of kept drafts, in that order"
            )
        if not 0 < self.weight < 1:
            raise ValueError(f"weight={self.weight} must lie between 0 and 1")

    @property
    def gamma_max(self) -> int:
        """The last rung."""
        return self.ladder[-1]

    @property
    def _undecided(self) -> float:
        return (self.lower + self.upper) / 2

    def init(self, gamma: int | None = None) -> ThresholdState:
        """Starts undecided on the rung of `gamma`, or on the first one that drafts.

        A short adversarial text could not make up for a descent from high rungs.

        Raises:
          ValueError: a gamma that is not on the ladder.
        """
        gamma = self.ladder[1] if gamma is None else gamma
        if gamma not in self.ladder:
            raise ValueError(f"{gamma=} is no rung of ladder={self.ladder}")
        return ThresholdState(
            level=jnp.int32(self.ladder.index(gamma)),
            average=jnp.float32(self._undecided),
            probe=self.probing.init(),
        )

    def choose(self, state: ThresholdState) -> Int[Array, ""]:
        """Returns the gamma of the rung; where that is 0, 1 if a probe is due."""
        gamma = jnp.asarray(self.ladder, jnp.int32)[state.level]
        return policy.or_probe(gamma, state.probe)

    def update(self, state, *, gamma, num_drafted, num_accepted):
        """Moves by one rung at most. A kept probe is the way up from gamma 0."""
        is_off = state.level == 0
        num_verified = self.probing.count_verified(gamma, num_drafted)
        is_verified = num_verified > 0
        share = num_accepted.astype(jnp.float32) / jnp.maximum(num_verified, 1).astype(
            jnp.float32
        )
        average = state.average + self.weight * (share - state.average)
        average = jnp.where(is_verified & ~is_off, average, state.average)
        climbs = jnp.where(is_off, num_accepted > 0, average > self.upper) & is_verified
        # At gamma 0, and after every change, the average is undecided: only verified
        # rounds change it.
        descends = average < self.lower
        level = state.level + climbs.astype(jnp.int32) - descends.astype(jnp.int32)
        level = jnp.minimum(level, len(self.ladder) - 1)
        return ThresholdState(
            level=level,
            average=jnp.where(
                level == state.level, average, jnp.float32(self._undecided)
            ),
            probe=self.probing.update(
                state.probe,
                is_off=is_off,
                num_verified=num_verified,
                num_accepted=num_accepted,
            ),
        )
