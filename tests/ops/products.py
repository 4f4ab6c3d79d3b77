"""Products and gates of rows, at one shape each: their arguments and float64 values."""

import dataclasses

import numpy as np
from native import native_oracle as oracle

from spec_jax.native import blocks


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
