"""Adaptive gamma: how many tokens to draft next, decided on the device."""

from typing import TYPE_CHECKING

import spec_jax


_NAMES = {
    "Budget": "spec_jax.gamma.budget",
    "Fixed": "spec_jax.gamma.policy",
    "GammaPolicy": "spec_jax.gamma.policy",
    "Goodput": "spec_jax.gamma.goodput",
    "Leader": "spec_jax.gamma.leader",
    "RankGoodput": "spec_jax.gamma.goodput",
    "RankLeader": "spec_jax.gamma.leader",
    "RoundCosts": "spec_jax.gamma.costs",
    "Schedule": "spec_jax.gamma.schedule",
    "Threshold": "spec_jax.gamma.threshold",
}

__all__ = [
    "Budget",
    "Fixed",
    "GammaPolicy",
    "Goodput",
    "Leader",
    "RankGoodput",
    "RankLeader",
    "RoundCosts",
    "Schedule",
    "Threshold",
    "budget",
    "confidence",
    "costs",
    "goodput",
    "leader",
    "policy",
    "schedule",
    "theory",
    "threshold",
]

if TYPE_CHECKING:
    from spec_jax.gamma import (
        budget,
        confidence,
        costs,
        goodput,
        leader,
        policy,
        schedule,
        theory,
        threshold,
    )
    from spec_jax.gamma.budget import Budget
    from spec_jax.gamma.costs import RoundCosts
    from spec_jax.gamma.goodput import Goodput, RankGoodput
    from spec_jax.gamma.leader import Leader, RankLeader
    from spec_jax.gamma.policy import Fixed, GammaPolicy
    from spec_jax.gamma.schedule import Schedule
    from spec_jax.gamma.threshold import Threshold

__getattr__, __dir__ = spec_jax.exports(__name__, _NAMES, __all__)
