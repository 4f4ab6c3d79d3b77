"""Strict modes for every test, and the place where compiled programs are kept."""

import gc
import os
import pathlib

import hypothesis
import jax
import numpy as np
import pytest
import random_weights
import tiny_pair

import spec_jax as sj


jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


# Traces are millions of objects: by default the collector takes a tenth of a test.
gc.set_threshold(100_000, 50, 100)

random_weights.install()

# Hypothesis must not fail or refuse an example because the machine is busy.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")


def pytest_configure(config) -> None:
    """Keeps compiled programs in pytest's own cache, beside its list of failed tests.

    The workers and the processes that tests start share them, and so does the next
    run; `pytest --cache-clear` forgets them. Tests prove no less by it: the key of an
    entry holds the whole program, the compiler's options, the versions of jax and
    jaxlib and the device, so that a changed program is compiled again. Native kernels
    are called by name and are not part of an entry.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return  # The user's own folder, or in a worker the one that is set below.
    try:
        folder = config.cache.mkdir("compiled")
    except (AttributeError, OSError):
        return  # `-p no:cacheprovider`, or a checkout that is read-only.
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
        "every_drafter heads head_training draft_model processing samples front_door "
        "native_threads readme"
    ).split()
]
"""The slowest files: begun last, one process would run them while others wait."""


def pytest_collection_modifyitems(items) -> None:
    """Puts the longest files first; fails where a required oracle is not installed.
    `SPEC_JAX_REQUIRE_ORACLE=1` is set in CI, so that the comparisons with Hugging Face
    are never skipped there without anyone noticing."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))
    if os.environ.get("SPEC_JAX_REQUIRE_ORACLE") == "1":
        import flax  # noqa: F401
        import torch  # noqa: F401
        import transformers  # noqa: F401


MAX_MAPPINGS = 25_000
"""Memory mappings that a process may keep; Linux allows 65,530 by default."""


@pytest.fixture(autouse=True, scope="module")
def bounded_mappings():
    """Drops compiled programs after a file of tests, if there are very many. Each
    program holds mappings of memory; a process that runs out of mappings dies."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and len(maps.read_text().splitlines()) > MAX_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def rng() -> np.random.Generator:
    """Returns a generator with a fixed seed."""
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Returns the folders of a target and a draft, which tests must not change."""
    return tiny_pair.write(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def lm(folders):
    """Loads the pair of `folders`: random weights; a token is a byte."""
    return sj.load(folders[0], draft=folders[1], gamma_max=4)


@pytest.fixture(scope="session")
def cycle(tmp_path_factory):
    """Returns a model that writes `tiny_pair.CYCLE` again and again."""
    return tiny_pair.load_cycle(tmp_path_factory.mktemp("cycle"))


@pytest.fixture
def optax_promotes():
    """Promotes as jax does by default: optax is not written for strict modes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
