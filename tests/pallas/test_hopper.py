"""The compile check itself: its reports on known kernels, and on bad ones."""

import functools

import hopper
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax import compilation


def _double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def doubled(is_exact: bool) -> hopper.Program:
    """Builds `x + 2 x` in place, with a kernel."""
    shape = jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    kernel = pl.pallas_call(
        _double,
        grid=(8,),
        in_specs=[pl.BlockSpec((1, 1024), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((1, 1024), lambda i: (i, 0)),
        out_shape=shape,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        name="double_rows",
    )
    return hopper.Program(
        fn=lambda x: x + kernel(x), args=(shape,), donate=(0,), is_exact=is_exact
    )


def outer() -> hopper.Program:
    """Builds a product of 64 rows with 256 columns, by one warp."""

    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = plt.dot(x_ref[...], w_ref[...])

    call = functools.partial(
        pl.pallas_call,
        out_shape=jax.ShapeDtypeStruct((64, 256), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        name="outer",
    )
    args = (jax.ShapeDtypeStruct((64, n), jnp.bfloat16) for n in (64, 256))
    return hopper.Program(fn=call(kernel), args=tuple(args))


def test_nothing_is_chosen_by_timing(compiler):
    """Fails if the options of exact programs do not reach XLA's compiler for a GPU."""
    wanted = {name: str(on).lower() for name, on in compilation.options("gpu").items()}
    for is_exact in (True, False):  # The other way is the negative control.
        told = compiler.compile(doubled, is_exact).options
        assert (wanted.items() <= told.items()) == is_exact


def test_spills_are_reported(compiler):
    """Negative control: 64 times 256 sums do not fit one warp's registers."""
    report = compiler.compile(outer)
    with pytest.raises(AssertionError, match="bytes are spilt"):
        report.assert_fits()
