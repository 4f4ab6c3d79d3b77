"""Drafters of a batch: what has a form for slots, and what their memories keep."""

import dataclasses
import functools

import batch_cases
import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_cases import GAMMA_MAX, SIZES, SLOTS, Case
from spec_jax.batch import draft_models, drafters, lookups, rows

from spec_jax import testing
from spec_jax.drafters import oracle


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("draft-model", draft_models.DraftModelBatch),
        ("sampled", draft_models.DraftModelBatch),
        ("ngram", lookups.EachSlot),
        ("suffix", lookups.EachSlot),
        ("hybrid", draft_models.HybridBatch),
        ("oracle", lookups.OracleBatch),
    ],
)
def test_each_drafter_has_a_form(name, kind):
    made = drafters.of(Case(name=name).drafter, 3)
    assert isinstance(made, kind)
    assert (made.num_slots, made.gamma_max) == (3, GAMMA_MAX)
    assert hash(made) == hash(drafters.of(Case(name=name).drafter, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draws": "independent"}, "no draws='independent' with"),
        ({"draft_cache": "round"}, "draft_cache='round': use 'highest' or"),
        ({"min_confidence": 0.5}, "min_confidence=0.5 must be 0"),
    ],
)
@pytest.mark.parametrize("name", ["draft-model", "hybrid"])
def test_what_draft_models_of_a_batch_cannot(name, changes, message):
    drafter = Case(name=name).drafter
    if name == "hybrid":
        draft = dataclasses.replace(drafter.draft, **changes)
        drafter = dataclasses.replace(drafter, draft=draft)
    else:
        drafter = dataclasses.replace(drafter, **changes)
    with pytest.raises(NotImplementedError, match=message):
        drafters.of(drafter, SLOTS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remembers(decoding.Scripted):
    """A drafter of somebody else's, with a memory."""

    def init(self, *, capacity, page_size):
        return jnp.zeros((capacity,), jnp.int32)


def test_drafters_without_a_form():
    stranger = Remembers()
    with pytest.raises(NotImplementedError, match="Remembers has no form for batches"):
        drafters.of(stranger, SLOTS)
    wrapped = lookups.EachSlot(drafter=stranger, num_slots=SLOTS)
    with pytest.raises(NotImplementedError, match="Remembers has a memory"):
        wrapped.init(**SIZES)
    assert lookups.EachSlot(drafter=Case(name="ngram").drafter, num_slots=3).init(
        **SIZES, num_pages=7
    ) == (())


def test_traces_that_an_oracle_does_not_take():
    """Fails if a trace is spread over a text of another size."""
    drafter = Case(name="oracle").batch().drafter
    memory = drafter.init(**SIZES)
    assert memory.tokens.shape == (SLOTS, 49)
    for size in (1, 48):
        with pytest.raises(
            ValueError, match=rf"a trace of {size} tokens .* text of 49"
        ):
            drafter.prefill(oracle.make_trace([3] * size), memory, [3], slot=1)
    with pytest.raises(ValueError, match="takes the trace of each request"):
        drafter.prefill(None, memory, [3], slot=1)
    memory = drafter.prefill(oracle.make_trace([3] * 49), memory, [3], slot=1)
    assert memory.tokens.sum(axis=1).tolist() == [0, 3 * 49, 0, 0]


PROMPTS = ([7, 3, 90, 41], [5], list(range(30, 50)), [8] * 9)


def begin(num_pages=None):
    """A draft model's memory with a prompt in each slot, and the slots' texts."""
    case = Case(name="draft-model")
    drafter = drafters.of(case.drafter, SLOTS)
    memory = drafter.init(**SIZES, num_pages=num_pages)
    tokens = np.zeros((SLOTS, batch_cases.CAPACITY + 1), np.int32)
    for slot, prompt in enumerate(PROMPTS):
        tokens[slot, : len(prompt)] = prompt
        memory = drafter.prefill(batch_cases.DRAFT_PARAMS, memory, prompt, slot=slot)
    return case, drafter, memory, jnp.asarray(tokens)


LENGTHS = jnp.array([len(prompt) for prompt in PROMPTS])


def propose(drafter, memory, tokens, gamma):
    return _propose(
        drafter, batch_cases.DRAFT_PARAMS, memory, tokens, LENGTHS, jnp.array(gamma)
    )


@functools.partial(jax.jit, static_argnums=0)
def _propose(drafter, params, memory, tokens, length, gamma):
    return drafter.propose(
        params, memory, tokens=tokens, length=length, gamma=gamma, settings=None
    )


def alone(case, slot, gamma):
    """What the draft model of one sequence drafts, and its memory afterwards."""
    drafter = case.drafter
    memory = drafter.init(**SIZES)
    memory = drafter.prefill(batch_cases.DRAFT_PARAMS, memory, PROMPTS[slot])
    tokens = np.zeros((batch_cases.CAPACITY + 1,), np.int32)
    tokens[: len(PROMPTS[slot])] = PROMPTS[slot]
    return jax.jit(drafter.propose)(
        batch_cases.DRAFT_PARAMS,
        memory,
        tokens=jnp.asarray(tokens),
        length=LENGTHS[slot],
        gamma=jnp.int32(gamma),
    )


def test_a_slot_that_is_asked_for_nothing_is_not_touched():
    """Fails if its cache grows or its drafts count; the others draft as alone."""
    batch_cases.skip_without("native")
    case, drafter, memory, tokens = begin()
    gamma = [3, 0, 4, 0]
    after, proposal = propose(drafter, memory, tokens, gamma)
    assert proposal.num_drafted.tolist() == gamma
    for slot in (1, 3):
        testing.assert_same_bits(
            batch_cases.held(after, slot), batch_cases.held(memory, slot)
        )
    for slot in (0, 2):
        expected_memory, expected = alone(case, slot, gamma[slot])
        count = gamma[slot]
        assert (
            proposal.tokens[slot, :count].tolist() == expected.tokens[:count].tolist()
        )
        testing.assert_same_bits(
            batch_cases.held(after, slot), batch_cases.held(expected_memory, 0)
        )


def test_drafts_stop_where_the_cache_has_no_room():
    """Fails if a slot without a page spins, or takes its neighbours' drafts."""
    batch_cases.skip_without("native")
    # Slots 0, 1, 3 have one page or two, slot 2 three: no page is left.
    case, drafter, memory, tokens = begin(num_pages=6)
    assert int(memory.num_free) == 0
    after, proposal = propose(drafter, memory, tokens, [4, 4, 4, 4])
    batch_cases.check_pages(after)
    # 20 tokens of slot 2 and 3 more rows fill 24 positions; slot 3 is full at once.
    assert proposal.num_drafted.tolist() == [4, 4, 4, 0]
    whole = propose(drafter, begin()[2], tokens, [4, 4, 4, 4])[1]
    np.testing.assert_array_equal(proposal.tokens[:3], whole.tokens[:3])
    assert not bool(after.refused.any())


def test_a_commit_of_length_one_forgets_a_slot():
    """Of the slots that are asked, and of no others."""
    batch_cases.skip_without("native")
    _, drafter, memory, _ = begin()
    asked = jnp.array([False, True, True, False])
    params = batch_cases.DRAFT_PARAMS
    after = drafter.commit(params, memory, jnp.ones((SLOTS,), jnp.int32), asked=asked)
    assert after.length.tolist() == [3, 0, 0, 8]
    assert after.num_owned.tolist() == [1, 1, 1, 1]
    batch_cases.check_pages(after)


def test_slots_far_behind_are_caught_up_in_few_forwards(monkeypatch):
    """Fails if `catch_up_rows` counts for one sequence alone: 10 forwards, of 2 rows.

    What is drafted, and the K/V, are those of slots that follow two rows at a time.
    """
    batch_cases.skip_without("native")
    _, slow, memory, tokens = begin()
    one = dataclasses.replace(slow.drafter, catch_up_rows=16)
    fast = dataclasses.replace(slow, drafter=one)
    # Slots that have taken in nothing, or a part; one is not asked.
    memory = slow.commit(
        batch_cases.DRAFT_PARAMS,
        memory,
        jnp.array([1, 1, 1, 3], jnp.int32),
        asked=jnp.ones((SLOTS,), bool),
    )
    gamma = [4, 4, 4, 0]
    expected_memory, expected = propose(slow, memory, tokens, gamma)
    found_memory, found = propose(fast, memory, tokens, gamma)
    testing.assert_same_bits(found, expected)
    for slot in range(SLOTS):
        testing.assert_same_bits(
            batch_cases.held(found_memory, slot),
            batch_cases.held(expected_memory, slot),
        )

    forwards, real = [], rows.RowBatch.next_tokens

    def counted(self, *arguments, tokens, **rest):
        forwards.append(tokens.shape[1])
        return real(self, *arguments, tokens=tokens, **rest)

    monkeypatch.setattr(rows.RowBatch, "next_tokens", counted)
    with jax.disable_jit():
        fast.propose(
            batch_cases.DRAFT_PARAMS,
            memory,
            tokens=tokens,
            length=LENGTHS,
            gamma=jnp.array(gamma),
            settings=None,
        )
    # 20 tokens of slot 2: 16 and 3 rows, then one for each draft.
    assert forwards == [16, 16, 2, 2, 2, 2]


@pytest.mark.parametrize("name", ["draft-model", "hybrid", "oracle"])
def test_a_draft_of_another_vocabulary_is_refused(name):
    """Fails if a form for batches does not say whose tokens it proposes."""
    case = Case(name=name, impl="xla")
    batch = case.batch()
    target = dataclasses.replace(
        batch.target,
        model=dataclasses.replace(
            case.target, config=dataclasses.replace(case.target.config, vocab_size=50)
        ),
    )
    with pytest.raises(ValueError, match="different vocabularies: 96 and 50 entries"):
        dataclasses.replace(batch, target=target)
