"""Speculative rounds commit what plain decoding would have committed: bits.

Drafters that are always right, always wrong and in between; every gamma; stop tokens,
limits and full caches in the middle of a window. The negative controls plant faults
in the round and require that the same comparison fails.
"""

import chex
import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import GAMMA_MAX, PROMPT, Scripted

from experiments.support import paired_runs
from spec_jax import autoregressive, rounds, rules, session, testing
from spec_jax.analysis import metrics
from spec_jax.ops import dispatch
from spec_jax.paging import cache
from spec_jax.rules import acceptance


@pytest.fixture(scope="module")
def plain():
    return decoding.plain()


def assert_same_as_plain(state, plain):
    """Tokens, committed K/V and bookkeeping."""
    session.check_state(state)
    assert decoding.text(state) == decoding.text(plain)
    cache.check_integrity(state.cache)
    length = int(state.length) - 1  # The last token is pending.
    assert int(state.cache.length[0]) == length
    testing.assert_same_bits(
        decoding.held(state.cache, length), decoding.held(plain.cache, length)
    )
    counters = paired_runs.count(state, int(state.length) - len(PROMPT))
    metrics.identities(counters)


@pytest.mark.parametrize("run", [0, 1, 2, 3, 10_000])
def test_tokens_and_kv_are_those_of_plain_decoding(plain, run):
    """Fails if a rejected draft is kept, or the target's own token is lost."""
    for gamma in range(GAMMA_MAX + 1):
        state = decoding.begin_scripted(plain.tokens, run=run)
        state = decoding.generate(Scripted(), state, gamma=gamma)
        assert_same_as_plain(state, plain)
        if run == 10_000:
            assert int(state.num_accepted) == int(state.num_proposed)
            assert int(state.num_rounds) == -(-40 // (gamma + 1))
        if run == 0 or gamma == 0:
            assert int(state.num_rounds) == 40


def test_native_kernels_keep_the_promise_too():
    """Fails if a native kernel's bits depend on the number of live rows."""
    try:
        dispatch.resolve("native")
    except NotImplementedError as error:
        pytest.skip(str(error))
    plain = decoding.plain(target=decoding.NATIVE)
    for run in (0, 2, 10_000):
        for gamma in range(GAMMA_MAX + 1):
            state = decoding.begin_scripted(
                plain.tokens, run=run, target=decoding.NATIVE
            )
            state = decoding.generate(
                Scripted(), state, gamma=gamma, target=decoding.NATIVE
            )
            assert_same_as_plain(state, plain)


def test_a_draft_model_with_a_cache_of_its_own(plain):
    """Fails if the draft's cache holds tokens that were not committed.

    With the target as its own draft every proposal must be right, which it is only
    where the draft's K/V covers exactly the committed text.
    """
    hopeless = decoding.draft_drafter()
    perfect = decoding.draft_drafter(decoding.TARGET.config)
    for gamma in range(GAMMA_MAX + 1):
        for drafter, draft_params in (
            (hopeless, decoding.DRAFT_PARAMS),
            (perfect, decoding.TARGET_PARAMS),
        ):
            state = decoding.begin_drafted(drafter, draft_params)
            state = decoding.generate(
                drafter, state, gamma=gamma, draft_params=draft_params
            )
            assert_same_as_plain(state, plain)
            cache.check_integrity(state.memory)
            assert int(state.memory.length[0]) <= int(state.length) - 1
        assert int(state.num_accepted) == int(state.num_proposed)


def test_stop_tokens_anywhere_in_the_window(plain):
    """Fails if a token after a stop token is kept, wherever in the window it is."""
    drafter, text = Scripted(), decoding.text(plain)
    for end in range(len(PROMPT), len(PROMPT) + 12):
        first = text.index(text[end], len(PROMPT))
        stop_ids = jnp.asarray([text[end]], jnp.int32)
        for gamma in (0, 3, 4):
            state = decoding.begin_scripted(plain.tokens)
            state = decoding.generate(drafter, state, gamma=gamma, stop_ids=stop_ids)
            assert_same_as_plain(state, state_up_to(plain, first + 1))
        alone = decoding.plain(stop_ids=stop_ids)
        assert decoding.text(alone) == text[: first + 1]


def state_up_to(plain, length):
    return plain.replace(length=jnp.int32(length))


def test_max_tokens_is_met_exactly(plain):
    """Fails if a window runs past the limit, or stops before it."""
    drafter = Scripted()
    for max_tokens in (1, 2, 4, 5, 6, 11):
        state = decoding.begin_scripted(plain.tokens, max_tokens=max_tokens)
        state = decoding.generate(drafter, state)
        assert_same_as_plain(state, state_up_to(plain, len(PROMPT) + max_tokens))


def test_a_full_cache_ends_the_sequence_in_the_middle_of_a_window():
    """Fails if a row is written past the capacity, or room is left."""
    capacity = 24
    plain = decoding.plain(max_tokens=60, capacity=capacity)
    # Every position has K/V but the last token's, which is pending.
    assert int(plain.length) == capacity + 1
    for run in (1, 10_000):
        state = decoding.begin_scripted(
            plain.tokens, run=run, max_tokens=60, capacity=capacity
        )
        assert_same_as_plain(decoding.generate(Scripted(), state), plain)


def test_out_of_pages_keeps_what_is_committed(plain):
    """Fails if a starved round commits a token, or the loop spins."""
    drafter = Scripted()
    state = decoding.begin_scripted(plain.tokens)
    left = 2  # pages: a pool that other sequences have eaten up
    kv = state.cache.replace(num_free=jnp.int32(left))
    state = decoding.generate(drafter, state.replace(cache=kv))
    assert bool(state.starved)
    covered = (2 + left) * decoding.PAGE_SIZE  # the prompt holds two pages
    committed = decoding.text(state)
    assert committed == decoding.text(plain)[: len(committed)]
    assert covered - GAMMA_MAX <= len(committed) <= covered + 1
    with pytest.raises(MemoryError, match=rf"out of pages after {len(committed)} tok"):
        session.check_state(state)


def test_a_few_rounds_per_call_change_nothing(plain):
    """Fails if a call for two rounds traces again, or returns other bits."""
    drafter = Scripted()
    whole = decoding.generate(drafter, decoding.begin_scripted(plain.tokens, run=2))
    misses = rounds.generate._cache_size()
    state, calls = decoding.begin_scripted(plain.tokens, run=2), 0
    while not bool(state.done):
        state = rounds.generate(
            decoding.TARGET,
            drafter,
            (decoding.TARGET_PARAMS, None),
            state,
            gamma=jnp.int32(GAMMA_MAX),
            stop_ids=decoding.NO_STOP,
            max_rounds=jnp.int32(2),
        )
        calls += 1
    assert calls == -(-int(whole.num_rounds) // 2)
    testing.assert_same_bits(state, whole)
    assert rounds.generate._cache_size() == misses


def test_one_round_called_from_python(plain):
    """`run_round` alone is a step of `generate`, and keeps shapes and dtypes."""
    drafter = Scripted()
    looped = decoding.begin_scripted(plain.tokens, run=1)
    params = (decoding.TARGET_PARAMS, None)
    arguments = {"gamma": jnp.int32(3), "stop_ids": decoding.NO_STOP}
    looped = rounds.generate(
        decoding.TARGET, drafter, params, looped, **arguments, max_rounds=jnp.int32(3)
    )
    step = jax.jit(
        chex.assert_max_traces(
            lambda s: rounds.run_round(
                decoding.TARGET, drafter, params, s, **arguments
            ),
            n=1,
        )
    )
    state = decoding.begin_scripted(plain.tokens, run=1)
    for _ in range(3):
        after = step(state)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
        state = after
    testing.assert_same_bits(state, looped)


def test_one_compilation_for_every_gamma_and_prompt(plain):
    """Fails if gamma, the prompt or its length is a static argument."""

    class OfThisTest(Scripted):
        """Nothing is compiled for it yet."""

    drafter = OfThisTest()
    before = rounds.generate._cache_size()
    for gamma, prompt in ((4, PROMPT), (0, PROMPT[:5]), (2, PROMPT[:1])):
        state = decoding.begin_scripted(plain.tokens, prompt)
        decoding.generate(drafter, state, gamma=gamma)
    assert rounds.generate._cache_size() == before + 1


def test_no_transfers_inside_generate(plain):
    """Fails if a round consults the host."""
    drafter = Scripted()
    state = decoding.begin_scripted(plain.tokens, run=2)
    arguments = {
        "gamma": jnp.int32(4),
        "stop_ids": decoding.NO_STOP,
        "max_rounds": decoding.FOREVER,
    }
    params = (decoding.TARGET_PARAMS, None)
    with jax.transfer_guard("disallow"):
        state = rounds.generate(decoding.TARGET, drafter, params, state, **arguments)
    assert_same_as_plain(state, plain)
    # Negative control: the guard notices a number of the host's.
    state = decoding.begin_scripted(plain.tokens)
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="transfer"):
        rounds.generate(
            decoding.TARGET, drafter, params, state, **(arguments | {"gamma": 4})
        )


def test_the_cache_is_donated_and_aliased():
    """Fails if the loop copies the pool: nothing near its size is temporary."""
    drafter = Scripted()
    truth = jnp.zeros(8 * 4096 + 1, jnp.int32)
    state = decoding.begin_scripted(truth, capacity=8 * 4096)
    arguments = (decoding.TARGET, drafter, (decoding.TARGET_PARAMS, None), state)
    keywords = {
        "gamma": jnp.int32(4),
        "stop_ids": decoding.NO_STOP,
        "max_rounds": decoding.FOREVER,
    }
    compiled = rounds.generate.lower(*arguments, **keywords).compile()
    pool_bytes = sum(x.nbytes for x in (*state.cache.k, *state.cache.v))
    usage = compiled.memory_analysis()
    assert "input_output_alias" in compiled.as_text()
    assert usage.alias_size_in_bytes >= pool_bytes
    assert usage.temp_size_in_bytes < pool_bytes / 8
    # Negative control: without donation there is nothing to alias.
    kept = jax.jit(
        lambda *a, **k: rounds.generate.__wrapped__(*a, **k),
        static_argnums=(0, 1),
    )
    usage = kept.lower(*arguments, **keywords).compile().memory_analysis()
    assert usage.alias_size_in_bytes == 0


def test_replay_finds_what_plain_decoding_would_not_have_chosen(plain):
    """Fails if replay follows its own choices instead of the given text."""
    text = np.asarray(plain.tokens).copy()
    start, stop = len(PROMPT), int(plain.length)
    planted = start + 5
    text[planted] = (text[planted] + 1) % 96

    def replay(tokens):
        kv = decoding.TARGET.new_cache(
            capacity=decoding.CAPACITY, page_size=decoding.PAGE_SIZE
        )
        state = session.begin_plain(
            decoding.TARGET, decoding.TARGET_PARAMS, kv, PROMPT, max_tokens=40
        )
        _, chosen = autoregressive.replay(
            decoding.TARGET,
            decoding.TARGET_PARAMS,
            state.cache,
            tokens=jnp.asarray(tokens),
            start=jnp.int32(start),
            stop=jnp.int32(stop),
        )
        return np.asarray(chosen)[start:stop]

    np.testing.assert_array_equal(
        replay(np.asarray(plain.tokens)), np.asarray(plain.tokens)[start:stop]
    )
    chosen = replay(text)
    assert chosen[5] != text[planted]
    np.testing.assert_array_equal(chosen[:6], np.asarray(plain.tokens)[start:][:6])


def _accept_one_more(drafts, targets, num_drafted):
    verdict = acceptance.accept_exact(drafts, targets, num_drafted)
    a = jnp.minimum(verdict.num_accepted + 1, num_drafted)
    slots = jnp.arange(targets.shape[0])
    tokens = jnp.where(slots < a, jnp.append(drafts, 0), targets)
    return acceptance.Verdict(num_accepted=a, tokens=tokens)


def _lose_the_targets_own_token(drafts, targets, num_drafted):
    verdict = acceptance.accept_exact(drafts, targets, num_drafted)
    a = jnp.maximum(verdict.num_accepted - 1, 0)
    return verdict.replace(num_accepted=a, tokens=jnp.roll(verdict.tokens, -1))


def _accept_nothing_but_say_so(drafts, targets, num_drafted):
    verdict = acceptance.accept_exact(drafts, targets, num_drafted)
    return verdict.replace(num_accepted=verdict.num_accepted * 0 + num_drafted)


@pytest.mark.parametrize(
    "fault",
    [_accept_one_more, _lose_the_targets_own_token, _accept_nothing_but_say_so],
)
def test_a_wrong_acceptance_is_caught(plain, fault, monkeypatch):
    """Negative control of every comparison above."""
    state = decoding.begin_scripted(plain.tokens, run=2)
    monkeypatch.setattr(
        rules, "acceptance", _Patched(accept_exact=fault, PAD=acceptance.PAD)
    )
    state = _fresh_generate(state)
    monkeypatch.undo()
    with pytest.raises((AssertionError, RuntimeError)):
        assert_same_as_plain(state, plain)


@pytest.mark.parametrize("shift", [-1, 1, None])
def test_a_wrong_truncation_is_caught(plain, shift, monkeypatch):
    """Negative control: the target's K/V cut one short, one long, or not at all."""
    real = type(decoding.TARGET).truncate

    def wrong(self, kv, new_len):
        if shift is None:
            return kv
        return real(self, kv, jnp.clip(new_len + shift, 0, kv.length[0]))

    state = decoding.begin_scripted(plain.tokens, run=2)
    monkeypatch.setattr(type(decoding.TARGET), "truncate", wrong)
    state = _fresh_generate(state)
    monkeypatch.undo()
    with pytest.raises((AssertionError, RuntimeError)):
        assert_same_as_plain(state, plain)


class _Patched:
    def __init__(self, **names):
        self.__dict__.update(names)


def _fresh_generate(state):
    """Rounds in a loop that is traced anew, so that a planted fault is in it."""

    def loop(state):
        def body(_, s):
            return jax.lax.cond(
                s.done,
                lambda s: s,
                lambda s: rounds.run_round(
                    decoding.TARGET,
                    Scripted(),
                    (decoding.TARGET_PARAMS, None),
                    s,
                    gamma=jnp.int32(GAMMA_MAX),
                    stop_ids=decoding.NO_STOP,
                ),
                s,
            )

        return jax.lax.fori_loop(0, 60, body, state)

    return jax.jit(loop)(state)
