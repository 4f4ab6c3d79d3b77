"""Parts of a drafter from its target: scales of features, vocabularies, tables."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.training import eagle3, targets


class Features:
    """Features of four texts; rows outside the mask are large, and must not count."""

    def __init__(self, factors):
        drawn = np.random.default_rng(0).normal(size=(4, 9, len(factors)))
        self._mask = np.arange(9) > np.arange(4)[:, None]
        self._rows = np.where(self._mask[..., None], drawn, 1e6) * factors

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, rows):
        return {"features": self._rows[rows], "mask": self._mask[rows]}


def test_scales_even_features_out():
    """Fails if a large feature stays large, a factor is no power of two, or a row
    that is masked out counts."""
    factors = np.array([1e-3, 1.0, 37.0, 900.0, 0.0])
    scale = targets.scale_of(Features(factors))
    assert scale.dtype == np.float32 and scale.shape == (5,)
    assert np.all(np.frexp(scale)[0] == 0.5)  # powers of two
    assert np.all((0.5 < scale[:4] * factors[:4]) & (scale[:4] * factors[:4] < 2))
    assert np.isfinite(scale[4])
    np.testing.assert_array_equal(
        targets.scale_of(Features(8 * factors))[:4] * 8, scale[:4]
    )


@pytest.mark.parametrize(("width", "kept"), [(4, 0.999), (3, 0.8), (8, 0.999)])
def test_a_resized_table_holds_what_its_width_can(rng, width, kept):
    """Fails if directions other than the leading ones stay, or a wide table changes."""
    x = rng.normal(size=(50, 6)) @ np.diag([4.0, 3.0, 2.0, 1.0, 0.0, 0.0])
    made = np.asarray(eagle3._resized(jnp.asarray(x, jnp.float32), width), float)
    assert made.shape == (50, width)
    gram, whole = made @ made.T, x @ x.T
    assert np.trace(gram) >= kept * np.trace(whole)
    if kept > 0.9:
        np.testing.assert_allclose(gram, whole, atol=1e-3)


def test_the_draft_vocabulary_is_the_most_frequent_of_what_was_written():
    tokens = np.array([[9, 4, 4, 7], [9, 9, 2, 2]], np.int32)
    mask = np.array([[True] * 4, [False, True, True, False]])
    texts = targets.Texts(tokens=tokens, mask=mask)
    found = lambda size: targets.draft_vocabulary(texts, size=size, vocab_size=12)
    np.testing.assert_array_equal(found(2), [2, 4])  # prompts have 9; 7 is written once
    np.testing.assert_array_equal(found(3), [2, 4, 7])
    assert found(12) is None
    with pytest.raises(ValueError, match="it must be from 1 to 12"):
        found(13)
