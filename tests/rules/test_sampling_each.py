"""Rows that draw by settings of their own: each as it would draw alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.rules import sampling


ROWS, VOCAB = 6, 311
SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 3},
    {"temperature": 2.0, "seed": 4},
    {"temperature": 1.0, "min_p": 0.05, "seed": 2**32 - 1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 9},
    {"temperature": 1.3, "top_k": 5, "seed": 3},
)
sample_each = jax.jit(sampling.sample_each)
sample = jax.jit(sampling.sample)


def stacked(order=range(ROWS)) -> sampling.SamplingSettings:
    each = [sampling.make_settings(**SETTINGS[row]) for row in order]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)


def make_rows(rng):
    """Logits and positions: two rows share a position, and no two much else."""
    logits = (2 * rng.standard_normal((ROWS, VOCAB))).astype(np.float32)
    positions = rng.integers(0, 1000, ROWS).astype(np.int32)
    positions[1] = positions[2]
    return logits, positions


def differences(rng, settings, *, shift=0) -> int:
    """How many of the tokens of 4 slabs are not those of each row alone."""
    count = 0
    for _ in range(4):
        logits, positions = make_rows(rng)
        found = sample_each(
            logits, settings, positions=positions + shift, draws=np.ones((ROWS,), bool)
        )
        for row in range(ROWS):
            own = sampling.make_settings(**SETTINGS[row])
            alone = sample(logits[row], own, jnp.int32(positions[row]))
            count += int(alone) != int(found[row])
    return count


def test_each_row_draws_as_it_does_alone(rng):
    """Fails if a row takes another row's settings, noise or position."""
    assert differences(rng, stacked()) == 0


def test_settings_and_positions_of_others_are_caught(rng):
    """Negative control: rolled by a row, and keyed one position late."""
    assert differences(rng, stacked([5, 0, 1, 2, 3, 4])) > 4
    assert differences(rng, stacked(), shift=1) > 4


@pytest.mark.parametrize("chosen", [[], [2], [0, 5], [1, 3, 4]])
def test_rows_that_do_not_draw_are_zero_and_unread(rng, chosen):
    """Fails if a row that draws nothing is computed, or spoils those that do."""
    logits, positions = make_rows(rng)
    settings = stacked()
    every = np.asarray(
        sample_each(logits, settings, positions=positions, draws=np.ones(ROWS, bool))
    )
    assert np.count_nonzero(every) == ROWS
    draws = np.isin(np.arange(ROWS), chosen)
    poisoned = np.where(draws[:, None], logits, np.float32(np.nan))
    found = sample_each(poisoned, settings, positions=positions, draws=draws)
    np.testing.assert_array_equal(found, np.where(draws, every, 0))
