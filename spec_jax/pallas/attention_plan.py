"""How the kernels divide the row attention: a function of heads and dtype."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from spec_jax.pallas import launch


MAX_HEAD = 256
MAX_GROUP = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The kernels' plan. A row's bits may depend on all fields but `programs`."""

    split: int = 256  # keys
    block: int = 64  # keys
    tile: int = 32  # queries: two tiles of the m16n8k16 product
    programs: int = 264  # two for each of the 132 multiprocessors of an H100
    num_warps: int = 4
    num_stages: int = 3


def default_config(head_dim: int, dtype: jnp.dtype) -> Config:
    """Returns the plan; it may depend on nothing but the size and dtype of heads."""
    config = Config()
    head_bytes = head_dim * jnp.dtype(dtype).itemsize
    if head_bytes > 256:  # Two blocks of keys and values are in shared memory.
        config = dataclasses.replace(config, block=32)
    if head_bytes > 512:  # Products of wide float32 heads would spill registers.
        config = dataclasses.replace(config, block=16, num_warps=8)
    if launch.is_interpreted():
        # Each program costs a copy of the pool; one computes the same bits.
        config = dataclasses.replace(config, programs=1)
    return config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The axes of partial sums, `[K, rows, heads, .., width]`."""

    group: int  # query heads of a key/value head
    heads: int  # `group`, padded to a power of two
    rows: int  # rows of the slab, padded to whole tiles
    tile_rows: int  # rows of a tile
    head_dim: int
    width: int  # `head_dim`, padded to a power of two
    half_width: int  # half a head, padded likewise, at least 16 for tensor cores


def layout(num_rows: int, group: int, head_dim: int, *, tile: int) -> Layout:
    """Returns the layout; raises `NotImplementedError` for heads it cannot take."""
    if head_dim % 2 or not 16 <= head_dim <= MAX_HEAD:
        raise NotImplementedError(
            f"head size {head_dim} is odd, below 16 or above {MAX_HEAD}"
        )
    if group > MAX_GROUP:
        raise NotImplementedError(
            f"{group} query heads to a key/value head: at most {MAX_GROUP}"
        )
    heads = pl.next_power_of_2(group)
    tile_rows = tile // heads
    return Layout(
        group=group,
        heads=heads,
        rows=-(-num_rows // tile_rows) * tile_rows,
        tile_rows=tile_rows,
        head_dim=head_dim,
        width=pl.next_power_of_2(head_dim),
        half_width=max(16, pl.next_power_of_2(head_dim // 2)),
    )


def check_pools(x: jax.Array, k_pages: jax.Array, v_pages: jax.Array) -> None:
    """Raises `NotImplementedError` or `ValueError` unless the kernels take these."""
    dtypes = {str(array.dtype) for array in (x, k_pages, v_pages)}
    if len(dtypes) != 1 or not dtypes <= {"float32", "bfloat16"}:
        raise NotImplementedError(
            f"heads and pages of one dtype, float32 or bfloat16, not {sorted(dtypes)}"
        )
    if k_pages.shape != v_pages.shape:
        raise ValueError(f"keys {k_pages.shape} against values {v_pages.shape}")
    if k_pages.size >= 2**31:
        raise NotImplementedError(f"{k_pages.size} elements of a pool: below 2**31")
