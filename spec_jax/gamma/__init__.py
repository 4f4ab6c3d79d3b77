"""Adaptive gamma: how many tokens to draft next, decided on the device."""

from typing import TYPE_CHECKING

import spec_jax


_NAMES = {
    "budget": ["Budget"],
    "confidence": [],
    "costs": ["RoundCosts"],
    "goodput": ["Goodput", "RankGoodput"],
    "leader": ["Leader", "RankLeader"],
    "policy": ["Fixed", "GammaPolicy"],
    "schedule": ["Schedule"],
    "theory": [],
    "threshold": ["Threshold"],
}

if TYPE_CHECKING:
    from spec_jax.gamma.budget import Budget as Budget
    from spec_jax.gamma.costs import RoundCosts as RoundCosts
    from spec_jax.gamma.goodput import Goodput as Goodput, RankGoodput as RankGoodput
    from spec_jax.gamma.leader import Leader as Leader, RankLeader as RankLeader
    from spec_jax.gamma.policy import Fixed as Fixed, GammaPolicy as GammaPolicy
    from spec_jax.gamma.schedule import Schedule as Schedule
    from spec_jax.gamma.threshold import Threshold as Threshold

__getattr__, __dir__, __all__ = spec_jax.exports(__name__, _NAMES, _NAMES)
