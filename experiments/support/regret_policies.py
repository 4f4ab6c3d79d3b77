"""Candidates: what regret compares, constant gammas and policies by name."""

import dataclasses
from collections.abc import Sequence

from experiments.support import model_pair, paired_runs, policies
from spec_jax.gamma import policy


ADAPTIVE = tuple(name for name in policies.POLICIES if name != "fixed")
"""Policies that adapt; beside them stands every constant gamma."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy, and the state that its first text begins with.

    Attributes:
      gamma: tokens that are drafted a round, at most.
      is_fixed: whether it is a constant gamma, one of those that regret is against.
      pair: with a drafter of its own, which ends drafts by itself; it cannot be
        simulated. None: the pair of all others.
    """

    name: str
    gamma: int
    gamma_policy: policy.GammaPolicy
    state: policy.State
    is_fixed: bool
    pair: model_pair.ModelPair | None = None


def candidates(
    names: Sequence[str],
    pair: model_pair.ModelPair,
    settings: paired_runs.Settings,
    prompt: list[int],
) -> list[Candidate]:
    """Every constant gamma up to `settings.gamma`, then the policies of these names.

    Args:
      names: of `ADAPTIVE`; they are what `spec_round.py` runs by these names.
      prompt: as in `policies.with_policy`, whose errors are raised.
    """
    fixed = policy.Fixed(gamma_max=settings.gamma)
    made = [
        Candidate(
            name=f"fixed {gamma}",
            gamma=gamma,
            gamma_policy=fixed,
            state=fixed.init(gamma),
            is_fixed=True,
        )
        for gamma in range(settings.gamma + 1)
    ]
    for name in names:
        asked = policies.with_policy(name, pair, settings, prompt)
        made.append(
            Candidate(
                name=name,
                gamma=asked.gamma,
                gamma_policy=asked.gamma_policy,
                state=asked.policy_state,
                is_fixed=False,
            )
        )
    return made


def confident(
    confidence: float, pair: model_pair.ModelPair, settings: paired_runs.Settings
) -> Candidate:
    """The largest gamma, with a drafter that stops where it is not confident.

    Args:
      pair: of that drafter.
    """
    fixed = policy.Fixed(gamma_max=settings.gamma)
    return Candidate(
        name=f"confidence {confidence:g}",
        gamma=settings.gamma,
        gamma_policy=fixed,
        state=fixed.init(settings.gamma),
        is_fixed=False,
        pair=pair,
    )
