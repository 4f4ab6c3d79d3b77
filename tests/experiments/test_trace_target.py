"""Replay without the target: the statistics of live rounds, as integers."""

import dataclasses
import functools

import decoding
import numpy as np
import pytest
from decoding import CAPACITY, GAMMA_MAX, PROMPT, Ask
from hypothesis import given, settings as hypothesis_settings, strategies as st

from experiments.lib import trace as trace_lib
from spec_jax import testing
from spec_jax.drafters import draft_model, ngram
from spec_jax.engine import requests as requests_lib


MAX_TOKENS = 40
SETTING = decoding.Setting()
SIZE = CAPACITY + 1


@functools.cache
def truth(sampling: tuple = ()) -> list[int]:
    """Prompt and decoding's output, for as long as tests look."""
    return decoding.text(decoding.decoded(SETTING, Ask(sampling=sampling)))


def scheduler(drafter=None, *, live=False, draft_params=None, num_slots=1):
    """Slots of the target, or of traces."""
    changes = {}
    if not live:
        changes["target"] = trace_lib.TraceTarget(
            max_rows=GAMMA_MAX + 1, size=SIZE, num_slots=num_slots
        )
    shared = {"num_slots": num_slots, "draft_params": draft_params}
    return SETTING.scheduler(drafter, **shared, **changes)


def request_of(ask: Ask, text=None, *, drafts=None) -> requests_lib.Request:
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
    """Everything that is reported."""
    testing.assert_same_bits(one.slots, other.slots)


@given(
    run_length=st.sampled_from([0, 1, 2, 5, 10_000]),
    gamma=st.integers(0, GAMMA_MAX),
    stop_at=st.integers(0, MAX_TOKENS),
    max_tokens=st.integers(1, MAX_TOKENS),
)
@hypothesis_settings(max_examples=15, deadline=None, derandomize=True)
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [*PROMPT[:-1], 1]}, "does not begin with the prompt"),
        ({"target_params": None}, "takes such a trace as the parameters"),
    ],
)
def test_what_cannot_be_replayed(changes, said):
    request = dataclasses.replace(request_of(Ask()), **changes)
    made = scheduler()
    with pytest.raises(ValueError, match=said):
        made.begin(request)
