"""The compiler for the H100, skipped where it is not installed unless it must run."""

import os

import hopper
import pytest


# Its assertions then show what they found, as those of a test do.
pytest.register_assert_rewrite("hopper_checks")


@pytest.fixture(scope="session")
def compiler():
    """Yields a `hopper.compiler` that all tests share. CI sets
    `SPEC_JAX_REQUIRE_CUDA_COMPILE=1`, so that a missing compiler fails there and does
    not skip the tests unnoticed."""
    why = hopper.missing()
    if why:
        if os.environ.get("SPEC_JAX_REQUIRE_CUDA_COMPILE") == "1":
            pytest.fail(why)
        pytest.skip(why)
    with hopper.compiler() as compiler:
        yield compiler
