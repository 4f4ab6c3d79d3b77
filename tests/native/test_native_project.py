"""`calls.project`: rows alone and together as bits, and against float64."""

import functools

import jax
import jax.numpy as jnp
import native_oracle as oracle
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.native import calls
from spec_jax.ops import projection
from spec_jax.parallel import collectives
from spec_jax.testing import compare


DTYPES = ("float32", "bfloat16")
SHAPES = ((1, 1), (7, 5), (33, 13), (80, 64), (129, 9))  # (K, N)
SLAB = 16

_project = jax.jit(calls.project, static_argnames=("eps", "out_dtype", "isa"))
_op = jax.jit(projection.project, static_argnames=("eps", "out_dtype", "impl"))


def inputs(rng, dtype, K, N, rows=SLAB):
    """Rows, and the weights with everything that an epilogue takes."""
    weights = {
        "w": oracle.normal(rng, (N, K), dtype),
        "norm": oracle.normal(rng, (K,), dtype, 0.2) + np.ones((), jnp.dtype(dtype)),
    }
    residual = oracle.normal(rng, (rows, N), dtype)
    return oracle.normal(rng, (rows, K), dtype), residual, weights


def run(isa, x, residual, weights, live=None, *, eps=1e-6, project=_project):
    live = np.int32(len(x) if live is None else live)
    return np.asarray(
        project(
            x,
            **weights,
            residual=residual,
            num_active=live,
            eps=eps,
            out_dtype=x.dtype,
            isa=isa,
        )
    )


def assert_rows_alone(isa, x, residual, weights, *, project=_project):
    """Asserts the row contract: every number of active rows, and other places."""
    call = functools.partial(run, isa, weights=weights, project=project)
    alone = [call(x[r : r + 1], residual[r : r + 1]) for r in range(len(x))]
    alone = np.concatenate(alone)
    assert np.isfinite(alone.astype(np.float32)).all()
    for live in range(len(x) + 1):
        dead = np.arange(len(x))[:, None] >= live
        poisoned = [np.where(dead, np.nan, a).astype(a.dtype) for a in (x, residual)]
        together = call(*poisoned, live=live)
        testing.assert_same_bits(together[:live], alone[:live], what=f"{live} live")
    for shift in (1, 5, 11):
        rolled = call(np.roll(x, shift, axis=0), np.roll(residual, shift, axis=0))
        testing.assert_same_bits(rolled, np.roll(alone, shift, axis=0), what="rolled")


@pytest.mark.few(10)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "N"), SHAPES)
def test_a_row_is_that_row_alone(rng, isa, dtype, K, N):
    """Fails if a tile sums in another order, or a padding row is read."""
    assert_rows_alone(isa, *inputs(rng, dtype, K, N))


@pytest.mark.parametrize("rows", [17, 40])
def test_slabs_beyond_sixteen_rows(rng, isa, rows):
    """Fails if rows past the widest tile are lost or share another row's sums."""
    assert_rows_alone(isa, *inputs(rng, "bfloat16", 33, 13, rows))


def test_a_split_by_rows_is_caught(rng):
    """Negative control: sums over two halves of K where there is more than one row."""

    def split(x, *, w, norm, residual, out_dtype, **rest):
        shared = {"norm": None, "residual": None, "out_dtype": jnp.float32, **rest}
        edges = (0, 80) if x.shape[0] == 1 else (0, 40, 80)
        parts = [
            calls.project(x[:, a:b], w[:, a:b], **shared)
            for a, b in zip(edges, edges[1:], strict=False)
        ]
        return sum(parts[1:], parts[0]).astype(out_dtype)

    planted = jax.jit(split, static_argnames=("eps", "out_dtype", "isa"))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_rows_alone(None, *inputs(rng, "float32", 80, 64), project=planted)


def close(actual, expected, **near):
    """Row by row; where a row is a few sums, one of which may be near 0, as a whole."""
    if actual.shape[-1] < 8:
        actual, expected = actual.reshape(1, -1), expected.reshape(1, -1)
    testing.assert_rows_close(actual, expected, **near)


@pytest.mark.few(10)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "N"), SHAPES)
def test_products_are_those_of_float64(rng, isa, dtype, K, N):
    """Fails if a term of a ragged end is lost, or an epilogue is left out."""
    x, residual, weights = inputs(rng, dtype, K, N, rows=5)
    plain = {"w": weights["w"], "norm": None}
    cases = [
        (weights, residual, dtype),
        (weights, None, dtype),
        (plain, residual, dtype),
        (plain, None, dtype),
        (plain, None, "float32"),
    ]
    for given, added, out in cases:
        out_dtype = jnp.dtype(out)
        options = {"residual": added, "eps": 1e-6, "out_dtype": out_dtype}
        y = _project(x, **given, **options, num_active=np.int32(5), isa=isa)
        assert y.dtype == out_dtype
        close(y, oracle.project(x, **given, **options), dtype=out, reduction=K)
        with pytest.raises(AssertionError, match="rows are off"):
            scaled = np.asarray(y).astype(np.float64) * 1.02
            testing.assert_rows_close(
                scaled,
                oracle.project(x, **given, **options),
                dtype=out,
                reduction=K,
            )


def test_roundings_are_where_the_op_says(rng, isa):
    """Fails if a rounding to bfloat16 is left out: of the sum, or of the norm."""
    x, residual, weights = inputs(rng, "bfloat16", 80, 64)
    for added in (residual, None):
        expected = oracle.project(x, **weights, residual=added, eps=1e-6)
        oracle.assert_rounded_alike(run(isa, x, added, weights), expected)


def test_an_outlier_and_eps(rng, isa):
    """Fails if `eps` is left out: rows of zeros, and rows far below it."""
    x, residual, weights = inputs(rng, "float32", 33, 13, rows=3)
    x = x * np.float32([[0], [1e-4], [1e4]])
    y = run(isa, x, residual, weights, eps=1e-2)
    expected = oracle.project(x, **weights, residual=residual, eps=1e-2)
    testing.assert_same_bits(y[0], residual[0])
    close(y, expected, dtype="float32", reduction=33)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_form_agrees(rng, dtype):
    """Fails if the product is rounded elsewhere than in the reference."""
    x, residual, weights = inputs(rng, dtype, 80, 64, rows=6)
    unit = compare.UNIT_ROUNDOFF[dtype]
    for added in (None, residual):
        y, reference = (
            _op(x, weights["w"], residual=added, num_active=np.int32(6), impl=impl)
            for impl in ("native", "xla")
        )
        y, reference = oracle.wide(y, reference)
        # One rounding to the dtype apart, and the float32 sums.
        allowed = 2 * unit * np.abs(reference) + 1e-5
        assert (np.abs(y - reference) <= allowed).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_stay_in_their_row(rng, isa, dtype, value):
    """Fails if a lane or a row of one sum reaches another, or NaN is swallowed."""
    x, residual, weights = inputs(rng, dtype, 33, 13, rows=9)
    weights["norm"] = None
    clean = run(isa, x, residual, weights)
    bad = x.copy()
    bad[3, 32] = value
    y = run(isa, bad, residual, weights)
    others = np.arange(9) != 3
    testing.assert_same_bits(y[others], clean[others])
    assert not np.isfinite(y[3].astype(np.float32)).any()
    spoilt = dict(weights, w=weights["w"].copy())
    spoilt["w"][5, 0] = value
    y = run(isa, x, residual, spoilt)
    others = np.arange(13) != 5
    testing.assert_same_bits(y[:, others], clean[:, others])
    assert not np.isfinite(y[:, 5].astype(np.float32)).any()


@pytest.mark.parametrize(("rows", "K", "N"), [(0, 7, 5), (3, 0, 5), (3, 7, 0)])
def test_empty_shapes(isa, rows, K, N):
    """Fails if an empty dimension divides by zero, or its sums are not zero."""
    x, w = np.ones((rows, K), np.float32), np.ones((N, K), np.float32)
    y = run(isa, x, None, {"w": w, "norm": None})
    assert y.shape == (rows, N) and not y.any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"w": np.ones((5, 8), np.float32)}, ValueError, "w has shape"),
        ({"norm": np.ones(6, np.float32)}, ValueError, "norm has shape"),
        ({"residual": np.ones((4, 5), np.float32)}, ValueError, "residual has shape"),
        ({"num_active": np.ones(1, np.int32)}, ValueError, "num_active has shape"),
        ({"w": np.ones((5, 7), np.float16)}, NotImplementedError, "float16"),
        ({"w": jnp.ones((5, 7), "bfloat16")}, NotImplementedError, "one of them"),
        ({"out_dtype": jnp.bfloat16}, NotImplementedError, "cannot give bfloat16"),
        ({"isa": "sse"}, ValueError, "isa='sse' is not one of avx512"),
    ],
)
def test_refusals(change, error, message):
    """Fails if the kernel is let loose on arrays of another shape or dtype."""
    x, w = np.ones((3, 7), np.float32), np.ones((5, 7), np.float32)
    options = {"w": w, "norm": None, "residual": None, "eps": 0.0} | {
        "num_active": np.int32(3),
        "out_dtype": jnp.float32,
    }
    with pytest.raises(error, match=message):
        _project(x, **(options | change))


_segments = jax.jit(calls.project_segments, static_argnames="isa")


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "K", "N"), [(1, 7, 5), (2, 33, 13), (8, 16, 64), (8, 5, 290), (16, 1, 9)]
)
def test_segments_are_products_added_in_a_tree(rng, isa, dtype, count, K, N):
    """Fails if a segment reads another's elements, or sums are added in their order."""
    x = oracle.normal(rng, (SLAB, count * K), dtype)
    pieces = [oracle.normal(rng, (N, K), dtype) for _ in range(count)]
    products = [
        _project(
            part,
            w=w,
            norm=None,
            residual=None,
            num_active=np.int32(SLAB),
            eps=0.0,
            out_dtype=jnp.dtype("float32"),
            isa=isa,
        )
        for part, w in zip(np.split(x, count, axis=1), pieces, strict=True)
    ]
    expected = np.asarray(collectives.tree_sum(products))
    for live in (SLAB, 3):
        rows = np.where(np.arange(SLAB)[:, None] < live, x, np.nan).astype(x.dtype)
        found = np.asarray(_segments(rows, pieces, num_active=np.int32(live), isa=isa))
        testing.assert_same_bits(found[:live], expected[:live], what=f"{live} live")
    in_order = np.asarray(functools.reduce(jnp.add, products))
    if count > 2:  # Negative control: one after the other they are other sums.
        with pytest.raises(AssertionError, match="elements differ"):
            testing.assert_same_bits(in_order, expected)


def test_segments_that_are_refused():
    x, piece = jnp.zeros((2, 9)), jnp.zeros((4, 3))
    with pytest.raises(ValueError, match="3 segments: their number must be a power"):
        calls.project_segments(x, [piece] * 3, num_active=jnp.int32(2))
    with pytest.raises(ValueError, match=r"x has shape \(2, 9\), not \(2, 6\)"):
        calls.project_segments(x, [piece] * 2, num_active=jnp.int32(2))
