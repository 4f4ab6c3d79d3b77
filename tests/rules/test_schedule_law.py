"""The exact law of rounds with a schedule of drafts, or with a choice among drafters.

No draft may be left out because of its own token, and no choice may depend on tokens of
the round. The example is the paper's: one slot, two drafts, survival 0.8 of the first;
whether the second is worth its row depends on the first one's token alone.
"""

import enumeration
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters import knowledge
from spec_jax.gamma import schedule as schedule_lib


STEP_S = jnp.asarray([1.0, 1.0, 1 / 0.5, 1 / 0.45], jnp.float32)
CASE = enumeration.honest(
    target=[np.array(p, np.float32) for p in ([0.7, 0.3], [[0.7, 0.3]] * 2)]
    + [np.full((2, 2, 2), 0.5, np.float32)],
    draft=[np.full((2,) * n, 0.5, np.float32) for n in (1, 2)],
)
A = 0  # The token that the target prefers.


def verified(survival_of, *, stops_early):
    """Returns a function: how many drafts of a chain are verified, by its survivals."""

    def num_drafted(chain):
        counts = schedule_lib.schedule(
            jnp.asarray([survival_of(chain)], jnp.float32),
            jnp.array([2], jnp.int32),
            jnp.array([True]),
            STEP_S,
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


def one_ahead(chain):
    """Plants survivals that are read one draft too far on."""
    _, second = known_before(chain)
    return second, second


def law_of(num_drafted, rule="rejection"):
    law = enumeration.committed_law(enumeration.RULES[rule], CASE, num_drafted)
    return law.sum(axis=(1, 2))


@pytest.mark.parametrize("rule", enumeration.RULES)
def test_the_papers_example_is_exact_with_the_stop_alone(rule):
    """Checks for (0.7, 0.3) by the stop, the paper's (0.85, 0.15) by the maximum."""
    stop = verified(known_before, stops_early=True)
    assert {stop(chain) for chain in enumeration.all_chains(CASE)} == {0}
    np.testing.assert_allclose(law_of(stop, rule), [0.7, 0.3], atol=1e-6)
    everything = verified(known_before, stops_early=False)
    assert everything([A, A]) == 2 and everything([1 - A, A]) == 0
    np.testing.assert_allclose(law_of(everything, rule), [0.85, 0.15], atol=1e-6)


FAULTS = {
    "confidence of the token itself": verified(of_itself, stops_early=True),
    "survival of the draft after it": verified(one_ahead, stops_early=True),
    "the drawn token": lambda chain: 2 if chain[0] == A else 0,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rule", enumeration.RULES)
def test_a_schedule_that_sees_the_token_is_caught(rule, fault, monkeypatch):
    """Negative control. More rows cost less here, so that some drafts are verified."""
    cheap = jnp.asarray([1.0, 1.0, 1.6, 1.7], jnp.float32)
    monkeypatch.setitem(globals(), "STEP_S", cheap)
    biased = enumeration.bias(enumeration.RULES[rule], CASE, FAULTS[fault])
    assert biased > 1000 * enumeration.ROUNDING
    honest = verified(known_before, stops_early=True)
    assert {honest(chain) for chain in enumeration.all_chains(CASE)} == {1, 2}
    assert enumeration.bias(enumeration.RULES[rule], CASE, honest) < 1e-6


_best = jax.jit(knowledge.best)


def asked_by(kept_of):
    """Returns a function: how many drafts a choice asks for, by `kept_of(chain)`."""
    round_s = jnp.asarray([[1.0, 1.4, 1.8]], jnp.float32)

    def num_drafted(chain):
        known = knowledge.nothing(1, 1, 2)
        kept = jnp.full_like(known.kept, kept_of(chain))
        known = known.replace(reached=jnp.full_like(kept, 20.0), kept=kept)
        most = jnp.full((1, 1), 2, jnp.int32)
        how = {"prior": 0.7, "weight": 4.0}
        return int(_best(known, round_s, most, **how)[1][0])

    return num_drafted


@pytest.mark.parametrize("rule", enumeration.RULES)
def test_the_law_of_a_choice_that_knows_rounds_that_are_done(rule):
    """Checks that the law is exact, but not if the counts know this round's drafts."""
    for kept in (0.0, 10.0, 20.0):
        honest = asked_by(lambda chain, kept=kept: kept)
        assert enumeration.bias(enumeration.RULES[rule], CASE, honest) < 1e-6
    peeks = asked_by(lambda chain: 20.0 if chain[0] == 0 else 0.0)
    assert {peeks(chain) for chain in enumeration.all_chains(CASE)} == {0, 2}
    biased = enumeration.bias(enumeration.RULES[rule], CASE, peeks)
    assert biased > 1000 * enumeration.ROUNDING
