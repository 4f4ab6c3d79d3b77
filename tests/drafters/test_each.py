"""Drafters of one sequence, lifted over slots that have memories of their own."""

import dataclasses

import decoding
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import slow

from spec_jax import testing
from spec_jax.drafters import each, hybrid, oracle, suffix
from spec_jax.engine import checks, protocols, rows


DRAFT = decoding.draft_drafter()
HYBRID = hybrid.Hybrid(suffix=suffix.SuffixDecoding(gamma_max=4), draft=DRAFT)
ORACLE = oracle.Oracle(gamma_max=4, vocab_size=96)


@pytest.mark.parametrize("drafter", [DRAFT, HYBRID, ORACLE], ids=["draft", "hy", "or"])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_a_draft_of_another_vocabulary_is_refused(drafter, num_slots):
    """Fails if a lifted drafter does not tell the size of its vocabulary."""
    config = decoding.make_config(vocab_size=50)
    model = dataclasses.replace(decoding.TARGET, config=config)
    target = rows.SlotRows(model=model, num_slots=num_slots)
    with pytest.raises(ValueError, match="different vocabularies: 96 and 50 entries"):
        checks.check_pair(target, each.lift(drafter, num_slots))
    with pytest.raises(ValueError, match="different vocabularies: 96 and 50 entries"):
        dataclasses.replace(decoding.Setting(), target=model).scheduler(
            drafter, num_slots=num_slots
        )


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
        return DRAFT.model.new_cache(capacity=capacity, page_size=page_size)


def test_a_paged_memory_is_mapped_over_one_slot_alone():
    each.lift(KeepsPages(), 1).init(capacity=8, page_size=4)
    message = "KeepsPages keeps a paged cache, .* over 2 slots .* give it `for_slots"
    with pytest.raises(NotImplementedError, match=message):
        each.lift(KeepsPages(), 2).init(capacity=8, page_size=4)
