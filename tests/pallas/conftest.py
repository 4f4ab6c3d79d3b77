"""The compiler for the H100, skipped where it is not installed unless it must run."""

import functools
import os

import hopper
import pytest


# What is asserted there is to say what it found, as in a test.
pytest.register_assert_rewrite("hopper_launches")


@pytest.fixture(scope="session")
def compiler():
    """A `hopper.Compiler` that all tests share.

    `SPEC_JAX_REQUIRE_CUDA_COMPILE=1` is set in CI, so that what is compiled for the
    GPU is never skipped there without anyone noticing.
    """
    why = hopper.missing()
    if why:
        if os.environ.get("SPEC_JAX_REQUIRE_CUDA_COMPILE") == "1":
            pytest.fail(why)
        pytest.skip(why)
    with hopper.Compiler() as compiler:
        yield compiler


@pytest.fixture(scope="session")
def compiled(compiler):
    """Compiles each program once."""
    return functools.cache(compiler.compile)
