"""Paged attention of Triton, interpreted: the job list, edges, and the combine."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native import native_oracle as oracle

from spec_jax import testing
from spec_jax.ops import paged_attention
from spec_jax.pallas import (
    attention_plan as plan,
    paged_attention_triton as paged,
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


def interpreted(fn, **static):
    """`fn`, compiled for a CPU."""
    return jax.jit(functools.partial(fn, interpret=True, **static))


_attend = interpreted(paged.paged_attention, scale=H**-0.5, config=CONFIG)


def test_edges_of_pages_blocks_and_splits(rng):
    """Fails if a key is missed or seen twice at an edge, the table's end included."""
    case = make_case(rng)
    out = np.asarray(_attend(**case.inputs()))
    near = {"dtype": "float32", "reduction": max(LENGTHS) + H}
    testing.assert_rows_close(out[: case.num_active], case.oracle(), **near)
    assert not out[case.num_active :].any()
    reference = paged_attention.paged_attention(
        **case.inputs(), scale=H**-0.5, impl="xla"
    )
    reference = np.asarray(reference)[: case.num_active]
    testing.assert_rows_close(out[: case.num_active], reference, **near)


def walk(jobs, tile_rows):
    """What the kernel does: `(rows, split, shared)` for each job."""
    slots, lengths, full, led, ends, _ = (np.asarray(field) for field in jobs)
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
        num_pages=64, page_size=16, split=256, tile_rows=16,
    )  # fmt: skip
    assert list(np.asarray(jobs.led_splits)[:2]) == [3, 0]
    assert jobs.job_ends[-1] == 3 + 5


def test_a_pool_too_large_is_refused():
    """Fails if offsets into a pool could pass 32 bits."""
    pool = jax.ShapeDtypeStruct((2**17, 16, 8, 128), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((R, 16, 128), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((R,), jnp.int32)
    attend = functools.partial(
        paged.paged_attention,
        page_table=jnp.zeros((1, 4), jnp.int32),
        num_active=jnp.int32(0),
        scale=1.0,
        interpret=True,
    )
    with pytest.raises(NotImplementedError, match="2147483648 elements of a pool"):
        jax.eval_shape(
            lambda q, pool, rows: attend(q, pool, pool, slots=rows, positions=rows),
            q,
            pool,
            rows,
        )
