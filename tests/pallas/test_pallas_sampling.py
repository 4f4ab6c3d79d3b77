"""Filters, noise and sums of Triton's kernels, interpreted, against float64.

Draws are tested in `ops/test_draw`, and code for a GPU in `test_hopper_exact`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import slow

from spec_jax import testing
from spec_jax.engine import protocols, target as target_lib, verification
from spec_jax.ops import draw as draw_op
from spec_jax.pallas import (
    first_tokens_triton as first,
    noisy_weights_triton,
    row_sums_triton,
)
from spec_jax.rules import rule as rule_lib, sampling


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
_first_tokens = jax.jit(functools.partial(first.first_tokens, interpret=True))


def stacked(each=SETTINGS) -> sampling.SamplingSettings:
    made = [sampling.make_settings(**values) for values in each]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)


def make_rows(rng, scale=3.0):
    return (scale * rng.standard_normal((ROWS, VOCAB))).astype(np.float32)


def kept_by_oracle(logits, *, temperature=1.0, top_k=None, top_p=1.0, seed=0):
    """Returns which tokens stay, and how far top-p's bound is from one more or less,
    by sorting in float64."""
    del seed
    logits = logits.astype(np.float64)
    order = np.argsort(-logits, kind="stable")
    masses = np.exp((logits[order] - logits.max()) / temperature)
    # Tokens that equal the last of the first k stay.
    last = logits[order][min(top_k or logits.size, logits.size) - 1]
    count, margin = int(np.sum(logits >= last)), 1.0
    masses[count:] = 0
    shares = np.cumsum(masses) / np.sum(masses)
    if top_p < 1:
        count = int(np.searchsorted(shares, top_p)) + 1
        around = shares[max(count - 2, 0) : count]
        margin = float(np.min(np.abs(around - top_p)))
    kept = np.zeros(logits.size, bool)
    kept[order[:count]] = True
    return kept, margin


def kept_by_kernel(logits, each):
    """Returns which tokens stay, `[R, V]`."""
    settings, draws = stacked(each), np.ones(len(each), bool)
    how = {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p")}
    found = _first_tokens(logits, logits.max(axis=1), draws=draws, **how)
    index = np.arange(logits.shape[1], dtype=np.int32)[None]
    last, end = (np.asarray(x)[:, None] for x in (found.last, found.end))
    return np.asarray(first.is_kept(first.rank(jnp.asarray(logits)), index, last, end))


FILTERS = (
    {},
    {"top_k": 1},
    {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
    {"top_k": VOCAB - 1},
    {"top_p": 0.9, "temperature": 0.6},
    {"top_p": 0.999, "temperature": 2.0},
)


def test_filters_keep_what_sorting_keeps(rng):
    """Fails if a block, a bit of the boundary or a filter is left out."""
    for scale in (0.1, 3.0):  # Nearly even, and peaked.
        logits = make_rows(rng, scale)
        found = kept_by_kernel(logits, FILTERS)
        for row, values in enumerate(FILTERS):
            expected, margin = kept_by_oracle(logits[row], **values)
            # Sums in float32 may round past a bound that is so near.
            allowed = 0 if margin > 1e-5 else 1
            assert np.sum(found[row] != expected) <= allowed, (scale, values)
            # Negative control: what another row keeps.
            assert np.sum(found[row - 1] != expected) > 1


def test_ties(rng):
    """Fails if top-k cuts logits that are equal, or top-p does not, or does so in
    another order than that of their indices."""
    coarse = np.round(rng.standard_normal((ROWS, VOCAB))).astype(np.float32)
    coarse[0] = 0
    coarse[1] = np.where(np.arange(VOCAB) % 2, np.float32(0.0), np.float32(-0.0))
    each = [{"top_p": 6.5 / VOCAB}, {"top_p": 0.75}, {"top_k": 1000}, {"top_k": 4990}]
    each += [{"top_k": 3000, "top_p": 0.5}, {"top_k": 7}]
    found = kept_by_kernel(coarse, each)
    for row, values in enumerate(each):
        expected, _ = kept_by_oracle(coarse[row], **values)
        # The bound is a multiple of so many equal masses, and float32 may round it.
        off = np.flatnonzero(found[row] != expected)
        assert off.size <= ("top_p" in values), (values, off)
    assert np.flatnonzero(found[0]).tolist() == list(range(7))
    assert np.array_equal(found[5], coarse[5] >= np.sort(coarse[5])[-7])
    # Negative control: the last seven.
    assert not np.array_equal(found[0], found[0][::-1])


def test_the_whole_vocabulary(rng):
    """Fails if chunks or the bits of an index end before 151,936 tokens do."""
    logits = np.round(rng.standard_normal((1, 151_936)), 3).astype(np.float32)
    logits[0, -4000:] = logits.max()
    values = {"top_k": 4000, "top_p": 0.75}
    found = kept_by_kernel(logits, [values])
    expected, _ = kept_by_oracle(logits[0], **values)
    assert np.array_equal(found[0], expected) and 3000 <= expected.sum() < 3003


def test_boundaries_are_exact():
    """Fails if the token that reaches p is cut, or a masked one stays. XLA's filters
    have the same test in `rules.test_sampling`."""
    inf = np.inf
    rows = (
        ([0.0, 0.0, 0.0, 0.0], {"top_p": 0.5}, [0, 1]),
        ([0.0, 0.0, 0.0, 0.0], {"top_p": 0.500001}, [0, 1, 2]),
        ([0.0, 0.0, 0.0, 0.0], {"top_p": 1e-6}, [0]),
        ([2.0, 1.0, 0.9, 0.8], {"top_k": 2, "top_p": 0.7}, [0]),
        ([2.0, 1.0, 1.0, 0.5], {"top_k": 2}, [0, 1, 2]),
        ([2.0, 1.0, 1.0, 1.0], {"top_p": 0.7}, [0, 1, 2]),
        ([-inf, 0.0, -inf, 0.0], {"top_k": 2}, [1, 3]),
        ([1.0, 5.0, 5.0, -3.0], {"top_k": 1}, [1, 2]),
        ([1.0, 5.0, 5.0, -3.0], {"temperature": 2.0**-126, "top_p": 0.9}, [1, 2]),
    )
    logits = np.array([row[0] for row in rows], np.float32)
    found = kept_by_kernel(logits, [row[1] for row in rows])
    assert [np.flatnonzero(row).tolist() for row in found] == [row[2] for row in rows]


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


_distribution = jax.jit(functools.partial(draw_op.distribution, impl="interpret"))


def test_distributions_are_those_of_the_rules(rng):
    """Fails if a filter, a temperature or a token is left out of a row, or summed
    twice."""
    logits = make_rows(rng)
    settings = stacked()
    found = np.asarray(_distribution(logits, settings))
    rule = jax.jit(sampling.distribution)
    each = map(lambda values: sampling.make_settings(**values), SETTINGS)
    expected = np.stack(list(map(rule, logits, each)))
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
    for row in range(ROWS):
        testing.assert_same_bits(sums(x[row]), found[row])
    parts = np.asarray(sums(x[:, : first.CHUNK])), np.asarray(sums(x[:, first.CHUNK :]))
    # Negative control: other chunks give another order.
    assert (np.add(*parts) != found).any()
    with pytest.raises(ValueError, match=r"rows bfloat16\[1, 8\]"):
        row_sums_triton.row_sums(jnp.zeros((1, 8), jnp.bfloat16), interpret=True)


def test_scores_of_children_are_log_softmaxes(rng):
    """Fails if a row is normed by another's sum, or not at all."""
    logits = make_rows(rng)
    found = draw_op.log_softmax(jnp.asarray(logits).reshape(2, 3, -1), impl="interpret")
    expected = jax.nn.log_softmax(logits).reshape(2, 3, -1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@dataclasses.dataclass(frozen=True)
class Target(target_lib.Target):
    """A target that decides by logits that are given to it."""

    sums: draw_op.Sums | None

    def choose(self, logits, num_active):
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@pytest.mark.parametrize(
    ("rule", "parents"),
    [("block", None), slow("rejection", (0, 0, 1))],
)
def test_rules_decide_as_they_do_by_xla(rng, rule, parents):
    """Fails if the kernels give a rule other sums, rows or settings.

    Sums differ in bits from XLA's, but no uniform number here is so near a bound.
    """
    logits = jnp.asarray(make_rows(rng, 1.0)[:4])
    sharper = sampling.make_settings(top_k=50, temperature=0.6)
    drafted = jax.jit(sampling.distribution)(logits[:3], sharper)
    verified = protocols.Verified(
        logits=logits,
        slots=jnp.zeros(4, jnp.int32),
        positions=jnp.arange(4, dtype=jnp.int32),
        num_active=jnp.int32(4),
        at=jnp.arange(4, dtype=jnp.int32)[None],
    )

    @functools.partial(jax.jit, static_argnums=0)
    def decide(target, settings, tokens):
        proposal = protocols.Proposal(
            tokens=tokens[None],
            num_drafted=jnp.asarray([3], jnp.int32),
            probs=drafted[None],
            parents=None if parents is None else jnp.asarray([parents], jnp.int32),
        )
        settings = jax.tree.map(lambda leaf: leaf[None], settings)
        how = {"first_position": jnp.asarray([7], jnp.int32), "depth_max": 2}
        how |= {"rule": rule_lib.of(rule), "wanted": jnp.asarray([3], jnp.int32)}
        return verification.decide(target, verified, proposal, settings, **how)[0]

    columns = jnp.asarray(parents or (0, 1, 2))
    best = jax.lax.top_k(logits[columns], 3)[1]

    def outcomes(impl, top_k=50):
        target = Target(draw_op.sums(impl))
        found = []
        for seed in range(12):
            settings = sampling.make_settings(seed=seed, top_k=top_k, temperature=0.9)
            found.append(decide(target, settings, best[:, seed % 3]))
        return jax.tree.map(np.asarray, found)

    by_xla = outcomes("xla")
    testing.assert_same_bits(outcomes("interpret"), by_xla)
    accepted = {int(each.num_accepted[0]) for each in by_xla}
    assert len(accepted) > 1
    with pytest.raises(AssertionError):  # Negative control: by other settings.
        testing.assert_same_bits(outcomes("interpret", top_k=4), by_xla)
