"""Sums of the skinny GEMM with weights of eight bits (Pallas Triton).

    y[r, n] = sum_b (sum_i x[b, r, i] * w[b, n, i]) * (x_scale[b, r] * w_scale[b, n])

A block of 32 is one product of integers, as deep as a tensor-core instruction; its sum
is exact in any order. It is scaled, rounded, and added to a float32 sum, first block to
last: the bits of the portable native kernels, and no splits of K. A program reads 34
bytes for each output and block. Triton copies values to shared memory ahead, but not
scales: the code loads these one turn of the loop ahead, and turns are long to hide the
wait. (Two turns ahead would stop the copies of values.)
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import byte_rows_triton as byte_rows, launch, slab


Bytes = tuple[jax.Array, jax.Array]
"""Int8 weights `[2 P, N, 32]`; float16 scales of two blocks in int32 `[P, N]`."""

PAIR = 2 * byte_rows.BLOCK  # terms; one word holds their scales
_MORE = 2**30  # more than any sum of a block


def plan_for(plan: Any, *, parts: int) -> Any:
    """Returns the plan for weights of eight bits, given that for dense ones."""
    num_pairs = 4 if plan.block_n >= 64 // parts else 8
    changes = {"block_k": num_pairs * PAIR, "splits": 1, "chains": 1}
    return dataclasses.replace(plan, **changes, num_stages=4)


def check(w: Bytes, shape: tuple[int, int]) -> None:
    """Raises `ValueError` unless `w` has weights of `shape`, `(N, K)`."""
    N, count = shape[0], byte_rows.num_blocks(shape[1])
    values, scales = (count, N, byte_rows.BLOCK), (count // 2, N)
    slab.check_shapes(values=(w[0], values), scales=(w[1], scales))


def by_parts(w: Bytes, parts: int) -> Bytes:
    """Returns the weights with their outputs split: `N` becomes `parts, N / parts`."""
    return jax.tree.map(
        lambda x: x.reshape(len(x), parts, x.shape[1] // parts, *x.shape[2:]), w
    )


def specs(x: Bytes, w: Bytes, height: int, plan: Any) -> tuple[Any, list[Any]]:
    """Returns a program's rows, and of each part of the weights its outputs.

    Args:
      x: a result of `byte_rows_triton.round_rows`.
      w: a result of `by_parts`.
    """
    (count, num_parts), pairs, block_n = w[0].shape[:2], w[1].shape[0], plan.block_n

    def of_part(part):
        values = count, None, block_n, byte_rows.BLOCK
        return (
            pl.BlockSpec(values, lambda r, n, s: (0, part, n, 0)),
            pl.BlockSpec((pairs, None, block_n), lambda r, n, s: (0, part, n)),
        )

    rows = (
        pl.BlockSpec((count, height, byte_rows.BLOCK), lambda r, n, s: (0, r, 0)),
        pl.BlockSpec((count, height), lambda r, n, s: (0, r)),
    )
    return rows, [of_part(part) for part in range(num_parts)]


def sums(refs, plan, rows, in_columns) -> list[tuple[jax.Array, ...]]:
    """Returns sums as `skinny_gemm_triton._sums` does, for weights of eight bits."""
    num_pairs = refs.weights[0][1].shape[0]
    # Shorter turns for several tiles: as much code. No bit depends on `step`.
    step = max(plan.block_k // PAIR // len(rows), 1)
    turns = num_pairs // step
    add = functools.partial(_add_pair, refs, rows, in_columns)

    def words_of(pair):
        return [_vector(scales.at[pair, :], in_columns) for _, scales in refs.weights]

    def words_ahead(turn):
        """Loads the words of a turn; past the last turn, unused words."""
        first = jnp.minimum(turn, turns - 1) * step
        return [words_of(first + pair) for pair in range(step)]

    def several(turn, carry):
        """Adds the blocks of one turn; the turn before has loaded their words."""
        sums, words = carry
        later = words_ahead(turn + 1)
        for pair in range(step):
            sums = add(turn * step + pair, words[pair], sums)
        return sums, later

    zeros = jnp.zeros((slab.ROWS, plan.block_n), jnp.float32)
    sums = ((zeros,) * len(refs.weights),) * len(rows)
    if turns:
        start = sums, words_ahead(jnp.int32(0))
        sums, _ = jax.lax.fori_loop(0, turns, several, start)
    for pair in map(jnp.int32, range(turns * step, num_pairs)):
        sums = add(pair, words_of(pair), sums)
    return list(sums)


def _add_pair(refs, rows, in_columns, pair, words, sums):
    """Adds two blocks, whose scales are `words`, to each sum of each of `rows`."""
    for half in range(2):
        block, added = 2 * pair + half, []
        weights = [
            slab.load(values.at[block, :, :], in_columns, last_use=True)
            for values, _ in refs.weights
        ]
        columns = [_float16(word >> 16 * half)[None, :] for word in words]
        for (tile, is_active), parts in zip(rows, sums, strict=True):
            at = pl.ds(tile, slab.ROWS)
            x = slab.load(refs.x[0].at[block, at, :], is_active)
            of_row = _vector(refs.x[1].at[block, at], is_active)[:, None]
            added.append(
                tuple(
                    _added(total, x, w, of_row * column)
                    for total, w, column in zip(parts, weights, columns, strict=True)
                )
            )
        sums = tuple(added)
    return sums


def _vector(view, mask) -> jax.Array:
    return plt.load(view, mask=mask, other=None if mask is None else 0)


def _float16(word: jax.Array) -> jax.Array:
    """Returns the lower half of words as float32."""
    half = jax.lax.bitcast_convert_type(word.astype(jnp.int16), jnp.float16)
    return half.astype(jnp.float32)


def _added(total, x, w, scale) -> jax.Array:
    """Returns `total + (x w^T) * scale` of integers `x`, `w`; rounds each operation."""
    over = (((1,), (1,)), ((), ()))
    whole = jax.lax.dot_general(x, w, over, preferred_element_type=jnp.int32)
    product = whole.astype(jnp.float32) * scale
    if launch.is_interpreted():  # Else XLA on a CPU leaves some products unrounded.
        product = jnp.where(whole > _MORE, 0.0, product)
    return total + product
