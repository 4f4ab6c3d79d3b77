"""Strict modes for every test: no silent promotion of ranks or dtypes."""

import jax
import numpy as np
import pytest


jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a fixed seed."""
    return np.random.default_rng(0)
