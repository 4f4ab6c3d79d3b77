"""Which splits of which rows there are to attend: whole numbers only.

The keys of a slot are cut into splits of a fixed size at absolute positions. A split
that a row sees in full is *shared*: the rows of a tile that are of one slot and see
all of it are attended together, and the keys are read once. What is left of a row,
the split that it sees in part (and in a tree the splits of its own branch), is
*private* to it. Which of the two a split is follows from the row's own position, so
that no row ever meets a key that it may not see, and none needs a mask for the sake
of another.

A job is one split for the rows that share it. Row by row, a job list has the shared
splits that the row leads (the first row of its slot in its tile does) and then its
private ones. The list is the same for all layers: compiled with them, XLA keeps one.
"""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax.typing import typed


LOST = -1

_Count = TypeVar("_Count", int, jax.Array)


class RowJobs(NamedTuple):
    """What each row of a slab attends to and where it is stored, all `[R]` int32."""

    slots: jax.Array  # of the row; 0 where it has none
    lengths: jax.Array  # keys that the row sees; 0: dead; `LOST`: has no pages
    full_splits: jax.Array  # splits `0 .. full_splits` are shared
    led_splits: jax.Array  # shared jobs of the row: splits `0 .. led_splits`
    job_ends: jax.Array  # jobs of the rows up to this one
    stored_at: jax.Array  # token `page * C + offset` of the pool; `LOST`: nowhere


def split_count(capacity: _Count, split: int) -> _Count:
    """Splits in `capacity` positions, the last one perhaps in part."""
    return -(-capacity // split)


@typed
def row_jobs(
    page_table: Int[Array, "S M"],
    slots: Int[Array, " R"],
    positions: Int[Array, " R"],
    num_active: Int[Array, ""],
    *,
    num_pages: int,
    page_size: int,
    split: int,
    tile_rows: int,
    branch: Int[Array, "R A"] | None = None,
) -> RowJobs:
    """The jobs of a slab whose tiles are `tile_rows` consecutive rows.

    An active row is lost if its slot or position does not exist, or a page that it sees
    is not one of `num_pages`: it has no jobs and is stored nowhere.

    Args:
      branch: see `paged_attention_triton.paged_attention`.
    """
    live = jnp.arange(slots.shape[0], dtype=jnp.int32) < num_active
    mapped, stored_at = _locate(
        page_table, slots, positions, branch, num_pages, page_size
    )
    valid = live & mapped
    # Positions of lost rows may be the largest integer: no sum before the selection.
    lengths = jnp.where(valid, jnp.where(valid, positions, 0) + 1, 0)
    own_branch = 0 if branch is None else branch.shape[1]
    full_splits = jnp.maximum(lengths - own_branch, 0) // split
    led_splits = _led_splits(slots, full_splits, tile_rows)
    private = split_count(lengths, split) - full_splits
    return RowJobs(
        slots=jnp.where(valid, slots, 0),
        lengths=jnp.where(live & ~mapped, LOST, lengths),
        full_splits=full_splits,
        led_splits=led_splits,
        job_ends=jnp.cumsum(led_splits + private, dtype=jnp.int32),
        stored_at=jnp.where(valid, stored_at, LOST),
    )


def _locate(page_table, slots, positions, branch, num_pages, page_size):
    """Whether all that each row sees has pages, and the row's token of the pool."""
    S, M = page_table.shape
    exists = (slots >= 0) & (slots < S)
    exists &= (positions >= 0) & (positions < M * page_size)
    slots, positions = (jnp.where(exists, x, 0) for x in (slots, positions))
    table = page_table[slots]  # [R, M]
    has_page = (table >= 0) & (table < num_pages)
    prefix = positions + 1
    if branch is None:
        branch = positions[:, None]
    else:
        A = branch.shape[1]
        prefix = jnp.maximum(prefix - A, 0)
        # Entries before position 0 are of no row; the row's own place stands in.
        steps = jnp.arange(A, dtype=jnp.int32)[None, :]
        before = positions[:, None] + 1 - A + steps < 0
        branch = jnp.where(before, branch[:, -1:], branch)
    first_positions = jnp.arange(M, dtype=jnp.int32)[None, :] * page_size
    unseen = first_positions >= prefix[:, None]
    mapped = exists & jnp.all(has_page | unseen, axis=1)
    inside = (branch >= 0) & (branch < M * page_size)
    branch = jnp.where(inside, branch, 0)
    pages = jnp.take_along_axis(table, branch // page_size, axis=1)
    mapped &= jnp.all(inside & (pages >= 0) & (pages < num_pages), axis=1)
    return mapped, pages[:, -1] * page_size + branch[:, -1] % page_size


def _led_splits(slots, full_splits, tile_rows):
    """The most full splits of a slot's rows in a tile, at the first of them; else 0."""
    index = jnp.arange(slots.shape[0], dtype=jnp.int32)
    pairs = lambda compare, x: compare(x[:, None], x[None, :])
    together = pairs(jnp.equal, slots) & pairs(jnp.equal, index // tile_rows)
    together &= pairs(jnp.logical_and, full_splits > 0)
    most = jnp.max(jnp.where(together, full_splits[None, :], 0), axis=1)
    earlier = jnp.any(together & pairs(jnp.greater, index), axis=1)
    return jnp.where(earlier, 0, most)
