"""Filters, noise and sums of Triton's kernels, interpreted, against the rules' own.

Draws are tested in `ops/test_draw`, and code for a GPU in `test_hopper_model`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rules import test_sampling

from spec_jax import testing
from spec_jax.ops import draw as draw_op
from spec_jax.pallas import (
    first_tokens_triton as first,
    noisy_weights_triton,
    row_sums_triton,
)
from spec_jax.rules import sampling


ROWS = 6
VOCAB = 2 * first.CHUNK + 904  # three chunks, the last of which is not full
SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 3},
    {"temperature": 2.0, "seed": 4},
    {"temperature": 1.0, "min_p": 0.05, "seed": 2**32 - 1},
    {"temperature": 1.0, "top_p": 0.95, "seed": 9},
    {"temperature": 1.3, "top_k": 700, "seed": 3},
)


def stacked(each=SETTINGS) -> sampling.SamplingSettings:
    made = [sampling.make_settings(**values) for values in each]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)


def make_rows(rng, scale=3.0):
    return (scale * rng.standard_normal((ROWS, VOCAB))).astype(np.float32)


_distribution = jax.jit(functools.partial(draw_op.distribution, impl="interpret"))
_rule = jax.jit(jax.vmap(sampling.distribution))
BOTH = (_distribution, _rule)


def tied_rows(rng):
    """Makes rows of many equal logits, one of zeros and one of zeros of both signs."""
    rows = np.round(rng.standard_normal((ROWS, VOCAB))).astype(np.float32)
    rows[0] = 0
    rows[1] = np.where(np.arange(VOCAB) % 2, np.float32(0.0), np.float32(-0.0))
    return rows


def whole_vocabulary(rng):
    logits = np.round(rng.standard_normal((1, 151_936)), 3).astype(np.float32)
    logits[0, -4000:] = logits.max()
    return logits


FILTERS = (
    {},
    {"top_k": 1},
    {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
    {"top_k": VOCAB - 1},
    {"top_p": 0.9, "temperature": 0.6},
    {"top_p": 0.999, "temperature": 2.0},
)
OF_TIES = (
    {"top_p": 6.5 / VOCAB},
    {"top_p": 0.75},
    {"top_k": 1000},
    {"top_k": 4990},
    {"top_k": 3000, "top_p": 0.5},
    {"top_k": 7},
)
CASES = {
    "nearly even": (functools.partial(make_rows, scale=0.1), FILTERS),
    "peaked": (make_rows, FILTERS),
    "tied": (tied_rows, OF_TIES),
    "the whole vocabulary": (whole_vocabulary, ({"top_k": 4000, "top_p": 0.75},)),
}


@pytest.mark.parametrize("case", CASES)
def test_filters_keep_what_the_rules_keep(rng, case):
    """Fails if a block, a chunk, a bit of the boundary or a filter is left out; if
    top-k cuts logits that are equal, or top-p cuts them in another order than that of
    their indices."""
    make, filters = CASES[case]
    logits, settings = make(rng), stacked(filters)
    found, expected = (np.asarray(x(logits, settings)) > 0 for x in BOTH)
    for row, values in enumerate(filters):
        # Sums in float32 may round past a bound that is near.
        off = np.sum(found[row] != expected[row])
        assert off <= ("top_p" in values), (values, off)
        # Negative control: what another row keeps, or the same tokens backwards.
        other = found[row - 1] if row else found[0][::-1]
        assert np.sum(other != expected[row]) > 1 or not values


def test_boundaries_are_exact():
    """Fails if the token that reaches p is cut, or a masked one stays."""
    logits, settings, kept = zip(*test_sampling.BOUNDARIES, strict=True)
    found = _distribution(np.float32(logits), stacked(settings)) > 0
    assert [np.flatnonzero(row).tolist() for row in found] == list(kept)


def test_noise_has_the_bits_of_threefry(rng):
    """Fails if a counter, a key or a round of Threefry is another than jax's."""
    positions = rng.integers(0, 2**20, ROWS).astype(np.int32)
    seeds = [0, 1, 2**31, 2**32 - 1, 7, 7]
    settings = stacked([{"seed": seed} for seed in seeds])
    even = np.zeros((ROWS, VOCAB), np.float32)
    noisy = jax.jit(functools.partial(draw_op.noisy_weights, impl="interpret"))
    draws = np.ones(ROWS, bool)
    found = np.asarray(noisy(even, settings, positions=positions, draws=draws))
    expected = jax.jit(
        jax.vmap(functools.partial(sampling.noise, vocab_size=VOCAB))
    )(settings.seed, positions)  # fmt: skip
    # Logarithms may be compiled otherwise; other random bits would differ by more.
    np.testing.assert_allclose(found, expected, rtol=3e-7, atol=3e-7)
    key = tuple(jnp.uint32(x) for x in (3, 2**32 - 5))
    count = jnp.arange(64, dtype=jnp.uint32)
    ours = jnp.concatenate(noisy_weights_triton.threefry(key, count[:32], count[32:]))
    theirs = jax.extend.random.threefry_2x32(jnp.stack(key), count)
    testing.assert_same_bits(ours, theirs)


def test_distributions_are_those_of_the_rules(rng):
    """Fails if a filter, a temperature or a token is left out of a row, or summed
    twice."""
    logits = make_rows(rng)
    settings = stacked()
    found = np.asarray(_distribution(logits, settings))
    expected = _rule(logits, settings)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert (found == 0).any(axis=1).tolist() == [True, True, False, True, True, True]
    assert found[0, np.argmax(logits[0])] == found[0].sum() == 1
    # Negative control: the row's own settings decide.
    with pytest.raises(AssertionError):
        turned = jax.tree.map(lambda leaf: leaf[::-1], settings)
        np.testing.assert_allclose(_distribution(logits, turned), expected, rtol=1e-5)
    # Settings may be one for all rows; and a row may be alone.
    one = sampling.make_settings(**SETTINGS[4])
    testing.assert_same_bits(_distribution(logits[4:5], one), found[4:5])


def test_sums_have_one_order(rng):
    """Fails if a chunk is left out, or a row's sum depends on other rows."""
    x = np.exp(make_rows(rng))
    sums = jax.jit(functools.partial(draw_op.row_sums, impl="interpret"))
    found = np.asarray(sums(x))
    np.testing.assert_allclose(found, x.sum(axis=1, dtype=np.float64), rtol=1e-5)
    alone = [sums(x[row]) for row in range(ROWS)]
    for other in (np.stack(alone), jax.vmap(sums)(x)):
        testing.assert_same_bits(other, found)
    parts = np.asarray(sums(x[:, : first.CHUNK])), np.asarray(sums(x[:, first.CHUNK :]))
    # Negative control: other chunks give another order.
    assert (np.add(*parts) != found).any()
    with pytest.raises(ValueError, match=r"rows bfloat16\[1, 8\]"):
        row_sums_triton.row_sums(jnp.zeros((1, 8), jnp.bfloat16))


def test_scores_of_children_are_log_softmaxes(rng):
    """Fails if a row is normed by another's sum, or not at all."""
    logits = make_rows(rng)
    found = draw_op.log_softmax(jnp.asarray(logits).reshape(2, 3, -1), impl="interpret")
    expected = jax.nn.log_softmax(logits).reshape(2, 3, -1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
