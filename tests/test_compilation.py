"""The compiler's options: on a GPU they reach it, on a CPU there are none; there
bookkeeping is compiled to one kernel, and its values stay the same."""

import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
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


MARK = "inlineable"


def _all_sorts(state, size, *, start):
    """Does a bit of everything that bookkeeping does, at any size."""
    row, count, flag, pages = state
    places = jnp.arange(row.shape[0], dtype=jnp.int32)
    is_new = (places >= start) & (places < start + size)
    count = count + jnp.sum(is_new, dtype=jnp.int32)
    row = jnp.where(is_new, row.at[places * 2].get(mode="clip") - count, row)
    row = jax.lax.dynamic_update_index_in_dim(row, count, start, axis=0)
    flag = flag | (jnp.argmax(row).astype(jnp.int32) == jnp.max(row)) | jnp.any(is_new)
    return (row, count, flag, pages), {"static": size, "none": None, "one": 1}


def _folds_away(state, size, *, start):
    """Computes values in which row, flag and start vanish once constants are folded."""
    row, count, flag, pages = state
    never = jnp.sum(row * 0, dtype=jnp.int32) + start - start
    return (row * 0, count + never, flag & False, pages), row.shape[0] + size


def _arguments(length):
    row = jnp.asarray(np.random.default_rng(length).integers(-9, 9, length), jnp.int32)
    pages = jnp.ones((4, 3), jnp.bfloat16)
    return (row, jnp.int32(3), jnp.asarray(False), pages), jnp.int32(min(1, length - 1))


def _compiled(function, state, start):
    marked = compilation.one_kernel(function)
    return jax.jit(lambda state, start: marked(state, 2, start=start)).lower(
        state, start
    )


@pytest.mark.parametrize(
    ("function", "length"),
    # Above 256 elements a returned array must depend on the one that it replaces.
    [*itertools.product((_all_sorts, _folds_away), (1, 256)), (_all_sorts, 300)],
)
def test_one_kernel_of_the_same_values(function, length):
    state, start = _arguments(length)
    compiled = _compiled(function, state, start).compile()
    entry = compiled.as_text().split("ENTRY")[1]
    assert entry.count(" call(") == 1
    assert entry.count(" fusion(") == 0
    expected = function(state, 2, start=start)
    chex.assert_trees_all_equal(compiled(state, start), expected)


def _scatters(state, size, *, start):
    return state[0].at[state[0]].add(size, mode="drop"), start + 1


def _adds_floats(state, size, *, start):
    return state[0].astype(jnp.float32) * 0.1, start + 1


def _loops(state, size, *, start):
    return jax.lax.while_loop(lambda x: x < 9, lambda x: x + size, start), start + 1


@pytest.mark.parametrize("function", [_scatters, _adds_floats, _loops])
def test_what_it_cannot_do_stays_as_it_is(function):
    """Negative control: these lack the mark; a function made one kernel has it."""
    state, start = _arguments(9)
    compiled = _compiled(function, state, start).compile()
    assert MARK not in compiled.as_text()
    expected = jax.jit(lambda s, x: function(s, 2, start=x))(state, start)
    chex.assert_trees_all_equal(compiled(state, start), expected)
    assert MARK in _compiled(_all_sorts, state, start).compile().as_text()


def _kernels_of_a_round(lm) -> list[str]:
    """Returns the kernels of a round's program: operations of its outermost loop."""
    sizes = {"gamma": 4, "gen_tokens": 8, "capacity": 4096, "page_size": 16}
    settings = runs.Settings(lm=lm, **sizes)
    scheduler = runs.make_scheduler(settings)
    state = scheduler.begin(runs.make_request(settings, [1, 2, 3]))
    lowered = round_lib.generate.lower(
        scheduler.speculator, state, max_rounds=jnp.int32(8)
    )
    bodies = re.split(r"\n(?=(?:ENTRY )?%[^\n]*\{\n)", lowered.compile().as_text())
    of_rounds = max(bodies, key=lambda body: body.count("custom-call("))
    kinds = "call|conditional|copy|custom-call|fusion|while"
    return re.findall(rf"= (.*? (?:{kinds}))\(", of_rounds)


@pytest.mark.slow
def test_a_native_round_has_few_kernels(monkeypatch):
    lm = sj.load(impl="native", gamma_max=4)
    kernels = _kernels_of_a_round(lm)
    assert len(kernels) <= 44
    # Tokens that a round commits are written in place: the text is not copied.
    assert not [kernel for kernel in kernels if "4097]" in kernel and "copy" in kernel]
    jax.clear_caches()
    monkeypatch.setattr(compilation, "_TAKEN", frozenset())
    assert len(_kernels_of_a_round(lm)) > 60
