"""Triton's attention, interpreted: its plans, and the adding of splits.

The promises of every implementation are tested in `ops/test_row_attention`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native import native_oracle as oracle
from ops import row_slabs as slabs

from spec_jax import testing
from spec_jax.pallas import row_attention_triton, row_jobs


R = 16


def run(slab, live, **changes):
    config = dataclasses.replace(slabs.SMALL, **changes)
    return slabs.run("interpret", slab, live, config=config)


def test_whoever_is_last_adds_the_same_splits(rng):
    """Fails if a row's bits depend on which program does its last job, or a kernel
    keeps another call's grid."""
    slab = slabs.in_slab(slabs.small_slab(rng), range(8))
    first = run(slab, 8)
    testing.assert_same_bits(run(slab, 8, programs=6), first)
    testing.assert_same_bits(run(slab, 8), first)


def test_a_split_that_is_added_early_is_caught(rng, monkeypatch):
    """Negative control: a head's last program adds a split before it is there."""
    real = row_jobs.row_jobs

    def planted(*args, **options):
        jobs = real(*args, **options)
        return jobs._replace(done=jobs.done + 1)

    monkeypatch.setattr(row_jobs, "row_jobs", planted)
    slab = slabs.in_slab(slabs.small_slab(rng), range(8))
    # A number of programs that is not compiled yet.
    assert np.isnan(run(slab, 8, programs=12)[0][:8].astype(np.float32)).any()


def test_default_plan_with_several_splits(monkeypatch):
    """Fails if splits that rows share, in several slabs at once, give a row other bits
    than it has alone, or than a tree's row has with the same keys."""
    monkeypatch.setattr(slabs, "HEIGHT", 32)
    rng = np.random.default_rng(5)
    rows = slabs.window((3, 8), (254, 262), (515, 522))
    slab = slabs.small_slab(rng, rows=rows, page_size=64, prefix=(3, 254, 515))
    default = functools.partial(slabs.run, "interpret", config=None)
    out, *_ = slabs.assert_row_contract(slab, default)
    expected, *_ = oracle.attend(slab, **slabs.numbers(slab))
    testing.assert_rows_close(out, expected, dtype="bfloat16", reduction=535)
    whole = slabs.in_slab(slab, range(len(rows)))
    branch = whole.positions[:, None] + np.arange(-3, 1, dtype=np.int32)
    tree, *_ = default(whole, len(rows), branch=branch)
    testing.assert_same_bits(tree[: len(rows)], out)


def test_rows_of_a_slot_share_their_prefix():
    """Fails if the keys of a prefix are read once for each row of a window."""
    slots, positions = jnp.zeros(R, jnp.int32), jnp.arange(1000, 1000 + R)
    table = jnp.arange(64, dtype=jnp.int32)[None]
    jobs = row_jobs.row_jobs(
        table, slots, positions, jnp.int32(5),
        num_pages=64, page_size=16, split=256, tile_rows=16, num_kv_heads=2,
        interpret=True,
    )  # fmt: skip
    assert list(np.asarray(jobs.led_splits)[:2]) == [3, 0]
    assert jobs.job_ends[-1] == 3 + 5


def test_a_pool_too_large_is_refused(rng):
    """Fails if offsets into a pool could pass 32 bits."""
    slab = slabs.small_slab(rng)
    how = slabs.numbers(slab) | {"interpret": True}
    pool = jax.ShapeDtypeStruct((2**23, 8, 2, 16), jnp.bfloat16)
    given = slab.arguments() | {"k_pages": pool, "v_pages": pool}
    attend = functools.partial(row_attention_triton.attend, **how)
    with pytest.raises(NotImplementedError, match="2147483648 elements of a pool"):
        jax.eval_shape(attend, **given)
