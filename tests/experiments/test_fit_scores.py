"""The tau that makes scores chances: fitted to tokens whose law is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from script_runs import assert_fails_with, models_of, rows_of

from experiments import fit_scores
from spec_jax.analysis import calibration


def drawn(rng, tau, *, size=4000, vocab_size=12):
    """Log weights, and tokens drawn from `softmax(log_weights / tau)`."""
    weights = rng.normal(size=(size, vocab_size)).astype(np.float32)
    noise = rng.gumbel(size=weights.shape)
    return jnp.asarray(weights), jnp.asarray(np.argmax(weights / tau + noise, axis=1))


@pytest.mark.parametrize("tau", [0.3, 0.6, 1.0])
def test_the_tau_of_the_tokens_is_found(tau, rng):
    weights, tokens = drawn(rng, tau)
    taus = jnp.asarray(calibration.TAUS, jnp.float32)
    sums = calibration.negative_log_likelihood(weights, tokens, taus)
    found = calibration.fit(np.asarray(sums), np.asarray(taus), num_tokens=len(tokens))
    assert found.tau == pytest.approx(tau, rel=0.12) and found.is_inside
    assert found.nats <= found.nats_at_one + 1e-6
    # Negative control: tokens of another row say nothing of a row.
    sums = calibration.negative_log_likelihood(weights, jnp.roll(tokens, 1), taus)
    other = calibration.fit(np.asarray(sums), np.asarray(taus), num_tokens=len(tokens))
    assert other.tau > 2 * tau


def test_likelihoods_are_those_of_log_softmax(rng):
    weights, tokens = drawn(rng, 0.7, size=50)
    taus = jnp.array([0.2, 0.7, 3.0], jnp.float32)
    found = calibration.negative_log_likelihood(weights, tokens, taus)
    for tau, total in zip(taus, found, strict=True):
        scores = jax.nn.log_softmax(weights / tau)
        expected = -jnp.take_along_axis(scores, tokens[:, None], axis=1).sum()
        np.testing.assert_allclose(total, expected, rtol=1e-5)


def test_ranks_of_equal_weights_go_by_number():
    weights = jnp.array([[1.0, 3.0, 3.0, 2.0]] * 4)
    assert calibration.ranks(weights, jnp.arange(4)).tolist() == [3, 0, 1, 2]


@pytest.mark.parametrize(
    ("sums", "count"), [([np.inf, 1.0], 3), ([np.nan, 1.0], 3), ([0.0, 0.0], 0)]
)
def test_nothing_to_fit_is_refused(sums, count):
    with pytest.raises(ValueError, match="some weight"):
        calibration.fit(np.array(sums), np.array([0.5, 2.0]), num_tokens=count)


def test_the_script_fits_each_temperature(folders, tmp_path, capsys):
    out = tmp_path / "fits.jsonl"
    sizes = ("--prompts", "2", "--gen-tokens", "6", "--temperature", "0,1")
    assert fit_scores.main([*models_of(folders), *sizes, "--out", str(out)]) == 0
    rows = rows_of(out)
    assert [row["temperature"] for row in rows] == [0, 1]
    for row in rows:
        assert 0.1 <= row["tau"] <= 4 and row["tokens"] <= 12
        assert 0 <= row["first_1"] <= row["first_8"] <= 1
    assert "at tau 1" in capsys.readouterr().out
    one = [*models_of(folders), "--prompts", "1", "--gen-tokens", "6"]
    assert_fails_with(fit_scores.main, capsys, one, "give --prompts 2")
