"""Rounds without models: the time that a policy would have taken on a given text.

The outcome of every draft is given (drawn, or recorded from a real run), so that two
policies meet the same text, and the best constant gamma is known in hindsight. Times
come from a table, seconds by gamma, and are not measured.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Bool, Int

from spec_jax import pytree
from spec_jax.gamma import goodput, leader, policy, threshold


GAMMA_MAX = 4
ROUND_S = np.array([1.35, 1.75, 2.0, 2.2, 2.45]) * 1e-3
"""Seconds of a round by gamma, about those of the embedded pair on two cores."""

ADAPTIVE = pytest.mark.parametrize("name", ["threshold", "goodput", "leader"])


def make(name, *, first=None, **changes):
    """Returns a policy and its first state; thresholds start at the gamma `first`."""
    if name == "threshold":
        made = threshold.Threshold(**changes)
        return made, made.init(first)
    kind = goodput.Goodput if name == "goodput" else leader.Leader
    made = kind(gamma_max=GAMMA_MAX, **changes)
    return made, made.init(ROUND_S)


class Simulation(pytree.Node):
    """A run up to some position of the text. All counts are exact."""

    state: policy.State  # the policy's
    position: jax.Array  # [] int32, tokens committed
    rounds_at: jax.Array  # [gamma_max + 1] int32, rounds by gamma
    num_behind: jax.Array  # [] int32, tokens that the drafter has not taken in yet
    num_caught_up: jax.Array  # [] int32, tokens that it took in after gamma 0

    def seconds(self, round_s: np.ndarray, *, catch_up_s: float = 0.0) -> np.ndarray:
        """Returns the time of the run, or of several, in float64.

        Args:
          round_s: seconds of a round, `[gamma_max + 1]`, by gamma.
          catch_up_s: seconds by which a token that the drafter sat out makes its next
            proposal longer; 0 for drafters that look up, or that follow every round.
        """
        rounds_s = np.asarray(self.rounds_at, np.float64) @ np.asarray(round_s)
        return rounds_s + np.asarray(self.num_caught_up) * catch_up_s


@functools.partial(jax.jit, static_argnames=("gamma_policy",))
def simulate(
    gamma_policy: policy.GammaPolicy,
    state: policy.State,
    is_kept: Bool[Array, "num_tokens gamma_max"],
    *,
    max_rounds: Int[Array, ""] | int = 1_000_000,
) -> Simulation:
    """Runs rounds from a policy's first state until the text is full.

    Args:
      is_kept: by position of the text and by `i`, whether draft `i` of a round is kept
        if it stands there and all drafts before it were kept.
    """
    num_tokens, gamma_max = is_kept.shape
    drafts = jnp.arange(gamma_max, dtype=jnp.int32)
    first = Simulation(
        state=state,
        position=jnp.int32(0),
        rounds_at=jnp.zeros(gamma_max + 1, jnp.int32),
        num_behind=jnp.int32(0),
        num_caught_up=jnp.int32(0),
    )

    def keep_going(carry):
        step, run = carry
        return (run.position < num_tokens) & (step < max_rounds)

    def body(carry):
        """Runs one round: asks for gamma, counts kept drafts, updates all state."""
        step, run = carry
        # At most `gamma + 1` tokens are committed, so the end is met exactly.
        left = num_tokens - run.position - 1
        gamma = jnp.minimum(gamma_policy.choose(run.state), left)
        at = jnp.minimum(run.position + drafts, num_tokens - 1)
        kept = is_kept[at, drafts] & (drafts < gamma)
        num_accepted = jnp.sum(jnp.cumprod(kept.astype(jnp.int32)), dtype=jnp.int32)
        caught_up = jnp.where(gamma > 0, run.num_behind, 0)
        state = run.state
        if policy.settles(gamma_policy):
            state = _settle(gamma_policy, state, gamma, num_accepted)
        return step + 1, Simulation(
            state=gamma_policy.update(
                state, gamma=gamma, num_drafted=gamma, num_accepted=num_accepted
            ),
            position=run.position + num_accepted + 1,
            rounds_at=run.rounds_at.at[gamma].add(1),
            num_behind=jnp.where(gamma > 0, 0, run.num_behind + 1),
            num_caught_up=run.num_caught_up + caught_up,
        )

    _, run = jax.lax.while_loop(keep_going, body, (jnp.int32(0), first))
    return run


def _settle(gamma_policy, state, gamma, num_accepted):
    """Settles a round of one slot."""
    told = {"num_active": jnp.int32(1), "num_verified": gamma}
    told |= {"asked": gamma[None], "num_accepted": num_accepted}
    slots = jax.tree.map(lambda leaf: leaf[None], state)
    settled = gamma_policy.settle(slots, **told)
    return jax.tree.map(lambda leaf: leaf[0], settled)
