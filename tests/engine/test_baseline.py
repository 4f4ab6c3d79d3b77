"""Autoregressive decoding and its replay, and the inputs that are refused."""

import dataclasses

import decoding
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import PROMPT, SMALL, Ask

from spec_jax.drafters import each, ngram, tree_shapes
from spec_jax.engine import baseline, checks, rows, scheduler as scheduler_lib
from spec_jax.model import row_model


START = len(PROMPT)


def begin(prompt=PROMPT, *, target=SMALL.target, capacity=96, **settings):
    """Returns the state of decoding before its first step."""
    kv = target.new_cache(capacity=capacity, page_size=decoding.PAGE_SIZE)
    settings = {"max_tokens": 40, "stop_ids": (), "sampling": None} | settings
    return baseline.begin(target, SMALL.weights, kv, prompt, **settings)


def test_replay_finds_what_decoding_would_not_have_chosen():
    """Fails if replay follows its own choices instead of the given text."""
    ask = Ask(sampling=decoding.WARM)
    text = np.array(decoding.decoded(SMALL, ask).tokens)
    written = text[START : START + 40].copy()

    def replay():
        where = {"start": jnp.int32(START), "stop": jnp.int32(START + 40)}
        where |= {"tokens": jnp.asarray(text), "sampling": ask.settings}
        _, chosen = baseline.replay(SMALL.target, SMALL.weights, begin().cache, **where)
        return np.asarray(chosen)[START : START + 40]

    np.testing.assert_array_equal(replay(), written)
    text[START + 5] = (text[START + 5] + 1) % 96
    np.testing.assert_array_equal(replay()[:6], written[:6])


BAD = {
    "a long prompt": ({"prompt": list(range(97))}, r"97 tokens but the cache holds 96"),
    "a token": ({"prompt": [3, 96]}, r"token 96, outside \[0, 96\)"),
    "no prompt": ({"prompt": np.array([], np.int32)}, "prompt is empty"),
    "a text": ({"prompt": "def f"}, "prompt is text, 'def f': give token ids, as a to"),
    "numbers": ({"prompt": [3.0]}, r"shape \[1\] and dtype float64: give one row of"),
    "rows": ({"prompt": [[3, 4]]}, r"prompt has shape \[1, 2\] and dtype int64"),
    "no answer": ({"max_tokens": 0}, "max_tokens=0 must be a whole number of at least"),
    "half a token": ({"max_tokens": 2.5}, "max_tokens=2.5 must be a whole number of"),
    "half a stop": ({"stop_ids": (2.5,)}, "stop_ids has shape .* give one row of toke"),
    "a gamma": ({"gamma": 5}, "gamma=5 is above 4: give less"),
    "a gamma of no number": (
        {"gamma": 2.0},
        "gamma=2.0 must be a whole number of at",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_requests_are_refused_before_anything_runs(bad, monkeypatch):
    """Checks decoding, and schedulers, where the second request of a queue is bad."""
    changes, message = BAD[bad]
    scheduler, good = SMALL.scheduler(), Ask().request()
    request = dataclasses.replace(good, **changes)
    monkeypatch.setattr(scheduler_lib.Scheduler, "empty", None)  # Nothing may run.
    for call in (
        lambda: scheduler.begin(request),
        lambda: next(scheduler.run([good, request])),
        *([lambda: begin(**changes)] if "gamma" not in changes else []),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_longest_prompt_that_fits():
    """Checks that a prompt that fills the cache yields a token, which needs no room."""
    full = Ask(prompt=(5,) * decoding.CAPACITY)
    assert int(decoding.decoded(SMALL, full).length) == decoding.CAPACITY + 1
    decoding.checked(SMALL, [full])


@pytest.mark.parametrize("kind", row_model.CACHE_KINDS)
def test_what_a_loop_can_only_flag_is_raised(kind):
    """Fails if a failure, or a text that no loop writes, passes, or lacks numbers."""
    target = dataclasses.replace(SMALL.target, cache=kind)
    state = begin([3], target=target, max_tokens=2, capacity=90)
    baseline.check(state, vocab_size=96)
    free = {"paged": 11, "static": 0}[kind]
    pages = (
        rf"out of pages in slots \[0\] after \[1\] tokens: {free} of 12 pages of 8 "
        "tokens are free, and a sequence holds at most 96 tokens"
    )
    failed = jnp.int32(decoding.Status.OUT_OF_PAGES)
    refused = state.cache.replace(refused=jnp.array([True]))
    spoilt = "2 tokens were chosen from logits that hold NaN or inf"
    outside = "token {} at position 0 is committed, outside"
    for changes, error, message in (
        ({"status": failed}, MemoryError, pages),
        ({"cache": refused}, RuntimeError, "refused"),
        ({"num_nonfinite": jnp.int32(2)}, FloatingPointError, spoilt),
        ({"length": jnp.int32(4)}, RuntimeError, "4 tokens are committed, past .* 3"),
        ({"tokens": state.tokens + 93}, RuntimeError, outside.format(96)),
        ({"tokens": state.tokens - 4}, RuntimeError, outside.format(-1)),
    ):
        with pytest.raises(error, match=message):
            baseline.check(state.replace(**changes), vocab_size=96)


def test_a_full_static_cache_keeps_what_is_committed():
    """Fails if the flag of a full slot is lost, or the step that failed counts."""
    target = dataclasses.replace(SMALL.target, cache="static")
    state = begin(target=target, max_tokens=60, capacity=24)
    # A limit and a text that are longer than the cache, which `begin` never makes.
    longer = jnp.pad(state.tokens, (0, 15))
    state = state.replace(limit=jnp.int32(40), tokens=longer)
    state = baseline.generate(target, SMALL.weights, state, max_steps=decoding.FOREVER)
    assert decoding.text(state) == decoding.text(decoding.decoded(SMALL, Ask()))[:25]
    assert int(state.num_steps) == 25 - START
    with pytest.raises(MemoryError, match=r"\[25\] tokens: .* at most 24 tokens"):
        baseline.check(state, vocab_size=96)


def test_pairs_that_do_not_fit_together():
    draft = decoding.draft_drafter()
    slots = SMALL.scheduler().target
    for gamma_max, message in (
        (5, "gamma_max=5 needs 6 rows a window, the target has 5"),
        (-1, "gamma_max=-1 must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            checks.check_pair(slots, dataclasses.replace(draft, gamma_max=gamma_max))
    with pytest.raises(ValueError, match="gamma_max=0 must be a whole number of"):
        each.lift(dataclasses.replace(draft, gamma_max=0), 1)
    for drafter in (draft, ngram.PromptLookup(gamma_max=6)):
        checks.check_pair(slots, drafter.for_tree(tree_shapes.parse("96x2:6")))
        wide = drafter.for_tree(tree_shapes.parse("97x2:6"))
        with pytest.raises(ValueError, match="97 children .* has 96 tokens: take"):
            checks.check_pair(slots, wide)
    checks.check_pair(slots, draft)
    # A drafter that repeats tokens of its text fits any vocabulary.
    checks.check_pair(slots, decoding.Scripted())


@pytest.mark.parametrize("kind", row_model.CACHE_KINDS)
@pytest.mark.parametrize(
    ("capacity", "page_size", "message"),
    [
        (0, 8, "capacity=0 must be a whole number of at least 1"),
        (96, 0, "page_size=0 must be a whole number of at least 1"),
        (96, 1025, "page_size=1025 is above 512"),
    ],
)
def test_impossible_sizes_are_refused(kind, capacity, page_size, message):
    target = dataclasses.replace(SMALL.target, cache=kind)
    with pytest.raises(ValueError, match=message):
        rows.of(target, 1).new_cache(capacity=capacity, page_size=page_size)
    with pytest.raises(ValueError, match="cache='dynamic' is not one of paged, static"):
        dataclasses.replace(SMALL.target, cache="dynamic")
