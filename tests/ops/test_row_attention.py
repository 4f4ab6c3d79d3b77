"""The row attention of every implementation: rows alone, together and in float64; and
causal attention over whole sequences, against attention row by row."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native import native_oracle as oracle
from ops import row_slabs as slabs

from spec_jax import testing
from spec_jax.ops import causal_attention


CASES = {
    "bfloat16": ((7, 1, 80), 16, True),  # (N, K, H), page size, norms of heads
    "float32": ((2, 1, 256), 128, False),
}


@pytest.mark.parametrize("dtype", CASES)
def test_a_row_is_that_row_alone_and_float64s(rng, impl, dtype):
    """Fails if a neighbour, a padding row, an unowned page or a later position is seen.
    Slot 0 begins empty, slot 1 crosses a page, slots 2 and 3 a split: rows see keys on
    both sides of each edge."""
    (N, K, H), page_size, has_norms = CASES[dtype]
    crossing = page_size - 1
    rows = slabs.window((0, 3), (crossing, crossing + 3), (62, 66), (30, 36))
    slab = oracle.make_slab(
        rng, rows, dtype=dtype, N=N, K=K, H=H, page_size=page_size,
        prefix=(0, crossing, 62, 30),
    )  # fmt: skip
    if not has_norms:
        slab = dataclasses.replace(slab, q_norm=None, k_norm=None)
    attend = functools.partial(slabs.run, impl)
    out, k_pages, v_pages = slabs.assert_row_contract(slab, attend)
    expected, expected_k, expected_v = oracle.attend(slab, **slabs.numbers(slab))
    near = {"dtype": dtype, "reduction": H + slab.positions.max() + 1}
    testing.assert_rows_close(out, expected, **near)
    with pytest.raises(AssertionError, match="rows are off"):  # Negative control.
        testing.assert_rows_close(np.roll(out, 1, axis=0), expected, **near)
    written = ~np.isnan(expected_k).any(axis=-1)
    near = {"dtype": dtype, "reduction": H}
    testing.assert_rows_close(k_pages[written], expected_k[written], **near)
    np.testing.assert_array_equal(v_pages.astype(np.float64), expected_v)
    assert np.isnan(k_pages[~written].astype(np.float32)).all()
    if dtype == "bfloat16" and impl != "xla":  # XLA may fuse roundings.
        new = tuple(np.transpose([slab.locate(*row) for row in rows]))
        oracle.assert_rounded_alike(k_pages[new], expected_k[new])
        if impl != "interpret":  # Triton rounds probabilities, too.
            oracle.assert_rounded_alike(out, expected)


def test_another_order_for_one_row_is_caught(rng):
    """Negative control: one row by XLA, and several by native kernels."""

    def planted(slab, live):
        return slabs.run("xla" if live == 1 else "portable", slab, live)

    with pytest.raises(AssertionError, match="5 live.*elements differ"):
        slabs.assert_row_contract(slabs.small_slab(rng, "float32"), planted)


BRANCH = np.arange(-7, 1, dtype=np.int32)
"""Where the branch of a chain lies, counted from each position."""


@pytest.mark.parametrize("window", [1, 5, 32, 40])
def test_a_window(rng, impl, window):
    """Fails if a row sees a key before its window, or misses one in it, or if its bits
    depend on how far back its neighbours see. Rows lie in several blocks, splits and
    slots; keys that no row sees are NaN."""
    rows = slabs.window((0, 3), (70, 74), (126, 131))
    slab = oracle.make_slab(
        rng, rows, dtype="float32", N=4, K=2, H=16, page_size=8,
        prefix=(0, 70, 126),
    )  # fmt: skip
    for slot, start in ((1, 70), (2, 126)):
        for position in range(start - window + 1):
            slab.k_pages[slab.locate(slot, position)] = np.nan
            slab.v_pages[slab.locate(slot, position)] = np.nan
    attend = functools.partial(slabs.run, impl, window=window)
    if impl == "interpret":  # Its keys before a window must be finite.
        finite = {x: np.nan_to_num(getattr(slab, x)) for x in ("k_pages", "v_pages")}
        slab = dataclasses.replace(slab, **finite)
    R = len(rows)
    out, *_ = attend(slabs.in_slab(slab, range(R)), R)
    expected, *_ = oracle.attend(slab, **slabs.numbers(slab), window=window)
    near = {"dtype": "float32", "reduction": 16 + window}
    testing.assert_rows_close(out[:R], expected, **near)
    alone, *_ = slabs.rows_alone(slab, attend)
    testing.assert_same_bits(out[:R], alone)
    other, *_ = oracle.attend(slab, **slabs.numbers(slab), window=window + 1)
    if not np.isnan(other).any():  # Negative control: one key more.
        with pytest.raises(AssertionError, match="rows are off"):
            testing.assert_rows_close(out[:R], other, **near)


def test_a_window_of_trees(rng, kernels):
    """Fails if rows of a tree see another window than rows of a chain."""
    rows = slabs.window((70, 75), (1026, 1031))
    slab = oracle.make_slab(
        rng, rows, dtype="float32", N=4, K=2, H=16, page_size=64, prefix=(70, 1026)
    )
    branch = slab.positions[:, None] + BRANCH
    for window in (3, 20, 64):
        tree = slabs.run(kernels, slab, 10, branch=branch, window=window)
        expected, *_ = oracle.attend(slab, **slabs.numbers(slab), window=window)
        near = {"dtype": "float32", "reduction": 16 + window}
        testing.assert_rows_close(tree[0], expected, **near)


def paged_otherwise(page_size, *, width=None):
    """Makes one slot of 71 positions, always of the same data, on shuffled pages."""
    data, shuffle = np.random.default_rng(1), np.random.default_rng(page_size)
    drawn = mock.Mock(wraps=data, permutation=shuffle.permutation)
    slab = oracle.make_slab(
        drawn, [(0, 69), (0, 70)], dtype="bfloat16", N=4, K=2, H=16,
        page_size=page_size, prefix=(69,), table_width=width,
    )  # fmt: skip
    return slabs.in_slab(slab, [0, 1])


def test_pages_and_table_width_do_not_matter(impl):
    """Fails if bits depend on where a prefix lies, or on what it might grow to. A page
    of 128 positions holds all of the text, and its table has another page."""
    slabs_ = paged_otherwise(8), paged_otherwise(48), paged_otherwise(128, width=2)
    one, *others = (slabs.run(impl, slab, 2)[0][:2] for slab in slabs_)
    for other in others:
        testing.assert_same_bits(other, one)


UNMAPPED = {
    "a page past the pool": {"page_table": (0, 1, 99)},
    "the first page past the pool": {"page_table": (0, 1, 20)},
    "a negative page": {"page_table": (0, 1, -1)},
    "a hole in the prefix": {"page_table": (0, 0, 20)},
    "a position past the table": {"positions": (0, 72)},
    "the last position there is": {"positions": (0, 2**31 - 1)},
    "a negative position": {"positions": (0, -1)},
    "a slot past the table": {"slots": (0, 2)},
    "a negative slot": {"slots": (0, -1)},
    "a branch past the table": {"branch": (0, -1, 72)},
    "the last branch there is": {"branch": (0, -1, 2**31 - 1)},
    "a negative branch": {"branch": (0, -1, -1)},
}


def test_rows_without_a_page(rng, kernels):
    """Fails if such a row is written anywhere, reads anything, or is not NaN."""
    slab = slabs.in_slab(slabs.small_slab(rng), range(8))
    assert slab.k_pages.shape[0] == 20 and slab.page_table.shape == (2, 9)
    clean, *_ = slabs.run(kernels, slab, 8)
    for fault, changes in UNMAPPED.items():
        ((name, change),) = changes.items()
        arrays = {"branch": slab.positions[:, None] + BRANCH}
        arrays = arrays if name == "branch" else {name: getattr(slab, name).copy()}
        arrays[name][change[:-1]] = change[-1]
        # Slot 0 has the first rows.
        lost = {0, 1, 2, 3} if name == "page_table" else {0}
        branch = arrays.pop("branch", None)
        broken = dataclasses.replace(slab, **arrays)
        out, *pools = slabs.run(kernels, broken, 8, branch=branch)
        kept = [r for r in range(8) if r not in lost]
        assert np.isnan(out[list(lost)].astype(np.float32)).all(), fault
        if name == "page_table":
            testing.assert_same_bits(out[kept], clean[kept], what=fault)
        without, *only_kept = slabs.run(kernels, slabs.in_slab(slab, kept), len(kept))
        testing.assert_same_bits(pools, only_kept, what=fault)
        testing.assert_same_bits(out[kept], without[: len(kept)], what=fault)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_inf_reach_what_sees_them(rng, impl, value):
    """Fails if NaN is swallowed by a mask, a maximum or an exponential, or leaks."""
    slab = slabs.in_slab(slabs.small_slab(rng), range(8))
    run = lambda slab: slabs.run(impl, slab, 8)[0][:8].astype(np.float32)
    clean, of_slot = run(slab), slab.slots[:8] == 1
    for pool, column in (("k_pages", slice(32, 64)), ("v_pages", 35)):
        for position, is_seen in ((33, True), (70, False)):
            pages = getattr(slab, pool).copy()
            pages[slab.locate(1, position)][1, 3] = value
            out = run(dataclasses.replace(slab, **{pool: pages}))
            testing.assert_same_bits(out[~of_slot], clean[~of_slot])
            testing.assert_same_bits(out[:, :32], clean[:, :32])
            if not is_seen:  # Negative control: no row sees it.
                testing.assert_same_bits(out, clean)
            elif pool == "v_pages" or np.isnan(value):  # Infinite keys may weigh 0.
                assert not np.isfinite(out[of_slot][:, column]).any()
    bad = slab.heads.copy()
    bad[np.flatnonzero(slab.positions == 64)] = value
    out = run(dataclasses.replace(slab, heads=bad))
    sees = of_slot & (slab.positions[:8] > 63)
    testing.assert_same_bits(out[~sees], clean[~sees])
    assert not np.isfinite(out[sees]).all(axis=1).any()


PARENTS = (-1, 0, 0, 1, 1, 2, 3, 3, 6)
"""Parents of the nodes in slot 1, after 62 positions: node `i` lies at `62 + i`."""
NODES, WIDTH = len(PARENTS), 6


def path(node: int) -> list[int]:
    """Lists the nodes from the root to this one."""
    return [node] if PARENTS[node] < 0 else [*path(PARENTS[node]), node]


def tree_slab(rng):
    """Returns rows of the tree and of a chain in slot 0, and where their keys lie. Rows
    of one position have one rotation. Slot 1 has a page for every node."""
    rows = [(1, 62 + node) for node in range(NODES)] + [(0, 10), (0, 11)]
    slab = slabs.small_slab(rng, "float32", rows=rows)
    positions = [61 + len(path(node)) for node in range(NODES)] + [10, 11]
    first = [positions.index(position) for position in positions]
    turned = {"cos": slab.cos[first], "sin": slab.sin[first]}
    slab = dataclasses.replace(slab, positions=np.int32(positions), **turned)
    branches = [[*range(62), *(62 + i for i in path(node))] for node in range(NODES)]
    branches += [list(range(position + 1)) for position in (10, 11)]
    return slab, np.asarray([branch[-WIDTH:] for branch in branches], np.int32)


def attend_tree(impl, slab, lies_at, order):
    """Attends rows of the tree, each with its own branch."""
    order = np.asarray(order)
    grow = ((0, slabs.HEIGHT - len(order)), (0, 0))
    branch = np.pad(lies_at[order], grow, constant_values=2**30)
    return slabs.run(impl, slabs.in_slab(slab, order), len(order), branch=branch)


def test_a_tree_row_is_the_plain_row_of_its_branch(rng, kernels):
    """Fails if a branch is seen in another order, or in other blocks, than a chain."""
    slab, lies_at = tree_slab(rng)
    out, *pools = attend_tree(kernels, slab, lies_at, range(NODES + 2))
    turned = np.random.default_rng(2).permutation(NODES + 2)
    again, *pools_again = attend_tree(kernels, slab, lies_at, turned)
    testing.assert_same_bits(again[: NODES + 2], out[turned])
    testing.assert_same_bits(pools_again, pools)
    attend = functools.partial(slabs.run, kernels)
    for leaf in (4, 5, 8):
        nodes = path(leaf)
        plain, *chain = slabs.rows_alone(slab.rows(nodes), attend)
        testing.assert_same_bits(out[nodes], plain, what=f"leaf {leaf}")
        for pool, chained in zip(pools, chain, strict=True):
            for step, node in enumerate(nodes):
                written = pool[slab.locate(1, 62 + node)]
                testing.assert_same_bits(written, chained[slab.locate(1, 62 + step)])
    chain, *_ = attend(slabs.in_slab(slab, [9, 10]), 2)
    testing.assert_same_bits(out[[9, 10]], chain[:2])
    # Negative control: the right keys of a branch, two of them exchanged.
    lies_at[8, [2, 3]] = lies_at[8, [3, 2]]
    wrong, *_ = attend_tree(kernels, slab, lies_at, range(NODES + 2))
    testing.assert_rows_close(wrong[:11], out[:11], dtype="float32", reduction=83)
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(wrong[:11], out[:11])


BATCH, HEADS, KV_HEADS = 2, 6, 2
LENGTH = 150  # two blocks, the second one ragged


def inputs(rng, length=LENGTH, head_dim=64, dtype="float32"):
    """Draws queries, keys and values; each sequence has its own."""

    def normal(heads):
        x = rng.standard_normal((BATCH, length, heads, head_dim))
        return jnp.asarray(x.astype(jnp.dtype(dtype)))

    return normal(HEADS), normal(KV_HEADS), normal(KV_HEADS)


def compile_():
    """Compiles a fresh executable, so that changed block sizes take effect."""
    return jax.jit(functools.partial(causal_attention.causal_attention, scale=64**-0.5))


_attend = compile_()


def naive(q, k, v, own=None, *, scale, window):
    """Attends as rows say: a query is the last of its column's own rows."""
    own_k, own_v = own or [x[:, :, None][:, :, :0] for x in (k, v)]
    B, T, N, H = q.shape
    queries = q.reshape(B, T, KV_HEADS, -1, H)
    columns, behind = jnp.arange(T), own_k.shape[2]
    ages = columns[:, None] + behind - columns[None, :]
    seen = (ages >= behind) & (ages < window)
    before = jnp.where(seen, jnp.einsum("btkgh,bskh->bkgts", queries, k), -jnp.inf)
    own = jnp.einsum("btkgh,btjkh->bkgtj", queries, own_k)
    own = jnp.where(jnp.arange(behind)[::-1] < window, own, -jnp.inf)
    probs = jax.nn.softmax(jnp.concatenate([before, own], axis=-1) * scale, axis=-1)
    out = jnp.einsum("bkgts,bskh->btkgh", probs[..., :T], v)
    out += jnp.einsum("bkgtj,btjkh->btkgh", probs[..., T:], own_v)
    return out.reshape(q.shape)


def assert_close(out, q, k, v):
    """Compares with attention in float32, by rows."""
    assert out.dtype == q.dtype
    T, H = q.shape[1], q.shape[3]
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    expected = naive(*wide, scale=H**-0.5, window=T)
    testing.assert_rows_close(out, expected, dtype=q.dtype, reduction=T + H)


def test_bfloat16(rng):
    """Fails if scores are rounded, or a position sees the one after it."""
    q, k, v = inputs(rng, dtype="bfloat16")
    assert_close(_attend(q, k, v), q, k, v)
    with pytest.raises(AssertionError, match="rows are off"):  # Negative control.
        assert_close(_attend(q, k, k), q, k, v)


def test_many_blocks(rng, monkeypatch):
    """Fails if blocks overlap, or the last and shorter one is lost."""
    monkeypatch.setattr(causal_attention, "MIN_BLOCK", 8)
    monkeypatch.setattr(causal_attention, "MAX_BLOCKS", 3)
    qkv = inputs(rng, length=28)  # blocks of 10, 10 and 8
    assert_close(compile_()(*qkv), *qkv)


def test_later_keys_are_never_used(rng):
    """Fails if a masked key is multiplied by zero: NaN would show."""
    q, k, v = inputs(rng)
    half = 64  # inside the first block
    poisoned = [x.at[:, half:].set(jnp.nan) for x in (q, k)]
    out = _attend(*poisoned, v)
    testing.assert_same_bits(out[:, :half], _attend(q, k, v)[:, :half])


@pytest.mark.parametrize(
    ("behind", "window"), [(0, LENGTH), (3, LENGTH + 3), (3, 40), (3, 2)]
)
def test_rows_behind_each_position(rng, behind, window):
    """Compares attention to a position's own rows, if any, and all gradients."""
    (q, k, v), own = inputs(rng), None
    if behind:
        own = [jnp.stack([inputs(rng)[1] for _ in range(behind)], 2) for _ in "kv"]
    weights = inputs(rng)[0]

    def pulled(attend, window):
        how = {"scale": 64**-0.5, "window": window}
        bound = lambda q, k, v, own: attend(q, k, v, own, **how)
        made, pull = jax.vjp(bound, q, k, v, own)
        return jax.tree.leaves((made, pull(weights)))

    expected = pulled(naive, window)
    actual = pulled(causal_attention.causal_attention, window)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)
    # Negative control: a window of one key less.
    assert not np.allclose(pulled(naive, window - 1)[0], expected[0], atol=2e-5)
