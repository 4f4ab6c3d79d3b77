"""Strict modes for every test: no silent promotion of ranks or dtypes."""

import gc
import os
import pathlib

import jax
import numpy as np
import pytest


jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_collection_modifyitems(items) -> None:
    """Fails where the oracle is required and cannot be imported.

    `SPEC_JAX_REQUIRE_ORACLE=1` is set in CI, so that the comparisons with Hugging
    Face are never skipped there without anyone noticing.
    """
    del items
    if os.environ.get("SPEC_JAX_REQUIRE_ORACLE") == "1":
        import torch  # noqa: F401
        import transformers  # noqa: F401


MAX_MAPPINGS = 25_000
"""Of 65,530 that Linux gives a process, unless told otherwise."""


@pytest.fixture(autouse=True, scope="module")
def bounded_mappings():
    """Drops compiled programs after a file of tests, where there are very many.

    Each of them holds mappings of memory; the process that runs out of these dies.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and len(maps.read_text().splitlines()) > MAX_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a fixed seed."""
    return np.random.default_rng(0)
