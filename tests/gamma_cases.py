"""Policies of gamma and times that the tests of `spec_jax.gamma` share."""

import numpy as np
import pytest

from spec_jax.gamma import goodput, leader, threshold


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
