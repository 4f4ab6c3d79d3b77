"""The kernel of the skinny GEMM on Pallas Triton: one program of a product.

It walks its columns of the weights once, for up to `slab.MOST_ROWS` rows, in tiles of
16: each block is multiplied by one tile after the other, a product of its own for each.
A row's sums are the same products in the same order whatever the number of tiles.
Blocks go from shared memory to the tensor cores unchanged: norming the rows here cost
10 of 30 us at 50 MB of weights (H200); a kernel of its own before takes 1 to 2 us.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import byte_gemm_triton, early_launch, slab


class Refs(NamedTuple):
    """Inputs and outputs of a program; K is padded to whole blocks."""

    num_active: Any  # [1]
    x: Any  # [16 * tiles, K]; for weights of eight bits see `byte_gemm_triton`
    weights: list[Any]  # one, or the gate's and up's: [block_n, K]
    residual: Any  # [16 * tiles, block_n] or None
    outs: list[Any]  # [16 * tiles, block_n]: one; one for each weight if K is split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk:
    """How a program walks its weights; all static.

    Attributes:
      plan: `skinny_gemm_triton.Plan`.
      height: rows of the program.
    """

    plan: Any
    num_columns: int
    num_terms: int
    height: int
    interpret: bool

    @property
    def width(self) -> int:
        """Terms of a block in one chain."""
        return self.plan.block_k // self.plan.chains


def multiply(*refs: Any, walk: Walk) -> None:
    """Stores one program's tiles of the result, or of a split's partial sums."""
    refs, plan = Refs(*refs), walk.plan
    columns = pl.program_id(1) * plan.block_n + jnp.arange(plan.block_n)
    in_columns = columns < walk.num_columns if walk.num_columns % plan.block_n else None
    first_row = pl.program_id(0) * walk.height
    is_row = early_launch.released(first_row, interpret=walk.interpret)
    is_row = is_row + jnp.arange(slab.ROWS)
    tiles = range(0, walk.height, slab.ROWS)
    active = [is_row + tile < refs.num_active[0] for tile in tiles]
    rows = list(zip(tiles, active, strict=True))
    is_bytes = isinstance(refs.x, tuple)
    sums_of = byte_gemm_triton.sums if is_bytes else _sums
    sums = sums_of(refs, walk, rows, in_columns)
    for (tile, is_active), parts in zip(rows, sums, strict=True):
        at = pl.ds(tile, slab.ROWS)
        if plan.splits > 1:
            for out_ref, total in zip(refs.outs, parts, strict=True):
                slab.store(out_ref.at[at, :], total, is_active, in_columns)
        else:
            (out_ref,) = refs.outs
            residual = None if refs.residual is None else refs.residual.at[at, :]
            slab.finish(parts, residual, out_ref.at[at, :], is_active, in_columns)


def _sums(refs, walk, rows, in_columns):
    """Returns the sums of each weight for each of `rows`, float32 `[16, block_n]`."""
    plan, num_terms = walk.plan, walk.num_terms
    num_blocks = num_terms // plan.block_k // plan.splits
    first_block = pl.program_id(2) * num_blocks if plan.splits > 1 else 0
    add_block = functools.partial(_add_block, refs, walk, rows, in_columns)

    def whole_block(block, sums):
        return add_block(sums, (first_block + block) * plan.block_k, False)

    zeros = jnp.zeros((slab.ROWS, plan.block_n), jnp.float32)
    parts = (zeros,) * len(refs.weights)
    sums = ((parts,) * plan.chains,) * len(rows)
    if num_blocks:
        sums = jax.lax.fori_loop(0, num_blocks, whole_block, sums)
    if num_terms % plan.block_k:
        sums = add_block(sums, num_blocks * plan.block_k, True)
    return [functools.reduce(slab.each_added, chains) for chains in sums]


def _add_block(refs, walk, rows, in_columns, sums, start, is_ragged):
    """Adds one block of terms to the sum of each chain, for each of `rows`."""
    added: list[list[tuple[jax.Array, ...]]] = [[] for _ in rows]
    for chain in range(walk.plan.chains):
        first = start + chain * walk.width
        terms = pl.ds(first, walk.width)
        in_terms = None
        if is_ragged:
            in_terms = first + jnp.arange(walk.width) < walk.num_terms
        weights = [
            slab.load(ref.at[:, terms], in_columns, in_terms, last_use=True).T
            for ref in refs.weights
        ]
        for number, (tile, is_active) in enumerate(rows):
            view = refs.x.at[pl.ds(tile, slab.ROWS), terms]
            x = slab.load(view, is_active, in_terms)
            products = [plt.dot(x, each) for each in weights]
            added[number].append(slab.each_added(sums[number][chain], products))
    return tuple(map(tuple, added))
