"""Policies of gamma on traces.

As `policies.with_policy` makes them for live rounds, but that expected tokens per
second come from a table of costs: there is no target to measure.
"""

from collections.abc import Sequence

from experiments.support import policies
from spec_jax.engine import protocols
from spec_jax.gamma import theory


def check_costs(names: Sequence[str], *, has_costs: bool) -> None:
    """Raises `ValueError` for a policy that lacks the costs that it expects from."""
    if "goodput" in names and not has_costs:
        raise ValueError(
            "gamma policy goodput expects speeds from step costs: give --costs"
        )


def make(
    name: str, drafter: protocols.Drafter, *, gamma: int, curve: theory.CostCurve | None
) -> policies.Chosen:
    """The policy of that name for gammas up to `gamma`.

    Args:
      curve: of the drafter; None where `check_costs` lets it be.

    Raises:
      ValueError: an unknown name.
    """
    return policies.make(
        name, drafter, gamma=gamma, round_s=lambda: curve.round_s(gamma)
    )
