"""Which splits of which rows there are to attend, on a GPU (Pallas Mosaic): one launch.

The list is `row_jobs_triton`'s. One program goes through the active rows, twice: where
a row lies and how far it sees, a line of its pages at once; then which of the rows of a
tile leads what they share.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from spec_jax.pallas import row_jobs as jobs_lib, warpgroup


TABLE_ENTRIES = 1024  # pages of a row that are looked at together
AT_ONCE = 4  # rows whose loads are in flight together

# Nothing here is negative: no need for the signs of `//` and `%`.
div, rem = jax.lax.div, jax.lax.rem


def row_jobs(
    page_table: jax.Array,  # [S, M] int32
    slots: jax.Array,  # [R] int32
    positions: jax.Array,  # [R] int32
    num_active: jax.Array,  # [] int32
    *,
    num_pages: int,
    page_size: int,
    split: int,
    tile_rows: int,
    num_kv_heads: int,
    interpret: Any,
    branch: jax.Array | None = None,  # [R, A] int32
    places: jax.Array | None = None,  # [R] int32
) -> jobs_lib.RowJobs:
    """See `row_jobs_triton.row_jobs`.

    Args:
      interpret: False, or jax's `InterpretGPUParams()`.
    """
    (R,), M = slots.shape, page_table.shape[1]
    whole = warpgroup.whole(M)
    if whole > M:  # No line may end past the last row of the table.
        page_table = jnp.pad(page_table, ((0, 0), (0, whole - M)))
    walk = _Walk(
        capacity=M * page_size,
        num_pages=num_pages,
        page_size=page_size,
        split=split,
        tile_rows=tile_rows,
        width=math.gcd(whole, TABLE_ENTRIES),
    )
    inputs = [num_active.reshape(1), page_table, slots, positions]
    others = (("branch", branch), ("places", places))
    extra = {name: array for name, array in others if array is not None}
    inputs += extra.values()
    counts = num_kv_heads, pl.cdiv(R, tile_rows)
    line = plgpu.SMEM((warpgroup.whole(R),), jnp.int32)

    def list_jobs(*refs: Any) -> None:
        source, refs = _Source(*refs[:4]), refs[4:]
        given = dict(zip(extra, refs, strict=False))
        source, refs = source._replace(**given), refs[len(given) :]
        _list(source, jobs_lib.RowJobs(*refs[:7]), _Known(*refs[7:]), walk)

    made = warpgroup.kernel(
        list_jobs,
        outputs=[
            jax.ShapeDtypeStruct(shape, jnp.int32) for shape in [(R,)] * 6 + [counts]
        ],
        grid={"one": 1},
        scratch=[line] * 3,
        interpret=interpret,
    )(*inputs)
    return jobs_lib.RowJobs(*made)


class _Walk(NamedTuple):
    """How the rows are gone through; all static."""

    capacity: int  # positions of a slot
    num_pages: int
    page_size: int
    split: int
    tile_rows: int
    width: int  # columns of the table that are looked at together


class _Source(NamedTuple):
    """What a list is made from, references."""

    num_active: Any  # [1]
    table: Any  # [S, M]
    slots: Any  # [R]
    positions: Any  # [R]
    branch: Any = None  # [R, A]
    places: Any = None  # [R]


class _Known(NamedTuple):
    """What is known of the rows after the first time, in shared memory."""

    slots: Any
    lengths: Any
    full_splits: Any  # 0 where there is no row


def _list(source, jobs, known, walk):
    """Lists the jobs of all rows."""
    (R,), (K, tiles) = source.slots.shape, jobs.done.shape
    num_live = jnp.clip(source.num_active[0], 0, R)
    line = _line(known)
    none = plgpu.layout_cast(jnp.zeros(known.slots.shape, jnp.int32), line)
    known.full_splits[...] = none
    plgpu.commit_smem()

    def place(turn, carry):
        first = turn * AT_ONCE
        # The last one more than once: to one place the same.
        rows = [jnp.minimum(first + i, num_live - 1) for i in range(AT_ONCE)]
        _place(source, jobs, known, walk, rows)
        return carry

    jax.lax.fori_loop(0, div(num_live + AT_ONCE - 1, AT_ONCE), place, None)
    plgpu.commit_smem()

    def count(row, before):
        """Adds the jobs of a row to those of the rows before it."""
        led = _led_splits(row, known, walk.tile_rows)
        splits = div(known.lengths[row] + walk.split - 1, walk.split)
        end = before + led + splits - known.full_splits[row]
        jobs.led_splits[row], jobs.job_ends[row] = led, end
        return end

    end = jax.lax.fori_loop(0, num_live, count, jnp.int32(0))

    def pad(row, carry):
        """A row that is not active has no job."""
        for field in (jobs.slots, jobs.lengths, jobs.full_splits, jobs.led_splits):
            field[row] = jnp.int32(0)
        jobs.job_ends[row], jobs.stored_at[row] = end, jnp.int32(jobs_lib.LOST)
        return carry

    jax.lax.fori_loop(num_live, R, pad, None)

    def clear(number, carry):
        jobs.done[div(number, tiles), rem(number, tiles)] = jnp.int32(0)
        return carry

    jax.lax.fori_loop(0, K * tiles, clear, None)


def _place(source, jobs, known, walk, rows):
    """Finds where some active rows lie, and what they see."""
    found = [_find(source, walk, row) for row in rows]
    prefixes = [prefix for *_, prefix in found]
    missing = _missing_before(
        source.table, [slot for slot, *_ in found], prefixes, walk
    )
    for row, (slot, length, place, on_branch, prefix), before in zip(
        rows, found, missing, strict=True
    ):
        valid = (length > 0) & (before + on_branch == 0)
        page = source.table[slot, div(place, walk.page_size)]
        token = page * walk.page_size + rem(place, walk.page_size)
        # Where rows lie apart from what they see, all of a slot see the same.
        part = 0 if source.places is None else walk.split - 1
        full = jnp.where(valid, div(prefix + part, walk.split), 0)
        seen = jnp.where(valid, length, 0)
        known.slots[row], known.lengths[row] = slot, seen
        known.full_splits[row] = jobs.full_splits[row] = full
        jobs.slots[row] = jnp.where(valid, slot, 0)
        jobs.lengths[row] = jnp.where(valid, seen, jobs_lib.LOST)
        jobs.stored_at[row] = jnp.where(valid, token, jobs_lib.LOST)


def _find(source, walk, row):
    """The slot of a row, its length, its place, what its branch lacks, its prefix.

    The length is 0 of a row whose slot or position does not exist.
    """
    slot, position = source.slots[row], source.positions[row]
    exists = (slot >= 0) & (slot < source.table.shape[0])
    exists &= (position >= 0) & (position < walk.capacity)
    # That of a lost row may be the largest integer: no sum before the selection.
    slot, place = (jnp.where(exists, x, 0) for x in (slot, position))
    length = jnp.where(exists, place + 1, 0)
    if source.places is not None:
        place = jnp.where(exists, source.places[row], 0)
    if source.branch is None:
        return slot, length, place, 0, length
    (_, A), missing = source.branch.shape, jnp.int32(0)
    for step in range(A):
        place = source.branch[row, step]
        inside = (place >= 0) & (place < walk.capacity)
        place = jnp.where(inside, place, 0)
        page = source.table[slot, div(place, walk.page_size)]
        # Entries before position 0 are of no row.
        counts = length - A + step >= 0
        missing += (counts & (~inside | _is_none(page, walk))).astype(jnp.int32)
    return slot, length, place, missing, jnp.maximum(length - A, 0)


def _is_none(page, walk):
    return (page < 0) | (page >= walk.num_pages)


def _missing_before(table, slots, lengths, walk):
    """How many pages of positions `0 .. length` of each slot are none."""
    width, line = walk.width, warpgroup.line(walk.width)
    needed = [div(length + walk.page_size - 1, walk.page_size) for length in lengths]

    def look(turn, missing):
        columns = pl.ds(turn * width, width)
        pages = [warpgroup.load(table.at[slot, columns], line) for slot in slots]
        number = turn * width + warpgroup.line_numbers(width)
        none = [
            (number < each) & _is_none(page, walk)
            for each, page in zip(needed, pages, strict=True)
        ]
        return [
            jnp.where(each, before + 1, before)
            for each, before in zip(none, missing, strict=True)
        ]

    zeros = plgpu.layout_cast(jnp.zeros((width,), jnp.int32), line)
    turns = div(functools.reduce(jnp.maximum, needed) + width - 1, width)
    found = jax.lax.fori_loop(0, turns, look, [zeros] * len(slots))
    return [jnp.sum(each) for each in found]


def _led_splits(row, known, tile_rows):
    """The most full splits of a slot and tile, for the first of their rows; else 0."""
    line = _line(known)
    slots, full = (warpgroup.load(x, line) for x in (known.slots, known.full_splits))
    others = warpgroup.line_numbers(known.slots.shape[0])
    together = (slots == known.slots[row]) & (full > 0)
    together &= div(others, tile_rows) == div(row, tile_rows)
    most = jnp.max(jnp.where(together, full, 0))
    earlier = jnp.max(jnp.where(together & (others < row), 1, 0))
    return jnp.where((known.full_splits[row] > 0) & (earlier == 0), most, 0)


def _line(known):
    return warpgroup.line(known.slots.shape[0])
