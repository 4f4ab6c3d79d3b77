"""Attention over pages, against float64: what is not a visible key is NaN."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.ops import paged_attention


ROWS, HEADS, KV_HEADS = 8, 6, 2
GROUP = HEADS // KV_HEADS
RAGGED = 141  # past one key block, inside a page

_attend = jax.jit(paged_attention.paged_attention, static_argnames="scale")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Seven active rows over five slots, and the plain sequences behind the pages."""

    q: np.ndarray  # [R, N, H]
    keys: list[np.ndarray]  # per slot [length, K, H]
    values: list[np.ndarray]
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    num_active: int = ROWS - 1

    def attend(self, **changes):
        inputs = {
            "page_table": self.page_table,
            "slots": self.slots,
            "positions": self.positions,
            "num_active": np.int32(self.num_active),
            "scale": self.q.shape[-1] ** -0.5,
        }
        arrays = {"q": self.q, "k_pages": self.k_pages, "v_pages": self.v_pages}
        out = _attend(**(arrays | inputs | changes))
        assert out.shape == self.q.shape and out.dtype == self.q.dtype
        return np.asarray(out)[: self.num_active]

    def oracle(self) -> np.ndarray:
        """Row by row and head by head, as the definition has it."""
        out = np.zeros((self.num_active, HEADS, self.q.shape[-1]))
        for row in range(self.num_active):
            seen = slice(self.positions[row] + 1)
            keys = self.keys[self.slots[row]][seen].astype(np.float64)
            values = self.values[self.slots[row]][seen].astype(np.float64)
            for head in range(HEADS):
                query = self.q[row, head].astype(np.float64)
                scores = keys[:, head // GROUP] @ query / np.sqrt(len(query))
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ values[:, head // GROUP] / weights.sum()
        return out

    def assert_close(self, out):
        longest, head_dim = max(map(len, self.keys)), self.q.shape[-1]
        testing.assert_rows_close(
            out, self.oracle(), dtype=self.q.dtype, reduction=longest + head_dim
        )


def make_case(*, page_size=16, head_dim=64, dtype="float32") -> Case:
    """Slots of 1, C-1, C, C+1 and a ragged number of tokens, each with its own data.

    Pages are allocated in random order. The bytes of free pages, and of owned ones
    past a slot's length, are NaN.
    """
    rng = np.random.default_rng(page_size + head_dim)
    dtype = jnp.dtype(dtype)
    lengths = [1, page_size - 1, page_size, page_size + 1, RAGGED]
    width = -(-max(lengths) // page_size) + 1
    num_pages = len(lengths) * width + 3
    free = list(rng.permutation(num_pages))
    table = np.full((len(lengths), width), num_pages, np.int32)
    pools = np.full((2, num_pages, page_size, KV_HEADS, head_dim), np.nan, dtype)
    sequences = []
    for slot, length in enumerate(lengths):
        tokens = rng.standard_normal((2, length, KV_HEADS, head_dim)).astype(dtype)
        sequences.append(tokens)
        for page in range(-(-length // page_size)):
            table[slot, page] = free.pop()
            part = tokens[:, page * page_size : (page + 1) * page_size]
            pools[:, table[slot, page], : part.shape[1]] = part
    q = 3 * rng.standard_normal((ROWS, HEADS, head_dim))
    q[-1] = np.nan  # the padding row
    rows = [(slot, length - 1) for slot, length in enumerate(lengths)]
    rows += [(4, RAGGED - 3), (4, RAGGED - 2)]  # in the company of a longer row
    rows = [rows[i] for i in rng.permutation(len(rows))] + [(4, 10**6)]
    slots, positions = np.asarray(rows, np.int32).T
    return Case(
        q=q.astype(dtype),
        keys=[tokens[0] for tokens in sequences],
        values=[tokens[1] for tokens in sequences],
        k_pages=pools[0],
        v_pages=pools[1],
        page_table=table,
        slots=slots,
        positions=positions,
    )


@pytest.mark.parametrize("page_size", [8, 16, 256])
def test_page_sizes(page_size):
    """Fails if a block reads past a page, or starts in the wrong half of one."""
    case = make_case(page_size=page_size)
    case.assert_close(case.attend())


@pytest.mark.parametrize(("head_dim", "dtype"), [(80, "float32"), (128, "bfloat16")])
def test_head_sizes_and_dtypes(head_dim, dtype):
    """Fails if the scale is that of another head size, or sums are bfloat16."""
    case = make_case(head_dim=head_dim, dtype=dtype)
    case.assert_close(case.attend())


def test_one_slot():
    """Fails if the form without a loop over slots does something else."""
    case = make_case()
    mine = np.flatnonzero(case.slots[: case.num_active] == 4)
    order = np.concatenate([mine, np.setdiff1d(np.arange(ROWS), mine)])
    case = dataclasses.replace(
        case,
        q=case.q[order],
        slots=np.full(ROWS, 0, np.int32),
        positions=case.positions[order],
        page_table=case.page_table[4:],
        keys=case.keys[4:],
        values=case.values[4:],
        num_active=len(mine),
    )
    case.assert_close(case.attend())


def test_order_and_count_of_rows_do_not_matter():
    """Fails if a row's bits depend on its place, or on the rows it shares with."""
    case = make_case()
    out = case.attend()
    order = np.roll(np.arange(ROWS - 1), 3)
    turned = np.append(order, ROWS - 1)
    moved = dataclasses.replace(
        case,
        q=case.q[turned],
        slots=case.slots[turned],
        positions=case.positions[turned],
    )
    testing.assert_same_bits(moved.attend(), out[order])
    alone = dataclasses.replace(case, num_active=1)
    testing.assert_same_bits(alone.attend(), out[:1])


def other_groups(q):
    """Heads so permuted that head `n` meets key/value head `n % K`."""
    return q.reshape(ROWS, KV_HEADS, GROUP, -1).swapaxes(1, 2).reshape(q.shape)


def repeated_page(table):
    table = table.copy()
    table[4, 1] = table[4, 0]
    return table


FAULTS = {
    "zeros": lambda case: np.zeros_like(case.oracle()),
    "no scale": lambda case: case.attend(q=case.q * 8),  # 8 = sqrt(H)
    "inverse scale": lambda case: case.attend(q=case.q * 64),
    "scale of a smaller head": lambda case: case.attend(q=case.q * np.float32(1.01)),
    "last key unseen": lambda case: case.attend(
        positions=np.maximum(case.positions - 1, 0)
    ),
    "one key too many": lambda case: case.attend(positions=case.positions + 1),
    "another slot": lambda case: case.attend(slots=case.slots[::-1].copy()),
    "heads interleaved": lambda case: case.attend(q=other_groups(case.q)),
    "a page twice": lambda case: case.attend(page_table=repeated_page(case.page_table)),
    "keys as values": lambda case: case.attend(v_pages=case.k_pages),
    "rows exchanged": lambda case: case.attend()[::-1],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault):
    """Negative control: the oracle tells these from attention."""
    case = make_case()
    with pytest.raises(AssertionError, match="rows are off"):
        case.assert_close(FAULTS[fault](case))


def test_an_unowned_page_is_poison():
    """Negative control: a table that points at a free page gives NaN."""
    case = make_case()
    unowned = np.setdiff1d(np.arange(case.k_pages.shape[0]), case.page_table)[0]
    table = case.page_table.copy()
    table[4, 2] = unowned
    is_nan = np.isnan(case.attend(page_table=table)).all((1, 2))
    np.testing.assert_array_equal(is_nan, case.slots[: case.num_active] == 4)


@pytest.mark.parametrize("page_size", [48, 192])
def test_refusals(page_size):
    """Fails if an odd page size is read wrongly."""
    case = make_case(page_size=page_size)
    message = f"page_size={page_size} must divide 128, the key block"
    with pytest.raises(ValueError, match=message):
        case.attend()
