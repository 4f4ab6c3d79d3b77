"""What cannot be decoded is refused at the edge, with the values."""

import dataclasses

import decoding
import jax.numpy as jnp
import pytest

from spec_jax import rounds, session
from spec_jax.drafters import ngram, oracle
from spec_jax.model import row_model


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "prompt is empty"),
        (list(range(97)), r"97 tokens but the cache holds 96"),
        ([3, 96], r"token 96, outside \[0, 96\)"),
        ([3, -1], r"token -1, outside \[0, 96\)"),
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
