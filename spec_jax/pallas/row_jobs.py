"""Which splits of which rows there are to attend: whole numbers only.

The keys of a slot are cut into splits of a fixed size at absolute positions. A split
that a row sees in full is *shared*: the rows of a tile that are of one slot and see
all of it are attended together, and the keys are read once. What is left of a row,
the split that it sees in part (and in a tree the splits of its own branch), is
*private* to it. Which of the two a split is follows from the row's own position, so
that no row ever meets a key that it may not see, and none needs a mask for the sake
of another. Rows of a slot that all see the same keys, those of a block drafter's block,
share every split, the last one too.

A job is one split for the rows that share it. Row by row, a job list has the shared
splits that the row leads (the first row of its slot in its tile does) and then its
private ones. The list is the same for all layers: compiled with them, XLA keeps one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


LOST = -1


class RowJobs(NamedTuple):
    """What each row of a slab attends to and where it is stored, int32, `[R]` each."""

    slots: jax.Array  # of the row; 0 where it has none
    lengths: jax.Array  # keys that the row sees; 0: dead; `LOST`: has no pages
    full_splits: jax.Array  # splits `0 .. full_splits` are shared
    led_splits: jax.Array  # shared jobs of the row: splits `0 .. led_splits`
    job_ends: jax.Array  # jobs of the rows up to this one
    stored_at: jax.Array  # token `page * C + offset` of the pool; `LOST`: nowhere
    # [K, tiles]: the jobs of a tile that are done. A kernel that counts in it leaves it
    # as it was, all zeros, so that the next layer's has it too.
    done: jax.Array


class Job(NamedTuple):
    """One split for the rows that share it; all scalars."""

    row: jax.Array  # the first of the rows, and the only one unless shared
    slot: jax.Array
    length: jax.Array  # of `row`, which need not see a shared split itself
    shared: jax.Array  # bool
    split: jax.Array  # its number
    first: jax.Array  # keys `first .. end`
    end: jax.Array


def job_of(row: jax.Array, step: jax.Array, jobs: RowJobs, split: int) -> Job:
    """The job of a number among those of a row; `jobs` are references."""
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
        # A split that the row does not see is seen in full by those that share it.
        end=jnp.where(shared & (index >= full), end, jnp.minimum(end, length)),
    )


def jobs_of_tile(tile: jax.Array, jobs: RowJobs, tile_rows: int) -> jax.Array:
    """How many jobs the rows of a tile have; `jobs` are references."""
    first, (R,) = tile * tile_rows, jobs.job_ends.shape
    last = jnp.minimum(first + tile_rows, R) - 1
    before = jnp.where(first > 0, jobs.job_ends[jnp.maximum(first - 1, 0)], 0)
    return jobs.job_ends[last] - before
