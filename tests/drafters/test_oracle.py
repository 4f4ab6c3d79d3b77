"""The oracle proposes its trace, and is wrong where it was told to be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.drafters import each, oracle


GAMMA_MAX = 4
DRAFTER = oracle.Oracle(gamma_max=GAMMA_MAX, vocab_size=96)
TEXT = [3, 95, 0, 41, 41, 7]


_propose = jax.jit(DRAFTER.propose)


def drafts(trace, length, *, gamma=GAMMA_MAX) -> list[int]:
    tokens = jnp.zeros((12,), jnp.int32)
    memory = DRAFTER.init(capacity=11, page_size=4)
    memory = DRAFTER.prefill(trace, memory, TEXT[:1])
    assert memory.tokens.shape == memory.is_right.shape == (13,)
    _, proposal = _propose(
        None, memory, tokens=tokens, length=jnp.int32(length), gamma=jnp.int32(gamma)
    )
    return np.asarray(proposal.tokens)[: int(proposal.num_drafted)].tolist()


def test_it_proposes_the_trace():
    """Fails if a position is off by one, or more is drafted than is known."""
    trace = oracle.make_trace(TEXT)
    for length in range(1, len(TEXT) + 2):
        for gamma in range(GAMMA_MAX + 1):
            assert drafts(trace, length, gamma=gamma) == TEXT[length:][:gamma]


def test_wrong_tokens_are_other_tokens_of_the_vocabulary():
    """Fails if a forced error is right, or past the vocabulary."""
    trace = oracle.make_trace(TEXT, rate=0.0)
    assert drafts(trace, 1) == [0, 1, 42, 42]


@pytest.mark.parametrize("rate", [0.2, 0.7])
def test_positions_are_right_at_the_rate_whatever_came_before(rate):
    """Fails if acceptance is not `rate` at every position of a window."""
    size = 20_000
    trace = oracle.make_trace([5] * size, rate=rate, seed=3)
    right = np.asarray(trace.is_right)
    for before in range(3):
        # How often windows that keep their first drafts keep the next one, too.
        kept = np.ones(size - 3, bool)
        for i in range(before):
            kept &= right[i : size - 3 + i]
        following = right[before : size - 3 + before][kept]
        error = np.sqrt(rate * (1 - rate) / following.size)
        assert abs(following.mean() - rate) < 5 * error
    # The seed alone decides which drafts are right.
    testing.assert_same_bits(trace, oracle.make_trace([5] * size, rate=rate, seed=3))
    other = oracle.make_trace([5] * size, rate=rate, seed=4)
    assert (np.asarray(other.is_right) != right).any()


@pytest.mark.parametrize(
    ("text", "rate", "message"),
    [
        ([], 1.0, "the text is empty"),
        (TEXT, 1.5, r"rate=1.5 is outside \[0, 1\]"),
        (TEXT, -0.1, r"rate=-0.1 is outside \[0, 1\]"),
    ],
)
def test_impossible_traces_are_refused(text, rate, message):
    with pytest.raises(ValueError, match=message):
        oracle.make_trace(text, rate=rate)


def test_traces_that_a_slot_does_not_take():
    """Fails if a trace may be too long or missing, or goes into another slot."""
    slots = each.lift(DRAFTER, 3)
    memory = slots.init(capacity=11, page_size=4)
    with pytest.raises(ValueError, match="a trace of 14 tokens for a text of 13"):
        slots.prefill(oracle.make_trace([3] * 14), memory, [3], slot=1)
    with pytest.raises(ValueError, match="takes the trace of each request.* `draft_p"):
        slots.prefill(None, memory, [3], slot=1)
    memory = slots.prefill(oracle.make_trace([3] * 5), memory, [3], slot=1)
    assert memory.slots.length.tolist() == [0, 5, 0]
    assert memory.slots.tokens.sum(axis=1).tolist() == [0, 15, 0]
