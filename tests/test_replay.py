"""Replay of a given text goes on from the text, not from its own choices."""

import decoding
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import PROMPT

from spec_jax import autoregressive, session


MAX_TOKENS = 12
PLANTED = len(PROMPT) + 4
VOCAB = decoding.TARGET.config.vocab_size


@pytest.fixture(scope="module")
def plain():
    return decoding.plain(max_tokens=MAX_TOKENS)


def other_text(plain) -> np.ndarray:
    """Plain decoding's text with another token planted in it, and what follows cut.

    What follows is another text too: no choice of the model's own.
    """
    text = np.asarray(plain.tokens).copy()
    text[PLANTED:] = (text[PLANTED:] + 1) % VOCAB
    return text


def test_replay_follows_the_given_text(plain):
    """Fails if replay follows its own choices after the first that differs."""
    text, start = other_text(plain), len(PROMPT)
    stop = int(plain.length)
    target = decoding.TARGET
    kv = target.new_cache(capacity=decoding.CAPACITY, page_size=decoding.PAGE_SIZE)
    state = session.begin_plain(
        target, decoding.TARGET_PARAMS, kv, PROMPT, max_tokens=MAX_TOKENS
    )
    _, chosen = autoregressive.replay(
        target,
        decoding.TARGET_PARAMS,
        state.cache,
        tokens=jnp.asarray(text),
        start=jnp.int32(start),
        stop=jnp.int32(stop),
    )
    # What plain decoding chooses after each prefix of that text, asked for itself.
    expected = [
        decoding.text(decoding.plain(text[:end].tolist(), max_tokens=1))[-1]
        for end in range(start, stop)
    ]
    assert np.asarray(chosen)[start:stop].tolist() == expected
    # Negative control: after the planted token the choices are other ones.
    own = decoding.text(plain)[start:stop]
    kept = PLANTED - start
    assert expected[: kept + 1] == own[: kept + 1]
    assert expected[kept + 1 :] != own[kept + 1 :]
