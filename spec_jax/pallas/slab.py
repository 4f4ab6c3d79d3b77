"""Parts that the kernels of the row path share: slab, checks and epilogues.

Here a slab is a tile of `ROWS` rows, the height of one tensor-core instruction. It is
always computed whole, so that a row's bits cannot depend on how many rows are active.
Padding rows are neither loaded nor stored, and are zeros where they are computed.
Up to `MOST_ROWS` rows, in whole slabs, share one read of the weights.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt


ROWS = 16
MOST_ROWS = 64
MAX_SHARED_BYTES = 232_448  # of one program on an H100


def padded(x: jax.Array) -> jax.Array:
    """Pads `x` with zeros to a multiple of `ROWS`, and to at least one slab."""
    missing = -x.shape[0] % ROWS if x.shape[0] else ROWS
    return jnp.pad(x, ((0, missing), (0, 0))) if missing else x


def height(num_rows: int) -> int:
    """Returns the rows of one program of a product; they share a read of weights."""
    slabs, most = num_rows // ROWS, MOST_ROWS // ROWS
    return ROWS * max(n for n in range(1, most + 1) if slabs % n == 0)


def check_shapes(**pairs: tuple[jax.Array | None, tuple[int, ...]]) -> None:
    """Raises `ValueError` unless every given array has its shape."""
    for name, (array, shape) in pairs.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, not {shape}")


def check_bfloat16(**arrays: jax.Array | None) -> None:
    """Raises `NotImplementedError` unless every given array is bfloat16."""
    for name, array in arrays.items():
        if array is not None and array.dtype != jnp.bfloat16:
            raise NotImplementedError(
                f"the GPU kernels multiply bfloat16, and {name} is {array.dtype}"
            )


def finish(sums, residual_view, out_view, is_active, in_columns) -> None:
    """Rounds a tile, gates it or adds the residual, and stores it.

    Args:
      sums: one array of sums `[16, n]` float32, or two: of the gate and of the up half.
      residual_view: the tile of the residual `[16, n]`, or None.
      is_active, in_columns: masks `[16]` and `[n]` of what exists; None masks nothing.
    """
    dtype = out_view.dtype
    if len(sums) == 2:  # Rounds both, and silu, as `ops.swiglu` does.
        gate, up = sums
        gate, up = gate.astype(dtype).astype(jnp.float32), up.astype(dtype)
        result = jax.nn.silu(gate).astype(dtype) * up
    else:
        (total,) = sums
        if residual_view is not None:
            residual = load(residual_view, is_active, in_columns)
        result = total.astype(dtype)
        if residual_view is not None:
            result = residual + result
    store(out_view, result, is_active, in_columns)


def each_added(sums, others):
    """Adds two tuples, element by element."""
    return tuple(a + b for a, b in zip(sums, others, strict=True))


def load(view, first_mask=None, last_mask=None, *, last_use=False) -> jax.Array:
    """Loads a block of two axes, without a read and as zeros where a mask is false.

    With `last_use` the block is the first to leave the cache: few programs read it.
    """
    mask = _mask(view.shape, first_mask, last_mask)
    return plt.load(
        view,
        mask=mask,
        other=None if mask is None else 0,
        eviction_policy="evict_first" if last_use else None,
    )


def store(view, block, first_mask=None, last_mask=None) -> None:
    """Stores a block of two axes where both masks are true."""
    plt.store(view, block, mask=_mask(view.shape, first_mask, last_mask))


def _mask(shape, first_mask, last_mask):
    """Combines both masks to one of `shape`; None where there is nothing to mask."""
    masks = []
    if first_mask is not None:
        masks.append(jnp.broadcast_to(first_mask[:, None], shape))
    if last_mask is not None:
        masks.append(jnp.broadcast_to(last_mask[None, :], shape))
    return functools.reduce(jnp.logical_and, masks) if masks else None
