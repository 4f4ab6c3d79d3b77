"""What rounds of a choice among drafters commit, as an exact law.

Who drafts, and how much, may depend on rounds that are done; on no draft of this one.
"""

import enumeration
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters import knowledge


CASE = enumeration.honest(
    target=[np.array(p, np.float32) for p in ([0.7, 0.3], [[0.7, 0.3]] * 2)]
    + [np.full((2, 2, 2), 0.5, np.float32)],
    draft=[np.full((2,) * n, 0.5, np.float32) for n in (1, 2)],
)


def asked_by(kept_of):
    """How much a choice asks for, by counts that may know what is drafted."""
    round_s = jnp.asarray([[1.0, 1.4, 1.8]], jnp.float32)

    def num_drafted(chain):
        known = knowledge.nothing(1, 1, 2)
        kept = jnp.full_like(known.kept, kept_of(chain))
        known = known.replace(reached=jnp.full_like(kept, 20.0), kept=kept)
        most = jnp.full((1, 1), 2, jnp.int32)
        how = {"prior": 0.7, "weight": 4.0}
        return int(knowledge.best(known, round_s, most, **how)[1][0])

    return num_drafted


@pytest.mark.parametrize("rule", enumeration.RULES)
def test_the_law_of_a_choice_that_knows_rounds_that_are_done(rule):
    """Exact, whatever is asked for; and not where counts know this round's drafts."""
    for kept in (0.0, 10.0, 20.0):
        honest = asked_by(lambda chain, kept=kept: kept)
        assert enumeration.bias(enumeration.RULES[rule], CASE, honest) < 1e-6
    peeks = asked_by(lambda chain: 20.0 if chain[0] == 0 else 0.0)
    assert {peeks(chain) for chain in enumeration.all_chains(CASE)} == {0, 2}
    biased = enumeration.bias(enumeration.RULES[rule], CASE, peeks)
    assert biased > 1000 * enumeration.ROUNDING
