"""The Mosaic attention of a layer, interpreted: rows alone, together and on trees."""

import functools
import types

import jax
import jax.numpy as jnp
import mosaic_interpreter
import numpy as np
import pytest
import row_slabs as slabs
from native import native_oracle as oracle

from spec_jax import testing
from spec_jax.ops import dispatch, row_attention
from spec_jax.pallas import (
    attention_plan as plan,
    row_attention_mosaic,
    row_attention_triton,
    row_jobs_mosaic,
    row_jobs_triton,
)


# Two rows to a tile.
CONFIG = plan.Config(split=128, block=64, tile=4, programs=2, num_stages=2)
SIZES = {"N": 2, "K": 1, "H": 128}
ROWS = 4  # of every slab here

_attend = jax.jit(
    functools.partial(
        row_attention_mosaic.attend, interpret=mosaic_interpreter.params()
    ),
    static_argnames=("eps", "scale", "config"),
)


def run(slab, which, *, branch=None):
    """Attended heads of these rows and both pools; the slab's other rows are poison."""
    which = [*which]
    padding = ROWS - len(which)
    if branch is not None:
        branch = np.pad(branch[which], ((0, padding), (0, 0)), constant_values=2**30)
    outputs = _attend(
        **slab.rows([*which, *[-1] * padding]).arguments(len(which)),
        **slabs.numbers(slab),
        config=CONFIG,
        branch=branch,
    )
    out, *pools = (np.asarray(output) for output in outputs)
    return out[: len(which)], pools


def test_a_row_is_that_row_alone_and_float64s(rng):
    """Fails if a neighbour, a padding row or a later position is seen.

    Slot 1 crosses a page, a block and a split; slot 0 is one short.
    """
    rows = [(1, 127), (0, 3), (1, 128), (1, 129)]
    slab = slabs.small_slab(rng, rows=rows, prefix=(3, 127), **SIZES)
    out, pools = run(slab, range(ROWS))
    expected, expected_k, expected_v = oracle.attend(slab, **slabs.numbers(slab))
    testing.assert_rows_close(out, expected, dtype="bfloat16", reduction=128 + 130)
    written = ~np.isnan(expected_k).any(axis=-1)
    new = tuple(np.transpose([slab.locate(*row) for row in rows]))
    oracle.assert_rounded_alike(pools[0][new], expected_k[new])
    testing.assert_rows_close(
        pools[0][written], expected_k[written], dtype="bfloat16", reduction=128
    )
    np.testing.assert_array_equal(pools[1].astype(np.float64), expected_v)
    assert np.isnan(pools[0][~written].astype(np.float32)).all()
    # What is turned and written is Triton's, bit for bit.
    _, *twins = slabs.run(slabs.in_slab(slab, range(ROWS)), ROWS)
    testing.assert_same_bits(pools, twins)
    order = [3, 1, 0, 2]
    turned, after = run(slab, order)
    testing.assert_same_bits(turned, out[order])
    testing.assert_same_bits(after, pools)
    testing.assert_same_bits(run(slab, [0])[0], out[:1])


# Positions 127 .. 130 of slot 1 lie at 130, 127, 129 and 128.
BRANCHES = np.asarray(
    [[125, 126, 130], [126, 130, 127], [130, 127, 129], [1, 2, 3]], np.int32
)


def tree_slab(rng):
    """Three rows of a branch, and a chain of slot 0."""
    rows = [(1, 130), (1, 127), (1, 129), (0, 3)]
    slab = slabs.small_slab(rng, rows=rows, prefix=(3, 127), **SIZES)
    slab.positions[:] = [127, 128, 129, 3]
    return slab


def test_a_tree_row_is_the_plain_row_of_its_branch(rng):
    """Fails if a branch is seen in another order, or in other blocks, than a chain."""
    slab = tree_slab(rng)
    out, _ = run(slab, range(ROWS), branch=BRANCHES)
    plain, _ = run(slab, range(ROWS))
    testing.assert_same_bits(out, plain)
    swapped = BRANCHES.copy()
    swapped[2, [0, 1]] = swapped[2, [1, 0]]
    wrong, _ = run(slab, range(ROWS), branch=swapped)
    testing.assert_rows_close(wrong, out, dtype="bfloat16", reduction=130)
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(wrong, out)


def test_a_row_without_a_page_is_lost(rng):
    """Fails if it reads or writes where no page is, or another row does."""
    slab = tree_slab(rng)
    out, _ = run(slab, range(ROWS), branch=BRANCHES)
    broken = BRANCHES.copy()
    broken[2, -1] = 2**31 - 1
    lost, after = run(slab, range(ROWS), branch=broken)
    assert np.isnan(lost[2].astype(np.float32)).all()
    kept = [0, 1, 3]
    testing.assert_same_bits(lost[kept], out[kept])
    testing.assert_same_bits(after, run(slab, kept, branch=BRANCHES)[1])


@pytest.mark.parametrize("width", [0, 3, None])
def test_the_jobs_are_those_of_triton(rng, monkeypatch, width):
    """Fails if a row lies elsewhere, is lost for another reason, or leads other splits.

    A slot's pages are two lines of the table. Rows without a width lie one position
    before the last that they see.
    """
    monkeypatch.setattr(row_jobs_mosaic, "TABLE_ENTRIES", 128)
    S, M, P, R = 3, 130, 400, 7
    sizes = {"num_pages": P, "page_size": 8, "split": 256, "tile_rows": 4}
    kinds = (row_jobs_triton, True), (row_jobs_mosaic, mosaic_interpreter.params())
    make, twin = (
        jax.jit(
            functools.partial(
                module.row_jobs, **sizes, num_kv_heads=2, interpret=interpret
            )
        )
        for module, interpret in kinds
    )
    table = rng.permutation(P)[: S * M].reshape(S, M).astype(np.int32)
    table[0, 129] = P  # Of its last place alone.
    for live, first in ((R, 1000), (R, 1030), (3, 500), (0, 0)):
        slots = np.asarray([0, 1, 1, 0, 1, 3, -1], np.int32)
        positions = first + np.asarray([3, 9, 2, 5, 2**30, 1, 1], np.int32)
        branch = {}
        if width:
            steps = np.tile(np.arange(1 - width, 1, dtype=np.int32), (R, 1))
            branch["branch"] = positions[:, None] + rng.permuted(steps, axis=1)
        if width is None:
            branch["places"] = positions - 1
        given = table, slots, positions, np.int32(live)
        testing.assert_same_bits(twin(*given, **branch), make(*given, **branch))


BLOCK = 17  # of rows that lie on both sides of a split's end
BACKENDS = {
    "mosaic": (row_attention_mosaic, CONFIG, mosaic_interpreter.params()),
    "triton": (row_attention_triton, slabs.SMALL, True),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("impl", BACKENDS)
def test_rows_of_a_block_see_all_of_it(rng, monkeypatch, impl):
    """Fails if a row of a block drafter's sees less than its block, or more."""
    module, config, interpret = BACKENDS[impl]
    attend = functools.partial(module.attend, config=config)
    kernels = types.SimpleNamespace(attend=attend)
    monkeypatch.setattr(dispatch, "kernels", lambda name, impl: (kernels, interpret))
    rows = [(1, 120 + i) for i in range(BLOCK)]
    slab = slabs.small_slab(rng, rows=rows, prefix=(3, 120), **SIZES)
    for pool in (slab.k_pages, slab.v_pages):  # XLA's form reads all of a page.
        pool[np.isnan(pool.astype(np.float32))] = 0
    inputs = {name: jnp.asarray(x) for name, x in slab.arguments(BLOCK).items()}
    run = functools.partial(
        row_attention.row_attention, **inputs, **slabs.numbers(slab)
    )
    attended = lambda **how: jax.jit(functools.partial(run, **how))()[0]
    found = attended(block=BLOCK, impl=impl)
    expected = attended(block=BLOCK, impl="xla")
    close = functools.partial(
        testing.assert_rows_close, dtype="bfloat16", reduction=128 + 137
    )
    close(found, expected)
    with pytest.raises(AssertionError):  # Negative control: each to its own position.
        close(attended(impl="xla"), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"H": 64}, "head size 64: the Mosaic kernels take 128"),
        ({"dtype": "float32"}, "take bfloat16, not float32"),
        ({"page_size": 24}, "pages of 24 positions: a multiple of 8 that divides 64"),
        ({"N": 17}, "17 query heads to a key/value head: at most 16"),
    ],
)
def test_refusals(rng, changes, message):
    """Fails if what the kernels cannot take is computed in some way."""
    slab = slabs.small_slab(rng, **SIZES | changes)
    with pytest.raises(NotImplementedError, match=message):
        row_attention_mosaic.attend(**slab.arguments(), **slabs.numbers(slab))
