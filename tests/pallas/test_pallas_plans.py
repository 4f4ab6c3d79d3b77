"""Plans of Triton's skinny GEMM, interpreted: blocks, chains, splits and tiles; and of
its attention: plans, and the adding of splits. Filters, noise and sums of its kernels,
against the rules' own.

The promises of every implementation are tested in `ops/test_projection`,
`ops/test_row_attention` and `ops/test_draw`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native import native_oracle as oracle
from ops import row_contract, row_slabs as slabs
from ops.row_contract import EPS, Product
from rules import test_sampling
from slow_cases import slow

from spec_jax import testing
from spec_jax.native import blocks
from spec_jax.ops import draw as draw_op, weights as weights_lib
from spec_jax.pallas import (
    first_tokens_triton,
    noisy_weights_triton,
    rms_norm_triton,
    row_attention_triton,
    row_jobs,
    row_sums_triton,
    skinny_gemm_triton as gemm,
)
from spec_jax.rules import sampling


SMALL = gemm.Plan(block_n=16, block_k=32)
SPLIT = dataclasses.replace(SMALL, splits=2)
CHAINS = dataclasses.replace(SMALL, chains=2)


_project = jax.jit(gemm.project, static_argnames=("out_dtype", "plan"))
_add = jax.jit(gemm.add, static_argnames=("eps", "plan"))
_norm = jax.jit(rms_norm_triton.rms_norm, static_argnames="eps")


def run(product, weights, rows, live=None, *, plan=SMALL):
    given = product.arguments(rows, weights, live) | {"plan": plan}
    assert given.pop("norm") is None and given.pop("eps")  # Rows are normed before.
    if product.form:
        w = weights_lib.of_kernels(given["w"], "interpret")
        given |= {"w": w, "plan": None}
    return np.asarray(_project(**given | {"out_dtype": jnp.dtype(given["out_dtype"])}))


LOGITS = Product(K=80, N=40, has_norm=False, out_dtype="float32")
ADDED = {"has_norm": False, "has_residual": True}
CASES = {
    "chains": (Product(K=84, N=40, **ADDED), {"plan": CHAINS}),
    "split": (Product(K=128, N=80, **ADDED), {"plan": SPLIT}),
    "one by one": (Product(K=1, N=1, has_norm=False, out_dtype="float32"), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_plans_are_products(rng, name):
    """Fails if a row depends on others, if a ragged end is lost or read past, where
    interpret mode has NaN, or if a rounding is left out."""
    product, how = CASES[name]
    rows, weights = product.inputs(rng)
    call = functools.partial(run, product, weights, **how)
    row_contract.assert_row_contract(call, rows)
    y, expected = call(rows), product.expected(rows, weights)
    if y.dtype == jnp.bfloat16:
        oracle.assert_rounded_alike(y, expected)
    if y.shape[1] < 8:  # A row is a few sums, one of which may be near 0.
        y, expected = y.reshape(1, -1), expected.reshape(1, -1)
    testing.assert_rows_close(y, expected, dtype=y.dtype, reduction=product.K)


@pytest.mark.parametrize(
    ("form", "count"), [(None, 33), slow(None, 68), slow("q8_0", 33)]
)
def test_more_rows_are_more_tiles_in_one_process(rng, form, count):
    """Fails if a second tile is lost, a row's bits depend on how many there are, or a
    kernel keeps the grid of another shape. 68 rows are five programs of one tile each.

    Fails if padding rows of any tile are read or written: interpreted, what is not
    written is NaN.
    """
    product = Product(K=80, N=24, form=form, has_norm=False)
    rows, weights = product.inputs(rng, count)
    call = functools.partial(run, product, weights)
    whole = np.arange(-(-count // 16) * 16)
    of_tiles = np.minimum(whole, count - 1).reshape(-1, 16)  # The last is repeated.
    tiles = [call(row_contract.take(rows, tile)) for tile in of_tiles]
    tiles = np.concatenate(tiles)[:count]
    testing.assert_same_bits(call(rows), tiles)
    part = call(row_contract.poisoned(rows, 20), 20)
    testing.assert_same_bits(part[:20], tiles[:20])
    assert np.isnan(part[20:].astype(np.float32)).all()


def test_splits_are_added_in_their_order(rng):
    """Fails if partial sums are added in another order, or to something else."""
    whole = dataclasses.replace(LOGITS, K=128)
    rows, weights = whole.inputs(rng)
    total = 0
    for split in range(4):
        terms = slice(split * 32, (split + 1) * 32)
        part = {**weights, "w": weights["w"][:, terms]}
        total = total + run(LOGITS, part, {**rows, "x": rows["x"][:, terms]})
    plan = dataclasses.replace(SPLIT, splits=4)
    testing.assert_same_bits(run(whole, weights, rows, plan=plan), total)


@pytest.mark.parametrize("plan", [slow(SMALL), SPLIT])
def test_what_is_added_is_normed_as_by_two_kernels(rng, plan):
    """Fails if the norm that adds partial sums rounds or orders them another way.
    Negative control: the same sums in twice as many pieces. One half of the terms
    cancels the other, so that only the rounding of the additions is left."""
    product = Product(K=256, N=40, **ADDED)
    rows, weights = product.inputs(rng)
    norm = 1 + oracle.normal(rng, 40, "bfloat16", 0.2)
    rows["x"][:, 128:] = -rows["x"][:, :128]
    weights["w"][:, 128:] = weights["w"][:, :128]
    rows["residual"][3:5] = 0
    how = {"num_active": np.int32(5), "eps": EPS}

    def add(plan):
        return _add(rows["x"], weights["w"], rows["residual"], norm, plan=plan, **how)

    added, normed = (np.asarray(y)[:5] for y in add(plan))
    expected = run(product, weights, rows, 5, plan=plan)
    testing.assert_same_bits(added, expected[:5])
    expected = np.asarray(_norm(expected, norm, **how))
    testing.assert_same_bits(normed, expected[:5])
    others, _ = add(dataclasses.replace(plan, splits=2 * plan.splits))
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(np.asarray(others)[:5], added)


@pytest.mark.parametrize(("K", "N"), [(129, 40), slow(577, 20)])
def test_eight_bits_on_tiles(rng, K, N):
    """Fails if rows are rounded otherwise, tiles lose a bit, or blocks are not added
    first to last, each after it was rounded. Negative controls: blocks in another
    order, a neighbour's scale, one rounding."""
    logits = dataclasses.replace(LOGITS, K=K, N=N, form="q8_0")
    rows, weights = logits.inputs(rng, 9)
    x, w = rows["x"], weights["w"]
    # Extremes of integers, of both signs; a row of halves, and one of zeros.
    w = w.replace(values=w.values.at[:, 0].set(-128).at[:, 1].set(127))
    x[:, :64] = np.where(rng.integers(0, 2, (9, 64)), 3, -3)
    x[0, 64:] = np.resize([127, 0.5, 1.5, -0.5, -2.5], K - 64)
    x[1] = 0
    packed = weights_lib.prepare(w, "triton")
    testing.assert_same_bits(weights_lib.unpacked(packed), w)
    index = jnp.asarray([[N - 1], [0]])
    looked_up = weights_lib.take_rows(packed, index)
    testing.assert_same_bits(looked_up, blocks.take_rows(w, index))
    order = oracle.SUM_ORDERS["portable"]
    expected = order.project_bytes(x, w)
    y = run(logits, {**weights, "w": packed}, rows)
    testing.assert_same_bits(y, expected)
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(y, oracle.SUM_ORDERS["avx2"].project_bytes(x, w))
    for fault in ({"order": range(w.values.shape[1])[::-1]}, {"neighbour": 1}):
        with pytest.raises(AssertionError, match="elements differ"):
            testing.assert_same_bits(y, order.project_bytes(x, w, **fault))
    with pytest.raises(ValueError, match="scales has shape"):
        wrong = packed.replace(scales=packed.scales[1:])
        run(logits, {**weights, "w": wrong}, rows)


@pytest.mark.parametrize(("K", "parts"), [(7, 1), (64 + 32, 1), (64, 2)])
def test_splits_that_lose_terms_are_refused(K, parts):
    """Fails if a plan that splits no whole blocks, or a gate, is taken."""
    x, w = (jnp.zeros((rows, K), jnp.bfloat16) for rows in (16, 32))
    with pytest.raises(ValueError, match=f"does not split {K} terms of {parts} parts"):
        gemm.project(x, w, num_active=jnp.int32(1), parts=parts, plan=SPLIT)


R = 16


def attend(slab, live, **changes):
    config = dataclasses.replace(slabs.SMALL, **changes)
    return slabs.run("interpret", slab, live, config=config)


def test_whoever_is_last_adds_the_same_splits(rng):
    """Fails if a row's bits depend on which program does its last job, or a kernel
    keeps another call's grid."""
    slab = slabs.in_slab(slabs.small_slab(rng), range(8))
    first = attend(slab, 8)
    testing.assert_same_bits(attend(slab, 8, programs=6), first)
    testing.assert_same_bits(attend(slab, 8), first)


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
    )  # fmt: skip
    assert list(np.asarray(jobs.led_splits)[:2]) == [3, 0]
    assert jobs.job_ends[-1] == 3 + 5


def test_a_pool_too_large_is_refused(rng):
    """Fails if offsets into a pool could pass 32 bits."""
    slab = slabs.small_slab(rng)
    how = slabs.numbers(slab)
    pool = jax.ShapeDtypeStruct((2**23, 8, 2, 16), jnp.bfloat16)
    given = slab.arguments() | {"k_pages": pool, "v_pages": pool}
    attend = functools.partial(row_attention_triton.attend, **how)
    with pytest.raises(NotImplementedError, match="2147483648 elements of a pool"):
        jax.eval_shape(attend, **given)


ROWS, CHUNK = 6, first_tokens_triton.CHUNK
VOCAB = 2 * CHUNK + 904  # three chunks, the last of which is not full
SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 3},
    {"temperature": 2.0, "seed": 4},
    {"temperature": 1.0, "min_p": 0.05, "seed": 2**32 - 1},
    {"temperature": 1.0, "top_p": 0.95, "seed": 9},
    {"temperature": 1.3, "top_k": 700, "seed": 3},
)


def stacked(each=SETTINGS) -> sampling.SamplingSettings:
    made = [sampling.make_settings(**values) for values in each]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)


def make_rows(rng, scale=3.0):
    return (scale * rng.standard_normal((ROWS, VOCAB))).astype(np.float32)


_distribution = jax.jit(functools.partial(draw_op.distribution, impl="interpret"))
_rule = jax.jit(jax.vmap(sampling.distribution))
BOTH = (_distribution, _rule)


def tied_rows(rng):
    """Makes rows of many equal logits, one of zeros and one of zeros of both signs."""
    rows = np.round(rng.standard_normal((ROWS, VOCAB))).astype(np.float32)
    rows[0] = 0
    rows[1] = np.where(np.arange(VOCAB) % 2, np.float32(0.0), np.float32(-0.0))
    return rows


def whole_vocabulary(rng):
    logits = np.round(rng.standard_normal((1, 151_936)), 3).astype(np.float32)
    logits[0, -4000:] = logits.max()
    return logits


FILTERS = (
    {},
    {"top_k": 1},
    {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
    {"top_k": VOCAB - 1},
    {"top_p": 0.9, "temperature": 0.6},
    {"top_p": 0.999, "temperature": 2.0},
)
OF_TIES = (
    {"top_p": 6.5 / VOCAB},
    {"top_p": 0.75},
    {"top_k": 1000},
    {"top_k": 4990},
    {"top_k": 3000, "top_p": 0.5},
    {"top_k": 7},
)
FILTERED = {
    "nearly even": (functools.partial(make_rows, scale=0.1), FILTERS),
    "peaked": (make_rows, FILTERS),
    "tied": (tied_rows, OF_TIES),
    "the whole vocabulary": (whole_vocabulary, ({"top_k": 4000, "top_p": 0.75},)),
}


@pytest.mark.parametrize("case", FILTERED)
def test_filters_keep_what_the_rules_keep(rng, case):
    """Fails if a block, a chunk, a bit of the boundary or a filter is left out; if
    top-k cuts logits that are equal, or top-p cuts them in another order than that of
    their indices."""
    make, filters = FILTERED[case]
    logits, settings = make(rng), stacked(filters)
    found, expected = (np.asarray(x(logits, settings)) > 0 for x in BOTH)
    for row, values in enumerate(filters):
        # Sums in float32 may round past a bound that is near.
        off = np.sum(found[row] != expected[row])
        assert off <= ("top_p" in values), (values, off)
        # Negative control: what another row keeps, or the same tokens backwards.
        other = found[row - 1] if row else found[0][::-1]
        assert np.sum(other != expected[row]) > 1 or not values


def test_boundaries_are_exact():
    """Fails if the token that reaches p is cut, or a masked one stays."""
    logits, settings, kept = zip(*test_sampling.BOUNDARIES, strict=True)
    found = _distribution(np.float32(logits), stacked(settings)) > 0
    assert [np.flatnonzero(row).tolist() for row in found] == list(kept)


def test_noise_has_the_bits_of_threefry(rng):
    """Fails if a counter, a key or a round of Threefry is another than jax's."""
    positions = rng.integers(0, 2**20, ROWS).astype(np.int32)
    seeds = [0, 1, 2**31, 2**32 - 1, 7, 7]
    settings = stacked([{"seed": seed} for seed in seeds])
    even = np.zeros((ROWS, VOCAB), np.float32)
    noisy = jax.jit(functools.partial(draw_op.noisy_weights, impl="interpret"))
    draws = np.ones(ROWS, bool)
    found = np.asarray(noisy(even, settings, positions=positions, draws=draws))
    expected = jax.jit(
        jax.vmap(functools.partial(sampling.noise, vocab_size=VOCAB))
    )(settings.seed, positions)  # fmt: skip
    # Logarithms may be compiled otherwise; other random bits would differ by more.
    np.testing.assert_allclose(found, expected, rtol=3e-7, atol=3e-7)
    key = tuple(jnp.uint32(x) for x in (3, 2**32 - 5))
    count = jnp.arange(64, dtype=jnp.uint32)
    ours = jnp.concatenate(noisy_weights_triton.threefry(key, count[:32], count[32:]))
    theirs = jax.extend.random.threefry_2x32(jnp.stack(key), count)
    testing.assert_same_bits(ours, theirs)


def test_distributions_are_those_of_the_rules(rng):
    """Fails if a filter, a temperature or a token is left out of a row, or summed
    twice."""
    logits = make_rows(rng)
    settings = stacked()
    found = np.asarray(_distribution(logits, settings))
    expected = _rule(logits, settings)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert (found == 0).any(axis=1).tolist() == [True, True, False, True, True, True]
    assert found[0, np.argmax(logits[0])] == found[0].sum() == 1
    # Negative control: the row's own settings decide.
    with pytest.raises(AssertionError):
        turned = jax.tree.map(lambda leaf: leaf[::-1], settings)
        np.testing.assert_allclose(_distribution(logits, turned), expected, rtol=1e-5)
    # Settings may be one for all rows; and a row may be alone.
    one = sampling.make_settings(**SETTINGS[4])
    testing.assert_same_bits(_distribution(logits[4:5], one), found[4:5])


def test_sums_have_one_order(rng):
    """Fails if a chunk is left out, or a row's sum depends on other rows."""
    x = np.exp(make_rows(rng))
    sums = jax.jit(functools.partial(draw_op.row_sums, impl="interpret"))
    found = np.asarray(sums(x))
    np.testing.assert_allclose(found, x.sum(axis=1, dtype=np.float64), rtol=1e-5)
    alone = [sums(x[row]) for row in range(ROWS)]
    for other in (np.stack(alone), jax.vmap(sums)(x)):
        testing.assert_same_bits(other, found)
    parts = np.asarray(sums(x[:, :CHUNK])), np.asarray(sums(x[:, CHUNK:]))
    # Negative control: other chunks give another order.
    assert (np.add(*parts) != found).any()
    with pytest.raises(ValueError, match=r"rows bfloat16\[1, 8\]"):
        row_sums_triton.row_sums(jnp.zeros((1, 8), jnp.bfloat16))


def test_scores_of_children_are_log_softmaxes(rng):
    """Fails if a row is normed by another's sum, or not at all."""
    logits = make_rows(rng)
    found = draw_op.log_softmax(jnp.asarray(logits).reshape(2, 3, -1), impl="interpret")
    expected = jax.nn.log_softmax(logits).reshape(2, 3, -1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
