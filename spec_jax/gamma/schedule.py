"""The drafts of a batch to verify: Algorithm 1 of DSpark, from measured step times.

DSpark (2026), https://arxiv.org/abs/2607.05147. A drafter says of each draft the chance
that it is kept with all before it, its survival, before the draft's token is drawn. A
round verifies the drafts of highest survival, of all slots together, as many as make
most tokens per second: with `R` slots, `a_1 >= a_2 >= ..` the survivals of all drafts
and `step_s[n]` the seconds of a step of `n` rows,

    theta_k = (R + a_1 + .. + a_k) / (step_s[R + k] + draft_s).

This is for a round that drafted, which takes `draft_s` whatever it verifies. Whether a
round drafts at all is decided before, by what such rounds brought: see `Schedule`.

The rule of acceptance decides how far the search may look. "coupled" writes one stream
whatever is verified, so the global maximum of theta is lossless. Under the rules that
draw uniforms, whether a draft is verified must not depend on its own token, and the
survivals after it do: there the search ends at the first `k` without a rise, so that a
draft is taken or left out before its own token counts.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int

from spec_jax import pytree
from spec_jax.gamma import confidence, policy as policy_lib
from spec_jax.typing import typed


@functools.partial(jax.jit, static_argnames=("stops_early",))
@typed
def schedule(
    survival: Float32[Array, "B W"],
    num_drafted: Int[Array, " B"],
    active: Bool[Array, " B"],
    step_s: Float32[Array, " rows"],
    draft_s: Float32[Array, ""] | float = 0.0,
    *,
    stops_early: bool,
) -> Int[Array, " B"]:
    """Returns how many of its drafts each slot verifies.

    Drafts are taken in descending order of survival, equal ones by their place in the
    proposal and then by slot, so that a slot's drafts are taken in their own order.

    Args:
      survival: chance that each draft is kept with all before it. One that is above the
        chance before it counts as equal to that one, NaN as 0.
      num_drafted: drafts of each slot; entries past them are never taken.
      active: slots that generate; each has a row of its own.
      step_s: seconds of a step by its rows, above 0, of all rows that there can be.
      draft_s: seconds that drafting took, whatever is verified.
      stops_early: take drafts up to the first that raises theta no further
        (Algorithm 1); otherwise up to its global maximum, lossless under the rule
        "coupled" alone.

    Raises:
      ValueError: times of fewer rows than there can be.
    """
    num_slots, width = survival.shape
    most = num_slots * (width + 1)
    if step_s.shape[0] <= most:
        raise ValueError(
            f"step_s has times up to {step_s.shape[0] - 1} rows, and {num_slots} slots "
            f"of {width} drafts have up to {most}: measure steps of as many"
        )
    columns = jnp.arange(width, dtype=jnp.int32)[None]
    is_real = active[:, None] & (columns < num_drafted[:, None])
    chances = jnp.clip(jnp.where(jnp.isnan(survival), 0.0, survival), 0.0, 1.0)
    chances = jax.lax.cummin(chances, axis=1)
    # The others go behind all real ones. The stable sort keeps a slot's own order.
    by_column = jnp.where(is_real, chances, -1.0).T.reshape(-1)
    order = jnp.argsort(-by_column, stable=True)
    num_real = jnp.sum(is_real, dtype=jnp.int32)
    num_active = jnp.sum(active, dtype=jnp.int32)
    kept = jnp.cumsum(jnp.maximum(by_column[order], 0.0))
    expected = num_active.astype(jnp.float32) + jnp.pad(kept, (1, 0))
    counts = jnp.arange(num_slots * width + 1, dtype=jnp.int32)
    theta = expected / (step_s[num_active + counts] + draft_s)
    theta = jnp.where(counts <= num_real, theta, -jnp.inf)
    if stops_early:
        rises = (theta[1:] > theta[:-1]).astype(jnp.int32)
        count = jnp.sum(jnp.cumprod(rises))
    else:
        count = jnp.argmax(theta)
    is_taken = jnp.zeros(order.shape, jnp.int32).at[order].set(counts[:-1]) < count
    return jnp.sum(is_taken.reshape(width, num_slots), axis=0, dtype=jnp.int32)


def times(step_s: np.ndarray) -> np.ndarray:
    """Returns measured seconds by rows, `[rows + 1]` float32, as data of a schedule.

    Raises:
      ValueError: not one row of three or more, finite, above 0, and never falling.
    """
    found = np.asarray(step_s, np.float32)
    if found.ndim != 1 or found.size < 3:
        raise ValueError(
            f"step_s has shape {list(found.shape)}: give one row of seconds, of a step "
            "of 0, 1, 2 .. rows; see experiments/profile_steps.py"
        )
    if not (np.isfinite(found) & (found > 0)).all():
        at = int(np.argmin(np.isfinite(found) & (found > 0)))
        raise ValueError(f"step_s[{at}]={found[at]} must be finite and above 0")
    falls = np.flatnonzero(np.diff(found) < 0)
    if falls.size:
        at = int(falls[0])
        raise ValueError(
            f"step_s falls from {found[at]:.4g} s at {at} rows to {found[at + 1]:.4g} "
            f"s at {at + 1}, which is noise: measure longer, or give "
            "np.maximum.accumulate(step_s)"
        )
    return found


class ScheduleState(pytree.Node):
    """The state of `Schedule`; all of it but `asks` is equal in all slots."""

    step_s: jax.Array  # [rows + 1] float32
    draft_s: jax.Array  # [] float32
    # Temperatures and shifts, [gamma_max] float32; None: survival as it is.
    scaling: tuple[jax.Array, jax.Array] | None
    balance: jax.Array  # [] float32, tokens
    asks: policy_lib.State  # of the policy that says how much is drafted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule(policy_lib.GammaPolicy):
    """Verifies those drafts of a batch that pay, and drafts while that pays.

    A policy of gamma for drafters that give `Proposal.survival`; gamma, the number of
    rows that each slot verifies, is data, and may differ from slot to slot and round to
    round: see `schedule`.

    Drafting itself is weighed against steps of one row for each of the `R` slots, in
    an account of tokens that all slots share. A round that drafted and verified `k`
    drafts, of which `A` were kept, adds

        (R + A) - R * (step_s[R + k] + draft_s) / step_s[R],

    the tokens that it committed beyond what plain steps would have in its time; a
    negative number lowers the balance. While the balance is above 0 all slots draft;
    else none does, and each plain step adds `allowance` for each slot. So a useless
    drafter, even with high survivals, makes a text slower than plain decoding by no
    more than `allowance`, by the profile's times, and besides by `savings` and one
    round. The less it loses, the sooner it is tried again, by all slots together, which
    share a forward of the drafter.

    Attributes:
      gamma_max: tokens to draft a round.
      stops_early: whether the search ends where theta first does not rise. False, the
        global maximum, is for the rule "coupled" alone, and `check` refuses others.
      asks: the policy that says how many tokens are drafted while the balance is above
        0; a slot verifies some of them. None: `gamma_max`. With `Threshold`, a slot
        whose drafts are not verified, or not kept, only probes now and then.
      credit: tokens in the account at first; infinite: drafting is never weighed.
      savings: tokens that it holds at most, if above `credit`.
      allowance: share of the time of plain steps that trying may cost.

    Raises:
      ValueError: gamma_max below 1, or below that of `asks`; credit or savings not
        above 0; or an allowance outside `(0, 1]`.
    """

    gamma_max: int
    stops_early: bool = False
    asks: policy_lib.GammaPolicy | None = None
    credit: float = 8.0
    savings: float = 32.0
    allowance: float = 0.01

    schedules = True
    """`trim` is asked how many of the drafts are verified."""

    settles = True
    """`settle` is told what the round of all slots brought."""

    keeps_state = True
    """The counts of drafting are of all slots, and outlive their requests."""

    def __post_init__(self):
        if self.gamma_max < 1:
            raise ValueError(f"gamma_max={self.gamma_max} must be at least 1")
        if self.asks is not None and self.asks.gamma_max > self.gamma_max:
            raise ValueError(
                f"gamma_max={self.gamma_max} of a schedule whose policy asks for up to "
                f"{self.asks.gamma_max} drafts: give both the same"
            )
        if not (0 < self.credit and 0 < self.savings and 0 < self.allowance <= 1):
            raise ValueError(
                f"credit={self.credit} and savings={self.savings} must be above 0, and "
                f"allowance={self.allowance} in (0, 1]: drafting would never be tried"
            )

    def init(
        self,
        step_s: np.ndarray,
        *,
        draft_s: float = 0.0,
        temperatures: np.ndarray | None = None,
        shifts: np.ndarray | None = None,
        asks: policy_lib.State = None,
    ) -> ScheduleState:
        """Returns the state.

        Args:
          step_s: measured seconds of a step by its rows, `[rows + 1]`, up to
            `num_slots * (gamma_max + 1)` rows.
          draft_s: seconds by which drafting makes a round of all slots longer.
          temperatures: of each draft's confidence, as `profile_steps.py --calibrate`
            fits them; None: survival is calibrated already.
          shifts: of each draft's confidence; None: 0.
          asks: the first state of the policy `asks`.

        Raises:
          ValueError: as `times`; a time of drafting that is not finite, or below 0; not
            one temperature above 0, or one shift, for each draft; or one of the policy
            `asks` and its state without the other.
        """
        if (self.asks is None) != (asks is None):
            raise ValueError("the policy `asks` and its first state go together")
        if not 0 <= draft_s < np.inf:
            raise ValueError(f"{draft_s=} must be finite and not below 0")
        made = ScheduleState(
            step_s=jnp.array(times(step_s)),
            draft_s=jnp.float32(draft_s),
            scaling=None,
            balance=jnp.float32(self.credit),
            asks=asks,
        )
        if temperatures is None and shifts is None:
            return made
        return made.replace(
            scaling=(
                self._of_each("temperatures", temperatures, neutral=1.0),
                self._of_each("shifts", shifts, neutral=0.0),
            )
        )

    def _of_each(self, name: str, given: np.ndarray | None, *, neutral: float):
        """Returns the numbers of all drafts, checked."""
        if given is None:
            return jnp.full(self.gamma_max, neutral, jnp.float32)
        found = np.asarray(given, np.float32)
        is_fine = found.shape == (self.gamma_max,) and np.isfinite(found).all()
        if not is_fine or (name == "temperatures" and (found <= 0).any()):
            raise ValueError(
                f"{name}={found} of gamma_max={self.gamma_max}: give one for each "
                "draft, finite, and temperatures above 0"
            )
        return jnp.array(found)

    def check(self, state: ScheduleState, *, num_slots: int, rule: Any) -> None:
        """Raises `ValueError` unless so many slots can be scheduled under the rule,
        of `rules.rule`."""
        if not rule.is_exact and not self.stops_early:
            raise ValueError(
                f"a schedule by the global maximum is biased under rule={rule!r}: "
                "whether a draft is verified may depend on its own token; give "
                "stops_early=True, or the rule 'coupled', whose stream no schedule can "
                "change"
            )
        rows, needed = state.step_s.shape[0] - 1, num_slots * (self.gamma_max + 1)
        if rows < needed:
            raise ValueError(
                f"the profile has times of 1 .. {rows} rows, and {num_slots} slots of "
                f"{self.gamma_max} drafts verify up to {needed} together: measure as "
                f"many, profile_steps.py --batch {num_slots} --gamma {self.gamma_max}, "
                "or take fewer slots or drafts"
            )

    def choose(self, state: ScheduleState) -> Int[Array, ""]:
        """Returns what `asks` chooses or `gamma_max`; 0 while drafting does not pay."""
        asked = jnp.int32(self.gamma_max)
        if self.asks is not None:
            asked = self.asks.choose(state.asks)
        return jnp.where(state.balance > 0, asked, 0)

    def update(self, state: ScheduleState, **numbers: jax.Array) -> ScheduleState:
        """Updates `asks` after a round; unverified drafts do not count."""
        if self.asks is None:
            return state
        return state.replace(asks=self.asks.update(state.asks, **numbers))

    def renew(self, state: ScheduleState) -> ScheduleState:
        """Returns the state of ONE slot where another text begins."""
        return state.replace(asks=policy_lib.renewed(self.asks, state.asks))

    def settle(self, state, *, asked, num_active, num_verified, num_accepted):
        """Returns the state with a round of all slots in the account.

        Args: as `policy.settles` says; a round without active slots changes nothing.
        """
        step_s, slots = state.step_s[0], num_active.astype(jnp.float32)
        round_s = step_s[num_active + num_verified] + state.draft_s[0]
        committed = slots + num_accepted.astype(jnp.float32)
        gain = committed - slots * round_s / step_s[num_active]
        gain = jnp.where(jnp.any(asked > 0), gain, self.allowance * slots)
        balance = state.balance + jnp.where(num_active > 0, gain, 0.0)
        return state.replace(balance=jnp.minimum(balance, self.most))

    @property
    def most(self) -> float:
        """Tokens that the account holds at most."""
        return max(self.credit, self.savings)

    def trim(
        self,
        state: ScheduleState,
        *,
        survival: Float32[Array, "B W"],
        num_drafted: Int[Array, " B"],
        active: Bool[Array, " B"],
    ) -> Int[Array, " B"]:
        """Returns how many of its drafts each slot verifies.

        Args:
          state: of all slots, leaves `[B, ..]`, which are all alike.
        """

        def some():
            """Weighs the drafts against each other."""
            chances = survival[:, : self.gamma_max]
            if state.scaling is not None:
                own = (each[0, : chances.shape[1]] for each in state.scaling)
                chances = confidence.recalibrated(chances, *own)
            return schedule(
                chances,
                num_drafted,
                active,
                state.step_s[0],
                state.draft_s[0],
                stops_early=self.stops_early,
            )

        # A plain step sorts nothing.
        return jax.lax.cond(
            jnp.any(num_drafted > 0), some, lambda: jnp.zeros_like(num_drafted)
        )
