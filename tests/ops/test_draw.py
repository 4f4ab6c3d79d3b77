"""Kernels draw the tokens of `rules.sampling`, and choose those of highest logit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops import row_contract
from slow_cases import slow

from spec_jax import testing
from spec_jax.native import draws as draws_lib
from spec_jax.ops import draw as draw_op
from spec_jax.rules import sampling


SETTINGS = (
    {"temperature": 1.7},
    {"temperature": 0.2},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.8, "top_p": 0.6},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.0},
)


def rows_of(rng, count, vocabulary):
    """Returns logits, settings, positions, and which rows draw: all but two."""
    logits = rng.normal(size=(count, vocabulary)).astype(np.float32) * 3
    made = [
        sampling.make_settings(**SETTINGS[i % len(SETTINGS)], seed=int(seed))
        for i, seed in enumerate(rng.integers(2**32, size=count))
    ]
    settings = jax.tree.map(lambda *leaves: np.stack(leaves), *made)
    positions = rng.integers(20_000, size=count).astype(np.int32)
    asked = np.ones(count, bool)
    asked[[3, count - 1]] = False
    return logits, settings, positions, asked


_interpreted = jax.jit(functools.partial(draw_op.draw, impl="interpret"))
_noisy = jax.jit(functools.partial(draw_op.noisy_weights, impl="interpret"))


def run(kernels, logits, settings, positions, asked):
    if kernels == "interpret":
        how = {"positions": positions, "draws": asked}
        return np.asarray(_interpreted(logits, settings, **how))
    how = draws_lib.Draws(settings, positions, logits.shape[1], independent=False)
    return np.asarray(
        draws_lib.draw(jnp.asarray(logits), how, asked=asked, isa=kernels)
    )


_drawn = jax.jit(sampling.sample_each)
_scores = jax.jit(jax.vmap(sampling.noisy_weights))


def test_tokens_are_those_of_xla(rng, kernels):
    """Fails if a filter, the noise or its key differs. Logarithms may differ by units
    of the last place, so that two tokens of nearly equal score may change places."""
    arguments = rows_of(rng, 24, 2999)
    logits, settings, positions, asked = arguments
    tokens = run(kernels, *arguments)
    expected = _drawn(logits, settings, positions=positions, draws=asked)
    scores = np.asarray(_scores(logits, settings, positions), np.float64)
    expected = np.asarray(expected)
    assert (tokens[~asked] == 0).all()
    each = np.arange(24)[asked]
    lost = scores[each, expected[asked]] - scores[each, tokens[asked]]
    assert (np.abs(lost) < 1e-4).all()
    assert (tokens == expected)[asked].mean() > 0.9
    # Negative controls: another seed, and another position.
    others = settings.replace(seed=settings.seed + np.uint32(1))
    samples = asked & (settings.temperature != 0)
    for changed in (
        run(kernels, logits, others, positions, asked),
        run(kernels, logits, settings, positions + 1, asked),
    ):
        assert (changed != tokens)[samples].mean() > 0.3
        np.testing.assert_array_equal(changed[~samples], tokens[~samples])


def test_a_row_draws_as_it_does_alone(rng, kernels):
    """Fails if a token, or a noisy weight, depends on other rows or on its place."""
    logits, settings, positions, _ = rows_of(rng, 7, 2100)

    def draw(rows, live):
        logits, which = rows
        which = np.minimum(which, 6)
        own = jax.tree.map(lambda leaf: leaf[which], settings)
        asked = np.arange(len(which)) < live
        if kernels == "interpret":
            how = {"positions": positions[which], "draws": asked}
            return _noisy(logits, own, **how)
        return run(kernels, logits, own, positions[which], asked)

    # The interpreted kernels are one program: one row of seven is active.
    is_alone = kernels != "interpret"
    row_contract.assert_row_contract(draw, (logits, np.arange(7)), is_alone=is_alone)


def test_targets_draw_by_it(rng):
    """Fails if native targets draw by XLA, or the operation takes other arguments."""
    logits, settings, positions, asked = rows_of(rng, 7, 97)
    draw = jax.jit(draw_op.draw, static_argnames="impl")
    how = {"positions": positions, "draws": asked, "impl": "native"}
    assert "spec_jax_draw" in draw.lower(logits, settings, **how).as_text()
    tokens = run(None, logits, settings, positions, asked)
    testing.assert_same_bits(draw(logits, settings, **how), tokens)


# Around pieces of 512 and 16,384 (native) and of 4,096 (Triton); Qwen3's vocabulary.
WIDTHS = (1, 7, 513, 4097, 16_385, slow(151_936))


def highest(impl, logits):
    call = row_contract.compiled("argmax", impl)
    indices = call(logits, num_active=np.int32(len(logits)))
    assert indices.dtype == jnp.int32
    return np.asarray(indices)


@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_numpys(rng, impl, width):
    """Fails if a piece or a tail is missed, a later equal wins, a NaN loses to a
    later one or to infinity, or zeros of both signs differ."""
    # Most logits are below the zeros that a block has past the end.
    x = rng.normal(size=(12, width)).astype(np.float32) - 10
    x[1] = rng.integers(-3, 3, width)
    x[2] = -np.inf
    x[3, rng.integers(width)] = np.inf
    x[4] = np.where(rng.random(width) < 0.5, 0.0, -0.0)
    for first, value in ((5, np.nan), (7, -np.nan), (9, np.inf)):
        x[first : first + 2, width // 3] = value
        x[first, rng.integers(width)] = np.nan
        x[first + 1, rng.integers(width)] = np.inf
    x[11, -1] = 10
    np.testing.assert_array_equal(highest(impl, x), np.argmax(x, axis=-1))
    if width > 500:  # Negative control: the last of equals differs.
        last = width - 1 - np.argmax(x[:, ::-1], axis=-1)
        assert (highest(impl, x) != last)[[1, 2, 4]].all()


def test_every_place_is_seen(impl):
    """Fails if the largest logit is found anywhere but at its place."""
    places = [0, 1, 511, 512, 4095, 4096, 16_383, 16_384, 20_479]
    x = np.zeros((len(places), 20_480), np.float32)
    x[np.arange(len(places)), places] = 1.0
    assert highest(impl, x).tolist() == places


def test_denormals_are_not_zeros():
    """Fails if a GPU's kernels take denormals for zeros, as XLA on a CPU does."""
    rows = np.float32([[0.0, 1e-45, -1e-45], [-1e-45, -2e-45, -3e-45]])
    assert highest("interpret", rows).tolist() == [1, 0]
