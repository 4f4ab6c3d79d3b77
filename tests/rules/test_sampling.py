"""Sampling: settings, filters against an oracle, and the law of a draw."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from spec_jax.ops import draw as draw_op
from spec_jax.rules import sampling, settings as settings_lib


VOCAB = 12
distribution = jax.jit(sampling.distribution)


def oracle(logits, *, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0):
    """Computes the filters in plain Python, by a sort, in float64."""
    if temperature == 0:
        return np.eye(len(logits))[int(np.argmax(logits))]
    # Scores in float32 decide the order, and so ties; settings are float32, too.
    logits = np.asarray(logits, np.float32)
    scores = (logits - logits.max()) / np.float32(temperature)
    weights = np.exp(scores.astype(np.float64))
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    last = scores[order[min(top_k or len(order), len(order)) - 1]]
    order = [i for i in order if scores[i] >= last]
    mass, kept = 0.0, []
    wanted = np.float32(top_p) * weights[order].sum()
    for i in order:
        # With top_p 1 all stay, even tokens too unlikely to change a sum.
        if top_p < 1 and mass >= wanted:
            break
        mass += weights[i]
        kept.append(i)
    kept = [i for i in kept if weights[i] >= np.float32(min_p)]
    probs = np.zeros(len(scores))
    probs[kept] = weights[kept] / weights[kept].sum()
    return probs


@hypothesis_settings(max_examples=150, deadline=None)
@given(
    # Steps of 1/2, so that there are ties, inside and at a boundary.
    halves=st.lists(st.integers(-12, 12), min_size=VOCAB, max_size=VOCAB),
    temperature=st.sampled_from((0.0, 0.3, 1.0, 2.5)),
    top_k=st.one_of(st.none(), st.integers(1, VOCAB + 2)),
    top_p=st.integers(1, 64).map(lambda n: n / 64),
    min_p=st.integers(0, 64).map(lambda n: n / 64),
)
def test_filters_agree_with_the_oracle(halves, temperature, top_k, top_p, min_p):
    """Fails if other tokens stay, or if their probabilities differ."""
    values = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = np.asarray(halves, np.float32) / 2
    settings = sampling.make_settings(**(values | {"temperature": temperature or 1.0}))
    settings = settings.replace(temperature=jnp.float32(temperature))
    found = distribution(logits, settings)
    np.testing.assert_allclose(found, oracle(logits, **values), atol=2e-6)


def filtered(logits, **values):
    return np.asarray(
        distribution(jnp.asarray(logits, jnp.float32), sampling.make_settings(**values))
    ).tolist()


def test_boundaries_are_exact():
    """Checks that top-k keeps all tokens that equal its last one, that top-p cuts ties
    by index and keeps the token that reaches p, and that min-p keeps its bound."""
    even = [0.0, 0.0, 0.0, 0.0]
    assert filtered(even, top_k=3) == [0.25] * 4
    assert (
        filtered([1.0, 0.0, -0.0, -1.0], top_k=2)[1:3]
        == [filtered([1.0, 0.0, 0.0], top_k=2)[1]] * 2
    )
    assert filtered([1.0, 1.0, 1.0, -1.0], top_k=2, top_p=0.6) == [0.5, 0.5, 0, 0]
    assert filtered(even, top_p=0.5) == [0.5, 0.5, 0, 0]
    assert filtered(even, top_p=0.500001) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert filtered(even, min_p=1.0) == [0.25] * 4
    assert filtered(even, top_p=1e-6) == [1, 0, 0, 0]
    # Top-p counts the mass that top-k left: one token reaches p then, not two.
    assert filtered([2.0, 1.0, 0.9, 0.8], top_k=2, top_p=0.7) == [1, 0, 0, 0]
    assert filtered([2.0, 1.0, 1.0, 1.0], top_p=0.7)[1] > 0
    # Masked tokens never come back, and the order among -inf does not matter.
    assert filtered([-math.inf, 0.0, -math.inf, 0.0], top_k=4) == [0, 0.5, 0, 0.5]


def test_greedy_and_its_neighbours():
    """Checks that temperature 0 and a tiny top-p give the first argmax exactly, and
    that top-k 1 and min-p 1 give all tokens that equal it."""
    logits = [1.0, 5.0, 5.0, -3.0]
    for values in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        is_all = "min_p" in values or "top_k" in values
        expected = [0, 0.5, 0.5, 0] if is_all else [0, 1, 0, 0]
        assert filtered(logits, **values) == expected
    # The smallest temperature that is allowed makes no NaN.
    tiny = settings_lib.SMALLEST_TEMPERATURE
    assert filtered(logits, temperature=tiny) == [0, 0.5, 0.5, 0]


def by_hugging_face(logits, values):
    """Returns the probabilities that the warpers of `generate` leave."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    scores = torch.from_numpy(logits)
    for name, warper in (
        ("temperature", transformers.TemperatureLogitsWarper),
        ("top_k", transformers.TopKLogitsWarper),
        ("top_p", transformers.TopPLogitsWarper),
        ("min_p", transformers.MinPLogitsWarper),
    ):
        if name in values:
            scores = warper(values[name])(None, scores)
    return scores.softmax(-1).numpy()


@pytest.mark.parametrize(
    "values",
    (
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.03},
    ),
    ids=str,
)
def test_filters_agree_with_hugging_face(values, rng):
    """Compares order and boundaries with `generate`'s, on logits without ties."""
    logits = (3 * rng.standard_normal((8, 50))).astype(np.float32)
    found = distribution(logits, sampling.make_settings(**values))
    np.testing.assert_allclose(found, by_hugging_face(logits, values), atol=2e-6)


TIED = (
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 9, "temperature": 0.5},
    {"top_k": 50},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 4, "min_p": 0.25, "temperature": 2.0},
)
NUM_ROWS = 600


@pytest.mark.parametrize("values", TIED, ids=str)
def test_ties_are_those_of_hugging_face(values, rng):
    """Fails if top-k cuts logits that equal its last one, or min-p its bound, in XLA or
    native kernels: draws must have each likely token that is kept, and no other.
    `pallas/test_pallas_sampling` checks the kernels of a GPU."""
    logits = rng.permutation(np.repeat(np.arange(5, dtype=np.float32), 10))
    expected = by_hugging_face(logits[None], values)[0]
    settings = sampling.make_settings(**values)
    found = np.asarray(distribution(logits, settings))
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert np.sum(expected > 0) % 10 == 0
    each = jax.tree.map(lambda x: jnp.broadcast_to(x, NUM_ROWS), settings)
    how = {"positions": jnp.arange(NUM_ROWS), "draws": jnp.ones(NUM_ROWS, bool)}
    rows = jnp.broadcast_to(jnp.asarray(logits), (NUM_ROWS, 50))
    drawn = np.asarray(draw_op.draw(rows, each, **how, impl="native"))
    shares = np.bincount(drawn, minlength=50) / NUM_ROWS
    assert not shares[expected == 0].any()
    assert shares[expected > 0.02].all()
    error = np.sqrt(expected * (1 - expected) / NUM_ROWS)
    assert np.all(np.abs(shares - expected) <= SIGMAS * error + 1e-9)


def test_a_large_vocabulary_is_filtered_as_a_small_one(rng):
    """Fails if a search misses an index, or sums of 20,001 entries are too coarse."""
    logits = (4 * rng.standard_normal(20_001)).astype(np.float32)
    for values in ({"top_k": 300}, {"top_p": 0.9}, {"top_p": 0.999, "min_p": 1e-3}):
        found = np.asarray(distribution(logits, sampling.make_settings(**values)))
        expected = oracle(logits, **values)
        # A sum in float32 may be rounded past the boundary: one token more or less.
        assert abs(np.sum(found > 0) - np.sum(expected > 0)) <= ("top_p" in values)
        np.testing.assert_allclose(found, expected, atol=1e-4)
    even = np.zeros(20_001, np.float32)
    assert np.all(distribution(even, sampling.make_settings(top_k=7)) > 0)
    first = distribution(even, sampling.make_settings(top_p=6.5 / 20_001))
    assert np.flatnonzero(first).tolist() == list(range(7))


FILTERS = {
    "none": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
    "all": {"temperature": 1.5, "top_k": 8, "top_p": 0.95, "min_p": 0.05},
}
NUM_DRAWS = 2**16
SIGMAS = 5.0


@functools.partial(jax.jit, static_argnames="draw")
def draws(logits, settings, draw):
    """Returns `NUM_DRAWS` draws from one row, at as many positions."""
    positions = jnp.arange(NUM_DRAWS, dtype=jnp.int32)
    return jax.vmap(lambda position: draw(logits, settings, position))(positions)


def worst_frequency(draw, values) -> float:
    """Returns the largest deviation from the oracle, in standard errors, n = 65,536."""
    logits = np.linspace(-2, 2, VOCAB, dtype=np.float32)[::-1]
    found = np.bincount(
        draws(logits, sampling.make_settings(**values), draw), minlength=VOCAB
    )
    law = oracle(logits, **values)
    assert not found[law == 0].any()
    error = np.abs(found / NUM_DRAWS - law)[law > 0]
    law = law[law > 0]
    return float(np.max(error / np.sqrt(law * (1 - law) / NUM_DRAWS)))


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_distribution(name):
    """Checks that each token's frequency is within 5 standard errors."""
    assert worst_frequency(sampling.sample, FILTERS[name]) < SIGMAS


def uniform_noise(logits, settings, position):
    """Plants uniform noise in place of Gumbel noise."""
    key = sampling.noise_key(settings.seed, sampling.Stream.SAMPLE, position)
    weights = sampling.log_weights(logits, settings)
    return jnp.argmax(weights + jax.random.uniform(key, weights.shape))


def unheated(logits, settings, position):
    """Plants temperature 1 in place of the given one."""
    settings = settings.replace(temperature=jnp.ones_like(settings.temperature))
    return sampling.sample(logits, settings, position)


@pytest.mark.parametrize("planted", (uniform_noise, unheated), ids=lambda f: f.__name__)
def test_wrong_draws_are_caught(planted):
    """Negative control: planted draws deviate by twice the bound, at the same n."""
    assert worst_frequency(planted, {"temperature": 0.6}) > 2 * SIGMAS


@pytest.mark.parametrize(
    "values, message",
    (
        ({"temperature": -0.1}, "temperature=-0.1 is negative: use 0 for greedy"),
        ({"temperature": math.inf}, "temperature=inf is not finite"),
        ({"temperature": 1e-40}, "temperature=1e-40 is too small to divide by"),
        ({"temperature": True}, "temperature=True is not a number"),
        ({"top_k": 0}, "top_k=0 keeps no token: use at least 1, or None for all"),
        ({"top_p": 0.0}, r"top_p=0.0 is outside \(0, 1\]: use 1 to keep all tokens"),
        ({"min_p": -0.1}, r"min_p=-0.1 is outside \[0, 1\]: use 0 to keep all tokens"),
        (
            {"temperature": 0, "top_k": 20},
            "temperature=0 is greedy decoding, which top_k=20 would not change",
        ),
        ({"seed": 2**32}, r"seed=4294967296 is outside \[0, 2\*\*32\)"),
    ),
    ids=str,
)
def test_bad_settings_are_refused(values, message):
    """Checks that `make_settings` refuses a bad value, and names it in the error."""
    with pytest.raises(ValueError, match=message):
        sampling.make_settings(**values)


EACH = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 3},
    {"temperature": 1.0, "min_p": 0.05, "seed": 2**32 - 1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 9},
)

sample_each = jax.jit(sampling.sample_each)
sample = jax.jit(sampling.sample)


def drawn_each(logits, order, *, positions=(7, 5, 5, 900), draws=(True,) * 4):
    each = [sampling.make_settings(**EACH[row]) for row in order]
    settings = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    found = sample_each(
        logits,
        settings,
        positions=jnp.array(positions, jnp.int32),
        draws=jnp.array(draws),
    )
    return np.asarray(found)


def test_each_row_draws_as_it_does_alone(rng):
    """Fails if a row takes another row's settings, noise or position, or if a row that
    draws nothing gives a token other than 0, or changes the draws of others."""
    others = 0
    for _ in range(4):
        logits = (2 * rng.standard_normal((4, 311))).astype(np.float32)
        found = drawn_each(logits, range(4))
        for row, position in enumerate((7, 5, 5, 900)):
            own = sampling.make_settings(**EACH[row])
            assert sample(logits[row], own, jnp.int32(position)) == found[row]
        # Negative controls: settings of the row before, and noise one position late.
        others += (drawn_each(logits, (3, 0, 1, 2)) != found).sum()
        others += (
            drawn_each(logits, range(4), positions=(8, 6, 6, 901)) != found
        ).sum()
        draws = np.array([True, False, False, True])
        poisoned = np.where(draws[:, None], logits, np.float32(np.nan))
        some = drawn_each(poisoned, range(4), draws=draws)
        np.testing.assert_array_equal(some, np.where(draws, found, 0))
    assert others > 12
