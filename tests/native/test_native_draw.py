"""`draws.draw`: XLA's draws, rows alone and together as bits, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.native import draws as draws_lib
from spec_jax.ops import draw as draw_op
from spec_jax.rules import sampling


ROWS, VOCABULARY = 24, 700

SETTINGS = {
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.2},
    "top k": {"temperature": 1.0, "top_k": 5},
    "top p": {"temperature": 0.8, "top_p": 0.6},
    "min p": {"temperature": 1.2, "min_p": 0.05},
    "all": {"temperature": 0.7, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
    "greedy": {"temperature": 0.0},
}


def settings_of(names, *, seeds):
    """The settings of each row, by name."""
    rows = [
        sampling.make_settings(**SETTINGS[name], seed=int(seed))
        for name, seed in zip(names, seeds, strict=True)
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def rows_of(rng, names, *, vocabulary=VOCABULARY):
    """Logits, settings, positions, and rows of which two do not draw."""
    count = len(names)
    logits = rng.normal(size=(count, vocabulary)).astype(np.float32) * 3
    settings = settings_of(names, seeds=rng.integers(2**32, size=count))
    positions = rng.integers(5000, size=count).astype(np.int32)
    asked = np.ones(count, bool)
    asked[[3, count - 1]] = False
    return jnp.asarray(logits), settings, jnp.asarray(positions), jnp.asarray(asked)


def run(isa, logits, settings, positions, asked):
    how = draws_lib.Draws(settings, positions, logits.shape[1], independent=False)
    return np.asarray(draws_lib.draw(logits, how, asked=asked, isa=isa))


def mixed(count):
    return [list(SETTINGS)[i % len(SETTINGS)] for i in range(count)]


_drawn = jax.jit(sampling.sample_each)
_scores = jax.jit(jax.vmap(sampling.noisy_weights))


@pytest.mark.parametrize("vocabulary", [1, 97, 3000])
def test_tokens_are_those_of_xla(rng, isa, vocabulary):
    """Fails if a filter, the noise or its key is another: logarithms differ by units of
    the last place, and two tokens as good as each other may change places."""
    arguments = rows_of(rng, mixed(ROWS), vocabulary=vocabulary)
    logits, settings, positions, asked = arguments
    tokens = run(isa, *arguments)
    expected = _drawn(logits, settings, positions=positions, draws=asked)
    scores = np.asarray(_scores(logits, settings, positions), np.float64)
    drawn, expected = np.asarray(asked), np.asarray(expected)
    assert (tokens[~drawn] == 0).all()
    each = np.arange(ROWS)[drawn]
    lost = scores[each, expected[drawn]] - scores[each, tokens[drawn]]
    assert (np.abs(lost) < 1e-4).all()
    assert (tokens == expected)[drawn].mean() > 0.9
    if vocabulary < VOCABULARY:
        return
    # Negative controls: another seed, and another position.
    others = settings.replace(seed=settings.seed + 1)
    samples = drawn & (np.asarray(settings.temperature) != 0)
    for changed in (
        run(isa, logits, others, positions, asked),
        run(isa, logits, settings, positions + 1, asked),
    ):
        assert (changed != tokens)[samples].mean() > 0.3
        np.testing.assert_array_equal(changed[~samples], tokens[~samples])


def test_a_row_draws_as_it_does_alone(rng, isa):
    """Fails if a token depends on its neighbours, or on where its row is."""
    arguments = rows_of(rng, mixed(ROWS), vocabulary=2100)
    tokens = run(isa, *arguments)
    order = rng.permutation(ROWS)
    moved = jax.tree.map(lambda leaf: leaf[order], arguments)
    np.testing.assert_array_equal(run(isa, *moved), tokens[order])
    for row in range(ROWS):
        one = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], arguments)
        np.testing.assert_array_equal(run(isa, *one), tokens[row : row + 1])
    # What does not draw may hold anything.
    logits, *others = arguments
    spoilt = logits.at[3].set(jnp.nan)
    np.testing.assert_array_equal(run(isa, spoilt, *others), tokens)


def test_shares_are_those_of_the_distribution(isa):
    """Fails if noise repeats, or weighs more at some positions: 20,000 draws, of which
    each share is a standard deviation of 0.0035 from its chance, at most."""
    count, chances = 20_000, np.array([0.5, 0.3, 0.15, 0.05])
    logits = jnp.tile(jnp.log(jnp.asarray(chances, jnp.float32)), (count, 1))
    one = sampling.make_settings(temperature=1.0, seed=9)
    settings = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count,)), one)
    positions = jnp.arange(count, dtype=jnp.int32)
    tokens = run(isa, logits, settings, positions, jnp.ones(count, bool))
    shares = np.bincount(tokens, minlength=4) / count
    assert np.abs(shares - chances).max() < 0.015
    # Negative control: a temperature of 2.
    warm = settings.replace(temperature=settings.temperature * 2)
    tokens = run(isa, logits, warm, positions, jnp.ones(count, bool))
    assert np.abs(np.bincount(tokens, minlength=4) / count - chances).max() > 0.05


def test_targets_draw_by_it(rng):
    """Fails if native targets draw by XLA, or the operation takes other arguments."""
    logits, settings, positions, asked = rows_of(rng, mixed(ROWS))
    how = {"positions": positions, "draws": asked}
    lowered = jax.jit(draw_op.draw, static_argnames="impl").lower(
        logits, settings, **how, impl="native"
    )
    assert "spec_jax_draw" in lowered.as_text()
    tokens = draw_op.draw(logits, settings, **how, impl="native")
    testing.assert_same_bits(tokens, run(None, logits, settings, positions, asked))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": jnp.zeros((2, 5), "bfloat16")}, NotImplementedError, "float32"),
        ({"asked": jnp.ones(3, bool)}, ValueError, "asked has shape"),
        ({"positions": jnp.zeros(3, jnp.int32)}, ValueError, "positions has shape"),
    ],
)
def test_refusals(change, error, message):
    arguments = {
        "logits": jnp.zeros((2, 5)),
        "settings": settings_of(["hot", "cold"], seeds=(1, 2)),
        "positions": jnp.zeros(2, jnp.int32),
        "asked": jnp.ones(2, bool),
    }
    with pytest.raises(error, match=message):
        run(None, **arguments | change)
