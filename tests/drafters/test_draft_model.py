"""Draft models: the content of their cache, their drafts, and several slots."""

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import MIXED, SMALL, Ask
from slow_cases import slow

from spec_jax import testing
from spec_jax.drafters import draft_model, each, tree_shapes
from spec_jax.engine import rows as rows_lib


NEARLY = decoding.NEARLY_TARGET


def as_drafter(**changes) -> draft_model.DraftModel:
    """Returns the target's model as a draft model, in slabs of two rows."""
    return decoding.draft_drafter(impl=SMALL.target.impl, **changes)


def scheduler_of(params, *, num_slots):
    return SMALL.scheduler(as_drafter(), num_slots=num_slots, draft_params=params)


def assert_only_committed(params, state, slot):
    """Asserts that the draft's K/V are those of the committed text, and no more."""
    decoding.check_cache(state.memory)
    held, length = int(state.memory.length[slot]), int(state.slots.length[slot])
    assert length - 2 <= held <= length - 1  # The last draft was never fed.
    model = as_drafter().model
    fresh = model.new_cache(**SMALL.sizes)
    text = decoding.text(state, slot)[:held]
    fresh = model.prefill(params, fresh, text)[0]
    testing.assert_same_bits(
        decoding.held(state.memory, held, slot=slot), decoding.held(fresh, held)
    )


def test_a_rejected_draft_leaves_nothing_behind(num_slots=3):
    """Fails if the draft's cache holds K/V of anything but committed tokens.

    Negative control: a cache whose length includes a rejected draft.
    """
    decoding.needs("native")  # Its K/V do not depend on how rows are grouped.
    asks = [Ask(), *MIXED[5:]][:num_slots]
    scheduler = scheduler_of(NEARLY, num_slots=num_slots)
    state = decoding.admit(scheduler, [ask.request() for ask in asks], draws=True)
    spoilt, kept = 0, 0
    for _ in range(6):
        state = decoding.generate(scheduler, state, max_rounds=1)
        for slot in range(num_slots):
            assert_only_committed(NEARLY, state, slot)
        rejected = int(state.slots.num_accepted[0]) == kept
        kept = int(state.slots.num_accepted[0])
        if rejected:
            longer = state.memory.replace(length=state.memory.length + 1)
            longer = state.replace(
                memory=longer, slots=state.slots.replace(length=state.slots.length + 1)
            )
            with pytest.raises((AssertionError, ValueError)):
                assert_only_committed(NEARLY, longer, 0)
            spoilt += 1
    # The rounds are not vacuous: some drafts were kept, and some were not.
    assert 0 < kept < int(state.slots.num_proposed[0]) and spoilt
    decoding.assert_as_decoded(
        SMALL, decoding.generate(scheduler, state), dict(enumerate(asks))
    )


def test_the_target_as_its_own_draft_is_always_right(num_slots=3):
    """Fails if a draft is read from another row than the last active one, drawn with
    another slot's settings, or on a cache that lacks a committed token."""
    scheduler = scheduler_of(SMALL.weights, num_slots=num_slots)
    for asks in (MIXED[:num_slots], MIXED[4 : 4 + num_slots]):
        state = decoding.rounds(scheduler, asks, draws=True)
        decoding.assert_as_decoded(SMALL, state, asks)
        slots = jax.device_get(state.slots)
        assert (slots.num_accepted == slots.num_proposed).all()


# Proposals of four slots, one call at a time.

PROMPTS = ([7, 3, 90, 41], [5], list(range(30, 50)), [8] * 9)
LENGTHS = jnp.array([len(prompt) for prompt in PROMPTS])
SIZES = {"capacity": 48, "page_size": 8}


def begin(drafter=None, num_pages=None):
    """Returns a draft model's slots, their memory after prompts, and their texts."""
    sizes = SIZES | {"num_pages": num_pages}
    drafter = drafter or as_drafter()
    slots, memory = decoding.prefilled(drafter, NEARLY, PROMPTS, **sizes)
    return slots, memory, decoding.padded(PROMPTS, SIZES["capacity"] + 1)


def propose(slots, memory, tokens, gamma, *, length=LENGTHS):
    asked = {"tokens": tokens, "length": length, "gamma": jnp.array(gamma)}
    return decoding.propose(slots, NEARLY, memory, **asked, sampling=None)


def kv_of(memory, slot):
    return decoding.held(memory, int(memory.length[slot]), slot=slot)


@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param(as_drafter(), id="chain"),
        slow(as_drafter().for_tree(tree_shapes.parse("3-2")), id="tree"),
    ],
)
def test_loops_end_in_a_slot_that_was_never_opened(drafter):
    """Fails by never ending if a loop waits for a row that the cache refuses."""
    slots, memory, tokens = begin(drafter)
    kv = memory.kv if drafter.tree else memory
    kv = kv.replace(registered=kv.registered.at[1].set(False))
    memory = memory.replace(kv=kv) if drafter.tree else kv
    after, proposal = propose(slots, memory, tokens, [3] * 4, length=LENGTHS + 6)
    assert proposal.num_drafted.tolist() == [3, 0, 3, 3]
    refused = (after.kv if drafter.tree else after).refused
    assert refused.tolist() == [False, True, False, False]


def test_a_slot_that_is_asked_for_nothing_is_not_touched():
    """Fails if a slot with gamma 0 changes, or others do not draft as alone."""
    slots, memory, tokens = begin()
    gamma = [3, 0, 4, 0]
    after, proposal = propose(slots, memory, tokens, gamma)
    assert proposal.num_drafted.tolist() == gamma
    alone = each.lift(as_drafter(), 1)
    for slot, count in enumerate(gamma):
        if not count:
            testing.assert_same_bits(kv_of(after, slot), kv_of(memory, slot))
            continue
        own = alone.prefill(NEARLY, alone.init(**SIZES), PROMPTS[slot], slot=0)
        one = slice(slot, slot + 1)
        own, expected = propose(alone, own, tokens[one], [count], length=LENGTHS[one])
        drafts = proposal.tokens[slot, :count].tolist()
        assert drafts == expected.tokens[0, :count].tolist()
        testing.assert_same_bits(kv_of(after, slot), kv_of(own, 0))


def test_drafts_stop_where_the_cache_has_no_room():
    """Fails if a slot without a page spins, or changes its neighbours' drafts."""
    # Slots 0, 1 and 3 have one page each, slot 2 has three: no page is left.
    slots, memory, tokens = begin(num_pages=6)
    assert int(memory.num_free) == 0
    after, proposal = propose(slots, memory, tokens, [4, 4, 4, 4])
    decoding.check_cache(after)
    # Slot 2's 20 tokens and 3 more rows fit into 24 positions; slot 3 is full.
    assert proposal.num_drafted.tolist() == [4, 4, 4, 0]
    whole = propose(slots, begin()[1], tokens, [4, 4, 4, 4])[1]
    np.testing.assert_array_equal(proposal.tokens[:3], whole.tokens[:3])


def test_a_commit_of_length_one_forgets_a_slot():
    """Checks that it forgets the slots that are asked, and no others."""
    slots, memory, _ = begin()
    asked = jnp.array([False, True, True, False])
    after = slots.commit(NEARLY, memory, jnp.ones((4,), jnp.int32), asked=asked)
    assert after.length.tolist() == [3, 0, 0, 8]
    assert after.num_owned.tolist() == [1, 1, 1, 1]
    decoding.check_cache(after)


def behind(slots, memory):
    """Returns the memory of slots that have taken in nothing, or a part of a text."""
    kept = jnp.array([1, 1, 1, 3], jnp.int32)
    return slots.commit(NEARLY, memory, kept, asked=jnp.ones((4,), bool))


def test_catching_up_in_taller_slabs_drafts_the_same():
    """Fails if drafts or K/V depend on `catch_up_rows`; the next test counts the
    forwards."""
    decoding.needs("native")
    slow, memory, tokens = begin()
    fast = each.lift(as_drafter(catch_up_rows=16), 4)
    gamma = [4, 4, 4, 0]  # The last slot is not asked.
    expected_memory, expected = propose(slow, behind(slow, memory), tokens, gamma)
    found_memory, found = propose(fast, behind(slow, memory), tokens, gamma)
    testing.assert_same_bits(found, expected)
    for slot in range(4):
        testing.assert_same_bits(
            kv_of(found_memory, slot), kv_of(expected_memory, slot)
        )


def test_catch_up_rows_count_in_slots(monkeypatch):
    """Fails if slots do not catch up by `catch_up_rows` rows a forward."""
    slots = each.lift(as_drafter(catch_up_rows=40), 3)
    memory, widths = slots.init(capacity=96, page_size=8), []
    forward, chains = rows_lib.SlotRows._run, rows_lib.SlotRows.run_chains

    def note(tokens, num_rows):
        one = lambda most: widths.append((tokens.shape[1], int(most)))
        jax.debug.callback(one, num_rows.max(), ordered=True)

    def counted(self, params, kv, window, **asked):
        note(window.tokens, window.num_active)
        return forward(self, params, kv, window, **asked)

    def counted_chains(self, params, kv, *, tokens, pending, **asked):
        note(tokens, pending)
        return chains(self, params, kv, tokens=tokens, pending=pending, **asked)

    monkeypatch.setattr(rows_lib.SlotRows, "_run", counted)
    monkeypatch.setattr(rows_lib.SlotRows, "run_chains", counted_chains)
    tokens = jnp.arange(3 * 97, dtype=jnp.int32).reshape(3, 97) % 96
    asked = {"length": jnp.full(3, 60, jnp.int32), "gamma": jnp.ones(3, jnp.int32)}
    run = jax.jit(lambda *arguments: slots.propose(*arguments[:2], **arguments[2]))
    run(SMALL.weights, memory, {"tokens": tokens, "sampling": None, **asked})
    jax.effects_barrier()
    # 60 tokens are 40 and 19 rows, and the last one, which drafts.
    assert widths == [(40, 40), (40, 19), (2, 1)]
