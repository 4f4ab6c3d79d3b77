"""Policies of gamma on traces, by the names that `policies.POLICIES` has.

As `policies.with_policy` makes them for live rounds, but that expected tokens per
second come from a table of costs: there is no target to measure.
"""

import dataclasses
from collections.abc import Sequence

from spec_jax import rounds, theory
from spec_jax.drafters import draft_model, hybrid
from spec_jax.gamma import goodput, policy, threshold


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """A policy and its first state; None twice is a constant gamma."""

    gamma_policy: policy.GammaPolicy | None = None
    state: policy.State = None


def check_costs(names: Sequence[str], *, has_costs: bool) -> None:
    """Raises `ValueError` for a policy that lacks the costs that it expects from."""
    if "goodput" in names and not has_costs:
        raise ValueError(
            "gamma policy goodput expects speeds from step costs: give --costs"
        )


def make(
    name: str, drafter: rounds.Drafter, *, gamma: int, curve: theory.CostCurve | None
) -> Chosen:
    """The policy of that name for gammas up to `gamma`.

    Args:
      curve: of the drafter; None where `check_costs` lets it be.

    Raises:
      ValueError: an unknown name.
    """
    # A lookup that finds nothing cost nothing, and is no evidence.
    asks_a_model = isinstance(drafter, draft_model.DraftModel | hybrid.Hybrid)
    probing = policy.Probing(silence_is_free=not asks_a_model)
    if name == "fixed":
        return Chosen()
    if name == "threshold":
        rungs = [rung for rung in (0, 1, 2, 4, 8, 16) if rung < gamma]
        chosen = threshold.Threshold(ladder=(*rungs, gamma), probing=probing)
        return Chosen(gamma_policy=chosen, state=chosen.init())
    if name == "goodput":
        chosen = goodput.Goodput(gamma_max=gamma, probing=probing)
        return Chosen(gamma_policy=chosen, state=chosen.init(curve.round_s(gamma)))
    raise ValueError(f"gamma policy {name!r} is not one of fixed, threshold, goodput")
