"""Draws depend on their row, seed and position alone; no two purposes share noise."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from spec_jax import testing
from spec_jax.rules import sampling


VOCAB = 12
SIGMAS = 5.0
noise = jax.jit(sampling.noise, static_argnames=("vocab_size", "stream"))

EACH = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 3},
    {"temperature": 1.0, "min_p": 0.05, "seed": 2**32 - 1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 9},
)
SETTINGS = [sampling.make_settings(**values) for values in EACH]
POSITIONS = (7, 5, 5, 900)
weights = jax.jit(sampling.noisy_weights)
sample_each = jax.jit(sampling.sample_each)


def drawn_each(logits, *, order=range(4), late=0, draws=(True,) * 4):
    """Returns the draws of rows, by settings in some order, at positions so late."""
    each = [SETTINGS[row] for row in order]
    found = sample_each(
        logits,
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *each),
        positions=jnp.array(POSITIONS, jnp.int32) + late,
        draws=jnp.array(draws),
    )
    return np.asarray(found)


def test_a_draw_depends_on_its_row_and_position(rng):
    """Fails if a row takes another row's settings, noise or position, if a row that
    draws nothing gives a token other than 0, or changes the draws of others."""
    others = 0
    for _ in range(4):
        logits = (2 * rng.standard_normal((4, 311))).astype(np.float32)
        found = drawn_each(logits)
        for row, position in enumerate(POSITIONS):
            alone = weights(logits[row], SETTINGS[row], jnp.int32(position))
            assert alone.argmax() == found[row]
        # Negative controls: settings of the row before, and noise one position late.
        others += (drawn_each(logits, order=(3, 0, 1, 2)) != found).sum()
        others += (drawn_each(logits, late=1) != found).sum()
        draws = np.array([True, False, False, True])
        poisoned = np.where(draws[:, None], logits, np.float32(np.nan))
        some = drawn_each(poisoned, draws=draws)
        np.testing.assert_array_equal(some, np.where(draws, found, 0))
    assert others > 12


def primitives_paid_always(jaxpr) -> set[str]:
    """Returns the names of the primitives outside all branches of a `cond`."""
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        if equation.primitive.name != "cond":
            for inner in core.jaxprs_in_params(equation.params):
                names |= primitives_paid_always(inner)
    return names


def test_greedy_pays_for_no_filter_and_no_noise():
    """Fails if noise, a search or a softmax is outside the branches of a draw. Noise
    that is in no branch is the negative control."""
    args = jnp.zeros((VOCAB,)), sampling.make_settings(temperature=0.0), jnp.int32(0)
    paid = lambda draw: primitives_paid_always(jax.make_jaxpr(draw)(*args).jaxpr)
    costly = {"exp", "log", "random_bits", "while", "scan"}
    assert not paid(sampling.noisy_weights) & costly
    noisy = lambda logits, settings, position: sampling.noise(
        settings.seed, position, vocab_size=VOCAB
    )
    assert {"log", "random_bits"} <= paid(noisy)


def test_no_two_purposes_share_noise():
    """Checks that bits repeat only for the same stream, position, offset and seed."""
    uses = list(itertools.product((0, 1), sampling.Stream, (0, 1, 2), (0, 1, 2)))

    def drawn(use):
        seed, stream, position, offset = use
        at, how = (jnp.uint32(seed), jnp.int32(position)), {"offset": jnp.int32(offset)}
        found = noise(*at, vocab_size=4, stream=stream, **how)
        return tuple(testing.bits(found).tolist())

    assert len({drawn(use) for use in uses}) == len(uses)
    assert drawn(uses[5]) == drawn(uses[5])
    # Uniforms are bits of a stream of their own, two words each.
    at = jnp.uint32(1), sampling.Stream.UNIFORM, jnp.int32(2)
    with jax.threefry_partitionable(True):
        bits = jax.random.bits(sampling.noise_key(*at), (3, 2), jnp.uint32)
    found = sampling.uniforms(at[0], at[2], gamma=3)
    testing.assert_same_bits(found, sampling._unit_interval(bits))


@pytest.mark.parametrize(
    "other", [jax.default_prng_impl("rbg"), jax.threefry_partitionable(False)]
)
def test_noise_does_not_depend_on_the_configured_generator(other):
    """Fails if jax's flags change the stream that a seed means."""

    def draw():
        at = jnp.uint32(3), jnp.int32(5)
        return sampling.noise(*at, vocab_size=8), sampling.uniforms(*at, gamma=4)

    expected = jax.jit(lambda: draw())()
    with other:
        testing.assert_same_bits(jax.jit(lambda: draw())(), expected)
    # Negative control: `jax.random.bits` by itself depends on a flag.
    key, found = jax.random.key(0, impl="threefry2x32"), set()
    for value in (False, True):
        with jax.threefry_partitionable(value):
            found.add(int(jax.random.bits(key, (8,))[0]))
    assert len(found) == 2


def equal_among_highest(values) -> int:
    """Returns how many of the 512 highest values repeat another of them."""
    return 512 - len(np.unique(np.sort(np.asarray(values))[-512:]))


def test_high_noise_is_finely_resolved():
    """Fails if noise is made of 24 bits: unlikely tokens are drawn too seldom."""
    size = 2**20
    found = noise(jnp.uint32(0), jnp.int32(0), vocab_size=size)
    coarse = jax.random.gumbel(jax.random.key(0), (size,), mode="low")
    assert equal_among_highest(found) == 0
    assert equal_among_highest(coarse) > 5  # negative control
    # Gumbel's law has mean 0.5772 and standard deviation 1.2825.
    assert abs(float(jnp.mean(found)) - 0.57722) < SIGMAS * 1.2825 / 2**10


def test_uniforms_are_the_leading_bits():
    """Fails if small uniforms are quantised, or one is rounded up to 1 or a bound."""
    ones = 2**32 - 1
    highs = [0, 1, 2, 255, 2**24 - 1, 2**24 + 1, 2**31 - 1, 2**31, ones]
    pairs = [(high, low) for high in highs for low in (0, 1, 2**31, ones)]
    found = jax.jit(sampling._unit_interval)(jnp.asarray(pairs, jnp.uint32))
    for (high, low), value in zip(pairs, np.asarray(found, np.float64), strict=True):
        exact = high << 32 | low
        cut = max(exact.bit_length() - 24, 0 if high else 8)
        assert value == (exact >> cut << cut) * 2.0**-64 < 1, (high, low)


def test_uniforms_have_more_than_23_bits():
    """Fails if uniforms are `jax.random.uniform`'s, of which 1 in 8 million is 0."""
    found = sampling.uniforms(jnp.uint32(0), jnp.int32(5), gamma=4096)
    coarse = jax.random.uniform(jax.random.key(0), (4096,), jnp.float32)
    for values, is_fine in ((found, True), (coarse, False)):
        steps = np.asarray(values, np.float64) * 2**23
        assert (steps != np.floor(steps)).any() == is_fine
    # The mean and the share below a bound, to 5 standard errors.
    found = np.asarray(found, np.float64)
    assert abs(found.mean() - 0.5) < 5 * (1 / 12 / 4096) ** 0.5
    assert abs((found < 0.1).mean() - 0.1) < 5 * (0.09 / 4096) ** 0.5


def least_matched(target, draft, count):
    """Returns the matching bound of lists (arXiv 2506.05632): the least chance that one
    of `count` drafts, each with its own noise, matches; for one, coupling's chance."""
    most = np.maximum(target[:, None] / target, draft[:, None] / draft).sum(0)
    return (count / (most + (count - 1) / target)).sum()


@pytest.mark.parametrize("seed", range(4))
def test_drafts_match_as_often_as_the_bound_of_lists(seed):
    """Fails if the draft's highest weights, with the target's noise, hold the target's
    token less often than the bound for lists of as many drafts; or if the highest one
    alone does so more or less often than coupling says."""
    rng = np.random.default_rng(seed)
    draws, at = 20_000, sampling.make_settings(temperature=1.0, seed=seed)
    logits = rng.standard_normal((2, VOCAB)).astype(np.float32)
    target, draft = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    noisy = jax.jit(jax.vmap(sampling.noisy_weights, in_axes=(None, None, 0)))
    positions = jnp.arange(draws, dtype=jnp.int32)
    own, drafts = (np.asarray(noisy(row, at, positions)) for row in logits)
    tokens, ranked = own.argmax(axis=1), np.argsort(-drafts, axis=1)
    spread = SIGMAS * 0.5 / draws**0.5
    for count in (1, 2, 4):
        found = (ranked[:, :count] == tokens[:, None]).any(axis=1).mean()
        bound = least_matched(target, draft, count)
        assert found > bound - spread
        assert count > 1 or found < bound + spread
        # Negative control: the noise of another position.
        other = np.roll(ranked, 1, axis=0)[:, :count]
        assert (other == tokens[:, None]).any(axis=1).mean() < bound - spread
