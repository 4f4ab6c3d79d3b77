"""Replay without the target: the statistics of live rounds, as integers."""

import dataclasses

import decoding
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import CAPACITY, GAMMA_MAX, PROMPT, Scripted
from hypothesis import given, settings as hypothesis_settings, strategies as st

from spec_jax import replay, rounds, session, testing
from spec_jax.drafters import draft_model, ngram
from spec_jax.gamma import goodput, threshold
from spec_jax.rules import sampling


MAX_TOKENS = 40
LIVE = decoding.quickest()
TARGET = replay.TraceTarget(slab=GAMMA_MAX + 1)
WARM = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knowing(Scripted):
    """A `Scripted` drafter that can begin by itself."""

    def prefill(self, params, memory, prompt):
        del params, prompt
        return memory


@pytest.fixture(scope="module")
def text():
    """Prompt and plain output, for as long as tests look."""
    return decoding.text(decoding.plain(max_tokens=MAX_TOKENS, target=LIVE))


def begin(
    drafter, memory, text, *, max_tokens=MAX_TOKENS, draft_params=None, policy=None
):
    """The trace of `text`, and the state before the first round on it."""
    trace = replay.make_trace(text, size=CAPACITY + 1)
    state = replay.begin(
        TARGET,
        drafter,
        (trace, draft_params),
        TARGET.new_cache(capacity=CAPACITY),
        memory,
        PROMPT,
        max_tokens=max_tokens,
        policy=policy,
    )
    return trace, state


def run(
    drafter,
    trace,
    state,
    *,
    gamma,
    stop_ids=decoding.NO_STOP,
    draft_params=None,
    gamma_policy=None,
):
    """All rounds on the trace."""
    return rounds.generate(
        TARGET,
        drafter,
        (trace, draft_params),
        state,
        gamma=jnp.int32(gamma),
        stop_ids=stop_ids,
        max_rounds=decoding.FOREVER,
        gamma_policy=gamma_policy,
    )


def replayed(run_length, text, *, gamma, stop_ids=decoding.NO_STOP, max_tokens):
    """A `Scripted` drafter on the trace."""
    drafter, memory = Knowing(), decoding.script(text, run=run_length)
    trace, state = begin(drafter, memory, text, max_tokens=max_tokens)
    return run(drafter, trace, state, gamma=gamma, stop_ids=stop_ids)


def live(run_length, text, *, gamma, stop_ids=decoding.NO_STOP, max_tokens):
    """A `Scripted` drafter with the target."""
    state = decoding.begin_scripted(
        text, run=run_length, max_tokens=max_tokens, target=LIVE
    )
    return decoding.generate(
        Knowing(), state, gamma=gamma, stop_ids=stop_ids, target=LIVE
    )


def reported(state) -> dict:
    """All of a state that a replay shares: a trace has neither cache nor vocabulary."""
    names = [field.name for field in dataclasses.fields(rounds.RoundState)]
    apart = ("cache", "memory", "settings", "vocab_size")
    return {name: getattr(state, name) for name in names if name not in apart}


def assert_same_run(a, b):
    testing.assert_same_bits(reported(a), reported(b))


@given(
    run_length=st.sampled_from([0, 1, 2, 5, 10_000]),
    gamma=st.integers(0, GAMMA_MAX),
    stop_at=st.integers(0, MAX_TOKENS),
    max_tokens=st.integers(1, MAX_TOKENS),
)
@hypothesis_settings(max_examples=40, deadline=None, derandomize=True)
def test_a_replay_has_the_statistics_of_the_live_run(
    text, run_length, gamma, stop_at, max_tokens
):
    """Fails if a window, a stop token in it or the limit is judged otherwise."""
    output = [*text[len(PROMPT) :], -1]
    same = {
        "gamma": gamma,
        "stop_ids": session.stop_array((output[stop_at],)),
        "max_tokens": max_tokens,
    }
    assert_same_run(live(run_length, text, **same), replayed(run_length, text, **same))


def test_drafts_behind_a_stop_token_are_judged_as_live(text):
    """Fails if the trace need not go on: live counters count what the stop cuts."""
    output = text[len(PROMPT) :]
    at = next(
        i for i, token in enumerate(output) if i % 5 == 1 and token not in output[:i]
    )
    same = {"gamma": 4, "stop_ids": session.stop_array((output[at],)), "max_tokens": 40}
    perfect = decoding.ALWAYS
    expected = live(perfect, text, **same)
    assert int(expected.num_cut) > 0
    assert_same_run(expected, replayed(perfect, text, **same))
    # Negative control: with anything else behind the stop token, less is accepted.
    behind = [(token + 1) % 96 for token in output[at + 1 :]]
    drafter = Knowing()
    trace, state = begin(
        drafter, jnp.asarray(text), text[: len(PROMPT) + at + 1] + behind
    )
    other = run(drafter, trace, state, gamma=4, stop_ids=same["stop_ids"])
    assert decoding.text(other) == decoding.text(expected)
    assert int(other.num_accepted) < int(expected.num_accepted)


@pytest.mark.parametrize("gamma", [1, 4])
def test_one_changed_token_is_seen(text, gamma):
    """Negative control: a trace that is not the target's has other statistics."""
    at = len(PROMPT) + 16  # A draft of either gamma, not the token behind drafts.
    wrong = [*text[:at], (text[at] + 1) % 96, *text[at + 1 :]]
    drafter = Knowing()
    trace, state = begin(drafter, jnp.asarray(text), wrong)
    seen = reported(run(drafter, trace, state, gamma=gamma))
    same = reported(live(decoding.ALWAYS, text, gamma=gamma, max_tokens=MAX_TOKENS))
    differing = {
        name
        for name in same
        if name != "policy" and not np.array_equal(seen[name], same[name])
    }
    assert {"num_accepted", "accepted_hist", "tokens"} <= differing


def sampled_text() -> list[int]:
    kv = LIVE.new_cache(capacity=CAPACITY, page_size=decoding.PAGE_SIZE)
    state = session.begin_plain(
        LIVE,
        decoding.TARGET_PARAMS,
        kv,
        PROMPT,
        max_tokens=MAX_TOKENS,
        settings=sampling.make_settings(**WARM),
    )
    return decoding.text(
        decoding.autoregressive.generate(
            LIVE,
            decoding.TARGET_PARAMS,
            state,
            stop_ids=decoding.NO_STOP,
            max_steps=decoding.FOREVER,
        )
    )


def test_drawn_tokens_need_no_draws(text):
    """Fails if a sampled stream is replayed by argmax, or drafts by other noise."""
    settings = sampling.make_settings(**WARM)
    drawn = sampled_text()
    assert drawn != text
    # The target's own weights draft: with its noise they are always right.
    model = dataclasses.replace(LIVE, slab=2)
    drafter = draft_model.DraftModel(
        model=model, gamma_max=GAMMA_MAX, draws="sample-path"
    )
    params = draft_model.SampledParams(
        weights=decoding.TARGET_PARAMS, settings=settings
    )
    sizes = {"capacity": CAPACITY, "page_size": decoding.PAGE_SIZE}
    state = session.begin(
        LIVE,
        drafter,
        (decoding.TARGET_PARAMS, params),
        LIVE.new_cache(**sizes),
        drafter.init(**sizes),
        PROMPT,
        max_tokens=MAX_TOKENS,
        settings=settings,
    )
    expected = decoding.generate(
        drafter, state, gamma=3, draft_params=params, target=LIVE
    )
    trace, state = begin(drafter, drafter.init(**sizes), drawn, draft_params=params)
    found = run(drafter, trace, state, gamma=3, draft_params=params)
    assert int(expected.num_accepted) == int(expected.num_proposed) > 0
    assert_same_run(expected, found)


POLICIES = {
    "threshold": (threshold.Threshold(weight=0.25), None),
    "goodput": (goodput.Goodput(gamma_max=GAMMA_MAX), np.linspace(1.0, 2.5, 5)),
}
"""Each with what its state is made of."""


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("run_length", [0, 2])
def test_a_policy_of_gamma_learns_what_it_learns_live(text, name, run_length):
    """Fails if adaptive rounds see other counts: their state is compared as well."""
    gamma_policy, about = POLICIES[name]
    drafter, memory = Knowing(), decoding.script(text, run=run_length)
    state = decoding.begin_scripted(memory, target=LIVE)
    expected = rounds.generate(
        LIVE,
        drafter,
        (decoding.TARGET_PARAMS, None),
        state.replace(policy=gamma_policy.init(about)),
        gamma=jnp.int32(GAMMA_MAX),
        stop_ids=decoding.NO_STOP,
        max_rounds=decoding.FOREVER,
        gamma_policy=gamma_policy,
    )
    trace, state = begin(drafter, memory, text, policy=gamma_policy.init(about))
    found = run(drafter, trace, state, gamma=GAMMA_MAX, gamma_policy=gamma_policy)
    assert_same_run(expected, found)
    # Not the constant policy: some round asked for less than `gamma`.
    assert int(found.num_proposed) < GAMMA_MAX * int(found.num_rounds) - GAMMA_MAX


def test_a_full_cache_ends_a_replay_as_it_ends_a_run(text):
    """Fails if room is counted otherwise, or a starved round is counted at all."""
    drafter, memory = Knowing(), jnp.asarray(text)
    state = decoding.begin_scripted(memory, target=LIVE)
    held = 2 * decoding.PAGE_SIZE  # What the prompt has reserved.
    kv = state.cache.replace(num_free=jnp.int32(0))
    expected = decoding.generate(drafter, state.replace(cache=kv), gamma=3, target=LIVE)
    trace, state = begin(drafter, jnp.asarray(text), text)
    small = state.cache.replace(capacity=jnp.int32(held))
    found = run(drafter, trace, state.replace(cache=small), gamma=3)
    assert bool(expected.starved) and int(expected.num_rounds) > 0
    assert_same_run(expected, found)
    assert int(found.cache.num_forwards.sum()) == int(found.num_rounds)


def test_a_replay_ends_where_the_trace_does(text):
    """Fails if padding is committed: a state whose limit is past the trace starves."""
    drafter = Knowing()
    trace, state = begin(drafter, jnp.asarray(text), text)
    state = state.replace(limit=jnp.int32(CAPACITY + 1))
    found = run(drafter, trace, state, gamma=GAMMA_MAX)
    assert bool(found.starved) and bool(found.done)
    assert decoding.text(found) == text[: int(found.length)]


def test_forwards_are_counted_by_their_live_rows(text):
    """Fails if the work that the target would have done is not that of the windows."""
    drafter = ngram.PromptLookup(gamma_max=GAMMA_MAX)
    trace, state = begin(
        drafter, (), [*PROMPT, *PROMPT, *PROMPT, *PROMPT], max_tokens=30
    )
    found = run(drafter, trace, state, gamma=GAMMA_MAX)
    by_rows = np.asarray(found.cache.num_forwards)
    assert by_rows.shape == (GAMMA_MAX + 2,) and by_rows[1] and by_rows[GAMMA_MAX + 1]
    assert by_rows.sum() == int(found.num_rounds)
    rows = by_rows @ np.arange(GAMMA_MAX + 2)
    assert rows == int(found.num_rounds + found.num_proposed)


def test_traces_of_one_size_share_an_executable(text):
    """Fails if a text, its length or gamma is traced into the program."""

    class OfThisTest(Knowing):
        """Nothing is compiled for it yet."""

    drafter = OfThisTest()
    shared = {"max_tokens": 20}
    before = None
    for length, gamma in ((len(text), 1), (len(text) - 5, 4), (len(text) - 20, 0)):
        trace, state = begin(drafter, jnp.asarray(text), text[:length], **shared)
        run(drafter, trace, state, gamma=gamma)
        before = before or rounds.generate._cache_size()
    assert rounds.generate._cache_size() == before


@pytest.mark.parametrize(
    ("text", "size", "said"),
    [
        ([], None, "0 tokens"),
        ([1, 2, 3], 2, "3 tokens is no trace of 1 .. 2"),
        ([1, -2], None, "token -2"),
        ([1, replay.MAX_VOCAB_SIZE], None, "token 16777216"),
    ],
)
def test_texts_that_are_no_trace(text, size, said):
    with pytest.raises(ValueError, match=said):
        replay.make_trace(text, size=size)


def test_tokens_pass_through_their_logits_unchanged():
    """Fails if a token id is rounded on its way."""
    largest = replay.MAX_VOCAB_SIZE - 1
    trace = replay.make_trace([0, largest, largest - 1, 7])
    _, logits = TARGET.forward(
        trace,
        TARGET.new_cache(capacity=8),
        tokens=jnp.zeros((3,), jnp.int32),
        start=jnp.int32(0),
        num_live=jnp.int32(3),
    )
    own = TARGET.choose(logits, jnp.int32(3))
    assert own.dtype == jnp.int32 and own.tolist() == [largest, largest - 1, 7]


def test_sizes_that_hold_nothing():
    with pytest.raises(ValueError, match="slab=0"):
        replay.TraceTarget(slab=0)
    with pytest.raises(ValueError, match="capacity=0"):
        TARGET.new_cache(capacity=0)


def test_a_window_that_is_too_high(text):
    with pytest.raises(ValueError, match="6 rows do not fit a slab of 5"):
        TARGET.forward(
            replay.make_trace(text),
            TARGET.new_cache(capacity=8),
            tokens=jnp.zeros((6,), jnp.int32),
            start=jnp.int32(0),
            num_live=jnp.int32(1),
        )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": []}, "prompt has 0 tokens"),
        ({"prompt": PROMPT * 10}, "prompt has 110 tokens: it needs 1 .. 96"),
        ({"prompt": [*PROMPT[:-1], 1]}, "does not begin with the prompt"),
        ({"max_tokens": MAX_TOKENS + 1}, "ends after 51 tokens.*past stop tokens"),
        ({"drafter": Knowing(gamma_max=9)}, "gamma_max=9 needs a slab of 10"),
    ],
)
def test_what_cannot_be_replayed(text, changes, said):
    drafter = changes.get("drafter", Knowing())
    with pytest.raises(ValueError, match=said):
        replay.begin(
            TARGET,
            drafter,
            (replay.make_trace(text, size=CAPACITY + 1), None),
            TARGET.new_cache(capacity=CAPACITY),
            jnp.asarray(text),
            changes.get("prompt", PROMPT),
            max_tokens=changes.get("max_tokens", MAX_TOKENS),
        )
