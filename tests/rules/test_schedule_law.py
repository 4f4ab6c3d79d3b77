"""The exact law of rounds with a schedule of drafts.

No draft may be left out because of its own token. The example is the paper's: one slot,
two drafts, survival 0.8 of the first; whether the second is worth its row depends on
the first one's token alone.
"""

import enumeration
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.gamma import schedule as schedule_lib


DEAR, CHEAP = (1.0, 1.0, 1 / 0.5, 1 / 0.45), (1.0, 1.0, 1.6, 1.7)
"""The seconds of a step by its rows; more rows cost less in the second."""

CASE = enumeration.honest(
    target=[np.array(p, np.float32) for p in ([0.7, 0.3], [[0.7, 0.3]] * 2)]
    + [np.full((2, 2, 2), 0.5, np.float32)],
    draft=[np.full((2,) * n, 0.5, np.float32) for n in (1, 2)],
)
A = 0  # The token that the target prefers.


def verified(survival_of, step_s=DEAR, *, stops_early=True):
    """Returns a function: how many drafts of a chain are verified, by its survivals."""

    def num_drafted(chain):
        counts = schedule_lib.schedule(
            jnp.asarray([survival_of(chain)], jnp.float32),
            jnp.array([2], jnp.int32),
            jnp.array([True]),
            jnp.asarray(step_s, jnp.float32),
            stops_early=stops_early,
        )
        return int(counts[0])

    return num_drafted


def known_before(chain):
    """Returns survivals: the first is fixed, the second depends on the first token."""
    return 0.8, 0.8 * (0.9 if chain[0] == A else 0.0)


def of_itself(chain):
    """Plants survivals of which the first depends on the first token itself."""
    first = 0.99 if chain[0] == A else 0.1
    return first, first * 0.99


def counts_of(num_drafted):
    return {num_drafted(chain) for chain in enumeration.all_chains(CASE)}


def law_of(num_drafted, rule):
    found = enumeration.outcomes(enumeration.RULES[rule], CASE, num_drafted)
    return found.law(CASE.truth).sum(axis=(1, 2))


@pytest.mark.parametrize("rule", enumeration.RULES)
def test_the_papers_example_is_exact_with_the_stop_alone(rule):
    """Checks for (0.7, 0.3) by the stop, the paper's (0.85, 0.15) by the maximum."""
    stop = verified(known_before)
    assert counts_of(stop) == {0}
    np.testing.assert_allclose(law_of(stop, rule), [0.7, 0.3], atol=1e-6)
    everything = verified(known_before, stops_early=False)
    assert everything([A, A]) == 2 and everything([1 - A, A]) == 0
    np.testing.assert_allclose(law_of(everything, rule), [0.85, 0.15], atol=1e-6)


@pytest.mark.parametrize("rule", enumeration.RULES)
def test_a_schedule_may_see_the_tokens_before(rule):
    """Fails if the law is not exact; negative control: a draft's own confidence."""
    honest = verified(known_before, CHEAP)
    assert counts_of(honest) == {1, 2}
    bias = lambda num_drafted: enumeration.bias(
        enumeration.RULES[rule], CASE, num_drafted
    )
    assert bias(honest) < enumeration.ROUNDING
    assert bias(verified(of_itself, CHEAP)) > 1000 * enumeration.ROUNDING
