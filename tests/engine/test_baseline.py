"""Autoregressive decoding and its replay, and the inputs that are refused."""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import PROMPT, SMALL, Ask
from slow_cases import slow

from spec_jax.drafters import each, ngram, tree_shapes
from spec_jax.engine import baseline, checks
from spec_jax.model import row_model


START = len(PROMPT)


def begin(prompt=PROMPT, *, target=SMALL.target, **settings):
    return decoding.begin_plain(prompt, target=target, params=SMALL.weights, **settings)


def replay(tokens, ask: Ask) -> np.ndarray:
    """Returns the tokens that decoding would choose after each prefix of a text."""
    where = {"start": jnp.int32(START), "stop": jnp.int32(START + 40)}
    where |= {"tokens": jnp.asarray(tokens), "sampling": ask.settings}
    kv = begin(max_tokens=40).cache
    _, chosen = baseline.replay(SMALL.target, SMALL.weights, kv, **where)
    return np.asarray(chosen)[START : START + 40]


@pytest.mark.parametrize(
    "sampling",
    [
        slow((), id="greedy"),
        pytest.param(decoding.WARM, id="drawn"),
    ],
)
def test_replay_finds_what_decoding_would_not_have_chosen(sampling):
    """Fails if replay follows its own choices instead of the given text."""
    ask = Ask(sampling=sampling)
    text = np.asarray(decoding.decoded(SMALL, ask).tokens).copy()
    written = text[START : START + 40].copy()
    np.testing.assert_array_equal(replay(text, ask), written)
    text[START + 5] = (text[START + 5] + 1) % 96
    chosen = replay(text, ask)
    assert chosen[5] != text[START + 5]
    np.testing.assert_array_equal(chosen[:6], written[:6])


BAD_PROMPTS = [
    (list(range(97)), r"97 tokens but the cache holds 96"),
    ([3, 96], r"token 96, outside \[0, 96\)"),
    (np.array([], np.int32), "prompt is empty"),
    ("def f", "prompt is text, 'def f': give token ids, as a tokenizer's `encode`"),
    ([3.0, 4.0], r"shape \[2\] and dtype float64: give one row of token ids"),
    ([[3, 4]], r"prompt has shape \[1, 2\] and dtype int64"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_unusable_prompts(prompt, message):
    """Checks that decoding and schedulers refuse such prompts, and name the values."""
    with pytest.raises(ValueError, match=message):
        begin(prompt)
    request = dataclasses.replace(Ask().request(), prompt=prompt)
    with pytest.raises(ValueError, match=message):
        SMALL.scheduler().check(request)


@pytest.mark.parametrize("max_tokens", [0, 2.5])
def test_nothing_to_generate(max_tokens):
    """Fails if a number of tokens that is below 1, or not whole, is accepted."""
    message = f"max_tokens={max_tokens} must be a whole number of at least 1"
    with pytest.raises(ValueError, match=message):
        begin(max_tokens=max_tokens)
    with pytest.raises(ValueError, match=message):
        SMALL.scheduler().check(Ask(max_tokens=max_tokens).request())


def test_the_longest_prompt_that_fits():
    """Checks that a prompt that fills the cache yields a token, which needs no room."""
    full = Ask(prompt=(5,) * decoding.CAPACITY)
    assert int(decoding.decoded(SMALL, full).length) == decoding.CAPACITY + 1
    decoding.checked(SMALL, [full])


@pytest.mark.parametrize("kind", row_model.CACHE_KINDS)
def test_flags_of_either_kind_of_cache_are_raised(kind):
    """Fails if a failure of a kind of cache passes, or its message lacks numbers."""
    target = dataclasses.replace(SMALL.target, cache=kind)
    state = begin([3], target=target, max_tokens=2, capacity=90)
    baseline.check(state, vocab_size=96)
    free = {"paged": 11, "static": 0}[kind]
    message = (
        rf"out of pages in slots \[0\] after \[1\] tokens: {free} of 12 pages of 8 "
        "tokens are free, and a sequence holds at most 96 tokens"
    )
    failed = jnp.int32(decoding.Status.OUT_OF_PAGES)
    with pytest.raises(MemoryError, match=message):
        baseline.check(state.replace(status=failed), vocab_size=96)
    refused = state.cache.replace(refused=jnp.array([True]))
    with pytest.raises(RuntimeError, match="refused"):
        baseline.check(state.replace(cache=refused), vocab_size=96)


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


def test_a_text_that_no_loop_writes_is_told():
    """Fails if `check_slot` does not look at the tokens and the length of a text."""
    ask = Ask(max_tokens=3)
    slot = decoding.slot_of(decoding.run(SMALL, [ask]))
    one = jax.device_get(decoding.decoded(SMALL, ask).replace(cache=None))
    for state in (slot, one):
        checks.check_slot(state, vocab_size=96)
        for token in (96, -1):
            text = np.array(state.tokens)
            text[12] = token
            message = f"token {token} at position 12 is committed, outside"
            with pytest.raises(RuntimeError, match=message):
                checks.check_slot(state.replace(tokens=text), vocab_size=96)
        longer = state.replace(length=state.length + 1)
        with pytest.raises(RuntimeError, match="15 tokens are committed, past .* 14"):
            checks.check_slot(longer, vocab_size=96)


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
        (0, 8, "capacity=0 must be at least 1"),
        (96, 0, "page_size=0 must be a whole number of at least 1"),
        (96, 1025, "page_size=1025 is above 1024"),
    ],
)
def test_impossible_sizes_are_refused(kind, capacity, page_size, message):
    target = dataclasses.replace(SMALL.target, cache=kind)
    with pytest.raises(ValueError, match=message):
        target.new_cache(capacity=capacity, page_size=page_size)
    with pytest.raises(ValueError, match="cache='dynamic' is not one of paged, static"):
        dataclasses.replace(SMALL.target, cache="dynamic")
