"""What cannot be decoded is refused at the edge, with the values."""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import autoregressive, rounds, session
from spec_jax.drafters import ngram, oracle
from spec_jax.model import row_model


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "prompt is empty"),
        (list(range(97)), r"97 tokens but the cache holds 96"),
        ([3, 96], r"token 96, outside \[0, 96\)"),
        ([3, -1], r"token -1, outside \[0, 96\)"),
        (np.array([], np.int32), "prompt is empty"),
        ("def f", "prompt is text, 'def f': give token ids, as `spec_jax.model.tok"),
        ([3.0, 4.0], r"shape \[2\] and dtype float64: give one row of token ids"),
        ([[3, 4]], r"prompt has shape \[1, 2\] and dtype int64"),
        ([True, False], "dtype bool: give one row of token ids, whole numbers"),
    ],
)
def test_unusable_prompts(prompt, message):
    with pytest.raises(ValueError, match=message):
        decoding.plain(prompt)
    with pytest.raises(ValueError, match=message):
        decoding.begin_drafted(decoding.draft_drafter(), decoding.DRAFT_PARAMS, prompt)


def test_the_longest_prompt_that_fits():
    """A full prompt still yields the one token that needs no room."""
    state = decoding.plain([5] * decoding.CAPACITY)
    assert int(state.length) == decoding.CAPACITY + 1


def test_pairs_that_do_not_fit_together():
    draft = decoding.draft_drafter(decoding.make_config(vocab_size=97))
    with pytest.raises(ValueError, match="vocabularies: 97 and 96"):
        session.check_pair(decoding.TARGET, draft)
    wide = dataclasses.replace(decoding.draft_drafter(), gamma_max=5)
    with pytest.raises(ValueError, match="slab of 6 rows, the target has 5"):
        session.check_pair(decoding.TARGET, wide)
    none = dataclasses.replace(decoding.draft_drafter(), gamma_max=0)
    with pytest.raises(ValueError, match="gamma_max=0 must be at least 1"):
        session.check_pair(decoding.TARGET, none)
    session.check_pair(decoding.TARGET, decoding.draft_drafter())


def test_drafters_without_a_model_fit_any_vocabulary():
    """Fails if a model is looked for where there is none, or a size is not compared."""
    session.check_pair(decoding.TARGET, ngram.PromptLookup(gamma_max=4))
    known = oracle.Oracle(gamma_max=4, vocab_size=97)
    with pytest.raises(ValueError, match="vocabularies: 97 and 96"):
        session.check_pair(decoding.TARGET, known)


@pytest.mark.parametrize("gamma", [-1, 5])
def test_gamma_outside_its_range(gamma):
    with pytest.raises(ValueError, match=rf"gamma={gamma} is outside \[0, 4\]"):
        session.check_gamma(gamma, 4)


def test_a_refused_operation_is_not_overlooked():
    """Fails if a flag that the loop raised stays unread."""
    state = decoding.plain(max_tokens=2)
    session.check_state(state)
    kv = state.cache.replace(refused=jnp.array([True]))
    with pytest.raises(RuntimeError, match="refused"):
        session.check_state(state.replace(cache=kv))


@pytest.mark.parametrize("wrap", [lambda kv: kv, lambda kv: {"of": (kv, 1)}])
def test_a_refusal_anywhere_in_a_memory_is_not_overlooked(wrap):
    """Fails if a cache is found only where it is all of the memory."""
    kv = decoding.TARGET.new_cache(capacity=8, page_size=8)
    state = rounds.init_state(
        jnp.zeros((9,), jnp.int32),
        length=jnp.int32(1),
        limit=jnp.int32(2),
        cache=kv,
        memory=wrap(kv),
        gamma_max=4,
    )
    session.check_state(state)
    refused = kv.replace(refused=jnp.array([True]))
    with pytest.raises(RuntimeError, match="refused"):
        session.check_state(state.replace(memory=wrap(refused)))


@pytest.mark.parametrize("kind", row_model.CACHE_KINDS)
def test_flags_of_either_kind_of_cache_are_raised(kind):
    """Fails if one kind's failures pass, or the message lacks the numbers."""
    target = dataclasses.replace(decoding.TARGET, cache=kind)
    kv = target.new_cache(capacity=90, page_size=8)
    state = session.begin_plain(target, decoding.TARGET_PARAMS, kv, [3], max_tokens=2)
    session.check_state(state)
    free = {"paged": 11, "static": 0}[kind]
    message = (
        f"out of pages after 1 tokens: {free} of 12 pages of 8 tokens are free, and a "
        "sequence holds at most 96 tokens"
    )
    with pytest.raises(MemoryError, match=message):
        session.check_state(state.replace(starved=jnp.array(True)))
    refused = state.cache.replace(refused=jnp.array([True]))
    with pytest.raises(RuntimeError, match="refused"):
        session.check_state(state.replace(cache=refused))


PROMPTS = {
    "tuple": tuple,
    "NumPy": np.asarray,
    "NumPy, 8 bits": lambda prompt: np.asarray(prompt, np.uint8),
    "JAX": jnp.asarray,
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_of_any_kind(kind):
    """Fails if a row of whole numbers is refused, or its type reaches the text."""
    expected = decoding.plain(max_tokens=2, target=decoding.quickest())
    prompt = PROMPTS[kind](decoding.PROMPT)
    state = decoding.plain(prompt, max_tokens=2, target=decoding.quickest())
    assert session.committed(state) == session.committed(expected)


@pytest.mark.parametrize("max_tokens", [0, -3, 2.5, True])
def test_nothing_to_generate(max_tokens):
    """Fails if a generation that ends before it begins looks like one that ended."""
    message = f"max_tokens={max_tokens} must be a whole number of at least 1"
    with pytest.raises(ValueError, match=message):
        decoding.plain(max_tokens=max_tokens)
    with pytest.raises(ValueError, match=message):
        decoding.begin_drafted(
            decoding.draft_drafter(), decoding.DRAFT_PARAMS, max_tokens=max_tokens
        )


@pytest.mark.parametrize("stop_ids", [(8, 9), [8, 9], np.array([8, 9]), 9, ()])
def test_stop_tokens_of_any_kind(stop_ids):
    """In `stop_array`, and handed to a loop as they are."""
    target = decoding.quickest()
    whole = decoding.text(decoding.plain(max_tokens=6, target=target))
    ids = {8: whole[len(decoding.PROMPT) + 2], 9: whole[len(decoding.PROMPT) + 3]}
    if isinstance(stop_ids, np.ndarray):
        chosen = np.array([ids[x] for x in stop_ids.tolist()])
    else:
        chosen = jax.tree.map(ids.get, stop_ids)
    made = session.stop_array(chosen)
    assert made.dtype == jnp.int32 and made.ndim == 1 and made.size
    expected = decoding.plain(max_tokens=6, stop_ids=made, target=target)
    assert bool(expected.stopped) == (made.tolist() != [-1])
    plain = decoding.plain(max_tokens=6, stop_ids=chosen, target=target)
    state = decoding.begin_scripted(
        jnp.asarray([*whole, *[0] * 80]), max_tokens=6, target=target
    )
    state = decoding.generate(
        decoding.Scripted(), state, stop_ids=chosen, target=target
    )
    assert decoding.text(plain) == decoding.text(state) == decoding.text(expected)


def test_stop_tokens_that_are_none():
    with pytest.raises(ValueError, match="stop_ids has shape .* give one row of token"):
        session.stop_array((2.5,))


ENDS = {
    "limit": (session.End.LIMIT, {"max_tokens": 5}),
    "limit that fills the cache": (session.End.LIMIT, {"max_tokens": 14}),
    "capacity": (session.End.CAPACITY, {"max_tokens": 15}),
    "stop": (session.End.STOP, {"max_tokens": 15, "stops": True}),
    "stop with the last token": (session.End.STOP, {"max_tokens": 1, "stops": True}),
}


@pytest.mark.parametrize("name", ENDS)
def test_why_a_generation_ended(name):
    """Fails if a full cache looks like all that was asked for."""
    expected, how = ENDS[name]
    target, how = decoding.quickest(), dict(how)
    sizes = {"capacity": 24, "target": target}
    text = decoding.plain(max_tokens=15, **sizes)
    first = int(text.tokens[len(decoding.PROMPT)])
    stop_ids = jnp.asarray([first if how.pop("stops", False) else -1], jnp.int32)
    plain = decoding.plain(**how, **sizes, stop_ids=stop_ids)
    drafter = ngram.PromptLookup(gamma_max=4)
    state = session.begin(
        target,
        drafter,
        (decoding.TARGET_PARAMS, None),
        target.new_cache(capacity=24, page_size=decoding.PAGE_SIZE),
        (),
        decoding.PROMPT,
        **how,
    )
    assert session.end_of(state) is None
    state = decoding.generate(drafter, state, stop_ids=stop_ids, target=target)
    for one in (plain, state):
        assert session.end_of(one) is expected
        assert session.end_of(one.replace(starved=jnp.bool_(True))) is session.End.PAGES


def test_a_gamma_above_the_largest_is_the_largest():
    """And a negative one is none: the text is that of plain decoding."""
    target = decoding.quickest()
    plain = decoding.plain(target=target)
    for gamma, num_rounds in ((9, 8), (-1, 40)):
        state = decoding.begin_scripted(plain.tokens, target=target)
        state = decoding.generate(
            decoding.Scripted(), state, gamma=gamma, target=target
        )
        assert session.committed(state) == session.committed(plain)
        assert int(state.num_rounds) == num_rounds


def test_a_state_that_was_used_up_is_named():
    """Fails if the error is a runtime's, about a buffer."""
    target = decoding.quickest()
    plain = decoding.plain(target=target)
    kept = decoding.begin_scripted(plain.tokens, target=target)
    decoding.generate(decoding.Scripted(), kept, target=target)
    message = "the state was used up by an earlier call.* give generate the state that"
    with pytest.raises(ValueError, match=message):
        decoding.generate(decoding.Scripted(), kept, target=target)
    kv = target.new_cache(capacity=24, page_size=8)
    state = session.begin_plain(target, decoding.TARGET_PARAMS, kv, [3], max_tokens=2)
    arguments = {"stop_ids": decoding.NO_STOP, "max_steps": decoding.FOREVER}
    copied = jax.tree.map(jnp.copy, state)
    generate = autoregressive.generate
    generate(target, decoding.TARGET_PARAMS, state, **arguments)
    with pytest.raises(ValueError, match=message):
        generate(target, decoding.TARGET_PARAMS, state=state, **arguments)
    generate(target, decoding.TARGET_PARAMS, copied, **arguments)


def test_a_text_that_no_loop_writes_is_told():
    """Fails if `check_state` or `committed` looks at flags alone."""
    state = decoding.plain(max_tokens=3, target=decoding.quickest())
    assert session.committed(state)[: len(decoding.PROMPT)] == decoding.PROMPT
    for token in (96, -1):
        wrong = state.replace(tokens=state.tokens.at[12].set(token))
        with pytest.raises(RuntimeError, match=f"token {token} at position 12 is comm"):
            session.committed(wrong)
    longer = state.replace(length=state.length + 1)
    with pytest.raises(RuntimeError, match="15 tokens are committed, past .* of 14"):
        session.check_state(longer)
