"""Instruction sets: what compiles, and the order of their sums."""

import dataclasses
import pathlib
import platform
import subprocess

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native import emulation, native_oracle as oracle
from ops import row_contract

from spec_jax import testing
from spec_jax.native import build


def order_of(isa) -> oracle.SumOrder:
    return oracle.SUM_ORDERS[isa.removeprefix("emulated_")]


@pytest.mark.parametrize("isa", emulation.every(amx=True), indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("K", "N"), [(1, 1), (129, 25), (1100, 9), (40, 150)])
def test_sums_have_the_stated_order(rng, isa, dtype, K, N):
    """Fails if a tile, a lone panel or a ragged end sums in an order of its own.

    Negative control: a reversed order, other roundings or pairs give other bits. (A
    product of two bfloat16 is exact in float32: one rounding equals two there.)
    """
    x, w = (oracle.normal(rng, (n, K), dtype) for n in (17, N))
    order = order_of(isa)
    expected = order.project(x, w)
    for live in (1, 3, 4, 5, 8, 9, 17):
        found = row_contract.sums(isa, x, w, live)
        testing.assert_same_bits(found, expected[:live], what=f"{live} live")
    if K == 129:
        change = {"fused": not order.fused}
        if dtype == "bfloat16":
            change = {"has_pairs": not order.has_pairs, "has_tiles": False}
        other = dataclasses.replace(order, **change)
        for y in (order.project(x[:, ::-1], w[:, ::-1]), other.project(x, w)):
            with pytest.raises(AssertionError, match="elements differ"):
                testing.assert_same_bits(y, expected)


@pytest.mark.parametrize("isa", emulation.every(amx=True), indirect=True)
def test_pairs_take_denormals_for_zero(isa):
    """Fails if a denormal operand or partial sum is not taken for zero.

    Without pairs the processor's mode decides this, and XLA sets it.
    """
    if not (order_of(isa).has_pairs or order_of(isa).has_tiles):
        pytest.skip(f"{isa} does not multiply by pairs")
    # Row 0 has a denormal operand. Row 1 has a product of 1e-39, which is denormal, and
    # row 2 has a product to add to it, 64 elements on.
    x = np.zeros((3, 96), np.float32)
    w = np.zeros((1, 96), np.float32)
    w[0, [0, 3, 4, 68]] = 1e38, -1e38, 1e-19, 1e-19
    x[0, [0, 3]] = 1e-39
    x[1, 4] = 1e-20
    x[2, [4, 68]] = 1e-20, 1e-17
    x, w = (a.astype(jnp.bfloat16) for a in (x, w))
    y = row_contract.sums(isa, x, w)
    testing.assert_same_bits(y, order_of(isa).project(x, w))
    assert y[:2].tolist() == [[0.0], [0.0]] and y[2, 0] > 0


def compile_kernels(instructions: str, *more: str) -> str:
    """Compiles for `instructions`, or skips; returns the compiler's messages."""
    if platform.machine() != "x86_64":
        pytest.skip("no AVX-512 to compile for on this machine")
    decoding.needs("native")
    flags = (*build.FLAGS, *build.ISA_FLAGS[instructions], "-O0")  # The last -O counts.
    source = pathlib.Path(build.__file__).with_name("kernels.cc")
    command = [
        *build.find_compiler(),
        *flags,
        f"-I{jax.ffi.include_dir()}",
        *more,
        str(source),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.mark.slow
def test_avx512_compiles(tmp_path):
    """Fails if plain AVX-512 code needs another extension, or bfloat16 is multiplied by
    other instructions: the emulation, with its own intrinsics, cannot show it."""
    assert not compile_kernels("avx512", "-fsyntax-only")
    assembly = tmp_path / "kernels.s"
    others = {"avx512bf16": "tdpbf16ps", "amx": "vdpbf16ps"}
    for isa, other in others.items():
        compile_kernels(isa, "-S", "-o", str(assembly))
        text = assembly.read_text()
        assert "%zmm" in text and other not in text
        assert next(iter({*others.values()} - {other})) in text
