"""Replay without the target: the statistics of live rounds, as integers."""

import dataclasses
import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import CAPACITY, GAMMA_MAX, PROMPT, Ask
from hypothesis import given, settings as hypothesis_settings, strategies as st

from spec_jax import testing
from spec_jax.analysis import trace as trace_lib
from spec_jax.drafters import draft_model, each, ngram
from spec_jax.engine import protocols, round as round_lib, scheduler as scheduler_lib
from spec_jax.gamma import goodput, threshold


MAX_TOKENS = 40
SETTING = decoding.Setting()
SIZE = CAPACITY + 1
POLICIES = {
    None: (None, None),
    "threshold": (threshold.Threshold(weight=0.25), None),
    "goodput": (goodput.Goodput(gamma_max=GAMMA_MAX), np.linspace(1.0, 2.5, 5)),
}
"""Each with what its state is made of."""


@functools.cache
def truth(sampling: tuple = ()) -> list[int]:
    """Prompt and decoding's output, for as long as tests look."""
    return decoding.text(decoding.decoded(SETTING, Ask(sampling=sampling)))


def scheduler(drafter=None, *, live=False, policy=None, draft_params=None, num_slots=1):
    """Slots of the target, or of traces."""
    gamma_policy, about = POLICIES[policy]
    state = None if gamma_policy is None else gamma_policy.init(about)
    changes = {"gamma_policy": gamma_policy, "policy_state": state}
    if not live:
        changes["target"] = trace_lib.TraceTarget(
            max_rows=GAMMA_MAX + 1, size=SIZE, num_slots=num_slots
        )
    shared = {"num_slots": num_slots, "draft_params": draft_params}
    return SETTING.scheduler(drafter, **shared, **changes)


def request_of(ask: Ask, text=None, *, drafts=None) -> scheduler_lib.Request:
    """The sequence's request, with its trace, and drafts right by its `run`."""
    text = truth(ask.sampling) if text is None else text
    if drafts is None:
        drafts = decoding.script(truth(ask.sampling), run=ask.run)
    trace = trace_lib.make_trace(text, size=SIZE)
    return dataclasses.replace(ask.request(draft_params=drafts), target_params=trace)


def replayed(ask: Ask, text=None, **settings):
    """All rounds on the trace."""
    made = scheduler(**settings)
    return decoding.generate(made, decoding.admit(made, [request_of(ask, text)]))


def live(ask: Ask, **settings):
    """All rounds with the target."""
    made = scheduler(live=True, **settings)
    request = dataclasses.replace(request_of(ask), target_params=None)
    return decoding.generate(made, decoding.admit(made, [request]))


def assert_same_run(one, other) -> None:
    """Everything that is reported, and the state of a policy."""
    testing.assert_same_bits(one.slots, other.slots)


@given(
    run_length=st.sampled_from([0, 1, 2, 5, 10_000]),
    gamma=st.integers(0, GAMMA_MAX),
    stop_at=st.integers(0, MAX_TOKENS),
    max_tokens=st.integers(1, MAX_TOKENS),
)
@hypothesis_settings(max_examples=40, deadline=None, derandomize=True)
def test_a_replay_has_the_statistics_of_the_live_run(
    run_length, gamma, stop_at, max_tokens
):
    """Fails if a window, a stop token in it or the limit is decided otherwise."""
    output = [*truth()[len(PROMPT) :], 95]
    stop_ids = (output[stop_at],)
    ask = Ask(run=run_length, gamma=gamma, max_tokens=max_tokens, stop_ids=stop_ids)
    assert_same_run(live(ask), replayed(ask))


def test_drafts_after_a_stop_token_are_decided_as_live():
    """Fails if the trace need not go on: live counters count what the stop cuts."""
    text = truth()
    output = text[len(PROMPT) :]
    at = next(
        i for i, token in enumerate(output) if i % 5 == 1 and token not in output[:i]
    )
    ask = Ask(stop_ids=(output[at],))
    expected = live(ask)
    assert int(expected.slots.num_cut[0]) > 0
    assert_same_run(expected, replayed(ask))
    # Negative control: with anything else after the stop token, less is accepted.
    after = [(token + 1) % 96 for token in output[at + 1 :]]
    other = replayed(ask, text[: len(PROMPT) + at + 1] + after)
    assert decoding.text(other) == decoding.text(expected)
    assert int(other.slots.num_accepted[0]) < int(expected.slots.num_accepted[0])


@pytest.mark.parametrize("gamma", [1, 4])
def test_one_changed_token_is_seen(gamma):
    """Negative control: a trace that is not the target's has other statistics."""
    text, at = truth(), len(PROMPT) + 16  # A draft of either gamma.
    wrong = [*text[:at], (text[at] + 1) % 96, *text[at + 1 :]]
    seen, same = replayed(Ask(gamma=gamma), wrong).slots, live(Ask(gamma=gamma)).slots
    for name in ("num_accepted", "accepted_hist", "tokens"):
        assert not np.array_equal(getattr(seen, name), getattr(same, name))


def test_drawn_tokens_need_no_draws():
    """Fails if a sampled stream is replayed by argmax or drawn again, or if a draft
    model does not draw as it does live."""
    ask = Ask(sampling=decoding.WARM, gamma=3)
    assert truth(ask.sampling) != truth()
    # The target's own weights draft: with its noise they are always right.
    model = dataclasses.replace(SETTING.target, slab=2)
    drafter = draft_model.DraftModel(model=model, gamma_max=GAMMA_MAX)
    shared = {"drafter": drafter, "draft_params": SETTING.weights}

    def run(made, trace):
        request = dataclasses.replace(ask.request(), target_params=trace)
        return decoding.generate(made, decoding.admit(made, [request]))

    expected = run(scheduler(live=True, **shared), None)
    trace = trace_lib.make_trace(truth(ask.sampling), size=SIZE)
    found = run(scheduler(**shared), trace)
    accepted = int(expected.slots.num_accepted[0])
    assert accepted == int(expected.slots.num_proposed[0]) > 0
    assert_same_run(expected, found)


@pytest.mark.parametrize(
    "name", [pytest.param("threshold", marks=pytest.mark.slow), "goodput"]
)
def test_a_policy_of_gamma_learns_what_it_learns_live(name):
    """Fails if adaptive rounds see other counts: their state is compared as well."""
    ask = Ask(run=2)
    found = replayed(ask, policy=name)
    assert_same_run(live(ask, policy=name), found)
    # Not the constant policy: some round asked for less than `gamma`.
    slots = found.slots
    proposed, num_rounds = int(slots.num_proposed[0]), int(slots.num_rounds[0])
    assert proposed < GAMMA_MAX * num_rounds - GAMMA_MAX


def test_slots_have_traces_of_their_own():
    """Fails if a slot reads another's text."""
    asks = [Ask(run=2), Ask(prompt=(5, 9), max_tokens=9, run=1), Ask(gamma=1, run=0)]
    texts = [decoding.text(decoding.decoded(SETTING, ask)) for ask in asks]
    requests = [
        request_of(ask, text, drafts=decoding.script(text, run=ask.run))
        for ask, text in zip(asks, texts, strict=True)
    ]
    made = scheduler(num_slots=3)
    found = decoding.generate(made, decoding.admit(made, requests))
    expected = decoding.run(SETTING, asks)
    assert_same_run(expected, found)


def test_a_full_cache_ends_a_replay_as_it_ends_a_run():
    """Fails if room is counted otherwise, or a round without a page is counted."""
    ask = Ask(gamma=3)
    request = dataclasses.replace(request_of(ask), target_params=None)
    real = scheduler(live=True)
    state = decoding.admit(real, [request])
    kv = state.cache.replace(num_free=jnp.int32(0))
    expected = decoding.generate(real, state.replace(cache=kv))
    held = 2 * decoding.PAGE_SIZE  # What the prompt has reserved.
    made = scheduler()
    state = decoding.admit(made, [request_of(ask)])
    small = state.cache.replace(capacity=jnp.int32(held))
    found = decoding.generate(made, state.replace(cache=small))
    assert int(expected.slots.status[0]) == decoding.Status.OUT_OF_PAGES
    assert int(expected.slots.num_rounds[0]) > 0
    assert_same_run(expected, found)
    assert int(found.cache.num_forwards.sum()) == int(found.slots.num_rounds[0])


def test_a_replay_ends_where_the_trace_does():
    """Fails if padding is committed: a state whose limit is past the trace ends."""
    made, text = scheduler(), truth()
    state = decoding.admit(made, [request_of(Ask())])
    limit = jnp.full_like(state.slots.limit, CAPACITY + 1)
    state = state.replace(slots=state.slots.replace(limit=limit))
    found = decoding.generate(made, state)
    assert int(found.slots.status[0]) == decoding.Status.OUT_OF_PAGES
    assert decoding.text(found) == text[: int(found.slots.length[0])]


def test_forwards_are_counted_by_their_active_rows():
    """Fails if the work that the target would have done is not that of the windows."""
    made = scheduler(ngram.PromptLookup(gamma_max=GAMMA_MAX))
    request = request_of(Ask(max_tokens=30), PROMPT * 4, drafts=())
    found = decoding.generate(made, decoding.admit(made, [request]))
    by_rows = np.asarray(found.cache.num_forwards)
    assert by_rows.shape == (GAMMA_MAX + 2,) and by_rows[1] and by_rows[GAMMA_MAX + 1]
    num_rounds = int(found.slots.num_rounds[0])
    assert by_rows.sum() == num_rounds
    rows = by_rows @ np.arange(GAMMA_MAX + 2)
    assert rows == num_rounds + int(found.slots.num_proposed[0])


def test_traces_of_one_size_share_an_executable():
    """Fails if a text, its length or gamma is traced into the program."""
    before = None
    for cut, gamma in ((0, 1), (5, 4), (20, 0)):
        text = truth()[: len(truth()) - cut]
        replayed(Ask(max_tokens=20, gamma=gamma, run=1), text)
        before = before or round_lib.generate._cache_size()
    assert round_lib.generate._cache_size() == before


@pytest.mark.parametrize(
    ("text", "size", "said"),
    [
        ([], None, "0 tokens"),
        ([1, 2, 3], 2, "3 tokens is no trace of 1 .. 2"),
        ([1, -2], None, "token -2"),
        ([1, trace_lib.MAX_VOCAB_SIZE], None, "token 16777216"),
    ],
)
def test_texts_that_are_no_trace(text, size, said):
    with pytest.raises(ValueError, match=said):
        trace_lib.make_trace(text, size=size)


def test_tokens_pass_through_their_logits_unchanged():
    """Fails if a token id is rounded on its way."""
    largest = trace_lib.MAX_VOCAB_SIZE - 1
    target = trace_lib.TraceTarget(max_rows=3, size=4)
    trace = trace_lib.make_trace([0, largest, largest - 1, 7])
    cache = target.prefill(trace, target.new_cache(capacity=8), [0], slot=0)
    window = protocols.Window(
        tokens=jnp.zeros((1, 3), jnp.int32),
        start=jnp.zeros((1,), jnp.int32),
        num_active=jnp.full((1,), 3, jnp.int32),
    )
    _, verified = jax.jit(target.verify)(None, cache, window)
    own = target.choose(verified.logits, verified.num_active)
    assert own.dtype == jnp.int32 and own.tolist() == [largest, largest - 1, 7]


@pytest.mark.parametrize("name", ["max_rows", "size", "num_slots"])
def test_sizes_that_hold_nothing(name):
    sizes = {"max_rows": 5, "size": 9} | {name: 0}
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        trace_lib.TraceTarget(**sizes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [*PROMPT[:-1], 1]}, "does not begin with the prompt"),
        ({"max_tokens": MAX_TOKENS + 1}, "ends after 51 tokens.*past stop tokens"),
        ({"target_params": None}, "takes such a trace as the parameters"),
    ],
)
def test_what_cannot_be_replayed(changes, said):
    request = dataclasses.replace(request_of(Ask()), **changes)
    made = scheduler()
    with pytest.raises(ValueError, match=said):
        if request.target_params is not None:
            trace = request.target_params
            trace_lib.check_request(trace, request.prompt, request.max_tokens)
        made.begin(request)


def test_a_drafter_that_does_not_fit():
    target = trace_lib.TraceTarget(max_rows=5, size=SIZE)
    speculator = round_lib.Speculator(
        params=(None, None),
        target=target,
        drafter=each.lift(decoding.Scripted(gamma_max=9), 1),
    )
    with pytest.raises(ValueError, match="gamma_max=9 needs 10 rows"):
        scheduler_lib.Scheduler(speculator=speculator, **SETTING.sizes)
