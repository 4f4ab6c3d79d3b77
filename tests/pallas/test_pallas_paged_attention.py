"""Triton's attention, interpreted: its jobs, its plans, and the adding of splits.

The promises of every implementation are tested in `ops/test_row_attention`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from native import native_oracle as oracle
from ops import row_slabs as slabs

from spec_jax import testing
from spec_jax.pallas import head_rotation, row_attention_triton, row_jobs


R, K = 16, 2


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


def _last_program_writes(*args, is_stored, real=head_rotation.write_rows, **options):
    is_last = pl.program_id(1) == pl.num_programs(1) - 1
    real(*args, is_stored=is_stored & is_last, **options)


def _one_job_early(*args, real=row_jobs.row_jobs, **options):
    jobs = real(*args, **options)
    return jobs._replace(done=jobs.done + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("programs", "module", "name", "planted"),
    [
        (8, head_rotation, "write_rows", _last_program_writes),
        (12, row_jobs, "row_jobs", _one_job_early),
    ],
)
def test_programs_that_work_for_others_are_caught(
    rng, monkeypatch, programs, module, name, planted
):
    """Negative control: a head's last program writes for all of them; or a split is
    added before it is there. (Each has a number of programs that is not compiled yet.)
    """
    monkeypatch.setattr(module, name, planted)
    slab = slabs.in_slab(slabs.small_slab(rng), range(8))
    found = run(slab, 8, programs=programs)[0][:8].astype(np.float32)
    assert np.isnan(found).any()


def test_default_plan_with_several_splits(monkeypatch):
    """Fails if splits that rows share, in several slabs at once, give a row other bits
    than it has alone."""
    monkeypatch.setattr(slabs, "HEIGHT", 32)
    rng = np.random.default_rng(5)
    rows = slabs.window((3, 8), (254, 262), (515, 522))
    slab = slabs.small_slab(rng, rows=rows, page_size=64, prefix=(3, 254, 515))
    default = functools.partial(slabs.run, "interpret", config=None)
    out, *_ = slabs.assert_row_contract(slab, default)
    expected, *_ = oracle.attend(slab, **slabs.numbers(slab))
    testing.assert_rows_close(out, expected, dtype="bfloat16", reduction=535)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"block": 32}, {"split": 48}])
def test_a_plan_by_active_rows_is_caught(rng, change):
    """Negative control: other blocks or splits where more than one row is active."""
    slab = slabs.small_slab(rng)
    planted = lambda slab, live: run(slab, live, **({} if live == 1 else change))
    with pytest.raises(AssertionError, match="elements differ"):
        slabs.assert_row_contract(slab, planted)


def walk(jobs, tile_rows):
    """Yields `(rows, split, shared)` for each job, as the kernel walks them."""
    slots, lengths, full, led, ends, *_ = (np.asarray(field) for field in jobs)
    index = np.arange(len(slots))
    for job in range(ends[-1]):
        row = np.sum(ends <= job)
        step = job - (ends[row - 1] if row else 0)
        if step < led[row]:
            mine = (slots == slots[row]) & (full > step)
            mine &= index // tile_rows == row // tile_rows
            yield index[mine], step, True
        else:
            yield [row], full[row] + step - led[row], False


@pytest.mark.parametrize("width", [0, 5])
def test_each_split_of_each_row_is_one_job(rng, width):
    """Fails if a split is missed, done twice, or shared by a row that sees a part."""
    S, M, P, split, tile_rows = 3, 6, 40, 16, 4
    sizes = {"num_pages": P, "page_size": 8, "num_kv_heads": 3}
    sizes |= {"split": split, "tile_rows": tile_rows}
    make = jax.jit(functools.partial(row_jobs.row_jobs, **sizes, interpret=True))
    table = rng.permutation(P)[: S * M].reshape(S, M).astype(np.int32)
    table[0, 4] = P  # Slot 0 has four pages.
    for live in (0, 1, 7, R, R):
        slots = rng.integers(-1, S + 1, R).astype(np.int32)
        positions = rng.integers(-1, M * 8 + 2, R).astype(np.int32)
        at = positions[:, None] + np.arange(1 - width, 1, dtype=np.int32)
        branch = {"branch": at} if width else {}
        jobs = make(table, slots, positions, np.int32(live), **branch)
        lengths = np.asarray(jobs.lengths)
        lost = (slots < 0) | (slots >= S) | (positions < 0) | (positions >= M * 8)
        lost |= (slots == 0) & (positions >= 32)
        padding = np.arange(R) >= live
        expected = np.where(padding, 0, np.where(lost, row_jobs.LOST, positions + 1))
        np.testing.assert_array_equal(lengths, expected)
        stored_at = table[slots % S, positions % 48 // 8] * 8 + positions % 8
        stored_at = np.where(padding | lost, row_jobs.LOST, stored_at)
        np.testing.assert_array_equal(jobs.stored_at, stored_at)
        np.testing.assert_array_equal(jobs.done, np.zeros((3, R // tile_rows)))
        done = []
        for rows, index, shared in walk(jobs, tile_rows):
            done += [(int(row), int(index)) for row in rows]
            if shared:
                assert ((index + 1) * split <= lengths[rows] - width).all()
        due = [(row, i) for row in range(R) for i in range(-(-lengths[row] // split))]
        assert sorted(done) == sorted(due)


def test_rows_of_a_slot_share_their_prefix():
    """Fails if the keys of a prefix are read once for each row of a window."""
    slots, positions = jnp.zeros(R, jnp.int32), jnp.arange(1000, 1000 + R)
    table = jnp.arange(64, dtype=jnp.int32)[None]
    jobs = row_jobs.row_jobs(
        table, slots, positions, jnp.int32(5),
        num_pages=64, page_size=16, split=256, tile_rows=16, num_kv_heads=K,
        interpret=True,
    )  # fmt: skip
    assert list(np.asarray(jobs.led_splits)[:2]) == [3, 0]
    assert jobs.job_ends[-1] == 3 + 5


def test_a_pool_too_large_is_refused():
    """Fails if offsets into a pool could pass 32 bits."""
    shape = jax.ShapeDtypeStruct
    pool = shape((2**17, 16, 8, 128), jnp.bfloat16)
    rows, turn = shape((R,), jnp.int32), shape((R, 64), jnp.bfloat16)
    attend = functools.partial(
        row_attention_triton.attend, q_norm=None, k_norm=None, eps=0.0, scale=1.0,
        interpret=True, page_table=jnp.zeros((1, 4), jnp.int32),
        num_active=jnp.int32(0),
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="2147483648 elements of a pool"):
        jax.eval_shape(
            attend, heads=shape((R, 32 * 128), jnp.bfloat16), k_pages=pool,
            v_pages=pool, cos=turn, sin=turn, slots=rows, positions=rows,
        )  # fmt: skip
