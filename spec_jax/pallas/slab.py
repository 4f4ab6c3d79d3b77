"""What the kernels of the row path share: the slab, its checks, and the epilogues.

A slab is a tile of `ROWS` rows, the height of one tensor-core instruction. It is
computed whole, whatever is live: a row's bits cannot depend on how many rows are.
"""

import jax
import jax.numpy as jnp


ROWS = 16


def padded(x: jax.Array) -> jax.Array:
    """`x` with rows of zeros up to a multiple of `ROWS`, and at least one slab."""
    missing = -x.shape[0] % ROWS if x.shape[0] else ROWS
    return jnp.pad(x, ((0, missing), (0, 0))) if missing else x


def check_shapes(**pairs: tuple[jax.Array, tuple[int, ...]]) -> None:
    """Raises `ValueError` unless every array has its shape."""
    for name, (array, shape) in pairs.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, not {shape}")


def check_bfloat16(**arrays: jax.Array | None) -> None:
    """Raises `NotImplementedError` unless all arrays that there are are bfloat16."""
    for name, array in arrays.items():
        if array is not None and array.dtype != jnp.bfloat16:
            raise NotImplementedError(
                f"the GPU kernels multiply bfloat16, and {name} is {array.dtype}"
            )


def added(
    total: jax.Array,  # [16, N] float32
    residual: jax.Array | None,  # [16, N]
    *,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """`round(total)`, or `residual + round(total)` in the residual's dtype."""
    if residual is None:
        return total.astype(out_dtype)
    return residual + total.astype(residual.dtype)


def gated(
    gate: jax.Array,  # [16, F] float32
    up: jax.Array,  # [16, F] float32
    *,
    dtype: jnp.dtype,
) -> jax.Array:
    """`silu(gate) * up` with the roundings of `ops.swiglu`: of both, and of silu."""
    gate, up = gate.astype(dtype).astype(jnp.float32), up.astype(dtype)
    return jax.nn.silu(gate).astype(dtype) * up
