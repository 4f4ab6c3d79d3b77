"""What the tests of training share."""

import jax
import pytest


@pytest.fixture
def optax_promotes():
    """Optax is not written for the strict modes of other tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
