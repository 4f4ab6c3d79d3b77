"""Strict modes for every test, and where what is compiled is kept."""

import gc
import os
import pathlib

import hypothesis
import jax
import numpy as np
import pytest
import random_weights


jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


# Traces are millions of objects, which a collection walks for a tenth of a test's time.
gc.set_threshold(100_000, 50, 100)

random_weights.install()

# No example fails, and none is refused, because the machine is busy with others.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")


def pytest_configure(config) -> None:
    """Keeps compiled programs in pytest's own cache, with what failed last.

    The workers and the processes that tests start share them, and so does the next
    run; `pytest --cache-clear` forgets them. It proves no less: the key of an entry
    holds the whole program, the compiler's options, the versions of jax and jaxlib
    and the device, so that a program which a change made another one is compiled
    again. Native kernels are called by name and are no part of an entry.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return  # The user's own, or in a worker what is set below.
    try:
        folder = config.cache.mkdir("compiled")
    except (AttributeError, OSError):
        return  # `-p no:cacheprovider`, or a checkout that cannot be written to.
    for name, value in {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # For processes that tests start.


LONGEST = [
    f"test_{name}.py"
    for name in (
        "hopper_model triton_model row_attention rows round mesh tree_rows "
        "every_drafter block eagle3 draft_trees processing samples front_door "
        "native_sanitizers native_threads readme"
    ).split()
]
"""Files that one process would be left with at the end, while the other waits."""


def pytest_collection_modifyitems(items) -> None:
    """Puts the longest files first; fails where a required oracle is not installed.

    `SPEC_JAX_REQUIRE_ORACLE=1` is set in CI, so that the comparisons with Hugging
    Face are never skipped there without anyone noticing.
    """
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))
    if os.environ.get("SPEC_JAX_REQUIRE_ORACLE") == "1":
        import flax  # noqa: F401
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


@pytest.fixture
def optax_promotes():
    """Promotion as jax has it by default: optax is not written for strict modes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
