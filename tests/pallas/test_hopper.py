"""The compile check itself: what it reports of known kernels, and of bad ones."""

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


def doubled(
    num_warps: int = 4, width: int = 1024, is_exact: bool = True
) -> hopper.Program:
    """`x + 2 x` in place, with a kernel that holds a row of `width`."""
    shape = jax.ShapeDtypeStruct((8, width), jnp.float32)
    kernel = pl.pallas_call(
        _double,
        grid=(8,),
        in_specs=[pl.BlockSpec((1, width), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((1, width), lambda i: (i, 0)),
        out_shape=shape,
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        name="double_rows",
    )
    return hopper.Program(
        fn=lambda x: x + kernel(x), args=(shape,), donate=(0,), is_exact=is_exact
    )


def outer(width: int) -> hopper.Program:
    """A product of a tile of 16 rows with `width` columns, by one warp."""

    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = plt.dot(x_ref[...], w_ref[...])

    call = functools.partial(
        pl.pallas_call,
        out_shape=jax.ShapeDtypeStruct((64, width), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        name="outer",
    )
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 64), (64, width))
    ]
    return hopper.Program(fn=call(kernel), args=tuple(shapes))


def looped() -> hopper.Program:
    """The kernel of `doubled` ten times, in a loop on the device."""
    program = doubled()

    def repeat(x):
        return jax.lax.fori_loop(0, 10, lambda _, x: program.fn(x), x)

    return hopper.Program(fn=repeat, args=program.args)


def test_a_report(compiler):
    """Fails if the machine code, the launch or the aliasing is not what was made."""
    report = compiler.compile(doubled)
    report.assert_fits()
    kernel, launch = report.kernel("double_rows"), report.launch("double_rows")
    assert kernel.arch == "sm_90a" and kernel.threads == launch.threads == 128
    assert 4 < kernel.registers < 100
    assert launch.grid == (8, 1, 1)
    assert kernel.count("EXIT") == 1 and kernel.count("STG") >= 1
    assert hopper.blocks_per_multiprocessor(kernel, launch) == 16
    assert report.aliases == (("{}", 0),) and report.alias_bytes == 8 * 1024 * 4
    assert len(report.launches) == 2


def test_nothing_is_chosen_by_timing(compiler):
    """Fails if the options of exact programs do not reach XLA's compiler for a GPU."""
    wanted = {name: str(on).lower() for name, on in compilation.options("gpu").items()}
    for is_exact in (True, False):  # The other way is the negative control.
        told = compiler.compile(doubled, is_exact=is_exact).options
        assert (wanted.items() <= told.items()) == is_exact


def test_the_code_of_one_program_is_one(compiler):
    """Fails if two compilations differ, or two different kernels do not."""
    first, second, other = (
        compiler.compile(doubled, width=width).kernel("double_rows").sass
        for width in (1024, 1024, 512)
    )
    assert first == second != other


def test_a_loop_is_seen(compiler):
    """Fails if launches in a loop are lost: those of a whole step are counted."""
    report = compiler.compile(looped)
    assert report.launch("double_rows").depth >= 1
    assert any(thunk.kind == "kWhile" for thunk in report.thunks)


def test_spills_are_reported(compiler):
    """Negative control: 64 times 256 sums do not fit one warp's registers."""
    report = compiler.compile(outer, 256)
    with pytest.raises(AssertionError, match="bytes are spilt"):
        report.assert_fits()


def test_too_many_threads_are_reported(compiler):
    """Negative control: 64 warps are more than a block may have."""
    report = compiler.compile(doubled, num_warps=64)
    with pytest.raises(AssertionError, match="2048 threads"):
        report.assert_fits()


def test_an_abort_is_an_error(compiler):
    """Negative control: three warps end the compiler's process, and only that."""
    with pytest.raises(hopper.CompilerAborted, match="doubled.*num_warps"):
        compiler.compile(doubled, num_warps=3)
    compiler.compile(doubled).assert_fits()


def test_missing_compilers_are_named(monkeypatch):
    """Fails if the message does not say what to install."""
    monkeypatch.setattr(hopper.importlib.metadata, "version", lambda name: "0.0.1")
    with pytest.raises(RuntimeError, match=r"0\.0\.1: pip install.*\[cuda-compile\]"):
        hopper.Compiler()
