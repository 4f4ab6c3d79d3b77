"""Section (a), attention: windows against one row after another, over two slots."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.support import gpu_arrays, gpu_bits, gpu_task
from spec_jax.model import rotary
from spec_jax.ops import rope
from spec_jax.pallas import row_attention_triton


class Layout(NamedTuple):
    """Where keys and values lie; the same keys at each position, whatever the pages."""

    table: jax.Array  # [2, M] int32
    pools: tuple[jax.Array, jax.Array]  # [P, C, K, H]
    token_at: jax.Array  # [2, T] int32, of each slot's position in its pool


def example(task: gpu_task.Task) -> tuple[Callable, Layout, dict[str, Any]]:
    """The attention and its inputs, for the first pair of contexts.

    Returns:
      `attend(layout, slab, num_live) -> out, k_pages, v_pages`, layout and slab.
    """
    pair = task.sizes.bitwise_contexts[0]
    width = _table_width(task, pair)
    layout = _layout(task, width, spread=1, seed=0)
    return _attend(task), layout, _slab(task, pair, seed=0)


def _table_width(task: gpu_task.Task, pair: tuple[int, int]) -> int:
    """Whole pages, and one more than the longest window reaches."""
    return (max(pair) + task.sizes.height) // task.sizes.page_size + 2


def check(task: gpu_task.Task) -> None:
    """A row of results for each pair of contexts and each thing that may not matter."""
    sizes = task.sizes
    height = sizes.height
    width = _table_width(task, max(sizes.bitwise_contexts, key=max))
    plain = _layout(task, width, spread=1, seed=0)
    others = {
        "other pages": _layout(task, width, spread=1, seed=1),
        "a wider table": _layout(task, 2 * width, spread=1, seed=2),
    }
    attend = _attend(task)
    for number, pair in enumerate(sizes.bitwise_contexts):
        slab = _slab(task, pair, seed=number)
        reference, *pools = attend(plain, slab, height)
        written = _written(plain, pools, slab)
        name = f"attention at {pair}"
        gpu_bits.report_hash(task, name, (reference, written))
        if task.only_hashes:
            continue
        tell = functools.partial(gpu_bits.report, task)

        wrong = elements = 0
        for live in range(1, height + 1):
            out, *_ = attend(plain, slab, live)
            found = gpu_bits.compare_rows(out, reference, at=range(height), live=live)
            wrong, elements = wrong + found[0], elements + found[1]
        tell(f"{name}: live rows", cases=height, elements=elements, wrong=wrong)

        rows, pools = [], plain.pools
        for row in range(height):
            at = (jnp.arange(height) + row) % height
            alone = gpu_bits.take_rows(slab, at)
            out, *pools = attend(plain._replace(pools=tuple(pools)), alone, 1)
            rows.append(out[0])
        wrong = gpu_bits.differing(jnp.stack(rows), reference)
        wrong += gpu_bits.differing(_written(plain, pools, slab), written)
        elements = reference.size + sum(leaf.size for leaf in written)
        tell(f"{name}: row by row", cases=height, elements=elements, wrong=wrong)

        for what, layout in others.items():
            out, *pools = attend(layout, slab, height)
            wrong = gpu_bits.differing(out, reference)
            wrong += gpu_bits.differing(_written(layout, pools, slab), written)
            tell(f"{name}: {what}", cases=1, elements=elements, wrong=wrong)


def _layout(task: gpu_task.Task, width: int, *, spread: int, seed: int) -> Layout:
    """Two slots of `width` pages in no order, among as many that nobody owns.

    Pages that nobody owns hold NaN.
    """
    model, page_size = task.sizes.draft, task.sizes.page_size
    num_pages = 3 * width
    order = np.random.default_rng(seed).permutation(num_pages).astype(np.int32)
    table = order[: 2 * width].reshape(2, width)
    at = table[:, :, None] * page_size + np.arange(page_size, dtype=np.int32)
    token_at = jnp.asarray(at.reshape(2, -1))
    shape = (num_pages * page_size, model.num_kv_heads, model.head_dim)
    # As many random numbers as the narrowest table has: the same at each position.
    pools = []
    for number in (1, 2):
        empty = jnp.full(shape, jnp.nan, model.dtype)
        pools.append(_fill(empty, token_at, jnp.int32(number)))
    shape = (num_pages, page_size, model.num_kv_heads, model.head_dim)
    pools = tuple(pool.reshape(shape) for pool in pools)
    return Layout(table=jnp.asarray(table), pools=pools, token_at=token_at)


@jax.jit
def _fill(pool, token_at, seed):
    """Random keys by slot and position alone, wherever they lie."""

    def row(slot, position):
        key = jax.random.fold_in(jax.random.key(seed), slot)
        noise = jax.random.normal(jax.random.fold_in(key, position), pool.shape[1:])
        return noise.astype(pool.dtype)

    slots, positions = (jnp.arange(n) for n in token_at.shape)
    noise = jax.vmap(lambda s: jax.vmap(lambda p: row(s, p))(positions))(slots)
    return pool.at[token_at.reshape(-1)].set(noise.reshape(-1, *pool.shape[1:]))


def _slab(task: gpu_task.Task, pair: tuple[int, int], *, seed: int) -> dict[str, Any]:
    """Windows of both slots, their rows in turn."""
    model, height = task.sizes.draft, task.sizes.height
    rows = np.arange(height, dtype=np.int32)
    slots = rows % 2
    positions = jnp.asarray(np.asarray(pair, np.int32)[slots] + rows // 2)
    frequencies, scale = rotary.rope_table(model)
    cos, sin = rope.angles(
        positions, jnp.asarray(frequencies), scale=scale, dtype=model.dtype
    )
    return {
        "heads": gpu_arrays.normal(100 + seed, (height, model.qkv_size), model.dtype),
        "slots": jnp.asarray(slots),
        "positions": positions,
        "cos": cos,
        "sin": sin,
    }


def _attend(task: gpu_task.Task) -> Callable:
    """`(layout, slab, live) -> out, k_pages, v_pages`; dead rows are NaN."""
    model = task.sizes.draft
    norms = [gpu_arrays.normal(i, (model.head_dim,), model.dtype) for i in (5, 6)]

    @jax.jit
    def call(table, pools, slab, live):
        dead = jnp.arange(slab["heads"].shape[0]) >= live
        nan = jnp.asarray(jnp.nan, slab["heads"].dtype)
        heads = jnp.where(dead[:, None], nan, slab["heads"])
        # No slot and no position that there is.
        slots, positions = (
            jnp.where(dead, -1, slab[name]) for name in ("slots", "positions")
        )
        return row_attention_triton.attend(
            heads,
            *norms,
            *pools,
            slab["cos"],
            slab["sin"],
            page_table=table,
            slots=slots,
            positions=positions,
            num_live=live,
            eps=model.rms_norm_eps,
            scale=model.head_dim**-0.5,
            interpret=task.interpret,
        )

    return lambda layout, slab, live: call(
        layout.table, layout.pools, slab, jnp.int32(live)
    )


def _written(layout: Layout, pools: Any, slab: dict[str, Any]) -> list[jax.Array]:
    """The keys and values of the slab's rows, wherever they lie."""
    at = layout.token_at[slab["slots"], slab["positions"]]
    return [pool.reshape(-1, *pool.shape[2:])[at] for pool in pools]
