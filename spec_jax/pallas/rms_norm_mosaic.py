"""RMSNorm on a GPU (Pallas Mosaic): one warpgroup a row.

A program reads its row once, 2 D bytes, and writes it once. The squares of a row are
summed in one order, whatever is beside it. Programs of padding rows read nothing.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from spec_jax.pallas import slab, warpgroup


def rms_norm(
    x: jax.Array,  # [R, D]
    weight: jax.Array,  # [D]
    *,
    num_active: jax.Array,  # [] int32
    eps: float,
    interpret: bool | object = False,
) -> jax.Array:
    """See `ops.rms_norm.rms_norm`, for rows of whole warpgroups.

    Padding rows are uninitialised.

    Raises:
      ValueError: a weight of another shape or dtype, or rows of another width.
    """
    R, D = x.shape
    slab.check_shapes(weight=(weight, (D,)), num_active=(num_active, ()))
    if x.dtype != weight.dtype:
        raise ValueError(f"rows are {x.dtype} but the weight is {weight.dtype}")
    if not D or D % warpgroup.THREADS:
        raise ValueError(f"rows of {D} elements are not whole {warpgroup.THREADS}s")

    def rms_norm(num_active_ref, x_ref, weight_ref, out_ref):
        """One row."""
        row = jax.lax.axis_index("r")

        @pl.when(row < num_active_ref[0])
        def _():
            x, weight = (
                warpgroup.load(ref, warpgroup.line(D))
                for ref in (x_ref.at[row], weight_ref)
            )
            wide = x.astype(jnp.float32)
            scale = jax.lax.rsqrt(jnp.sum(wide * wide) / D + eps)
            out_ref[row] = (wide * scale).astype(x.dtype) * weight

    return warpgroup.kernel(
        rms_norm,
        outputs=jax.ShapeDtypeStruct((R, D), x.dtype),
        grid={"r": R},
        interpret=interpret,
    )(num_active.reshape(1), x, weight)
