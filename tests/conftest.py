"""Strict modes for every test, and where what is compiled is kept."""

import gc
import os
import pathlib
import re

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
    "unhurried",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
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


TESTS = pathlib.Path(__file__).parent

LONGEST = (
    "test_hopper_model.py",
    "test_triton_model.py",
    "test_row_attention.py",
    "test_row_contract.py",
    "test_front_door.py",
    "test_recorder.py",
    "test_notebooks.py",
    "test_mesh.py",
    "test_mesh_models.py",
    "test_tree_rows.py",
)
"""Files that one process would be left with at the end, while the other waits."""


_OF_MODELS = "eagle3_head families fingerprint observe qwen3 row_model rows"
BITS = (
    *(f"model/test_{name}.py" for name in (*_OF_MODELS.split(), "tree_rows")),
    *(
        "ops/test_heads_of_a_mesh.py",
        "paging/test_pool_copies.py",
        "parallel/test_mesh.py",
    ),
    *("engine/test_round.py", "engine/test_trees.py"),
    *("engine/test_features.py", "engine/test_slot_rows.py"),
    "engine/test_processing.py",
    "experiments/test_parity_script.py",
    *("test_own_models.py", "test_recorder.py", "test_scoring.py"),
)
"""Files and folders whose tests compare bits of the library's own compiled programs, or
look at these: they are marked `bits`, and CI compiles them as users do."""


def pytest_ignore_collect(collection_path, config) -> bool | None:
    """Leaves out files of which `-m` takes no test, where it says `bits` or not.

    Each process would import all of them otherwise, for several seconds.
    """
    asked = re.fullmatch(r"(?:[\w ]+ and )?(not )?bits", config.option.markexpr)
    is_file = collection_path.suffix == ".py" and TESTS in collection_path.parents
    if not asked or not is_file or " or " in config.option.markexpr:
        return None
    compares = collection_path.relative_to(TESTS).as_posix().startswith(BITS)
    return compares == bool(asked[1]) or None


@pytest.hookimpl(tryfirst=True)  # Before `-m` looks at the markers.
def pytest_collection_modifyitems(items) -> None:
    """Puts the longest files first; fails where a required oracle is not installed.

    `SPEC_JAX_REQUIRE_ORACLE=1` is set in CI, so that the comparisons with Hugging
    Face are never skipped there without anyone noticing.
    """
    _leave_few(items)
    for item in items:
        if item.path.relative_to(TESTS).as_posix().startswith(BITS):
            item.add_marker(pytest.mark.bits)
    items.sort(key=lambda item: item.path.name not in LONGEST)
    if os.environ.get("SPEC_JAX_REQUIRE_ORACLE") == "1":
        import flax  # noqa: F401
        import torch  # noqa: F401
        import transformers  # noqa: F401


def _leave_few(items) -> None:
    """Makes all cases of a test slow but as many as its marker `few` says.

    They are marked `rest` too: of what CI compiles for a GPU all is slow.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        is_run = not item.get_closest_marker("slow") or item.get_closest_marker("h100")
        if is_run and item.get_closest_marker("few"):
            name, _, _ = item.nodeid.partition("[")
            cases.setdefault(name, []).append(item)
    for found in cases.values():
        (count,) = found[0].get_closest_marker("few").args
        kept = _spread(found, count)
        for item in found:
            if item not in kept:
                item.add_marker(pytest.mark.slow)
                item.add_marker(pytest.mark.rest)


def _spread(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """Returns the first case, and those with the most values not yet seen.

    Where several have as many, the one nearest to where even spacing puts it.
    """
    kept = cases[:1]
    seen = _values(cases[0])
    for turn in range(1, min(count, len(cases))):
        place = len(cases) * turn // count
        nearest_first = sorted(cases, key=lambda case: abs(cases.index(case) - place))
        left = [case for case in nearest_first if case not in kept]
        kept.append(max(left, key=lambda case: len(_values(case) - seen)))
        seen |= _values(kept[-1])
    return kept


def _values(case: pytest.Item) -> set[tuple[str, int]]:
    """A case's parameters by name and identity: cases share the values of a list."""
    return {(name, id(value)) for name, value in case.callspec.params.items()}


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
