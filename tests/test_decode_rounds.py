"""Rounds that decoding decides: equal to plain decoding whatever verification says."""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.ablations import decode_rounds, verify_paths
from spec_jax import rounds, session, testing
from spec_jax.engine import protocols
from spec_jax.paging import cache


TARGET = decoding.quickest()
FLASH = verify_paths.make("flash", TARGET)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrong:
    """A verify path that always chooses the token after the right one."""

    inner: protocols.Target

    def forward(self, params, cache, **rows):
        return self.inner.forward(params, cache, **rows)

    def choose(self, logits, num_live):
        return (self.inner.choose(logits, num_live) + 1) % 96

    def truncate(self, cache, new_len):
        return self.inner.truncate(cache, new_len)

    def is_starved(self, cache):
        return self.inner.is_starved(cache)


def plain(**options):
    """Plain decoding of the same target."""
    return decoding.plain(target=TARGET, **options)


def generate(
    verify, run, *, max_tokens=40, stop_ids=decoding.NO_STOP, capacity=None, gamma=4
):
    """Decode rounds of a `Scripted` drafter that is right `run` times in a row."""
    capacity = capacity or decoding.CAPACITY
    truth = plain(max_tokens=max_tokens).tokens
    truth = jnp.pad(truth, (0, decoding.CAPACITY))[: decoding.CAPACITY + 1]
    options = {"max_tokens": max_tokens, "capacity": capacity}
    inner = decoding.begin_scripted(truth, run=run, target=TARGET, **options)
    kv = TARGET.new_cache(capacity=capacity, page_size=decoding.PAGE_SIZE)
    commit = session.begin_plain(
        TARGET,
        decoding.TARGET_PARAMS,
        kv,
        decoding.PROMPT,
        max_tokens=max_tokens,
    )
    return decode_rounds.generate(
        TARGET,
        verify,
        decoding.Scripted(),
        (decoding.TARGET_PARAMS, None),
        decode_rounds.init_state(inner, commit_cache=commit.cache),
        gamma=jnp.int32(gamma),
        stop_ids=stop_ids,
        max_rounds=decoding.FOREVER,
    )


def held(kv):
    return decoding.held(kv, int(kv.length[0]))


@pytest.mark.parametrize("verify", [FLASH, Wrong(inner=FLASH)], ids=["flash", "wrong"])
@pytest.mark.parametrize("run", [0, 1, 3, 100])
def test_tokens_and_both_caches_are_those_of_decoding(verify, run):
    """Fails if a bit of verification gets into what is committed."""
    alone, state = plain(), generate(verify, run)
    assert decoding.text(state.inner) == decoding.text(alone)
    expected = held(alone.cache)
    testing.assert_same_bits(held(state.commit_cache), expected)
    testing.assert_same_bits(held(state.inner.cache), expected)
    for kv in (state.commit_cache, state.inner.cache):
        cache.check_integrity(kv)
        assert not np.asarray(kv.refused).any()


@pytest.mark.parametrize("run", [0, 1, 3, 100])
def test_counters(run):
    """By hand: an always right drafter never corrects, an always wrong one always."""
    state = generate(FLASH, run)
    inner = state.inner
    forwards = int(inner.num_accepted) + int(inner.num_rounds)
    assert int(state.num_commit_steps) == int(state.num_mirror_steps) == forwards
    origins = np.asarray(inner.origins)[len(decoding.PROMPT) : int(inner.length) - 1]
    corrections = int((origins == int(rounds.Origin.CORRECTION)).sum())
    assert int(state.num_correction_steps) == corrections
    if run == 100:
        assert corrections == 0
        assert int(inner.num_rounds) == 40 // 5
    if run == 0:
        # With one token to go nothing is drafted: that token corrects nothing.
        assert int(inner.num_rounds) == 40
        assert int(state.num_correction_steps) == 39


def test_mismatches_are_committed_rows_that_verification_saw_otherwise():
    """Negative control of the counter: a verify path that is always wrong."""
    assert int(generate(TARGET, 3).num_mismatches) == 0
    wrong = generate(Wrong(inner=TARGET), 3)
    assert int(wrong.num_mismatches) == 40
    cut = int(plain().tokens[len(decoding.PROMPT) + 2])
    stopped = generate(Wrong(inner=TARGET), 100, stop_ids=session.stop_array((cut,)))
    committed = int(stopped.inner.length) - len(decoding.PROMPT)
    assert int(stopped.num_mismatches) == committed


def test_stop_token_and_gamma_zero():
    stop = session.stop_array((int(plain().tokens[len(decoding.PROMPT) + 6]),))
    stopped = plain(stop_ids=stop)
    for gamma in (0, 1, 4):
        state = generate(FLASH, 100, stop_ids=stop, gamma=gamma)
        assert decoding.text(state.inner) == decoding.text(stopped)
        assert int(state.commit_cache.length[0]) == int(state.inner.length) - 1


def test_no_room_commits_and_counts_nothing():
    """The caches fill up in the middle of a window."""
    roomy = decoding.text(plain(max_tokens=80))
    state = generate(FLASH, 100, max_tokens=80, capacity=40)
    text = decoding.text(state.inner)
    assert text == roomy[: len(text)] and len(text) > 30
    forwards = int(state.inner.num_accepted) + int(state.inner.num_rounds)
    assert int(state.num_commit_steps) == forwards
    cache.check_integrity(state.inner.cache)


def test_rounds_one_at_a_time_are_the_same_executable():
    whole = generate(FLASH, 3)
    compiled = decode_rounds.generate._cache_size()
    again = generate(FLASH, 3)
    assert decode_rounds.generate._cache_size() == compiled
    testing.assert_same_bits(jax.tree.leaves(again.inner), jax.tree.leaves(whole.inner))
