"""Regret by simulation: recorded fates and a cost curve -> seconds of every policy."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.support import plan_costs, regret_fates, regret_policies
from spec_jax.gamma import simulation


def seconds_of(
    candidate: regret_policies.Candidate,
    texts: Sequence[regret_fates.Text],
    *,
    round_s: np.ndarray,
    catch_up_s: float,
    hand_on: bool,
) -> float:
    """Seconds that the policy takes for all texts.

    Args:
      hand_on: whether a text begins with what the text before it has taught.
    """
    total, state = 0.0, candidate.state
    for text in texts:
        run = simulation.simulate(
            candidate.gamma_policy,
            simulation.begin(candidate.gamma_policy, state),
            jnp.asarray(text.is_kept),
            max_rounds=jnp.int32(len(text.tokens)),
        )
        total += run.seconds(round_s, catch_up_s=catch_up_s)
        state = run.state if hand_on else candidate.state
    return total


def rows(
    candidates: Sequence[regret_policies.Candidate],
    sets: Mapping[str, Sequence[regret_fates.Text]],
    costs: plan_costs.RoundCosts,
    *,
    hand_on: bool,
) -> list[dict[str, Any]]:
    """A row of each set and policy, as `row` makes it, of kind "regret"."""
    round_s = costs.round_s()
    made = []
    for name, texts in sets.items():
        seconds = {
            candidate.name: seconds_of(
                candidate,
                texts,
                round_s=round_s,
                catch_up_s=costs.catch_up_s or 0.0,
                hand_on=hand_on,
            )
            for candidate in candidates
        }
        plain_s = sum(len(text.tokens) for text in texts) * costs.plain_s
        for candidate in candidates:
            about = {"kind": "regret", "set": name, "prompts": len(texts)}
            made.append(about | row(candidate, candidates, seconds, plain_s))
    return made


def row(
    candidate: regret_policies.Candidate,
    candidates: Sequence[regret_policies.Candidate],
    seconds: Mapping[str, float],
    plain_s: float,
) -> dict[str, Any]:
    """One policy on one set, beside the constant gammas and plain decoding.

    Args:
      seconds: of every candidate.
      plain_s: seconds of plain decoding of the same texts.
    """
    fixed_s = [seconds[other.name] for other in candidates if other.is_fixed]
    regret = simulation.Regret(seconds=seconds[candidate.name], fixed_s=tuple(fixed_s))
    return {
        "policy": candidate.name,
        "is_fixed": candidate.is_fixed,
        "seconds": regret.seconds,
        "plain_s": plain_s,
        "fixed_s": regret.fixed_s,
        "best_gamma": regret.best_gamma,
        "regret": regret.regret,
        "speedup": plain_s / regret.seconds,
        "slowdown_to_gamma_0": regret.overhead,
    }
