"""Policies of gamma by the name that a command line gives them."""

import dataclasses
from collections.abc import Callable

import numpy as np

from spec_jax.drafters import draft_model, hybrid
from spec_jax.engine import protocols
from spec_jax.gamma import goodput, policy, threshold


POLICIES = ("fixed", "threshold", "goodput")
"""Always the same gamma; by the share of kept drafts; by expected tokens per second,
from times of a round."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """A policy and its first state; None twice is a constant gamma."""

    gamma_policy: policy.GammaPolicy | None = None
    state: policy.State = None


def make(
    name: str,
    drafter: protocols.Drafter,
    *,
    gamma: int,
    round_s: Callable[[], np.ndarray],
) -> Chosen:
    """Returns the policy of that name, for gammas up to `gamma`.

    Args:
      round_s: seconds of a round by gamma, `0 .. gamma` at least; asked for where the
        policy needs them.

    Raises:
      ValueError: a name that is not in `POLICIES`.
    """
    # A lookup that finds nothing cost nothing, and is no evidence.
    asks_a_model = isinstance(drafter, draft_model.DraftModel | hybrid.Hybrid)
    probing = policy.Probing(silence_is_free=not asks_a_model)
    if name == "fixed":
        return Chosen()
    if name == "threshold":
        levels = [level for level in (0, 1, 2, 4, 8, 16) if level < gamma]
        chosen = threshold.Threshold(ladder=(*levels, gamma), probing=probing)
        return Chosen(gamma_policy=chosen, state=chosen.init())
    if name == "goodput":
        chosen = goodput.Goodput(gamma_max=gamma, probing=probing)
        return Chosen(gamma_policy=chosen, state=chosen.init(round_s()[: gamma + 1]))
    raise ValueError(f"gamma policy {name!r} is not one of {', '.join(POLICIES)}")
