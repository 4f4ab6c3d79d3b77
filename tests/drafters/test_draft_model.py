"""Draft models: the content of their cache, their drafts, and several slots; and trees:
what children are drawn from, and which rows are kept."""

import dataclasses
import itertools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import MIXED, PROMPT, SMALL, Ask

from spec_jax import testing
from spec_jax.drafters import draft_model, draw, each, tree_shapes
from spec_jax.engine import rows as rows_lib


NEARLY = decoding.NEARLY_TARGET


def as_drafter(**changes) -> draft_model.DraftModel:
    """Returns the target's model as a draft model, in slabs of two rows."""
    return decoding.draft_drafter(impl=SMALL.target.impl, **changes)


def assert_only_committed(state, slot):
    """Asserts that the draft's K/V are those of the committed text, and no more."""
    decoding.check_cache(state.memory)
    held, length = int(state.memory.length[slot]), int(state.slots.length[slot])
    assert length - 2 <= held <= length - 1  # The last draft was never fed.
    model = as_drafter().model
    fresh = model.new_cache(**SMALL.sizes)
    text = decoding.text(state, slot)[:held]
    fresh = model.prefill(NEARLY, fresh, text)[0]
    testing.assert_same_bits(
        decoding.held(state.memory, held, slot=slot), decoding.held(fresh, held)
    )


def test_a_rejected_draft_leaves_nothing_behind():
    """Fails if the draft's cache holds K/V of anything but committed tokens. Negative
    control: a cache whose length includes a rejected draft."""
    decoding.needs("native")  # Its K/V do not depend on how rows are grouped.
    asks = [Ask(), *MIXED[5:]]
    scheduler = SMALL.scheduler(as_drafter(), num_slots=3, draft_params=NEARLY)
    state = decoding.admit(scheduler, [ask.request() for ask in asks], draws=True)
    kept = [0]
    for _ in range(6):
        state = decoding.generate(scheduler, state, max_rounds=1)
        for slot in range(3):
            assert_only_committed(state, slot)
        kept.append(int(state.slots.num_accepted[0]))
        if kept[-1] == kept[-2]:
            memory = state.memory.replace(length=state.memory.length + 1)
            slots = state.slots.replace(length=state.slots.length + 1)
            with pytest.raises((AssertionError, ValueError)):
                assert_only_committed(state.replace(memory=memory, slots=slots), 0)
    # The rounds are not vacuous: in some drafts were kept, and in some none.
    assert 1 < len(set(kept)) < len(kept)
    decoding.assert_as_decoded(
        SMALL, decoding.generate(scheduler, state), dict(enumerate(asks))
    )


def test_the_target_as_its_own_draft_is_always_right():
    """Fails if a draft is read from another row than the last active one, drawn with
    another slot's settings, or on a cache that lacks a committed token."""
    scheduler = SMALL.scheduler(as_drafter(), num_slots=3, draft_params=SMALL.weights)
    for asks in (MIXED[:3], MIXED[4:]):
        state = decoding.rounds(scheduler, asks, draws=True)
        decoding.assert_as_decoded(SMALL, state, asks)
        slots = jax.device_get(state.slots)
        assert (slots.num_accepted == slots.num_proposed).all()


# Proposals of four slots, one call at a time.

PROMPTS = ([7, 3, 90, 41], [5], list(range(30, 50)), [8] * 9)
LENGTHS = jnp.array([len(prompt) for prompt in PROMPTS])
SIZES = {"capacity": 48, "page_size": 8}


def begin(drafter, **pages):
    """Returns a draft model's slots, their memory after prompts, and their texts."""
    sizes = SIZES | pages
    slots, memory = decoding.prefilled(drafter, NEARLY, PROMPTS, **sizes)
    return slots, memory, decoding.padded(PROMPTS, SIZES["capacity"] + 1)


def propose(slots, memory, tokens, gamma, *, length=LENGTHS):
    asked = {"tokens": tokens, "length": length, "gamma": jnp.array(gamma)}
    return decoding.propose(slots, NEARLY, memory, **asked, sampling=None)


def kv_of(memory, slot):
    return decoding.held(memory, int(memory.length[slot]), slot=slot)


def test_drafts_stop_where_the_cache_has_no_room():
    """Fails if a slot drafts from a row without a page, or its neighbours otherwise."""
    made = []
    for num_pages in (6, None):
        slots, memory, tokens = begin(as_drafter(), num_pages=num_pages)
        # Slots 0, 1 and 3 hold one of six pages, and slot 2 three: none is left.
        assert (int(memory.num_free) == 0) == (num_pages == 6)
        after, proposal = propose(slots, memory, tokens, [4] * 4)
        decoding.check_cache(after)
        made.append(proposal)
    # Slot 2's 20 tokens and 3 more rows fit into 24 positions; slot 3 is full.
    assert made[0].num_drafted.tolist() == [4, 4, 4, 0]
    np.testing.assert_array_equal(made[0].tokens[:3], made[1].tokens[:3])


def test_a_commit_of_length_one_forgets_a_slot():
    """Checks that it forgets the slots that are asked, and no others."""
    slots, memory, _ = begin(as_drafter())
    asked = jnp.array([False, True, True, False])
    after = slots.commit(NEARLY, memory, jnp.ones((4,), jnp.int32), asked=asked)
    assert after.length.tolist() == [3, 0, 0, 8]
    assert after.num_owned.tolist() == [1, 1, 1, 1]
    decoding.check_cache(after)


def test_catching_up_in_taller_slabs_drafts_the_same():
    """Fails if drafts or K/V depend on `catch_up_rows`."""
    decoding.needs("native")
    made = []
    for drafter in (as_drafter(), as_drafter(catch_up_rows=16)):
        slots, memory, tokens = begin(drafter)
        # Slots have taken in nothing, or a part of a text; the last is not asked.
        kept, asked = jnp.array([1, 1, 1, 3], jnp.int32), jnp.ones((4,), bool)
        memory = slots.commit(NEARLY, memory, kept, asked=asked)
        memory, proposal = propose(slots, memory, tokens, [4, 4, 4, 0])
        made.append((proposal, [kv_of(memory, slot) for slot in range(4)]))
    testing.assert_same_bits(*made)


def test_catch_up_rows_count_in_slots(monkeypatch):
    """Fails if slots do not catch up by `catch_up_rows` rows a forward."""
    widths, advance = [], rows_lib.SlotRows.advance

    def counted(self, params, kv, window):
        note = lambda most: widths.append((window.tokens.shape[1], int(most)))
        jax.debug.callback(note, window.num_active.max(), ordered=True)
        return advance(self, params, kv, window)

    monkeypatch.setattr(rows_lib.SlotRows, "advance", counted)
    slots = each.lift(as_drafter(catch_up_rows=40), 3)
    memory = slots.init(capacity=96, page_size=8)
    tokens = jnp.arange(3 * 97, dtype=jnp.int32).reshape(3, 97) % 96
    length, gamma = jnp.full(3, 60, jnp.int32), jnp.ones(3, jnp.int32)
    after, _ = propose(slots, memory, tokens, gamma, length=length)
    jax.effects_barrier()
    # 60 tokens are 40 and 19 rows, and the last one, which drafts.
    assert widths == [(40, 40), (40, 19)] and after.length.tolist() == [60] * 3


FIXED = tree_shapes.parse("3-2")


def drawn(drafter, text, *, seed=5):
    """Returns a drafter's proposal after one text, for a target that draws."""
    slots, memory = decoding.prefilled(drafter, NEARLY, [text], **SMALL.sizes)
    sampling = decoding.sampling_of(1, temperature=0.8, top_k=20, seed=seed)
    _, proposal = decoding.propose_after(
        slots, NEARLY, memory, [text], sampling=sampling
    )
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], proposal)


def test_what_the_children_of_a_tree_were_drawn_from():
    """Fails if a node has another node's probabilities, or draws a child twice."""
    independent = as_drafter(draws="independent")
    proposal, other = (
        drawn(independent.for_tree(FIXED), PROMPT, seed=seed) for seed in (5, 6)
    )
    assert (other.tokens != proposal.tokens).any()
    probs, inner = proposal.probs, sorted(set(FIXED.parents))
    np.testing.assert_allclose(probs[inner].sum(axis=-1), 1, rtol=1e-5)
    assert not np.delete(probs, inner, axis=0).any()
    for column in inner:
        children = proposal.tokens[np.equal(FIXED.parents, column)]
        assert len(set(children.tolist())) == len(children)
        assert (probs[column, children] > 0).all()
        # They are drawn from the draft's row after the path to the node.
        path = [int(proposal.tokens[column - 1])] if column else []
        alone = drawn(independent, [*PROMPT, *path])
        np.testing.assert_allclose(probs[column], alone.probs[0], rtol=1e-4, atol=1e-7)


UNEVEN = tree_shapes.parse("[[0],[1],[2],[0,0],[1,0],[2,0],[2,1],[2,1,0]]")


@pytest.mark.parametrize("path", [[2, 6, 7], [0], []])
def test_a_tree_leaves_the_rows_of_its_text_alone(path):
    """Fails if rows or pages of a tree stay, or if those of nodes that were committed
    are not run again: K/V, drafts and the probabilities that they were drawn from are
    those of a memory that never held the tree."""
    decoding.needs("native")  # Its K/V is the same however rows are grouped.
    slots = each.lift(as_drafter(draws="independent").for_tree(UNEVEN), 1)
    sampling = decoding.sampling_of(1, temperature=0.8, top_k=20, seed=5)
    begun = lambda text: slots.prefill(NEARLY, slots.init(**SMALL.sizes), text, slot=0)
    propose = lambda memory, text: decoding.propose_after(
        slots, NEARLY, memory, [text], sampling=sampling
    )
    memory, proposal = propose(begun(PROMPT), PROMPT)
    assert memory.length.tolist() == [len(PROMPT)]
    text = [*PROMPT, *(int(proposal.tokens[0, node]) for node in path), 94]
    length = jnp.array([len(text)])
    memory = decoding.commit(slots, NEARLY, memory, length, asked=jnp.ones((1,), bool))
    (memory, found), (fresh, expected) = (
        propose(memory, text),
        propose(begun(text), text),
    )
    testing.assert_same_bits(found, expected)
    testing.assert_same_bits(kv_of(memory, 0), kv_of(fresh, 0))
    testing.assert_same_bits(memory.num_owned, fresh.num_owned)
    decoding.check_cache(memory)


@pytest.mark.parametrize("replaces", (True, False))
def test_siblings_drawn_with_replacement_are_independent(replaces):
    """Compares frequencies of pairs of nodes, over seeds, with independent draws.
    Negative control: without replacement two siblings are never the same."""
    tree = dataclasses.replace(FIXED, replaces=replaces)
    num_slots, chances = 2000, np.array([0.5, 0.3, 0.2])
    settings = decoding.sampling_of(num_slots)
    settings = settings.replace(seed=jnp.arange(num_slots, dtype=jnp.uint32))
    length = jnp.full((num_slots,), 5, jnp.int32)
    how = {"impl": "xla", "has_probs": True, "vocab_size": 3}
    made = draw.Draw(sampling=settings, length=length, **how)

    def tokens(level, count):
        logits = jnp.log(jnp.asarray(chances, jnp.float32))
        shape = num_slots, count, 3
        found = made.children(
            jnp.broadcast_to(logits, shape),
            level=jnp.int32(level),
            counts=jnp.full((num_slots,), count, jnp.int32),
            tree=tree,
        )
        return np.asarray(found[1]).reshape(num_slots, -1)

    nodes = np.concatenate([tokens(0, 1), tokens(1, 3)], axis=1)
    pairs = itertools.combinations(np.eye(3)[nodes].swapaxes(0, 1), 2)
    found = [one.T @ other / num_slots for one, other in pairs]
    gaps = [np.abs(each_ - np.outer(chances, chances)).max() for each_ in found]
    assert (max(gaps) < 0.04) == replaces
