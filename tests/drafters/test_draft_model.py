"""Draft models: what their cache holds, what they draw, and slots beside each other."""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import GAMMA_MAX, MIXED, SMALL, Ask

from spec_jax import testing
from spec_jax.drafters import (
    draft_model,
    draft_slots,
    each,
    tree_shapes,
)
from spec_jax.model import prompt as prompt_lib
from spec_jax.testing import bench


SLOTS = pytest.mark.parametrize(
    "num_slots", [pytest.param(1, marks=pytest.mark.slow), 3]
)
BENCH = decoding.quickest_bench(GAMMA_MAX)
NEARLY = decoding.NEARLY_TARGET

WARM = (("temperature", 1.5), ("top_k", 40))


def as_drafter(**changes) -> draft_model.DraftModel:
    """The target's model as a draft model, in slabs of two rows."""
    return decoding.draft_drafter(impl=SMALL.target.impl, **changes)


@pytest.mark.parametrize(
    "kind", ["paged", pytest.param("static", marks=pytest.mark.slow)]
)
def test_a_draft_model_keeps_the_contract(kind):
    model = dataclasses.replace(BENCH.target, slab=2, cache=kind)
    drafter = draft_model.DraftModel(model=model, gamma_max=GAMMA_MAX)
    params = decoding.perturbed(BENCH.params, 0.02)
    assert testing.check_drafter(drafter, params, BENCH) == tuple(testing.CLAUSES)


class Hoarder(draft_slots.SlotDraftModel):
    """Keeps the keys of drafts that were not committed."""

    def commit(self, params, memory, length, *, asked):
        return memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hoards(draft_model.DraftModel):
    def for_slots(self, num_slots):
        return Hoarder(drafter=self, num_slots=num_slots)


def test_a_cache_that_is_not_cut_is_caught():
    """Negative control of the kit's truncation, on a cache and not on a number."""
    drafter = Hoards(
        model=dataclasses.replace(BENCH.target, slab=2), gamma_max=GAMMA_MAX
    )
    params = decoding.perturbed(BENCH.params, 0.02)
    with pytest.raises(AssertionError, match="truncation: .* from a fresh memory"):
        testing.CLAUSES["truncation"](drafter, params, BENCH)


def scheduler_of(params, *, num_slots, drafter=None, **changes):
    return SMALL.scheduler(
        drafter or as_drafter(), num_slots=num_slots, draft_params=params, **changes
    )


def assert_only_committed(params, state, slot):
    """Asserts that the draft's K/V is that of the committed text, and no longer."""
    decoding.check_cache(state.memory)
    held = int(state.memory.length[slot])
    assert held <= int(state.slots.length[slot]) - 1
    model = as_drafter().model
    fresh = model.new_cache(**SMALL.sizes)
    text = decoding.text(state, slot)[:held]
    fresh = prompt_lib.prefill(model, params, fresh, text)
    testing.assert_same_bits(
        decoding.held(state.memory, held, slot=slot), decoding.held(fresh, held)
    )


@SLOTS
def test_a_rejected_draft_leaves_nothing_behind(num_slots):
    """Fails if the K/V of a rejected draft stays, or of a kept one is lost.

    Negative control: a cache that says it holds more, of what was rejected.
    """
    decoding.needs("native")  # Its K/V is the same however rows are grouped.
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
                memory=longer,
                slots=state.slots.replace(length=state.slots.length + 1),
            )
            with pytest.raises((AssertionError, ValueError)):
                assert_only_committed(NEARLY, longer, 0)
            spoilt += 1
    # The rounds are not vacuous: some drafts were kept, and some were not.
    assert 0 < kept < int(state.slots.num_proposed[0]) and spoilt
    decoding.assert_as_decoded(
        SMALL, decoding.generate(scheduler, state), dict(enumerate(asks))
    )


@SLOTS
def test_the_target_as_its_own_draft_is_always_right(num_slots):
    """Fails if a draft is read from another row than the last active one, drawn with
    another slot's settings, or on a cache that lacks a committed token."""
    scheduler = scheduler_of(SMALL.weights, num_slots=num_slots)
    for asks in (MIXED[:num_slots], MIXED[4 : 4 + num_slots]):
        state = decoding.admit(scheduler, [ask.request() for ask in asks], draws=True)
        state = decoding.generate(scheduler, state)
        decoding.assert_as_decoded(SMALL, state, asks)
        slots = jax.device_get(state.slots)
        assert (slots.num_accepted == slots.num_proposed).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("draws", draft_model.DRAWS)
def test_how_drafts_are_drawn(draws):
    """The stream does not depend on it; the target's noise makes more of them right.

    Close distributions and the same noise: mostly the same token. Without a seed of
    its own to disagree: `sampling` is the slot's.
    """
    rates = {}
    for kind in {draws, "coupled"}:
        asks = [
            Ask(max_tokens=60, sampling=(*WARM, ("seed", seed))) for seed in (1, 2, 3)
        ]
        scheduler = scheduler_of(NEARLY, num_slots=3, drafter=as_drafter(draws=kind))
        state = decoding.admit(scheduler, [ask.request() for ask in asks])
        state = decoding.generate(scheduler, state)
        decoding.assert_as_decoded(SMALL, state, asks)
        slots = jax.device_get(state.slots)
        rates[kind] = slots.num_accepted.sum() / slots.num_proposed.sum()
        # At temperature 0 all draws are the highest.
        cold = [Ask(sampling=decoding.COLD)]
        state = decoding.admit(scheduler, [cold[0].request()] * 3)
        state = decoding.generate(scheduler, state)
        rates[f"{kind}, cold"] = int(state.slots.num_accepted[0])
    assert rates[f"{draws}, cold"] == rates["coupled, cold"]
    if draws != "coupled":
        assert rates["coupled"] > rates[draws] + 0.1, rates


def test_what_each_rule_draws():
    """Fails if a rule by uniforms takes coupled drafts, of unknown probabilities."""
    drafter = as_drafter()
    for rule, draws in (
        ("coupled", "coupled"),
        ("rejection", "independent"),
        ("block", "independent"),
    ):
        assert each.lift(drafter, 2, rule=rule).drafter.draws == draws
    chosen = as_drafter(draws="greedy")
    assert each.lift(chosen, 2, rule="block").drafter.draws == "greedy"


# Proposals of four slots, one call at a time.

PROMPTS = ([7, 3, 90, 41], [5], list(range(30, 50)), [8] * 9)
LENGTHS = jnp.array([len(prompt) for prompt in PROMPTS])
SIZES = {"capacity": 48, "page_size": 8}


def begin(drafter=None, num_pages=None):
    """A draft model's memory with a prompt in each slot, and the slots' texts."""
    slots = each.lift(drafter or as_drafter(), len(PROMPTS))
    memory = slots.init(**SIZES, num_pages=num_pages)
    tokens = np.zeros((len(PROMPTS), SIZES["capacity"] + 1), np.int32)
    for slot, prompt in enumerate(PROMPTS):
        tokens[slot, : len(prompt)] = prompt
        memory = slots.prefill(NEARLY, memory, prompt, slot=slot)
    return slots, memory, jnp.asarray(tokens)


def propose(slots, memory, tokens, gamma, *, length=LENGTHS):
    asked = {"tokens": tokens, "length": length, "gamma": jnp.array(gamma)}
    return decoding.propose(slots, NEARLY, memory, **asked, sampling=None)


def kv_of(memory, slot):
    return decoding.held(memory, int(memory.length[slot]), slot=slot)


@pytest.mark.parametrize(
    "drafter",
    [
        as_drafter(),
        pytest.param(as_drafter(catch_up_rows=4), marks=pytest.mark.slow),
        as_drafter().for_tree(tree_shapes.parse("3-2")),
    ],
    ids=["chain", "catching up", "tree"],
)
def test_loops_end_in_a_slot_that_was_never_opened(drafter):
    """Fails, by never ending, if a loop waits for a row that the cache refuses."""
    slots, memory, tokens = begin(drafter)
    kv = memory.kv if drafter.tree else memory
    kv = kv.replace(registered=kv.registered.at[1].set(False))
    memory = memory.replace(kv=kv) if drafter.tree else kv
    after, proposal = propose(slots, memory, tokens, [3] * 4, length=LENGTHS + 6)
    assert proposal.num_drafted.tolist() == [3, 0, 3, 3]
    refused = (after.kv if drafter.tree else after).refused
    assert refused.tolist() == [False, True, False, False]


def test_a_slot_that_is_asked_for_nothing_is_not_touched():
    """Fails if its cache grows or its drafts count; the others draft as alone."""
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
        own, expected = propose(
            alone,
            own,
            tokens[slot : slot + 1],
            [count],
            length=LENGTHS[slot : slot + 1],
        )
        drafts = proposal.tokens[slot, :count].tolist()
        assert drafts == expected.tokens[0, :count].tolist()
        testing.assert_same_bits(kv_of(after, slot), kv_of(own, 0))


def test_drafts_stop_where_the_cache_has_no_room():
    """Fails if a slot without a page spins, or takes its neighbours' drafts."""
    # Slots 0, 1, 3 have one page or two, slot 2 three: no page is left.
    slots, memory, tokens = begin(num_pages=6)
    assert int(memory.num_free) == 0
    after, proposal = propose(slots, memory, tokens, [4, 4, 4, 4])
    decoding.check_cache(after)
    # 20 tokens of slot 2 and 3 more rows fill 24 positions; slot 3 is full at once.
    assert proposal.num_drafted.tolist() == [4, 4, 4, 0]
    whole = propose(slots, begin()[1], tokens, [4, 4, 4, 4])[1]
    np.testing.assert_array_equal(proposal.tokens[:3], whole.tokens[:3])


def test_a_commit_of_length_one_forgets_a_slot():
    """Of the slots that are asked, and of no others."""
    slots, memory, _ = begin()
    asked = jnp.array([False, True, True, False])
    after = slots.commit(NEARLY, memory, jnp.ones((4,), jnp.int32), asked=asked)
    assert after.length.tolist() == [3, 0, 0, 8]
    assert after.num_owned.tolist() == [1, 1, 1, 1]
    decoding.check_cache(after)


def behind(slots, memory):
    """The memory of slots that have taken in nothing, or a part."""
    kept = jnp.array([1, 1, 1, 3], jnp.int32)
    return slots.commit(NEARLY, memory, kept, asked=jnp.ones((4,), bool))


def test_catching_up_in_taller_slabs_drafts_the_same():
    """What is drafted, and the K/V, do not depend on it; `engine/test_drift.py` counts
    the forwards."""
    decoding.needs("native")
    slow, memory, tokens = begin()
    fast = each.lift(as_drafter(catch_up_rows=16), 4)
    gamma = [4, 4, 4, 0]  # One is not asked.
    expected_memory, expected = propose(slow, behind(slow, memory), tokens, gamma)
    found_memory, found = propose(fast, behind(slow, memory), tokens, gamma)
    testing.assert_same_bits(found, expected)
    for slot in range(4):
        testing.assert_same_bits(
            kv_of(found_memory, slot), kv_of(expected_memory, slot)
        )


@pytest.mark.slow
@SLOTS
def test_a_draft_ends_where_the_model_is_not_confident(num_slots):
    """Prefixes of the whole drafts, none at a probability that is never reached; at
    any number of slots, and no token of the output changes."""
    counts = {}
    for threshold in (0.0, 0.5, 1.0):
        drafter = as_drafter(min_confidence=threshold)
        scheduler = scheduler_of(NEARLY, num_slots=num_slots, drafter=drafter)
        asks = [Ask(max_tokens=30), MIXED[6], MIXED[5]][:num_slots]
        asks = [dataclasses.replace(ask, sampling=()) for ask in asks]
        state = decoding.admit(scheduler, [ask.request() for ask in asks])
        state = decoding.generate(scheduler, state)
        decoding.assert_as_decoded(SMALL, state, asks)
        counts[threshold] = jax.device_get(state.slots).num_proposed
    assert (0 < counts[0.5][0]) and (counts[0.5] < counts[0.0]).all()
    assert not counts[1.0].any()
    slots, memory, tokens = begin()
    sure = each.lift(as_drafter(min_confidence=0.15), 4)
    whole = propose(slots, memory, tokens, [4] * 4)[1]
    some = propose(sure, begin()[1], tokens, [4] * 4)[1]
    lengths = some.num_drafted.tolist()
    assert len(set(lengths)) > 1, lengths
    for slot, count in enumerate(lengths):
        found, expected = some.tokens[slot, :count], whole.tokens[slot, :count]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("catch_up_rows", [0, 8])
def test_a_cache_that_was_full_drafts_again(catch_up_rows):
    """Fails if a round without room is remembered, or takes up room that is there."""
    slots = each.lift(as_drafter(catch_up_rows=catch_up_rows), 1)
    sizes, asked = {"capacity": 16, "page_size": 8}, jnp.ones((1,), bool)
    text = [7, 3, 90, 41, 5, 66, 23, 8, 14, 2, 77, 9, 31, 60, 12, 4, 88, 19, 50, 6]
    tokens = jnp.zeros((1, 41), jnp.int32).at[0, :20].set(jnp.asarray(text))

    def drafts_after(memory, length):
        """The drafts, none of which is committed, and the memory without them."""
        n = jnp.array([length], jnp.int32)
        memory = slots.commit(NEARLY, memory, n, asked=asked)
        memory, proposal = propose(slots, memory, tokens, [4], length=n)
        drafts = proposal.tokens[0, : int(proposal.num_drafted[0])].tolist()
        return slots.commit(NEARLY, memory, n, asked=asked), drafts

    def prefilled(length):
        return slots.prefill(NEARLY, slots.init(**sizes), text[:length], slot=0)

    memory = prefilled(14)
    # The last draft needs no room: 16 positions hold what the 17th token follows.
    for length, count in ((14, 3), (17, 0), (20, 0), (16, 1), (10, 4), (5, 4)):
        memory, drafts = drafts_after(memory, length)
        assert len(drafts) == count, length
        fresh = drafts_after(prefilled(length), length)[1] if length <= 16 else []
        assert drafts == fresh
    # A pool that others emptied, and gave back.
    memory = slots.commit(NEARLY, memory, jnp.array([2]), asked=asked)
    free = {"num_free": memory.num_free, "free_pages": memory.free_pages}
    free = jax.tree.map(jnp.array, free)
    memory, drafts = drafts_after(memory.replace(num_free=jnp.int32(0)), 14)
    assert drafts == []
    _, drafts = drafts_after(memory.replace(**free), 14)
    assert drafts == drafts_after(prefilled(14), 14)[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_confidence": 1.5}, "min_confidence=1.5 is no probability"),
        ({"min_confidence": float("nan")}, "min_confidence=nan is no probability"),
        ({"catch_up_rows": -1}, "catch_up_rows=-1 must not be negative"),
        ({"draws": "lowest"}, "draws='lowest' is not one of greedy"),
    ],
)
def test_bad_fields_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        as_drafter(**changes)


def test_the_pool_of_a_draft_model_is_not_copied():
    """Fails if the loop of a proposal hands the pool through a copy."""
    slots = each.lift(as_drafter(catch_up_rows=8), 3)
    memory = slots.init(capacity=8 * 1024, page_size=8)
    decoding.assert_proposes_in_place(slots, NEARLY, memory, memory)
    assert bench.TINY.vocab_size == slots.vocab_size
