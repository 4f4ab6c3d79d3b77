"""Whole rounds in slots: every sequence is what it is alone, whatever its neighbours.

Tokens, counters, K/V and what a gamma policy learnt, compared with `spec_jax.rounds` as
integers (`batch_cases`). The negative controls give a slot what is another's.
"""

import batch_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_cases import Case
from spec_jax.batch import rounds as batch_rounds

from spec_jax import rounds, testing


PLACEMENTS = (
    {0: 0, 1: 1, 2: 2, 3: 5},
    {3: 0, 1: 7, 0: 4},  # and one slot empty
    {2: 6, 1: 3},
)
"""Numbers of requests by slot: of different neighbours, and in other slots."""

# Compiling is nearly all of the time, so the slow ones are those whose parts others
# have: a hybrid has suffix statistics and a draft model that draws.
DRAFTERS = (
    "ngram",
    "hybrid",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("draft-model", "sampled", "suffix", "oracle")
    ),
)
ADAPTIVE = Case(name="oracle", adaptive="goodput")


def run(case: Case, placed, **changes):
    """All rounds of the requests in their slots."""
    batch = case.batch(**changes)
    return batch_cases.generate(batch, batch_cases.admit(batch, case, placed))


@pytest.mark.parametrize("name", DRAFTERS)
def test_each_slot_is_what_it_is_alone(name):
    """Fails if a slot sees another's draft, settings, gamma, limit, noise or pages."""
    batch_cases.skip_without("native")
    case = Case(name=name)
    for placed in PLACEMENTS:
        state = run(case, placed)
        batch_cases.assert_each_alone(case, state, placed)
        assert state.slots.done.all()
    # Not vacuous: drafts are kept and drafts are rejected.
    every = [batch_cases.alone(case, number) for number in (0, 2, 5, 6, 7)]
    proposed = sum(int(one.num_proposed) for one in every)
    assert 0 < sum(int(one.num_accepted) for one in every) < proposed


@pytest.mark.parametrize(
    ("name", "impl", "cache"),
    [
        ("draft-model", "native", "static"),
        pytest.param("ngram", "xla", "paged", marks=pytest.mark.slow),
        pytest.param("draft-model", "xla", "paged", marks=pytest.mark.slow),
    ],
)
def test_slots_of_a_greedy_program(name, impl, cache):
    """Fails if a program that cannot draw chooses otherwise, or tiles change a bit."""
    batch_cases.skip_without(impl)
    case = Case(name=name, impl=impl, cache=cache, greedy=True)
    for placed in PLACEMENTS[:2]:
        batch_cases.assert_each_alone(case, run(case, placed), placed)


@pytest.mark.parametrize(
    "adaptive", ["goodput", pytest.param("threshold", marks=pytest.mark.slow)]
)
def test_each_slot_has_a_policy_of_its_own(adaptive):
    """Fails if a slot drafts as another's rounds taught, or learns from them."""
    batch_cases.skip_without("native")
    case = Case(name="oracle", adaptive=adaptive)
    for placed in PLACEMENTS:
        batch_cases.assert_each_alone(case, run(case, placed), placed)
    # Not vacuous: what slots drafted made policies of different states.
    learnt = [jax.tree.leaves(batch_cases.alone(case, n).policy) for n in (0, 2, 6)]
    assert len({str(leaves) for leaves in learnt}) == 3


def test_stop_tokens_end_each_slot_by_itself():
    """Fails if a stop token ends a neighbour, or a token after it is kept."""
    batch_cases.skip_without("native")
    case, placed = ADAPTIVE, PLACEMENTS[0]
    ended = set()
    for number in placed.values():
        expected = batch_cases.alone(case, number)
        prompt = len(case.request(number).prompt)
        token = int(expected.tokens[(prompt + int(expected.length)) // 2])
        state = run(case, placed, stop_ids=(token,))
        batch_cases.assert_each_alone(case, state, placed, stop_ids=(token,))
        early = np.asarray(state.slots.length) < np.asarray(state.slots.limit)
        ended.add(tuple(early.tolist()))
    assert len(ended) > 1  # each of them ends other slots


def test_rounds_in_calls_of_one():
    """Fails if where a call ends changes what a slot writes."""
    batch_cases.skip_without("native")
    case, placed = ADAPTIVE, PLACEMENTS[0]
    batch = case.batch()
    state, num_calls = batch_cases.admit(batch, case, placed), 0
    while not state.slots.done.all():
        state = batch_cases.generate(batch, state, max_rounds=1)
        num_calls += 1
    batch_cases.assert_each_alone(case, state, placed)
    assert num_calls == int(state.slots.num_rounds.max())


def test_calls_return_when_a_slot_ends():
    """Fails if the host could refill a slot only after all others are done."""
    batch_cases.skip_without("native")
    case, placed = ADAPTIVE, PLACEMENTS[0]
    batch = case.batch()
    state, done = batch_cases.admit(batch, case, placed), []
    while not state.slots.done.all():
        state = batch_cases.generate(batch, state, until_one_ends=True)
        done.append(int(state.slots.done.sum()))
    assert done == sorted(set(done)) and len(done) >= 3, done
    batch_cases.assert_each_alone(case, state, placed)


def test_a_slot_that_is_done_stays_as_it_is():
    """Fails if rounds of the others write, count or move anything of it."""
    batch_cases.skip_without("native")
    case, placed = Case(name="hybrid"), {0: 5, 1: 3, 2: 2, 3: 0}
    batch = case.batch()
    state = batch_cases.admit(batch, case, placed)
    state = batch_cases.generate(batch, state, until_one_ends=True)
    assert state.slots.done.tolist() == [False, True, False, False]
    # What a slot that is done would draft next must not be asked for.
    state = state.replace(slots=state.slots.replace(limit=state.slots.limit + 4))
    before = jax.tree.map(np.asarray, state)
    after = jax.tree.map(np.asarray, batch_cases.generate(batch, state, max_rounds=3))
    first, then = (
        jax.tree.map(lambda leaf: leaf[1], each.slots) for each in (before, after)
    )
    batch_cases.assert_same_states(then, first)
    for name in ("cache", "memory"):
        for kv in (before, after):
            batch_cases.check_pages(getattr(kv, name))
        testing.assert_same_bits(
            batch_cases.held(getattr(after, name), 1),
            batch_cases.held(getattr(before, name), 1),
        )


def test_a_slot_that_finds_no_page_ends_and_the_others_go_on():
    """Fails if a starved slot commits or counts a round, or spoils a neighbour."""
    batch_cases.skip_without("native")
    case, placed = ADAPTIVE, {0: 0, 1: 3, 3: 2}
    batch = case.batch()
    state = batch_cases.admit(batch, case, placed)
    before = int(state.slots.length[3])
    # Pages that somebody else holds: requests 0 and 2 need three more each, and 0 is
    # the faster.
    few = state.cache.replace(num_free=jnp.int32(5))
    state = batch_cases.generate(batch, state.replace(cache=few))
    assert state.slots.starved.tolist() == [False, False, False, True]
    assert state.slots.done.all()
    slots = jax.tree.map(np.asarray, state.slots)
    for slot in (0, 1):
        one = jax.tree.map(lambda leaf, slot=slot: leaf[slot], slots)
        batch_cases.assert_same_states(one, batch_cases.alone(case, placed[slot]))
    # What it committed until then is what it commits alone.
    whole, length = batch_cases.alone(case, 2), int(slots.length[3])
    assert before <= length < int(whole.length)
    assert slots.tokens[3, :length].tolist() == whole.tokens[:length].tolist()
    assert int(state.cache.length[3]) == length - 1
    hist = slots.accepted_hist[3]
    assert hist.sum() == slots.num_rounds[3]
    assert length - before == int(slots.num_accepted[3] + slots.num_rounds[3])


def exchanged(tree):
    """The leaves `[B, ...]` with slots 0 and 1 exchanged."""
    return jax.tree.map(lambda leaf: leaf[jnp.array([1, 0, 2, 3])], tree)


def _exchange(name):
    """A field of the slots' states."""

    def fault(state):
        field = exchanged(getattr(state.slots, name))
        return state.replace(slots=state.slots.replace(**{name: field}))

    return fault


FAULTS = {
    "the other's settings": _exchange("settings"),
    "the other's limit": _exchange("limit"),
    "the other's text": _exchange("tokens"),
    "the other's policy": _exchange("policy"),
    "the other's gamma": lambda state: state.replace(gamma=exchanged(state.gamma)),
    "the other's trace": lambda state: state.replace(memory=exchanged(state.memory)),
    "the other's pages": lambda state: state.replace(
        cache=state.cache.replace(page_table=state.cache.page_table[::-1])
    ),
    "a bit of K/V": lambda state: state.replace(
        cache=state.cache.replace(
            k=tuple(
                k.at[state.cache.page_table[0, 0], 0].multiply(-1)
                for k in state.cache.k
            )
        )
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault):
    """Negative control: a slot has what is another's from some round on."""
    batch_cases.skip_without("native")
    case, placed = ADAPTIVE, {0: 0, 1: 5, 2: 2}
    batch = case.batch()
    state = batch_cases.admit(batch, case, placed)
    state = batch_cases.generate(batch, state, max_rounds=2)
    state = batch_cases.generate(batch, FAULTS[fault](state))
    with pytest.raises((AssertionError, ValueError)):
        batch_cases.assert_each_alone(case, state, placed)


def test_a_round_can_be_run_by_itself():
    """Shapes and dtypes of the state stay, and idle slots with it."""
    batch_cases.skip_without("native")
    batch = ADAPTIVE.batch()
    state = batch.empty(draws=True)

    def one_round(state):
        return batch_rounds.run_round(
            batch.target,
            batch.drafter,
            batch.params,
            state,
            stop_ids=jnp.array([-1]),
            gamma_policy=batch.gamma_policy,
        )

    shapes = jax.eval_shape(one_round, state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
    assert isinstance(state.slots, rounds.RoundState)
    assert state.slots.done.all() and not state.slots.num_rounds.any()
