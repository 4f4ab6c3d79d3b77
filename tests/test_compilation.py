"""The compiler's options: on a GPU they reach it, on a CPU there are none."""

import jax
import jax.numpy as jnp
import pytest

from spec_jax import compilation
from spec_jax.engine import baseline, loop, round as round_lib
from spec_jax.model import row_model


UNKNOWN = {"xla_no_such_option": False}


def no_option(platform):
    """As `compilation.options`, with one that every compiler refuses on a GPU."""
    return UNKNOWN if platform == "gpu" else {}


def make_programs():
    """A loop that donates its state, and a program that it is a part of; new ones."""

    @loop.donates(static_argnames=())
    def advance(state, by):
        return state + by

    @compilation.jit
    def doubled(x, by):
        return advance(x * 2, by)

    return advance, doubled


def call_both():
    return [int(program(jnp.int32(2), jnp.int32(3))) for program in make_programs()]


def test_a_gpu_has_one_option(monkeypatch):
    """Fails if the autotuner stays on, or results do not say that it is off."""
    assert compilation.options("gpu") == {
        "xla_gpu_experimental_enable_fusion_autotuner": False
    }
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compilation.describe() == {"compiler_options": compilation.options("gpu")}
    # A CPU's compiler knows the name, and takes it.
    assert call_both() == [5, 7]


def test_options_reach_the_compiler_of_a_gpu(monkeypatch):
    """Fails if a program is compiled without them, by a call or by hand."""
    monkeypatch.setattr(compilation, "options", no_option)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    args = jnp.int32(2), jnp.int32(3)
    for program in make_programs():
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
            program(*args)
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
            program.lower(*args).compile()


def test_a_cpu_has_none(monkeypatch):
    """Fails if anything that a CPU's program is compiled with changes."""
    assert compilation.options("cpu") == compilation.describe() == {}
    monkeypatch.setattr(compilation, "options", no_option)
    assert call_both() == [5, 7]
    args = jnp.int32(2), jnp.int32(3)
    for program in make_programs()[1:]:
        lowered, plain = program.lower(*args), jax.jit(program.__wrapped__).lower(*args)
        assert lowered.as_text() == plain.as_text()
        assert lowered.compile().as_text() == plain.compile().as_text()


@pytest.mark.parametrize(
    "function",
    [baseline.generate, baseline.replay, round_lib.generate, row_model._prefill],
    ids=lambda function: function.__qualname__,
)
def test_exact_programs_are_compiled_so(function):
    """Fails if one of them is a plain `jax.jit`."""
    assert isinstance(function, compilation.Jitted)
