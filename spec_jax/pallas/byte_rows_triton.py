"""Rows rounded for products with weights of eight bits, on a GPU (Pallas Triton).

Each block of 32 values of a row becomes integers from -127 to 127 and one float32
scale, as `native.blocks` says and with its bits: the largest magnitude / 127, integers
rounded to nearest, ties to even. One program owns `BLOCKS` blocks of a row, reads them
once, 64 bytes each, and writes 36. Programs of padding rows read nothing.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import launch


BLOCK = 32  # values that share a scale
BLOCKS = 32  # of one program
_MOST, _LEAST = 127.0, 1e-36  # largest integer; blocks up to this become zeros


def round_rows(
    x: jax.Array,  # [R, K], of whole slabs
    *,
    num_active: jax.Array,  # [] int32
) -> tuple[jax.Array, jax.Array]:
    """Returns integers int8 `[2 P, R, 32]` and scales float32 `[2 P, R]`.

    Integers past `K` are 0. A block with a value that is not finite has the scale NaN.
    Padding rows are uninitialised.
    """
    R, K = x.shape
    count = num_blocks(K)
    results = (
        jax.ShapeDtypeStruct((count, R, BLOCK), jnp.int8),
        jax.ShapeDtypeStruct((count, R), jnp.float32),
    )
    inputs, grid = (num_active.reshape(1), x), (R, pl.cdiv(count, BLOCKS))
    return launch.run(
        _kernel, inputs, results, grid=grid, name="byte_rows", num_terms=K
    )


def num_blocks(K: int) -> int:
    """Returns how many blocks a row of `K` values has, an even number."""
    return 2 * pl.cdiv(K, 2 * BLOCK)


def _kernel(
    num_active_ref,  # [1]
    x_ref,  # [R, K]
    values_ref,  # [2 P, R, 32]
    scales_ref,  # [2 P, R]
    *,
    num_terms: int,
):
    row = launch.program(0)
    block = pl.program_id(1) * BLOCKS + jnp.arange(BLOCKS)[:, None]
    lane = jnp.arange(BLOCK)[None, :]

    @pl.when(row < num_active_ref[0])
    def _():
        index = block * BLOCK + lane
        x = plt.load(x_ref.at[row, index], mask=index < num_terms, other=0)
        x = x.astype(jnp.float32)
        is_finite = jnp.abs(x) < jnp.inf
        most = jnp.max(jnp.where(is_finite, jnp.abs(x), jnp.inf), axis=1, keepdims=True)
        inverse = _exact("div.rn.f32 $0, 0f42FE0000, $1;", lambda m: _MOST / m, most)
        inverse = jnp.where(most > _LEAST, inverse, 0.0)
        scale = _exact("div.rn.f32 $0, $1, 0f42FE0000;", _share, most)
        scale = jnp.where(most < jnp.inf, scale, jnp.nan)
        nearest = _exact(
            "cvt.rni.s32.f32 $0, $1;",
            lambda v: jnp.round(v).astype(jnp.int32),
            jnp.where(is_finite, x * inverse, 0.0),
            dtype=jnp.int32,
        )
        is_block = block < values_ref.shape[0]
        inside = jnp.broadcast_to(is_block, nearest.shape)
        plt.store(
            values_ref.at[block, row, lane], nearest.astype(jnp.int8), mask=inside
        )
        plt.store(scales_ref.at[block, row], scale, mask=is_block)


def _share(most: jax.Array) -> jax.Array:
    """Divides by 127, hidden from XLA: it would multiply by a constant's inverse."""
    return most / jnp.where(most < 0, most, _MOST)


def _exact(code: str, meaning, x: jax.Array, *, dtype=jnp.float32):
    """Applies an instruction that Triton lacks: exact division, rounding to integers.

    Args:
      code: an instruction of PTX, `$0` its result.
      meaning: the same as a function of jax, for interpret mode.
    """
    if launch.is_interpreted():
        return meaning(x)
    (y,) = plt.elementwise_inline_asm(
        code,
        args=[x],
        constraints="=r,f" if dtype == jnp.int32 else "=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, dtype)],
    )
    return y
