"""The law of what several rounds of rejection or block verification write.

The check is Monte Carlo, with the noise of `sampling`: enumeration cannot find noise
that two purposes, or two rounds, share. Planted sharing goes through the same check.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import pytree
from spec_jax.rules import acceptance, sampling


NUM_STREAMS = 2**17
"""Streams of the check. A cell of probability 1/27 has a standard error of 0.00052."""

SIGMAS = 5.0
"""The bound on each of 27 cells: a right rule fails for one set of seeds in 60,000."""

CELLS = 3  # tokens of a stream that are compared
SMALL = 3  # vocabulary
DRAFTED = 2
TARGET_ROWS = jnp.asarray([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.5, 0.1, 0.4]])
DRAFT_ROWS = jnp.asarray([[0.3, 0.2, 0.5], [0.5, 0.4, 0.1], [0.1, 0.6, 0.3]])


class Noise(pytree.Node):
    """All noise of one stream: entry `n` is for a round that begins at position `n`."""

    draft: jax.Array  # [positions, DRAFTED, SMALL] float32
    uniforms: jax.Array  # [positions, DRAFTED] float32
    own: jax.Array  # [positions, SMALL] float32


def noise_of(seed) -> Noise:
    """Returns the noise that `sampling` gives one seed."""
    gumbel = functools.partial(sampling.noise, seed, vocab_size=SMALL)
    drafts = lambda n: jax.vmap(
        lambda i: gumbel(n, stream=sampling.Stream.DRAFT, offset=i)
    )(jnp.arange(DRAFTED))
    uniforms = lambda n: sampling.uniforms(seed, n, gamma=DRAFTED)
    positions = jnp.arange(CELLS + 1)
    return Noise(
        draft=jax.vmap(drafts)(positions),
        uniforms=jax.vmap(uniforms)(positions),
        own=jax.vmap(lambda n: gumbel(n, stream=sampling.Stream.OWN))(positions),
    )


@functools.lru_cache
def all_noise() -> Noise:
    return jax.jit(jax.vmap(noise_of))(jnp.arange(NUM_STREAMS, dtype=jnp.uint32))


def one_stream(accept, noise: Noise):
    """Returns the first `CELLS` tokens after token 0, by rounds of `DRAFTED` drafts."""

    def one_round(_, state):
        tokens, n = state
        last, drafts = tokens[n - 1], []
        for i in range(DRAFTED):
            scores = jnp.log(DRAFT_ROWS[last]) + noise.draft[n, i]
            last = jnp.argmax(scores).astype(jnp.int32)
            drafts.append(last)
        drafts = jnp.stack(drafts)
        read = jnp.concatenate([tokens[n - 1][None], drafts])
        drafted = drafts, DRAFT_ROWS[read[:-1]], TARGET_ROWS[read], jnp.int32(DRAFTED)
        outcome = accept(*drafted, uniforms=noise.uniforms[n], noise=noise.own[n])
        offsets = jnp.arange(DRAFTED + 1)
        at = jnp.where(offsets <= outcome.num_accepted, n + offsets, CELLS + 1)
        tokens = tokens.at[at].set(outcome.tokens, mode="drop")
        return tokens, jnp.minimum(n + outcome.num_accepted + 1, CELLS + 1)

    start = (jnp.zeros((CELLS + 1,), jnp.int32), jnp.int32(1))
    return jax.lax.fori_loop(0, CELLS, one_round, start)[0][1:]


RULES = {"rejection": acceptance.accept_rejection, "block": acceptance.accept_block}
STREAMS = {
    rule: jax.jit(jax.vmap(functools.partial(one_stream, accept)))
    for rule, accept in RULES.items()
}


def worst_cell(rule: str, noise: Noise) -> float:
    """Returns a cell's largest deviation from the target's law, in standard errors."""
    tokens = np.asarray(STREAMS[rule](noise))
    cells = np.ravel_multi_index(tokens.T, (SMALL,) * CELLS)
    found = np.bincount(cells, minlength=SMALL**CELLS) / NUM_STREAMS
    rows = np.asarray(TARGET_ROWS, np.float64)
    law = np.einsum("a,ab,bc->abc", rows[0], rows, rows).ravel()
    return float(np.max(np.abs(found - law) / np.sqrt(law * (1 - law) / NUM_STREAMS)))


@pytest.mark.parametrize("rule", STREAMS)
def test_rounds_write_the_targets_law(rule):
    """Fails if a cell of three tokens is off by 5 standard errors, n = 131,072."""
    assert worst_cell(rule, all_noise()) < SIGMAS


def own_from_the_drafts(noise: Noise) -> Noise:
    """Plants the first draft's noise as that of the own token."""
    return noise.replace(own=noise.draft[:, :, 0])


def one_uniform(noise: Noise) -> Noise:
    """Plants one uniform for all drafts of a round."""
    first = noise.uniforms[..., :1]
    return noise.replace(uniforms=jnp.broadcast_to(first, noise.uniforms.shape))


@pytest.mark.parametrize(
    ("rule", "plant"), [("rejection", own_from_the_drafts), ("block", one_uniform)]
)
def test_shared_noise_is_caught(rule, plant):
    """Negative control: shared noise moves a cell by twice the bound, at the same n."""
    assert worst_cell(rule, plant(all_noise())) > 2 * SIGMAS
