"""Policies of gamma, times and texts that the tests of `spec_jax.gamma` share."""

import jax.numpy as jnp
import numpy as np
import pytest
import simulation

from spec_jax.gamma import goodput, leader, policy, threshold


GAMMA_MAX = 4
ROUND_S = np.array([1.35, 1.75, 2.0, 2.2, 2.45]) * 1e-3
"""Seconds of a round by gamma, about those of the embedded pair on two cores."""

NUM_TOKENS = 9_000
"""Tokens of every text, so that all share an executable: 2,000 rounds and more."""

ADAPTIVE = pytest.mark.parametrize("name", ["threshold", "goodput", "leader"])


def make(name, *, first=None, **changes):
    """Returns a policy and its first state; thresholds start at the gamma `first`."""
    if name == "threshold":
        made = threshold.Threshold(**changes)
        return made, made.init(first)
    if name in ("goodput", "leader"):
        kind = goodput.Goodput if name == "goodput" else leader.Leader
        made = kind(**{"gamma_max": GAMMA_MAX, **changes})
        return made, made.init(ROUND_S[: made.gamma_max + 1])
    made = policy.Fixed(gamma_max=GAMMA_MAX)
    return made, made.init(**changes)


def draw_text(stretches, seed=0):
    """Draws a text of equal stretches, each with one chance for all its drafts.

    A stretch may give a chance for each draft: that it is kept if all before it were.
    The luck of a position is drawn once for all its drafts: a token that is hard to
    guess is so for every policy.
    """
    chances = np.repeat(np.array(stretches), NUM_TOKENS // len(stretches), axis=0)
    luck = np.random.default_rng(seed).random((NUM_TOKENS, 1))
    return luck < np.broadcast_to(
        chances.reshape(NUM_TOKENS, -1), (NUM_TOKENS, GAMMA_MAX)
    )


def simulate(made, run, text, max_rounds=NUM_TOKENS):
    return simulation.simulate(
        made, run, jnp.asarray(text), max_rounds=jnp.int32(max_rounds)
    )


def measure_regret(made, state, text, *, round_s=ROUND_S, catch_up_s=0.0):
    """Runs the policy and every constant gamma on one text, to its end."""

    def seconds(made, state):
        run = simulate(made, simulation.begin(made, state), text)
        return run.seconds(round_s, catch_up_s=catch_up_s)

    fixed = policy.Fixed(gamma_max=made.gamma_max)
    return simulation.Regret(
        seconds=seconds(made, state),
        fixed_s=tuple(seconds(fixed, fixed.init(g)) for g in range(len(round_s))),
    )


def measure(name, text, *, catch_up_s=0.0, **changes):
    return measure_regret(*make(name, **changes), text, catch_up_s=catch_up_s)
