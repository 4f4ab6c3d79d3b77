"""Rejection and block verification, enumerated: their laws and their mean lengths.

`tests/test_acceptance_biases.py` sends planted biases through the same enumeration.
"""

import acceptance_cases as cases
import enumeration
import numpy as np
import pytest


SIZES = ((2, 3), (3, 2), (5, 3))


@pytest.mark.few(18)
@pytest.mark.parametrize("vocab_size, gamma", SIZES)
@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("rule", enumeration.RULES)
def test_the_law_is_the_targets(rule, kind, vocab_size, gamma, rng):
    """Total variation 0 to rounding, for every number of real drafts."""
    case = cases.make_case(kind, rng, vocab_size, gamma)
    for num_drafted in range(gamma + 1):
        assert (
            enumeration.bias(enumeration.RULES[rule], case, num_drafted)
            < enumeration.ROUNDING
        )


@pytest.mark.parametrize("kind", cases.KINDS)
def test_accepted_lengths_follow_theory(kind, rng):
    """The mean lengths are the sums of the papers, and block's is not the smaller."""
    case = cases.make_case(kind, rng, 5, 3)
    rejection = enumeration.expected_accepted(enumeration.REJECTION, case, 3)
    block = enumeration.expected_accepted(enumeration.BLOCK, case, 3)
    assert rejection == pytest.approx(
        enumeration.mean_accepted_by_rejection(case), abs=enumeration.ROUNDING
    )
    assert block == pytest.approx(
        enumeration.mean_accepted_by_block(case), abs=enumeration.ROUNDING
    )
    assert block >= rejection - enumeration.ROUNDING


def test_the_papers_own_example():
    """Sun et al. (2024): 10/9 drafts are kept one by one, and 11/9 as a block."""
    target = enumeration.table(lambda n: np.tile([1 / 3, 2 / 3], (n, 1)), 2, 4)
    draft = enumeration.table(lambda n: np.tile([2 / 3, 1 / 3], (n, 1)), 2, 3)
    case = enumeration.honest(target, draft)
    accepted = [
        enumeration.expected_accepted(enumeration.RULES[name], case, 2)
        for name in enumeration.RULES
    ]
    assert accepted == pytest.approx([10 / 9, 11 / 9], abs=enumeration.ROUNDING)
