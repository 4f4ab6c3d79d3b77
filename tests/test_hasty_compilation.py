"""Haste reaches the compiler, and ends where it should."""

import os

import hasty_compilation
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import serialize_executable


@pytest.fixture
def switch():
    """`hasty_compilation.switch`, undone after the test."""
    before = hasty_compilation.is_on()
    yield hasty_compilation.switch
    hasty_compilation.switch(before)


def num_bytes() -> int:
    """The size of an executable whose machine code LLVM's passes change."""
    program = jax.jit(lambda x: jnp.cumsum(jnp.sin(x)) + 1).lower(jnp.ones((16,)))
    return len(serialize_executable.serialize(program.compile())[0])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="no haste but on a CPU")
def test_options_reach_the_compiler(switch):
    """Fails if a program stays as it was compiled before."""
    found = []
    # The first two fill the cache on disk: what is read from there has another size
    # than what was just compiled.
    for on in (True, False, True, False, True):
        switch(on)
        assert hasty_compilation.is_on() == on
        assert os.environ[hasty_compilation.FLAG.upper()] == str(int(on))
        found.append(num_bytes())
    assert found[2] == found[4] != found[3]


def test_files_that_are_not_marked(request):
    """`test_skinny_gemm` is one that is."""
    optimized = request.config.getoption("--optimized")
    on_cpu = jax.default_backend() == "cpu"
    assert hasty_compilation.is_on() == (on_cpu and not optimized)
