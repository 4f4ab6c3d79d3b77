"""Paged attention of Triton, interpreted: the job list, edges, and who adds splits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_slabs as slabs
from jax.experimental import pallas as pl
from native import native_oracle as oracle

from spec_jax import testing
from spec_jax.ops import paged_attention
from spec_jax.pallas import (
    attention_plan as plan,
    head_rotation,
    row_attention_triton,
    row_jobs,
)


R, K, G, H, PAGE = 16, 2, 3, 64, 16
SPLIT, BLOCK = 32, 16
CONFIG = plan.Config(split=SPLIT, block=BLOCK, programs=2)
LENGTHS = (1, BLOCK, SPLIT - 1, SPLIT, SPLIT + 1, 5 * PAGE)
"""One slot each, the last one as long as its table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Rows over slots of `LENGTHS`; what no sequence owns is NaN."""

    q: np.ndarray  # [R, N, H]
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    num_active: np.int32

    def inputs(self) -> dict:
        return jax.tree.map(jnp.asarray, dataclasses.asdict(self))

    def oracle(self) -> np.ndarray:
        """Row by row and head by head, in float64, of the active rows."""
        out = np.zeros((self.num_active, K * G, H))
        for row in range(self.num_active):
            seen = np.arange(self.positions[row] + 1)
            pages = self.page_table[self.slots[row], seen // PAGE]
            keys, values = oracle.wide(
                *(pool[pages, seen % PAGE] for pool in (self.k_pages, self.v_pages))
            )
            for head in range(K * G):
                query = self.q[row, head].astype(np.float64)
                probs = oracle.softmax(keys[:, head // G] @ query * H**-0.5)
                out[row, head] = probs @ values[:, head // G]
        return out


def make_case(rng) -> Case:
    slab = oracle.make_slab(
        rng, [(slot, length - 1) for slot, length in enumerate(LENGTHS)],
        dtype="float32", N=K * G, K=K, H=H, page_size=PAGE, prefix=LENGTHS,
    )  # fmt: skip
    rows = [(slot, length - 1) for slot, length in enumerate(LENGTHS)]
    rows += [(5, 78), (5, 63), (5, 64), (5, 0), (4, 31), (3, 30), (5, 70), (2, 15)]
    rows = [rows[i] for i in rng.permutation(len(rows))]
    slots, positions = np.asarray(rows + [(2**30, 2**30)] * (R - len(rows))).T
    q = 3 * rng.standard_normal((R, K * G, H))
    q[len(rows) :] = np.nan
    return Case(
        q=q.astype(np.float32),
        k_pages=slab.k_pages,
        v_pages=slab.v_pages,
        page_table=slab.page_table,
        slots=slots.astype(np.int32),
        positions=positions.astype(np.int32),
        num_active=np.int32(len(rows)),
    )


_row_attention = jax.jit(
    functools.partial(
        row_attention_triton.attend,
        q_norm=None,
        k_norm=None,
        eps=0.0,
        scale=H**-0.5,
        interpret=True,
    ),
    static_argnames=("config",),
)


def _attend(case, **options) -> np.ndarray:
    """Rows that are not turned, and whose keys and values lie in the pages already."""
    inputs = case.inputs()
    rows = np.arange(R) < case.num_active
    slots, positions = (np.where(rows, x, 0) for x in (case.slots, case.positions))
    at = case.page_table[slots, positions // PAGE], positions % PAGE
    own = (pool[at] for pool in (case.k_pages, case.v_pages))
    heads = np.concatenate([inputs.pop("q"), *own], axis=1).reshape(R, -1)
    turn = {"cos": np.ones((R, H // 2)), "sin": np.zeros((R, H // 2))}
    turn = {name: array.astype(np.float32) for name, array in turn.items()}
    options = {"config": CONFIG} | options
    out, *pools = _row_attention(heads, **turn, **inputs, **options)
    testing.assert_same_bits(pools, [case.k_pages, case.v_pages])
    return np.asarray(out).reshape(R, K * G, H)


def test_edges_of_pages_blocks_and_splits(rng):
    """Fails if a key is missed or seen twice at an edge, the table's end included."""
    case = make_case(rng)
    out = _attend(case)
    near = {"dtype": "float32", "reduction": max(LENGTHS) + H}
    testing.assert_rows_close(out[: case.num_active], case.oracle(), **near)
    reference = paged_attention.paged_attention(**case.inputs(), scale=H**-0.5)
    reference = np.asarray(reference)[: case.num_active]
    testing.assert_rows_close(out[: case.num_active], reference, **near)


def jobs_of(case) -> row_jobs.RowJobs:
    given = case.inputs()
    lay = plan.layout(R, G, H, tile=CONFIG.tile)
    return row_jobs.row_jobs(
        *(given[name] for name in ("page_table", "slots", "positions", "num_active")),
        num_pages=len(case.k_pages), page_size=PAGE, split=SPLIT,
        tile_rows=lay.tile_rows, num_kv_heads=K, interpret=True,
    )  # fmt: skip


def test_whoever_is_last_adds_the_same_splits(rng):
    """Fails if a row's bits depend on which program does its last job.

    Negative control: a program that believes to be the last one job too early adds a
    split that is not there yet.
    """
    case = make_case(rng)
    expected = _attend(case)[: case.num_active]
    several = dataclasses.replace(CONFIG, programs=10)
    out = _attend(case, config=several)[: case.num_active]
    testing.assert_same_bits(out, expected)
    jobs = jobs_of(case)
    out = _attend(case, jobs=jobs)[: case.num_active]
    testing.assert_same_bits(out, expected)
    early = _attend(case, jobs=jobs._replace(done=jobs.done + 1))[: case.num_active]
    assert np.isnan(early).any()


def test_each_program_writes_what_it_reads(rng, monkeypatch):
    """Negative control: of the programs of a head, the last one writes for all."""
    real = head_rotation.write_rows

    def write_rows(*args, is_stored, **options):
        is_last = pl.program_id(1) == pl.num_programs(1) - 1
        real(*args, is_stored=is_stored & is_last, **options)

    slab = slabs.in_slab(slabs.small_slab(rng), range(8))
    monkeypatch.setattr(head_rotation, "write_rows", write_rows)
    # Four programs for each head, and not a config that is compiled already.
    several = dataclasses.replace(slabs.SMALL, programs=8)
    planted = slabs.run(slab, 8, config=several)[0][:8].astype(np.float32)
    assert np.isnan(planted).any()


def walk(jobs, tile_rows):
    """What the kernel does: `(rows, split, shared)` for each job."""
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
    """Fails if a split is missed, done twice, or shared by a row that sees part."""
    S, M, P, split, tile_rows = 3, 6, 40, 16, 4
    make = jax.jit(
        functools.partial(
            row_jobs.row_jobs,
            num_pages=P,
            page_size=8,
            split=split,
            tile_rows=tile_rows,
            num_kv_heads=3,
            interpret=True,
        )  # fmt: skip
    )
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
    pool = jax.ShapeDtypeStruct((2**17, 16, 8, 128), jnp.bfloat16)
    heads = jax.ShapeDtypeStruct((R, 32 * 128), jnp.bfloat16)
    turn = jax.ShapeDtypeStruct((R, 64), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((R,), jnp.int32)
    given = {"page_table": jnp.zeros((1, 4), jnp.int32), "num_active": jnp.int32(0)}
    with pytest.raises(NotImplementedError, match="2147483648 elements of a pool"):
        jax.eval_shape(
            functools.partial(_row_attention, **given),
            heads,
            k_pages=pool,
            v_pages=pool,
            cos=turn,
            sin=turn,
            slots=rows,
            positions=rows,
        )
