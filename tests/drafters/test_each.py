"""Drafters of one sequence, lifted over slots that have memories of their own; and the
oracle, which is one of them: it proposes its trace, wrong where it was told to be."""

import dataclasses

import decoding
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import slow

from spec_jax import testing
from spec_jax.drafters import each, oracle
from spec_jax.engine import protocols


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Remembers its prompt's length, and each gamma by length; drafts tell the seed."""

    gamma_max: int = 4

    def init(self, *, capacity, page_size):
        return {"prompt": jnp.int32(0), "asked": jnp.zeros((capacity,), jnp.int32)}

    def prefill(self, params, memory, prompt):
        return memory | {"prompt": jnp.int32(len(prompt))}

    def propose(self, params, memory, *, tokens, length, gamma, sampling):
        seed = jnp.uint32(77) if sampling is None else sampling.seed
        drafts = jnp.full((self.gamma_max,), memory["prompt"] + seed.astype(jnp.int32))
        memory = memory | {"asked": memory["asked"].at[length].set(gamma)}
        return memory, protocols.Proposal(tokens=drafts, num_drafted=gamma)

    def commit(self, params, memory, length):
        return memory | {"asked": jnp.where(length == 1, 0, memory["asked"])}


@pytest.mark.parametrize("num_slots", [3, slow(1)])
def test_slots_have_memories_and_settings_of_their_own(num_slots):
    """Fails if a slot gets a neighbour's prompt, commit or seed, or forgets when it is
    not asked. A drafter that draws gets the settings of its slot."""
    slots = each.lift(Counts(), num_slots)
    memory = slots.init(capacity=8, page_size=4)
    for slot in range(num_slots):
        memory = slots.prefill(None, memory, [5] * (slot + 1), slot=slot)
    numbers = jnp.arange(num_slots, dtype=jnp.int32)
    sampling = decoding.sampling_of(num_slots, **dict(decoding.WARM))
    sampling = sampling.replace(seed=numbers.astype(jnp.uint32) * 10)
    arguments = {
        "tokens": jnp.zeros((num_slots, 9), jnp.int32),
        "length": numbers + 2,
        "gamma": numbers + 1,
    }
    after, proposal = slots.propose(None, memory, **arguments, sampling=sampling)
    expected = [slot + 1 + 10 * slot for slot in range(num_slots)]
    assert proposal.tokens[:, 0].tolist() == expected
    assert proposal.num_drafted.tolist() == [1, 2, 3][:num_slots]
    greedy = slots.propose(None, memory, **arguments, sampling=None)[1]
    assert greedy.tokens[:, 0].tolist() == [78, 79, 80][:num_slots]
    asked = numbers == num_slots - 1
    cleared = slots.commit(None, after, jnp.ones_like(numbers), asked=asked)
    found = np.asarray(cleared.slots["asked"]).sum(axis=1).tolist()
    assert found == [1, 2, 3][: num_slots - 1] + [0]
    # A slot that is filled again is as new.
    again = slots.prefill(None, after, [5], slot=num_slots - 1)
    testing.assert_same_bits(again.fresh, after.fresh)
    assert int(again.slots["asked"][num_slots - 1].sum()) == 0


class KeepsPages(Counts):
    def init(self, *, capacity, page_size):
        return decoding.TARGET.new_cache(capacity=capacity, page_size=page_size)


def test_a_paged_memory_is_mapped_over_one_slot_alone():
    each.lift(KeepsPages(), 1).init(capacity=8, page_size=4)
    message = "KeepsPages keeps a paged cache, .* over 2 slots .* give it `for_slots"
    with pytest.raises(NotImplementedError, match=message):
        each.lift(KeepsPages(), 2).init(capacity=8, page_size=4)


GAMMA_MAX = 4
ORACLE = oracle.Oracle(gamma_max=GAMMA_MAX, vocab_size=96)
TEXT = [3, 95, 0, 41, 41, 7]


def drafts(trace, length, *, gamma=GAMMA_MAX) -> list[int]:
    memory = ORACLE.init(capacity=11, page_size=4)
    memory = ORACLE.prefill(trace, memory, TEXT[:1])
    assert memory.tokens.shape == memory.is_right.shape == (13,)
    asked = {"tokens": jnp.zeros((12,), jnp.int32), "length": jnp.int32(length)}
    asked["gamma"] = jnp.int32(gamma)
    proposal = decoding.propose(ORACLE, None, memory, **asked)[1]
    return np.asarray(proposal.tokens)[: int(proposal.num_drafted)].tolist()


def test_it_proposes_the_trace():
    """Fails if a position is off by one, more is drafted than is known, or a forced
    error is right or past the vocabulary."""
    trace = oracle.make_trace(TEXT)
    for length in range(1, len(TEXT) + 2):
        for gamma in range(GAMMA_MAX + 1):
            assert drafts(trace, length, gamma=gamma) == TEXT[length:][:gamma]
    assert drafts(oracle.make_trace(TEXT, rate=0.0), 1) == [0, 1, 42, 42]


@pytest.mark.parametrize("rate", [0.2, 0.7])
def test_positions_are_right_at_the_rate_whatever_came_before(rate):
    """Fails if acceptance is not `rate` at every position of a window, or if more than
    the seed decides which drafts are right."""
    made = [oracle.make_trace([5] * 20_000, rate=rate, seed=seed) for seed in (3, 3, 4)]
    testing.assert_same_bits(made[0], made[1])
    right, _, other = (np.asarray(one.is_right) for one in made)
    assert (other != right).any()
    windows = np.lib.stride_tricks.sliding_window_view(right, 3)
    for before in range(3):
        # How often windows that keep their first drafts keep the next one, too.
        following = windows[windows[:, :before].all(axis=1), before]
        error = np.sqrt(rate * (1 - rate) / following.size)
        assert abs(following.mean() - rate) < 5 * error


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
    slots = each.lift(ORACLE, 3)
    memory = slots.init(capacity=11, page_size=4)
    with pytest.raises(ValueError, match="a trace of 14 tokens for a text of 13"):
        slots.prefill(oracle.make_trace([3] * 14), memory, [3], slot=1)
    with pytest.raises(ValueError, match="takes the trace of each request.* `draft_p"):
        slots.prefill(None, memory, [3], slot=1)
    memory = slots.prefill(oracle.make_trace([3] * 5), memory, [3], slot=1)
    assert memory.slots.length.tolist() == [0, 5, 0]
    assert memory.slots.tokens.sum(axis=1).tolist() == [0, 15, 0]
