"""Coupled speculation: the seeded stream of autoregressive decoding, bit for bit.

On a tiny Markov model, with rounds of a few lines, so that the rule and the noise are
tested without caches and models.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.rules import acceptance, sampling


VOCAB = 13
GAMMA_MAX = 4
LENGTH = 48
START = 2  # tokens of the prompt: the model reads two
LOGITS = 2 * jax.random.normal(jax.random.key(5), (VOCAB, VOCAB, VOCAB))
OTHER = LOGITS + 0.7 * jax.random.normal(jax.random.key(6), LOGITS.shape)
TABLES = jnp.stack([LOGITS, OTHER])


def same_noise(logits, settings, position, offset):
    return sampling.sample(logits, settings, position + offset)


def other_noise(logits, settings, position, offset):
    return sampling.sample(
        logits, settings, position, stream=sampling.Stream.DRAFT, offset=offset
    )


def greedy(logits, settings, position, offset):
    del settings, position, offset
    return jnp.argmax(logits).astype(jnp.int32)


def wrong(logits, settings, position, offset):
    return (same_noise(logits, settings, position, offset) + 1) % VOCAB


DRAWS = (same_noise, other_noise, greedy, wrong)
DRAFTERS = {  # the table that a drafter reads, and how it draws
    "right": (0, same_noise),
    "always wrong": (0, wrong),
    "same noise": (1, same_noise),
    "other noise": (1, other_noise),
    "greedy": (1, greedy),
}


def propose(drafter, settings, tokens, position):
    """`GAMMA_MAX` drafts. The drafter is data, so that all share one executable."""
    table, draw = drafter

    def step(last_two, offset):
        logits = TABLES[table, last_two[0], last_two[1]]
        token = jax.lax.switch(draw, DRAWS, logits, settings, position, offset)
        return jnp.stack([last_two[1], token]), token

    last_two = jax.lax.dynamic_slice(tokens, (position - 2,), (2,))
    return jax.lax.scan(step, last_two, jnp.arange(GAMMA_MAX))[1]


def by_position(logits, settings, position, num_live):
    return sampling.sample_rows(
        logits, settings, first_position=position, num_live=num_live
    )


def by_round(logits, settings, position, num_live):
    """Planted: every row of a round has the round's noise."""
    noise = sampling.noise(settings.seed, position, vocab_size=VOCAB)
    weights = jax.vmap(lambda row: sampling.log_weights(row, settings))(logits)
    del num_live
    return jnp.argmax(weights + noise[None], axis=-1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames="choose")
def generate(settings, gamma, drafter, *, choose):
    """A stream of `LENGTH` tokens, and the accepted and proposed drafts."""

    def one_round(state):
        tokens, n, accepted, proposed = state
        drafts = propose(drafter, settings, tokens, n)
        last_two = jax.lax.dynamic_slice(tokens, (n - 2,), (2,))
        window = jnp.concatenate([last_two, drafts])
        own = choose(LOGITS[window[:-1], window[1:]], settings, n, gamma + 1)
        verdict = acceptance.accept_exact(drafts, own, gamma)
        offsets = jnp.arange(GAMMA_MAX + 1)
        at = jnp.where(offsets <= verdict.num_accepted, n + offsets, LENGTH)
        return (
            tokens.at[at].set(verdict.tokens, mode="drop"),
            n + verdict.num_accepted + 1,
            accepted + verdict.num_accepted,
            proposed + gamma,
        )

    zero = jnp.int32(0)
    start = (jnp.zeros((LENGTH,), jnp.int32), jnp.int32(START), zero, zero)
    tokens, _, accepted, proposed = jax.lax.while_loop(
        lambda state: state[1] < LENGTH, one_round, start
    )
    return tokens, accepted, proposed


def speculate(settings, gamma, drafter, *, choose=by_position):
    table, draw = DRAFTERS[drafter]
    drafter = jnp.int32(table), jnp.int32(DRAWS.index(draw))
    return generate(settings, jnp.int32(gamma), drafter, choose=choose)


@jax.jit
def plain(settings):
    """One row at a time, in a slab of one: another program than `generate`."""

    def step(last_two, position):
        logits = LOGITS[last_two[0], last_two[1]]
        token = sampling.sample_rows(
            logits[None], settings, first_position=position, num_live=jnp.int32(1)
        )[0]
        return jnp.stack([last_two[1], token]), token

    start = jnp.zeros((START,), jnp.int32)
    _, tokens = jax.lax.scan(step, start, jnp.arange(START, LENGTH))
    return jnp.concatenate([start, tokens])


SETTINGS = {
    "plain": {},
    "hot": {"temperature": 1.6, "seed": 2**32 - 1},
    "top-k": {"top_k": 4, "seed": 1},
    "top-p": {"top_p": 0.8, "temperature": 0.8, "seed": 2},
    "min-p": {"min_p": 0.1, "seed": 3},
    "all": {"temperature": 0.9, "top_k": 6, "top_p": 0.95, "min_p": 0.02, "seed": 4},
    "greedy": {"temperature": 0.0, "seed": 5},
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculation_writes_the_plain_stream(drafter):
    """Bit for bit, for all settings and every gamma, from one executable."""
    for name, values in SETTINGS.items():
        settings = sampling.make_settings(**values)
        expected = plain(settings)
        for gamma in range(GAMMA_MAX + 1):
            found, *_ = speculate(settings, gamma, drafter)
            testing.assert_same_bits(found, expected, what=f"{name}, {gamma=}")


def test_noise_keyed_by_round_is_caught():
    """Negative control: a right drafter, one seed, and the same comparison."""
    settings = sampling.make_settings()
    found, *_ = speculate(settings, 3, "right", choose=by_round)
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(found, plain(settings))


def test_streams_differ_by_seed():
    """Fails if the seed is not read: all streams would be equal, and pass."""
    streams = {
        tuple(plain(sampling.make_settings(seed=seed)).tolist()) for seed in range(8)
    }
    assert len(streams) == 8


def test_the_targets_noise_raises_acceptance():
    """A right drafter is always kept; one somewhat wrong more often with the noise."""
    rates = {}
    for drafter in ("right", "same noise", "other noise", "always wrong"):
        counts = np.zeros(2)
        for seed in range(16):
            settings = sampling.make_settings(seed=seed)
            counts += speculate(settings, 2, drafter)[1:]
        rates[drafter] = counts[0] / counts[1]
    assert rates["right"] == 1 and rates["always wrong"] == 0
    assert rates["same noise"] > rates["other noise"] + 0.2, rates
