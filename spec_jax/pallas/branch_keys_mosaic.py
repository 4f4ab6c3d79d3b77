"""The keys and values on a row's own branch of a tree, put into their block (Mosaic).

Those of a prefix lie page by page in the order of their positions; those of a branch
lie anywhere in the slot, and are copied one by one beside the block, and then into it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from spec_jax.pallas import warpgroup


AT_ONCE = 4  # keys whose places are looked up together

# Nothing here is negative: no need for the signs of `//` and `%`.
div, rem = jax.lax.div, jax.lax.rem


def scratch(block: int, head_dim: int, length: int, dtype: jnp.dtype) -> list[Any]:
    """Shared memory for the values of a block, and what it takes to fill it.

    Its keys have a tile as high that is there.
    """
    copies = 2 * AT_ONCE * pl.cdiv(length, AT_ONCE)
    values = plgpu.SMEM((height(block), head_dim), dtype)
    return [values, plgpu.Barrier(num_arrivals=copies)]


def height(block: int) -> int:
    """The rows of a tile for a block: one more is for keys that are not in it."""
    return block + 1


def replace(refs, job, kv_head, first, k_block, v_block) -> None:
    """Puts the branch's keys and values into their places in a block of a job.

    Args:
      refs: `paged_attention_mosaic._Refs`.
      first: the position of the block's first key.
    """
    k_own, v_own, loaded = refs.own
    size, H = k_block.shape
    (P, C), A = refs.k.shape[:2], refs.branch.shape[1]
    start = job.length - A
    end = jnp.minimum(first + size, job.end)

    @pl.when(~job.shared & (end > start))
    def _():
        def copy(turn, _):
            """The next `AT_ONCE` of the branch; its last one more than once."""
            steps = [jnp.minimum(turn * AT_ONCE + i, A - 1) for i in range(AT_ONCE)]
            # Those before position 0 are of no row: the row's own is always there.
            steps = [jnp.where(start + step >= 0, step, A - 1) for step in steps]
            # Looked up for each block anew: registers would be kept for all of them.
            row = jax.lax.optimization_barrier(job.row)
            places = [refs.branch[row, step] for step in steps]
            pages = [refs.table[job.slot, div(place, C)] for place in places]
            for step, place, page in zip(steps, places, pages, strict=True):
                key = start + step
                inside = (key >= first) & (key < end)
                to = jnp.where(inside, key - first, size)
                at = jnp.clip(page, 0, P - 1), rem(place, C), kv_head
                for pool, own in ((refs.k, k_own), (refs.v, v_own)):
                    plgpu.copy_gmem_to_smem(pool.at[at], own.at[to], loaded)

        jax.lax.fori_loop(0, pl.cdiv(A, AT_ONCE), copy, None)
        plgpu.barrier_wait(loaded)
        key = first + warpgroup.numbers((size, H), 0)
        mine = key >= start
        for block, own in ((k_block, k_own), (v_block, v_own)):
            shared = warpgroup.load(block, warpgroup.TABLE)
            copied = warpgroup.load(own.at[pl.ds(0, size)], warpgroup.TABLE)
            block[...] = jnp.where(mine, copied, shared)
        plgpu.commit_smem()
