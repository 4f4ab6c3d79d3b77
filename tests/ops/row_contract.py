"""The promise of each operation on rows, and the call of each implementation; products
and gates of rows, their arguments and float64 values."""

import dataclasses
import functools

import jax
import numpy as np
from native import native_oracle as oracle

from spec_jax import testing
from spec_jax.native import blocks, calls
from spec_jax.ops import (
    argmax,
    embedding,
    gated_projection,
    page_move,
    projection,
    rms_norm,
    rope,
)


OPERATIONS = {
    "angles": (rope.angles, None, ("scale", "dtype")),
    "argmax": (argmax.argmax, calls.argmax, ()),
    "embed": (embedding.embed, calls.take_rows, ()),
    "gate": (gated_projection.gated_projection, calls.gate, ("eps",)),
    "move": (page_move.page_move, calls.move, ()),
    "norm": (rms_norm.rms_norm, None, ("eps",)),
    "project": (projection.project, calls.project, ("eps", "out_dtype")),
}
"""Each operation's function, its native kernel and the names of static arguments."""


@functools.cache
def compiled(name, impl):
    """Jits an operation by XLA, interpreted kernels, or those of an instruction set."""
    operation, native, static = OPERATIONS[name]
    if impl in ("xla", "interpret", "native"):
        return jax.jit(functools.partial(operation, impl=impl), static_argnames=static)
    return jax.jit(functools.partial(native, isa=impl), static_argnames=static)


def sums(isa, x, w, live=None) -> np.ndarray:
    """Returns native products of active rows, not rounded to the model's dtype."""
    how = {"norm": None, "residual": None, "eps": 0.0, "out_dtype": "float32"}
    live = len(x) if live is None else live
    project = compiled("project", isa)
    return np.asarray(project(x, w, num_active=np.int32(live), **how))[:live]


def take(rows, which):
    return jax.tree.map(lambda x: np.asarray(x)[np.asarray(which)], rows)


def poisoned(rows, live):
    """Returns the rows, with NaN or useless integers from row `live` on."""

    def spoil(x):
        x = x.copy()
        x[live:] = 2**30 if np.issubdtype(x.dtype, np.integer) else np.nan
        return x

    return jax.tree.map(spoil, rows)


def assert_row_contract(run, rows, *, is_alone=True):
    """Asserts that a row's bits are its own: alone, at any place, among rows of NaN.

    Args:
      run: `run(rows, live)` gives a pytree of arrays `[R, ..]`; `live` rows are active.
      rows: a pytree of NumPy arrays `[R, ..]`.
      is_alone: whether a slab may have one row; otherwise one of `R` is active.
    """
    count = len(jax.tree.leaves(rows)[0])
    whole = run(rows, count)
    for row in range(count):
        one = take(rows, [row] if is_alone else [row] * count)
        found = take(run(poisoned(one, 1), 1), [0])
        testing.assert_same_bits(found, take(whole, [row]), what=f"row {row} alone")
    for live in (2, 5, count - 1):
        some = take(run(poisoned(rows, live), live), range(live))
        testing.assert_same_bits(some, take(whole, range(live)), what=f"{live} live")
    order = np.roll(np.arange(count)[::-1], 5)
    moved = take(run(take(rows, order), count), range(count))
    testing.assert_same_bits(moved, take(whole, order), what="moved")


EPS = 1e-2  # seen in results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """Rows of `K` terms times weights `[N, K]`; half of a gate's weights are gates."""

    K: int
    N: int
    dtype: str = "bfloat16"
    is_gate: bool = False
    has_norm: bool = True
    has_residual: bool = False
    out_dtype: str | None = None
    form: str | None = None  # of the weights' blocks, if they are blocks

    @property
    def parts(self) -> int:
        return 2 if self.is_gate else 1

    def inputs(self, rng, rows: int = 16) -> tuple[dict, dict]:
        """Returns the arrays of rows, and the arrays that all rows share."""
        normal = lambda *shape, scale=1.0: oracle.normal(rng, shape, self.dtype, scale)
        residual = normal(rows, self.N) if self.has_residual else None
        norm = normal(self.K, scale=0.2) + np.ones((), self.dtype)
        x, w = normal(rows, self.K), normal(self.N, self.K)
        return {"x": x, "residual": residual}, {
            "w": w if self.form is None else blocks.of_matrix(w, form=self.form),
            "norm": norm if self.has_norm else None,
        }

    def arguments(self, rows: dict, weights: dict, live: int | None = None) -> dict:
        live = np.int32(len(rows["x"]) if live is None else live)
        given = rows | weights | {"num_active": live, "eps": EPS}
        if self.is_gate:
            del given["residual"]
            return given
        return given | {"out_dtype": self.out_dtype or self.dtype}

    def expected(self, rows: dict, weights: dict) -> np.ndarray:
        if self.is_gate:
            return oracle.gate(rows["x"], **weights, eps=EPS)
        return oracle.project(**rows, **weights, eps=EPS, out_dtype=self.out_dtype)
