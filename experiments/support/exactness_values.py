"""What names of axes stand for: sampling settings, and policies of gamma.

All numbers are stated here, none is measured, so that a run decides the same anywhere.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.support import exactness_cells as cells, policies
from spec_jax.engine import protocols
from spec_jax.rules import sampling as sampling_lib


CONSTANTS: Mapping[str, Mapping[str, float]] = {
    "sampled": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 0},
    # A round without drafts takes 1, in any unit, and each draft adds to it: enough
    # for texts of some difficulty to be drafted for by fewer than the most.
    "goodput": {"round": 1.0, "draft": 0.25},
}
"""Part of what a certificate says."""

SAMPLINGS = ("greedy", "sampled")


def settings_of(sampling: str) -> sampling_lib.SamplingSettings | None:
    """The settings of one of `SAMPLINGS`; None is greedy."""
    if sampling == "greedy":
        return None
    return sampling_lib.make_settings(**CONSTANTS[sampling])


def policy_of(name: str, drafter: protocols.Drafter) -> policies.Chosen:
    """One of `policies.POLICIES`, for all gammas that the drafter can draft.

    Goodput gets stated costs in the place of measured ones. A cell's gamma is data on
    top of the policy, so that cells of any gamma share executables.

    Raises:
      ValueError: another name.
    """
    costs, gamma_max = CONSTANTS["goodput"], drafter.gamma_max
    return policies.make(
        name,
        drafter,
        gamma=gamma_max,
        round_s=lambda: costs["round"] + costs["draft"] * np.arange(gamma_max + 1),
    )


def constants_of(
    all_cells: Sequence[cells.Cell],
) -> dict[str, Mapping[str, float]]:
    """Those of `CONSTANTS` that cells name."""
    named = {name for cell in all_cells for name in (cell.sampling, cell.gamma_policy)}
    return {name: dict(CONSTANTS[name]) for name in CONSTANTS if name in named}
