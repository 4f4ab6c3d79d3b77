"""The compiler's options: on a GPU they reach it, on a CPU there are none."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import spec_jax as sj
from experiments.lib import runs
from spec_jax import compilation
from spec_jax.engine import round as round_lib
from spec_jax.ops import dispatch


UNKNOWN = {"xla_no_such_option": False}


def no_option(platform):
    """Returns options as `compilation.options` does; on a GPU, an unknown one."""
    return UNKNOWN if platform == "gpu" else {}


def make_programs():
    """Returns a new loop that donates its state, and a new program that contains it."""

    @functools.partial(compilation.jit, donate_argnames=("state",))
    def advance(state, by):
        return state + by

    @compilation.jit
    def doubled(x, by):
        return advance(x * 2, by)

    return advance, doubled


def test_a_gpu_has_one_option(monkeypatch):
    """Fails if the autotuner stays on, or results do not say that it is off."""
    option = {"xla_gpu_experimental_enable_fusion_autotuner": False}
    assert compilation.options("gpu") == option
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compilation.describe() == {"compiler_options": option}
    # A CPU's compiler knows the option, and accepts it.
    for program, expected in zip(make_programs(), (5, 7), strict=True):
        assert int(program(jnp.int32(2), jnp.int32(3))) == expected


def test_options_reach_the_compiler_of_a_gpu(monkeypatch):
    """Fails if a program is compiled without the options, by a call or by `lower`."""
    monkeypatch.setattr(compilation, "options", no_option)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    args = jnp.int32(2), jnp.int32(3)
    for program in make_programs():
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
            program(*args)
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
            program.lower(*args).compile()


def test_a_cpu_has_none(monkeypatch):
    """Fails if the options change a CPU's program, before or after compiling."""
    assert compilation.options("cpu") == compilation.describe() == {}
    monkeypatch.setattr(compilation, "options", no_option)
    args = jnp.int32(2), jnp.int32(3)
    _, program = make_programs()
    lowered, plain = program.lower(*args), jax.jit(program.__wrapped__).lower(*args)
    assert lowered.as_text() == plain.as_text()
    assert lowered.compile().as_text() == plain.compile().as_text()


FLAG = "--xla_gpu_enable_command_buffer"
FLAGS = {
    "": "",
    f"{FLAG}=+WHILE": "WHILE",
    f"--a=b {FLAG}=+CONDITIONAL,+WHILE --c": "WHILE and CONDITIONAL",
    f"{FLAG}=FUSION,CUBLAS,WHILE": "WHILE",
    f"--xla_gpu_graph_min_graph_size=1 {FLAG}=FUSION,CUBLAS": "",
    f"{FLAG}=+WHILE,+CONDITIONAL {FLAG}=-WHILE": "CONDITIONAL",
    f"{FLAG}=+WHILE {FLAG}=FUSION": "",
    f"{FLAG}=+WHILE {FLAG}=": "",
}
"""Flags, and the commands in them with which results were wrong."""


@pytest.mark.parametrize(("flags", "found"), FLAGS.items())
@pytest.mark.parametrize("is_file", [False, True])
def test_loops_in_cuda_graphs_are_refused(flags, found, is_file, tmp_path, monkeypatch):
    """Fails if bad flags pass when a GPU's code is chosen, or harmless ones do not."""
    if is_file:
        (tmp_path / "flags").write_text(flags)
        flags = str(tmp_path / "flags")
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert dispatch.resolve("xla") == "xla"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    if found:
        for impl in ("auto", "triton", "xla"):
            with pytest.raises(ValueError, match=f"has {found}, with .* wrong tokens"):
                dispatch.resolve(impl)
        monkeypatch.setenv(compilation.ALLOW_VARIABLE, "1")
    assert dispatch.resolve("auto") == "triton"


@pytest.mark.slow
def test_a_native_round_copies_no_text():
    """Fails if tokens that a round commits are not written in place, or if bookkeeping
    comes to be many more kernels."""
    lm = sj.load(impl="native", gamma_max=4)
    sizes = {"gamma": 4, "gen_tokens": 8, "capacity": 4096, "page_size": 16}
    settings = runs.Settings(lm=lm, **sizes)
    scheduler = runs.make_scheduler(settings)
    state = scheduler.begin(runs.make_request(settings, [1, 2, 3]))
    lowered = round_lib.generate.lower(
        scheduler.speculator, state, max_rounds=jnp.int32(8)
    )
    # A round is the outermost loop's body.
    bodies = re.split(r"\n(?=(?:ENTRY )?%[^\n]*\{\n)", lowered.compile().as_text())
    of_rounds = max(bodies, key=lambda body: body.count("custom-call("))
    kinds = "call|conditional|copy|custom-call|fusion|while"
    kernels = re.findall(rf"= (.*? (?:{kinds}))\(", of_rounds)
    assert len(kernels) <= 90
    assert not [kernel for kernel in kernels if "4097]" in kernel and "copy" in kernel]
