"""The list of jobs of the row attention, on a GPU (Pallas Triton): one launch.

The keys of a slot are cut into splits of a fixed size at absolute positions. A split
that a row sees in full is *shared*: the rows of a tile that are of one slot and see
all of it are attended together, and the keys are read once. The split that a row sees
in part (and in a tree the splits of its own branch) is *private* to it. Whether a
split is shared or private follows from the row's own position. So no row meets a key
that it may not see, and no row needs a mask for the sake of another. Rows of a slot
that all see the same keys, as a block drafter's block does, share every split.

A job is one split for the rows that share it. Row by row, a job list has the shared
splits that the row leads (the first row of its slot in its tile does) and then its
private ones. It is the same for all layers: compiled together, they share one list.

One program makes the list from a few integers of each row and the row's part of the
page table: XLA would launch a dozen kernels for it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int

from spec_jax.pallas import launch
from spec_jax.typing import typed


LOST = -1
TABLE_ENTRIES = 8192  # entries of the page table that are read together

# Nothing here is negative: no need for the signs of `//` and `%`.
div, rem = jax.lax.div, jax.lax.rem


class RowJobs(NamedTuple):
    """The keys and the place of each row of a slab, int32, `[R]` each."""

    slots: jax.Array  # the row's slot; 0 for lost and padding rows
    lengths: jax.Array  # keys that the row sees; 0: padding; `LOST`: lost row
    full_splits: jax.Array  # splits `0 .. full_splits` are shared
    led_splits: jax.Array  # the row leads the shared jobs `0 .. led_splits`
    job_ends: jax.Array  # number of jobs of rows up to and including this one
    stored_at: jax.Array  # token `page * C + offset` of the pool; `LOST`: nowhere
    # [K, tiles]: how many jobs of a tile are done. A kernel that counts in it leaves it
    # all zeros again, for the next layer's kernel.
    done: jax.Array


class Job(NamedTuple):
    """One split for the rows that share it; all scalars."""

    row: jax.Array  # leads a shared job; the only row of a private one
    slot: jax.Array
    length: jax.Array  # keys that `row` sees; it may not see a shared split
    shared: jax.Array  # bool
    split: jax.Array  # its number
    first: jax.Array  # keys `first .. end`
    end: jax.Array


def job_of(row: jax.Array, step: jax.Array, jobs: RowJobs, split: int) -> Job:
    """Returns job number `step` of a row; `jobs` are references."""
    length, led = jobs.lengths[row], jobs.led_splits[row]
    shared = step < led
    full = jobs.full_splits[row]
    index = jnp.where(shared, step, full + step - led)
    first, end = index * split, (index + 1) * split
    return Job(
        row=row,
        slot=jobs.slots[row],
        length=length,
        shared=shared,
        split=index,
        first=first,
        # A split that the row does not see is seen in full by the rows that share it.
        end=jnp.where(shared & (index >= full), end, jnp.minimum(end, length)),
    )


def jobs_of_tile(tile: jax.Array, jobs: RowJobs, tile_rows: int) -> jax.Array:
    """Counts the jobs of a tile's rows; `jobs` are references."""
    first, (R,) = tile * tile_rows, jobs.job_ends.shape
    last = jnp.minimum(first + tile_rows, R) - 1
    before = jnp.where(first > 0, jobs.job_ends[jnp.maximum(first - 1, 0)], 0)
    return jobs.job_ends[last] - before


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
    num_kv_heads: int,
    branch: Int[Array, "R A"] | None = None,
    places: Int[Array, " R"] | None = None,
) -> RowJobs:
    """Lists the jobs of a slab whose tiles are `tile_rows` consecutive rows.

    An active row is lost if its slot or position does not exist, or a page that it sees
    is not one of `num_pages`. A lost row has no jobs and is stored nowhere.

    Args:
      branch, places: see `row_attention_triton.attend`; at most one of them.
    """
    (R,) = slots.shape
    shapes = [(R,)] * 6 + [(num_kv_heads, pl.cdiv(R, tile_rows))]
    outputs: list[Any] = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    (jobs,) = launch.run(
        _kernel,
        (num_active.reshape(1), page_table, slots, positions, branch, places),
        (RowJobs(*outputs),),
        grid=(1,),
        num_warps=8,
        name="row_jobs",
        num_pages=num_pages,
        page_size=page_size,
        split=split,
        tile_rows=tile_rows,
    )
    return jobs


def _kernel(
    num_active_ref,  # [1]
    table_ref,  # [S, M]
    slots_ref,  # [R]
    positions_ref,  # [R]
    branch_ref,  # [R, A] or None
    places_ref,  # [R] or None
    out_refs: RowJobs,
    *,
    num_pages,
    page_size,
    split,
    tile_rows,
):
    (S, M), (R,) = table_ref.shape, slots_ref.shape
    rows = jnp.arange(pl.next_power_of_2(R), dtype=jnp.int32)
    rows = launch.released(0) + rows
    is_row = rows < R
    live = is_row & (rows < num_active_ref[0])
    slots, positions = (
        plt.load(ref.at[rows], mask=is_row, other=0)
        for ref in (slots_ref, positions_ref)
    )
    exists = live & (slots >= 0) & (slots < S)
    exists &= (positions >= 0) & (positions < M * page_size)
    # Positions of lost rows may be the largest integer: select before adding 1.
    slots, positions = (jnp.where(exists, x, 0) for x in (slots, positions))
    lengths = jnp.where(exists, positions + 1, 0)
    look = functools.partial(_pages, table_ref, num_pages)
    if branch_ref is None:
        own_branch, places = 0, positions
        missing = _missing_before(look, slots, lengths, page_size, M)
        if places_ref is not None:
            places = plt.load(places_ref.at[rows], mask=exists, other=0)
    else:
        own_branch = branch_ref.shape[1]
        prefix = jnp.maximum(lengths - own_branch, 0)
        missing = _missing_before(look, slots, prefix, page_size, M)
        on_branch, places = _branch(
            look, branch_ref, rows, slots, lengths, page_size, M * page_size
        )
        missing += on_branch
    valid = exists & (missing == 0)
    pages, _ = look(slots, div(places, page_size), valid)
    stored_at = jnp.where(valid, pages * page_size + rem(places, page_size), LOST)
    lengths = jnp.where(valid, lengths, 0)
    # With `places`, rows of a slot see the same keys and share a partial last split.
    part = 0 if places_ref is None else split - 1
    full = div(jnp.maximum(lengths - own_branch, 0) + part, split)
    led = _led_splits(rows, slots, full, tile_rows)
    count = led + div(lengths + split - 1, split) - full
    is_before = rows[None, :] <= rows[:, None]
    ends = jnp.sum(jnp.where(is_before, count[None, :], 0), axis=1)
    lengths = jnp.where(live & ~valid, LOST, lengths)
    slots = jnp.where(valid, slots, 0)
    _store(out_refs, rows, (slots, lengths, full, led, ends, stored_at), is_row)


def _store(out_refs, rows, results, is_row):
    """Stores the results of each row, and zeros for the number of jobs done."""
    for ref, values in zip(out_refs[:-1], results, strict=True):
        plt.store(ref.at[rows], values, mask=is_row)
    done_ref = out_refs[-1]
    heads, tiles = (
        jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32) for size in done_ref.shape
    )
    inside = (heads < done_ref.shape[0])[:, None] & (tiles < done_ref.shape[1])[None, :]
    at = done_ref.at[heads[:, None], tiles[None, :]]
    plt.store(at, jnp.zeros(inside.shape, jnp.int32), mask=inside)


def _pages(table_ref, num_pages, slots, columns, mask):
    """Returns entries of the table, 0 outside of the mask, and which are no pages."""
    pages = plt.load(table_ref.at[slots, columns], mask=mask, other=0)
    return pages, mask & ((pages < 0) | (pages >= num_pages))


def _missing_before(look, slots, lengths, page_size, num_columns):
    """Counts the missing pages of each row's positions `0 .. lengths`."""
    needed = div(lengths + page_size - 1, page_size)
    width = max(TABLE_ENTRIES // slots.shape[0], 1)
    width = min(width, pl.next_power_of_2(num_columns))

    def count(turn, missing):
        columns = (turn * width + jnp.arange(width, dtype=jnp.int32))[None, :]
        _, is_none = look(slots[:, None], columns, columns < needed[:, None])
        return missing + jnp.sum(is_none.astype(jnp.int32), axis=1)

    turns = div(jnp.max(needed) + width - 1, width)
    return jax.lax.fori_loop(0, turns, count, jnp.zeros_like(needed))


def _branch(look, branch_ref, rows, slots, lengths, page_size, capacity):
    """Counts each row's branch entries that have no page; returns the last, too."""
    R, A = branch_ref.shape
    steps = jnp.arange(pl.next_power_of_2(A), dtype=jnp.int32)[None, :]
    # Entries before position 0, and all of a row that sees no key, do not count.
    counts = (steps < A) & (lengths[:, None] - A + steps >= 0) & (lengths > 0)[:, None]
    at = branch_ref.at[rows[:, None], steps]
    places = plt.load(at, mask=counts & (rows < R)[:, None], other=0)
    inside = counts & (places >= 0) & (places < capacity)
    _, is_none = look(
        slots[:, None], div(jnp.where(inside, places, 0), page_size), inside
    )
    missing = (is_none | (counts & ~inside)).astype(jnp.int32)
    own = plt.load(branch_ref.at[rows, A - 1], mask=rows < R, other=0)
    own = jnp.where((own >= 0) & (own < capacity), own, 0)
    return jnp.sum(missing, axis=1), own


def _led_splits(rows, slots, full_splits, tile_rows):
    """Returns at a slot's first row in a tile the rows' most full splits; else 0."""
    pairs = lambda compare, x: compare(x[:, None], x[None, :])
    together = pairs(jnp.equal, slots) & pairs(jnp.equal, div(rows, tile_rows))
    together &= pairs(jnp.logical_and, full_splits > 0)
    most = jnp.max(jnp.where(together, full_splits[None, :], 0), axis=1)
    earlier = together & pairs(jnp.greater, rows)
    earlier = jnp.max(earlier.astype(jnp.int32), axis=1)
    return jnp.where(earlier > 0, 0, most)
