"""Cosines and sines of positions on a GPU (Pallas Triton): one launch.

    cos = round(scale * cos(position * inv_freq));  sin likewise

Computes `ops.rope.angles`. Program `r` has row `r`, and everything is elementwise: a
row's bits depend on its position alone. XLA would compute it in a fusion, whose code
depends on what surrounds it.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import launch, slab


def angles(
    positions: jax.Array,  # [R] int32
    inv_freq: jax.Array,  # [H / 2] float32
    *,
    scale: float,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines `[R, H / 2]` in `dtype`.

    Raises:
      ValueError: positions or frequencies that are not vectors.
    """
    R, half = positions.size, inv_freq.size
    slab.check_shapes(positions=(positions, (R,)), inv_freq=(inv_freq, (half,)))
    inputs = positions, inv_freq.astype(jnp.float32)
    out = jax.ShapeDtypeStruct((R, half), dtype)
    return launch.run(
        _kernel,
        inputs,
        (out, out),
        grid=(R,),
        num_warps=1,
        name="row_angles",
        scale=scale,
    )


def _kernel(
    positions_ref,  # [R]
    inv_freq_ref,  # [H / 2]
    cos_ref,  # [R, H / 2]
    sin_ref,  # [R, H / 2]
    *,
    scale: float,
):
    row, half = launch.program(0), inv_freq_ref.shape[0]
    lane = jnp.arange(pl.next_power_of_2(half), dtype=jnp.int32)
    inside = lane < half
    inv_freq = plt.load(inv_freq_ref.at[lane], mask=inside, other=0.0)
    radians = positions_ref[row].astype(jnp.float32) * inv_freq
    for ref, turned in ((cos_ref, jnp.cos(radians)), (sin_ref, jnp.sin(radians))):
        plt.store(ref.at[row, lane], (turned * scale).astype(ref.dtype), mask=inside)
