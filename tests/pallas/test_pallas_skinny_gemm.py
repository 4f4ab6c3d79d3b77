"""The skinny GEMM in interpret mode: rows alone and together, and against float64."""

import dataclasses
import functools

import gemm_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.pallas import rms_norm_triton, skinny_gemm_triton as gemm, slab


EPS = 1e-6
SMALL = gemm.Plan(block_n=16, block_k=32)
SPLIT = dataclasses.replace(SMALL, splits=2)
CHAINS = dataclasses.replace(SMALL, chains=2)

_project = jax.jit(
    functools.partial(gemm.project, interpret=True),
    static_argnames=("eps", "out_dtype", "transposed", "plan"),
)
_add = jax.jit(
    functools.partial(gemm.add, interpret=True), static_argnames=("eps", "plan")
)
_norm = jax.jit(
    functools.partial(rms_norm_triton.rms_norm, interpret=True),
    static_argnames=("eps",),
)
_gate = jax.jit(
    functools.partial(gemm.gate, interpret=True),
    static_argnames=("eps", "transposed", "plan"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one shape: `K` terms, `N` columns of the weights."""

    K: int
    N: int
    plan: gemm.Plan | None = SMALL
    transposed: bool = False
    is_gate: bool = False
    has_norm: bool = True
    has_residual: bool = False
    out_dtype: str = "bfloat16"

    def inputs(self, rng, rows=slab.ROWS) -> dict:
        norm = 1 + oracle.normal(rng, self.K, scale=0.2)
        return {
            "x": oracle.normal(rng, rows, self.K),
            "w": oracle.normal(rng, self.N, self.K),
            "norm": norm if self.has_norm else None,
            "residual": oracle.normal(rng, rows, self.N) if self.has_residual else None,
        }

    def run(self, *, x, w, norm, residual, live=None, plan=None) -> np.ndarray:
        options = {
            "norm": norm,
            "num_active": np.int32(len(x) if live is None else live),
            "eps": EPS,
            "plan": plan or self.plan,
            "transposed": self.transposed,
        }
        w = np.ascontiguousarray(w.T) if self.transposed else w
        if self.is_gate:
            return np.asarray(_gate(x, w, **options))
        out_dtype = jnp.dtype(self.out_dtype)
        options |= {"residual": residual, "out_dtype": out_dtype}
        return np.asarray(_project(x, w, **options))

    def expected(self, *, x, w, norm, residual) -> np.ndarray:
        if self.is_gate:
            return oracle.gate(x, w, norm=norm, eps=EPS)
        options = {"norm": norm, "residual": residual, "eps": EPS}
        return oracle.project(x, w, out_dtype=jnp.dtype(self.out_dtype), **options)


LOGITS = Case(K=80, N=40, has_norm=False, out_dtype="float32")

CASES = {
    "logits": LOGITS,
    "norm": Case(K=80, N=40),
    "chains": Case(K=84, N=40, has_residual=True, has_norm=False, plan=CHAINS),
    "transposed": Case(K=72, N=24, has_residual=True, transposed=True),
    "split": Case(K=128, N=40, has_residual=True, plan=SPLIT, transposed=True),
    "gate": Case(K=80, N=80, is_gate=True),
    "gate transposed": Case(K=64, N=64, is_gate=True, transposed=True),
    "gate split": Case(K=128, N=80, is_gate=True, plan=SPLIT),
    "default plan": Case(K=1100, N=40, plan=None, has_residual=True, has_norm=False),
    "tiny": Case(K=7, N=5, plan=None, has_norm=False, out_dtype="float32"),
    "one by one": Case(K=1, N=1, plan=None, has_norm=False, out_dtype="float32"),
}


def rows_of(inputs, index) -> dict:
    """The inputs with other rows: those at `index`, in that order."""
    return inputs | {
        name: None if inputs[name] is None else inputs[name][index]
        for name in ("x", "residual")
    }


def poisoned(inputs, live) -> dict:
    """The inputs with NaN in the rows from `live` on."""
    return inputs | {
        name: np.where(np.arange(len(x))[:, None] < live, x, np.nan).astype(x.dtype)
        for name, x in inputs.items()
        if name in ("x", "residual") and x is not None
    }


def assert_rows_alone(run, inputs):
    """Asserts the row contract: one row of a slab or alone, padding rows, any place."""
    rows = np.arange(slab.ROWS)
    alone = [run(**rows_of(inputs, rows[r : r + 1])) for r in rows]
    alone = np.concatenate(alone)
    assert np.isfinite(oracle.wide(alone)).all()
    for live in range(slab.ROWS + 1):
        together = run(**poisoned(inputs, live), live=live)
        testing.assert_same_bits(together[:live], alone[:live], what=f"{live} live")
    for shift in (1, 5, 11):
        rolled = run(**rows_of(inputs, np.roll(rows, shift)))
        testing.assert_same_bits(rolled, np.roll(alone, shift, axis=0), what="rolled")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", ["logits", "norm", "chains", "transposed", "gate split"]
)
def test_a_row_is_that_row_alone(rng, name):
    """Fails if the order of sums depends on the rows, or a padding row is read."""
    assert_rows_alone(CASES[name].run, CASES[name].inputs(rng))


def test_empty_sums_are_refused():
    """Fails if a product of nothing is left to the pipeline."""
    with pytest.raises(ValueError, match="sums of 0 terms"):
        LOGITS.run(
            x=np.ones((3, 0), "bfloat16"),
            w=np.ones((5, 0), "bfloat16"),
            norm=None,
            residual=None,
        )


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_float64(rng, name):
    """Fails if a ragged end is lost, or read past: interpret mode has NaN there."""
    case = CASES[name]
    inputs = case.inputs(rng)
    y, expected = case.run(**inputs), case.expected(**inputs)
    assert y.dtype == jnp.dtype(case.out_dtype)
    if y.shape[1] < 8:  # a row is a few sums, one of which may be near 0
        y, expected = y.reshape(1, -1), expected.reshape(1, -1)
    near = {"dtype": case.out_dtype, "reduction": case.K}
    testing.assert_rows_close(y, expected, **near)
    with pytest.raises(AssertionError, match="rows are off"):
        testing.assert_rows_close(oracle.wide(y) * 1.02, expected, **near)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["norm", "chains", "split", "gate", "gate split"])
def test_roundings_are_where_the_op_says(rng, name):
    """Fails if a rounding is left out: of the norm, the sum, the gate or its silu."""
    inputs = CASES[name].inputs(rng)
    actual, expected = CASES[name].run(**inputs), CASES[name].expected(**inputs)
    oracle.assert_rounded_alike(actual, expected)


def test_a_plan_by_the_number_of_rows_is_caught(rng):
    """Negative control: other blocks of K where there is only one row."""

    def run(x, **inputs):
        plan = dataclasses.replace(SMALL, block_k=16 if len(x) == 1 else 32)
        return LOGITS.run(x=x, **inputs, plan=plan)

    with pytest.raises(AssertionError, match="1 live.*elements differ"):
        assert_rows_alone(run, LOGITS.inputs(rng))


def test_splits_by_the_number_of_rows_are_caught(rng):
    """Negative control: a split K for one row, as GEMV kernels have it."""
    case = dataclasses.replace(LOGITS, K=128)

    def run(x, **inputs):
        return case.run(x=x, **inputs, plan=SPLIT if len(x) == 1 else SMALL)

    with pytest.raises(AssertionError, match="1 live.*elements differ"):
        assert_rows_alone(run, case.inputs(rng))


def test_more_rows_are_more_tiles_in_one_process(rng):
    """Fails if a second tile is lost, or a row's bits depend on how many there are.

    Fails if a kernel keeps the grid of another shape.

    Fails if padding rows of any tile are read or written: interpreted, what is not
    written is NaN.
    """
    case = dataclasses.replace(CASES["norm"], N=24)
    inputs = case.inputs(rng, rows=33)
    tiles = [
        case.run(**rows_of(inputs, np.arange(a, min(a + 16, 33))))
        for a in range(0, 33, 16)
    ]
    tiles = np.concatenate(tiles)
    testing.assert_same_bits(case.run(**inputs), tiles)
    part = case.run(**poisoned(inputs, 20), live=20)
    testing.assert_same_bits(part[:20], tiles[:20])
    assert np.isnan(part[20:].astype(np.float32)).all()
    again = dataclasses.replace(LOGITS, N=56)
    inputs = again.inputs(rng, rows=20)
    near = {"dtype": "float32", "reduction": again.K}
    testing.assert_rows_close(again.run(**inputs), again.expected(**inputs), **near)


def test_splits_are_added_in_their_order(rng):
    """Fails if partial sums are added in another order, or to something else."""
    case = dataclasses.replace(LOGITS, K=128, plan=dataclasses.replace(SPLIT, splits=4))
    inputs = case.inputs(rng)
    total = 0
    for split in range(4):
        terms = slice(split * 32, (split + 1) * 32)
        part = {name: inputs[name][:, terms] for name in ("x", "w")}
        total = total + LOGITS.run(**(inputs | part))
    testing.assert_same_bits(case.run(**inputs), total)


def test_nan_stays_in_its_row_and_column(rng):
    """Fails if an element reaches another row's or column's sum, or is swallowed."""
    inputs = LOGITS.inputs(rng)
    clean = LOGITS.run(**inputs)
    spoilt = {name: inputs[name].copy() for name in ("x", "w")}
    spoilt["x"][3, 79] = spoilt["w"][6, 0] = np.nan
    y = LOGITS.run(**(inputs | spoilt))
    rows, columns = np.arange(16) != 3, np.arange(40) != 6
    testing.assert_same_bits(y[rows][:, columns], clean[rows][:, columns])
    assert np.isnan(y[3]).all() and np.isnan(y[:, 6]).all()


@pytest.mark.parametrize("plan", [SMALL, SPLIT])
def test_what_is_added_is_normed_as_by_two_kernels(rng, plan):
    """Fails if the norm that adds partial sums rounds or orders them another way.

    Negative control: the same sums in twice as many pieces, of which one half cancels
    the other, so that what is left is how they were added.
    """
    case = Case(K=256, N=40, plan=plan, has_norm=False, has_residual=True)
    inputs, norm = case.inputs(rng), 1 + oracle.normal(rng, 40, scale=0.2)
    inputs["x"][:, 128:] = -inputs["x"][:, :128]
    inputs["w"][:, 128:] = inputs["w"][:, :128]
    inputs["residual"][3:5] = 0
    how = {"num_active": np.int32(5), "eps": EPS}

    def add(plan):
        x, w, residual = (inputs[name] for name in ("x", "w", "residual"))
        return _add(x, w, residual, norm, plan=plan, **how)

    added, normed = (np.asarray(y)[:5] for y in add(plan))
    expected = case.run(**inputs, live=5)
    testing.assert_same_bits(added, expected[:5])
    expected = np.asarray(_norm(expected, norm, **how))
    testing.assert_same_bits(normed, expected[:5])
    others, _ = add(dataclasses.replace(plan, splits=2 * plan.splits))
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(np.asarray(others)[:5], added)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("shape", [(4096, 4096), (1024, 2048), (6144, 4096), (5, 7)])
def test_plans_fit(shape, parts):
    """Fails if a plan is refused, in blocks or in shared memory."""
    plan = gemm.plan_for(*shape, parts=parts)
    gemm.check_plan(plan, shape[1], parts=parts)
    assert plan == gemm.plan_for(*shape, parts=parts)
    for change in ({"splits": 0}, {"num_stages": 0}, {"block_k": 1 << 20}):
        broken = dataclasses.replace(plan, **change)
        with pytest.raises(ValueError, match="no split|shared memory|splits of"):
            gemm.check_plan(broken, shape[1], parts=parts)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"w": np.ones((5, 8), "bfloat16")}, ValueError, r"w has shape \(5, 8\), not"),
        ({"residual": np.ones((4, 5), "bfloat16")}, ValueError, "residual has shape"),
        ({"num_active": np.ones(1, np.int32)}, ValueError, "num_active has shape"),
        ({"w": np.ones((5, 7), np.float32)}, NotImplementedError, "and w is float32"),
        ({"out_dtype": jnp.float16}, NotImplementedError, "cannot give float16"),
        ({"out_dtype": jnp.float32, "residual": np.ones((3, 5), "bfloat16")},
         ValueError, "a residual of bfloat16 cannot give float32"),
        ({"plan": SPLIT}, ValueError, "7 terms are not 2 splits of whole 32s"),
        ({"plan": dataclasses.replace(SMALL, block_n=48)}, ValueError,
         "block_n=48 is not a power of two"),
        ({"plan": dataclasses.replace(SMALL, num_warps=3)}, ValueError,
         "num_warps=3 is not a power of two"),
        ({"plan": gemm.Plan(block_n=64, block_k=512)}, ValueError,
         "needs 245760 of 232448 bytes of shared memory"),
        ({"plan": dataclasses.replace(SMALL, chains=4)}, ValueError,
         "a block below 16"),
        ({"plan": gemm.Plan(block_n=8, block_k=64)}, ValueError, "a block below 16"),
    ],
)  # fmt: skip
def test_refusals(change, error, message):
    """Fails if the kernel is let loose on what it would read or add wrongly."""
    options = {
        "w": np.ones((5, 7), "bfloat16"),
        "num_active": np.int32(3),
        "norm": None,
        "residual": None,
        "eps": 0.0,
        "out_dtype": jnp.bfloat16,
    }
    with pytest.raises(error, match=message):
        _project(np.ones((3, 7), "bfloat16"), **(options | change))
