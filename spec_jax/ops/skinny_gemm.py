"""Skinny GEMM: a slab of rows times a weight matrix, the bulk of a decode step.

    y[r, n] = sum_k x[r, k] * w[n, k]          accumulated in float32

Row `r` of the result depends, bit for bit, on row `r` of `x` alone, for a fixed
number of rows. (With one row XLA takes another path than with several, with other
bits and, in bfloat16, a tenth of the speed: slabs have at least two rows.)
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spec_jax.native import blocks
from spec_jax.typing import typed


MIN_ROWS = 2


@typed
def skinny_gemm(
    x: Float[Array, "R K"], w: Float[Array, "N K"] | blocks.Blocks
) -> Float[Array, "R N"]:
    """Returns `x w^T` in float32; for `Blocks`, rows are rounded as `blocks` says.

    Raises:
      ValueError: fewer than `MIN_ROWS` rows, or `x` and `w` of different dtypes.
    """
    if x.shape[0] < MIN_ROWS:
        raise ValueError(f"a slab needs at least {MIN_ROWS} rows, got {x.shape[0]}")
    if x.dtype != w.dtype:
        raise ValueError(f"rows are {x.dtype} but weights are {w.dtype}")
    if isinstance(w, blocks.Blocks):
        return blocks.product(x, w)
    return jax.lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
