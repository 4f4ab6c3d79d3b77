"""What a round writes down beside the tokens: origins, counters, flags; and padding."""

import dataclasses

import decoding
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import GAMMA_MAX, PROMPT, Scripted

from spec_jax import rounds, session
from spec_jax.rules import acceptance


WRONG_EVERY = 3


@pytest.fixture(scope="module")
def plain():
    return decoding.plain()


def origins_in_python(text, start, *, gamma):
    """The origin of each token, by a walk over the rounds of `Scripted`."""
    origins = []
    while start + len(origins) < len(text):
        n = start + len(origins)
        drafted = min(gamma, len(text) - n - 1)
        right = 0
        while right < drafted and (n + right) % WRONG_EVERY != WRONG_EVERY - 1:
            right += 1
        own = rounds.Origin.BONUS if right == drafted else rounds.Origin.CORRECTION
        origins += [rounds.Origin.ACCEPTED] * right + [own]
    return origins


@pytest.mark.parametrize("gamma", [1, 2, GAMMA_MAX])
def test_origins_say_where_tokens_came_from(plain, gamma):
    """Fails if a correction is called a bonus, or the target's own token a draft."""
    state = decoding.begin_scripted(plain.tokens, run=WRONG_EVERY - 1)
    state = decoding.generate(Scripted(), state, gamma=gamma)
    text, origins = decoding.text(state), np.asarray(state.origins)
    expected = origins_in_python(text, len(PROMPT), gamma=gamma)
    assert origins[len(PROMPT) : len(text)].tolist() == expected
    assert not origins[: len(PROMPT)].any()
    counts = [expected.count(origin) for origin in rounds.Origin]
    # The walk is not vacuous: each of the three is there but a bonus at large gamma.
    assert counts[rounds.Origin.ACCEPTED] == int(state.num_accepted)
    assert counts[rounds.Origin.CORRECTION] and (
        counts[rounds.Origin.BONUS] or gamma > 2
    )


def test_padding_is_no_stop_token(plain):
    """Fails if what fills a verdict behind its tokens ends the sequence.

    The padding is a token of the vocabulary, and may be the one that stops.
    """
    text = decoding.text(plain)
    assert acceptance.PAD not in text[len(PROMPT) :]
    state = decoding.begin_scripted(plain.tokens, run=1)
    stop_ids = jnp.asarray([acceptance.PAD], jnp.int32)
    state = decoding.generate(Scripted(), state, stop_ids=stop_ids)
    assert int(state.num_accepted) < int(state.num_proposed)  # There was padding.
    assert decoding.text(state) == text


def test_a_starved_round_is_not_counted(plain):
    """Fails if a round that commits nothing shows in the statistics."""
    state = decoding.begin_scripted(plain.tokens)
    kv = state.cache.replace(num_free=jnp.int32(0))
    state = decoding.generate(Scripted(), state.replace(cache=kv), gamma=GAMMA_MAX)
    assert bool(state.starved)
    committed = int(state.length) - len(PROMPT)
    assert committed == int(state.num_accepted + state.num_rounds)
    assert int(state.num_cut) == 0
    assert int(state.accepted_hist.sum()) == int(state.num_rounds)


def test_a_refusal_of_the_drafts_cache_is_not_overlooked():
    """Fails if only the target's cache is asked whether it refused something."""
    drafter = decoding.draft_drafter()
    state = decoding.begin_drafted(drafter, decoding.DRAFT_PARAMS)
    session.check_state(state)
    spoilt = state.memory.replace(refused=jnp.array([True]))
    with pytest.raises(RuntimeError, match="refused"):
        session.check_state(dataclasses.replace(state, memory=spoilt))
