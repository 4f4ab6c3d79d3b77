"""Rounds whose gamma a policy chooses: the tokens stay, and the policy sees rounds."""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import rounds, session, testing
from spec_jax.gamma import goodput, policy, threshold


TARGET = decoding.quickest()
ROUND_S = np.array([1.0, 1.3, 1.45, 1.6, 1.75])
PROBING = policy.Probing(every=2, longest=8)


def make(name):
    """A policy that moves within a few rounds, and its first state."""
    if name == "threshold":
        made = threshold.Threshold(
            ladder=(0, 1, 2, 4), lower=0.35, upper=0.5, weight=0.5, probing=PROBING
        )
        return made, made.init(2)
    if name == "goodput":
        made = goodput.Goodput(gamma_max=4, decay=0.7, probing=PROBING)
        return made, made.init(ROUND_S)
    made = policy.Fixed(gamma_max=4)
    return made, made.init(3)


def truth() -> np.ndarray:
    """Plain decoding's whole text."""
    return np.asarray(decoding.plain(max_tokens=60, target=TARGET).tokens)


def run(run_length, name, *, gamma=4, max_rounds=None):
    """All rounds of a `Scripted` drafter, or that many at a time."""
    made, first = make(name)
    drafter = decoding.Scripted()
    state = decoding.begin_scripted(
        truth(), run=run_length, max_tokens=60, target=TARGET
    )
    state = state.replace(policy=jax.tree.map(jnp.array, first))
    states = []
    while not state.done:
        state = rounds.generate(
            TARGET,
            drafter,
            (decoding.TARGET_PARAMS, None),
            state,
            gamma=jnp.int32(gamma),
            stop_ids=decoding.NO_STOP,
            max_rounds=decoding.FOREVER if max_rounds is None else max_rounds,
            gamma_policy=made,
        )
        states.append(jax.tree.map(np.asarray, state))
    return states


@pytest.mark.parametrize("name", ["fixed", "threshold", "goodput"])
@pytest.mark.parametrize("run_length", [0, 1, 100])
def test_tokens_are_those_of_plain_decoding(name, run_length):
    (state,) = run(run_length, name)
    np.testing.assert_array_equal(decoding.text(state), truth()[: int(state.length)])


@pytest.mark.parametrize("name", ["threshold", "goodput"])
def test_it_drafts_where_drafts_are_kept_and_nowhere_else(name):
    """Of 60 tokens: a few rounds at gamma 4, or hardly a draft."""
    (kept,) = run(100, name)
    (rejected,) = run(0, name)
    assert kept.accepted_hist[4] >= 8
    assert kept.num_proposed >= 45
    assert rejected.num_proposed <= 15
    assert rejected.num_rounds == 60


def observed(name, state):
    """What a policy is told of each round, from the counters after each: `(states,
    [(gamma, num_drafted, num_accepted)])`."""
    made, first = make(name)
    states, told, before, learnt = state, [], (0, 0), first
    for after in states:
        counts = (int(after.num_proposed), int(after.num_accepted))
        drafted, accepted = (a - b for a, b in zip(counts, before, strict=True))
        told.append((drafted, drafted, accepted))
        before = counts
    return made, learnt, told


def replay_policy(name, states, fault=lambda told: told):
    """Raises unless the last state's policy is what the rounds' counts make of it."""
    made, learnt, told = observed(name, states)
    for gamma, drafted, accepted in fault(told):
        learnt = made.update(
            learnt,
            gamma=jnp.int32(gamma),
            num_drafted=jnp.int32(drafted),
            num_accepted=jnp.int32(accepted),
        )
    testing.assert_same_bits(states[-1].policy, jax.tree.map(np.asarray, learnt))


@pytest.mark.parametrize("name", ["threshold", "goodput"])
def test_the_policy_is_told_of_every_round(name):
    """Round by round, in calls of one: the state is that of the counts, bit for bit."""
    states = run(2, name, max_rounds=jnp.int32(1))
    replay_policy(name, states)
    with pytest.raises(AssertionError):
        replay_policy(name, states, fault=lambda told: told[:-1])
    with pytest.raises(AssertionError):
        replay_policy(name, states, fault=lambda told: [(g, d, d) for g, d, _ in told])


def test_calls_of_one_round_end_where_one_call_ends():
    """Negative control of both: another gamma ends elsewhere."""
    (at_once,) = run(100, "threshold")
    stepwise = run(100, "threshold", max_rounds=jnp.int32(1))[-1]
    testing.assert_same_bits(at_once, stepwise)
    (smaller,) = run(100, "threshold", gamma=1)
    assert int(smaller.num_rounds) != int(at_once.num_rounds)


def test_gamma_bounds_what_a_policy_chooses():
    (state,) = run(100, "fixed", gamma=2)
    assert int(state.accepted_hist[3:].sum()) == 0
    assert int(state.accepted_hist[2]) > 10


def test_a_starved_round_teaches_nothing():
    """The cache ends within the text: the last round commits nothing, and counts not.

    Negative control: a policy that is told of it knows more than the counts.
    """
    made, first = make("goodput")
    drafter = decoding.Scripted()
    state = decoding.begin_scripted(truth(), max_tokens=60, target=TARGET)
    # Pages that somebody else holds.
    taken = state.cache.replace(num_free=jnp.minimum(state.cache.num_free, 2))
    state = state.replace(cache=taken, policy=jax.tree.map(jnp.array, first))
    states = []
    while not state.done:
        state = rounds.generate(
            TARGET,
            drafter,
            (decoding.TARGET_PARAMS, None),
            state,
            gamma=jnp.int32(4),
            stop_ids=decoding.NO_STOP,
            max_rounds=jnp.int32(1),
            gamma_policy=made,
        )
        states.append(jax.tree.map(np.asarray, state))
    assert bool(states[-1].starved)
    testing.assert_same_bits(states[-1].policy, states[-2].policy)
    with pytest.raises(AssertionError):
        testing.assert_same_bits(states[-1].policy, states[-3].policy)


def test_a_policy_without_its_state_is_refused():
    made, _ = make("threshold")
    state = decoding.begin_scripted(truth(), max_tokens=60, target=TARGET)
    with pytest.raises(ValueError, match="needs its first state"):
        rounds.generate(
            TARGET,
            decoding.Scripted(),
            (decoding.TARGET_PARAMS, None),
            state,
            gamma=jnp.int32(4),
            stop_ids=decoding.NO_STOP,
            max_rounds=decoding.FOREVER,
            gamma_policy=made,
        )


def drafted_by(drafter, *, gamma=4, rounds_apart=1):
    """What a draft model proposes after every `rounds_apart` tokens of one text."""
    text = truth()
    tokens = jnp.asarray(text)
    memory = drafter.init(capacity=decoding.CAPACITY, page_size=decoding.PAGE_SIZE)
    memory = drafter.prefill(decoding.TARGET_PARAMS, memory, decoding.PROMPT)
    propose = jax.jit(drafter.propose)
    proposals = []
    for length in range(len(decoding.PROMPT), 60, rounds_apart):
        length = jnp.int32(length)
        memory, proposal = propose(
            decoding.TARGET_PARAMS,
            memory,
            tokens=tokens,
            length=length,
            gamma=jnp.int32(gamma),
        )
        memory = drafter.commit(decoding.TARGET_PARAMS, memory, length + rounds_apart)
        count = int(proposal.num_drafted)
        proposals.append(np.asarray(proposal.tokens)[:count].tolist())
    return proposals


def as_drafter(**changes):
    """The target as its own draft model, in slabs of two rows."""
    drafter = decoding.draft_drafter(TARGET.config, impl=TARGET.impl)
    return dataclasses.replace(drafter, **changes)


@pytest.mark.parametrize("rounds_apart", [3, 17])
def test_catching_up_in_taller_slabs_drafts_the_same(rounds_apart):
    """Of a drafter that is far behind; its drafts are right, however it catches up."""
    slow = drafted_by(as_drafter(), rounds_apart=rounds_apart)
    fast = drafted_by(as_drafter(catch_up_rows=8), rounds_apart=rounds_apart)
    assert fast == slow
    text = truth().tolist()
    for number, drafts in enumerate(fast):
        start = len(decoding.PROMPT) + number * rounds_apart
        assert drafts == text[start : start + 4]


def test_a_draft_ends_where_the_model_is_not_confident():
    """Prefixes of the whole drafts; nothing at a probability that is never reached."""
    whole = drafted_by(as_drafter())
    some = drafted_by(as_drafter(min_confidence=0.5))
    none = drafted_by(as_drafter(min_confidence=1.0))
    assert [d[: len(e)] for d, e in zip(whole, some, strict=True)] == some
    lengths = {len(drafts) for drafts in some}
    assert len(lengths) > 1, lengths
    assert not any(none)


def test_confidence_changes_no_token():
    drafter = as_drafter(min_confidence=0.5)
    state = decoding.begin_drafted(
        drafter, decoding.TARGET_PARAMS, max_tokens=48, target=TARGET
    )
    state = decoding.generate(
        drafter, state, draft_params=decoding.TARGET_PARAMS, target=TARGET
    )
    session.check_state(state)
    np.testing.assert_array_equal(decoding.text(state), truth()[: int(state.length)])
    assert 0 < int(state.num_proposed) < 4 * int(state.num_rounds)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_confidence": 1.5}, "min_confidence=1.5 is no probability"),
        ({"min_confidence": float("nan")}, "min_confidence=nan is no probability"),
        ({"catch_up_rows": -1}, "catch_up_rows=-1 must not be negative"),
    ],
)
def test_bad_fields_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        as_drafter(**changes)
