"""Instruction sets: which is chosen, what compiles, and the order of their sums."""

import dataclasses
import functools
import pathlib
import platform
import subprocess

import emulation
import jax
import jax.numpy as jnp
import native_oracle as oracle
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.native import build, calls


AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"}
DTYPES = ("float32", "bfloat16")

_project = jax.jit(calls.project, static_argnames=("eps", "out_dtype", "isa"))


def products(isa, x, w):
    """Sums of every row, before any rounding to the model's dtype."""
    options = {
        "norm": None,
        "residual": None,
        "num_active": np.int32(len(x)),
        "eps": 0.0,
    }
    return np.asarray(_project(x, w, **options, out_dtype=jnp.float32, isa=isa))


def order_of(isa) -> oracle.SumOrder:
    return oracle.SUM_ORDERS[isa.removeprefix("emulated_")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize(
    ("K", "N"), [(1, 1), (33, 13), (129, 25), (1100, 9), (40, 150)]
)
def test_sums_have_the_stated_order(rng, isa, dtype, rows, K, N):
    """Fails if a tile, a lone panel or a ragged end sums in an order of its own."""
    x, w = (oracle.normal(rng, (n, K), dtype) for n in (rows, N))
    expected = order_of(isa).project(x, w)
    testing.assert_same_bits(products(isa, x, w), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_order_is_caught(rng, isa, dtype):
    """Negative control: the order reversed, other roundings or pairs are other bits.

    (A product of two bfloat16 is a float32: it cannot tell one rounding from two.)
    """
    x, w = (oracle.normal(rng, (n, 129), dtype) for n in (4, 25))
    order, y = order_of(isa), products(isa, x, w)
    change = {"fused": not order.fused}
    if dtype == "bfloat16":
        change = {"has_pairs": not order.has_pairs}
    others = (
        order.project(x[:, ::-1], w[:, ::-1]),
        dataclasses.replace(order, **change).project(x, w),
    )
    for other in others:
        with pytest.raises(AssertionError, match="elements differ"):
            testing.assert_same_bits(y, other)


def test_pairs_take_denormals_for_zero(isa):
    """Fails if a denormal operand, or a sum on its way, counts where none should.

    Without pairs that is the processor's mode, which is XLA's to choose.
    """
    if not order_of(isa).has_pairs:
        pytest.skip(f"{isa} does not multiply by pairs")
    # Terms: a denormal operand; 1e-39, which is denormal; and, 64 elements on, what
    # would be added to it.
    x = np.zeros((3, 96), np.float32)
    w = np.zeros((1, 96), np.float32)
    w[0, [0, 3, 4, 68]] = 1e38, -1e38, 1e-19, 1e-19
    x[0, [0, 3]] = 1e-39
    x[1, 4] = 1e-20
    x[2, [4, 68]] = 1e-20, 1e-17
    x, w = (a.astype(jnp.bfloat16) for a in (x, w))
    y = products(isa, x, w)
    testing.assert_same_bits(y, order_of(isa).project(x, w))
    assert y[:2].tolist() == [[0.0], [0.0]] and y[2, 0] > 0


def test_the_widest_set_is_chosen(monkeypatch):
    """Fails if a set is chosen that the processor lacks, or a narrower one."""
    chosen = {
        "avx512bf16": AVX512 | {"avx512_bf16", "avx2"},
        "avx512": AVX512 | {"avx2"},
        "avx2": {"avx512_bf16", "avx512f", "avx2", "fma"},
        "portable": {"avx2"},
    }
    assert list(chosen) == list(build.ISA_FLAGS)
    for isa, features in chosen.items():
        has = functools.partial(frozenset, features)
        monkeypatch.setattr(build, "cpu_features", has)
        assert build.available_isas()[0] == isa


@pytest.mark.parametrize(
    ("own", "lacking"),
    [
        (("avx2", "portable"), ["emulated_avx512bf16", "emulated_avx512"]),
        (("avx512", "avx2", "portable"), ["emulated_avx512bf16"]),
        (("avx512bf16", "avx512", "avx2", "portable"), []),
    ],
)
def test_what_a_processor_lacks_is_emulated(own, lacking, monkeypatch):
    monkeypatch.setattr(build, "available_isas", lambda: own)
    assert emulation.lacking() == lacking


def test_emulation_can_be_required(monkeypatch):
    """Fails if a run that must emulate AVX-512 passes without."""
    monkeypatch.setattr(emulation, "_is_installed", lambda: False)
    monkeypatch.delenv("SPEC_JAX_REQUIRE_SIMDE", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no SIMD Everywhere"):
        emulation.install("emulated_avx512", monkeypatch)
    monkeypatch.setenv("SPEC_JAX_REQUIRE_SIMDE", "1")
    with pytest.raises(pytest.fail.Exception, match="no SIMD Everywhere"):
        emulation.install("emulated_avx512", monkeypatch)


def compile_kernels(instructions: str, *more: str) -> str:
    """Returns what the compiler says, with the flags of `instructions`, or skips."""
    if platform.machine() != "x86_64":
        pytest.skip("no AVX-512 to compile for on this machine")
    try:
        compiler = build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    flags = (*build.FLAGS, *build.ISA_FLAGS[instructions], "-O0")  # The last counts.
    source = pathlib.Path(build.__file__).with_name("kernels.cc")
    command = [*compiler, *flags, f"-I{jax.ffi.include_dir()}", *more, str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.mark.slow
def test_pairs_compile_to_their_instruction(tmp_path):
    """Fails if the compiler's own intrinsics are used wrongly, or not at all."""
    assembly = tmp_path / "kernels.s"
    compile_kernels("avx512bf16", "-S", "-o", str(assembly))
    text = assembly.read_text()
    assert "vdpbf16ps" in text and "%zmm" in text


@pytest.mark.slow
def test_avx512_compiles():
    """Fails if AVX-512 alone lacks what its code uses."""
    assert not compile_kernels("avx512", "-fsyntax-only")
