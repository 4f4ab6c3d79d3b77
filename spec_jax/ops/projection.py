"""A projection of the row path: normed rows times a weight matrix, plus a residual.

    y = round(norm(x) w^T)                      norm only where it is given
    y = residual + round(norm(x) w^T)           where there is a residual

The product is accumulated in float32 and rounded to the dtype of `x`, before the
residual is added in that dtype. One op, because norm, product and residual of a few
rows are one read of the weights and nothing beside it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax import pytree
from spec_jax.native import blocks, calls
from spec_jax.ops import dispatch, rms_norm, weights
from spec_jax.parallel import collectives
from spec_jax.typing import typed


MIN_ROWS = 2
"""Rows of a slab at the least. With one, XLA takes another path than with several, with
other bits and, in bfloat16, a tenth of the speed."""


class Residual(pytree.Node):
    """The residual of a slab, and what the next product reads where that is made
    already: its RMSNorm, by a kernel, or the input of a head's first layer."""

    x: jax.Array  # [R, D]
    normed: jax.Array | None = None  # [R, K]

    def before(self, norm: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns the rows of the next product, and the norm still to be applied."""
        return (self.x, norm) if self.normed is None else (self.normed, None)


def add(
    y: Float[Array, "R K"],
    w: Float[Array, "N K"] | weights.Form | weights.Split,
    x: Float[Array, "R N"],
    *,
    num_active: Int[Array, ""],
    norm: Float[Array, " N"],
    eps: float,
    impl: str,
) -> Residual:
    """Adds `project(y, w)` to the residual `x`; GPU kernels norm the sum, too.

    They norm rows in a launch of their own, which also adds up the pieces of a product
    whose K is split. A `Split` weight's sum is not normed.

    Args:
      norm: weight of the RMSNorm that follows, with `eps`.
    """
    if impl in dispatch.PALLAS and not isinstance(w, weights.Split):
        kernel = dispatch.kernel("skinny_gemm", impl, "add")
        given = y, weights.of_kernels(w, impl), x, norm
        x, normed = kernel(*given, num_active=num_active, eps=eps)
        return Residual(x=x, normed=normed)
    x = project(y, w, residual=x, num_active=num_active, eps=eps, impl=impl)
    return Residual(x=x)


@typed
def project(
    x: Float[Array, "R K"],
    w: Float[Array, "N K"] | weights.Form | weights.Split,
    *,
    num_active: Int[Array, ""],
    norm: Float[Array, " K"] | None = None,
    residual: Float[Array, "R N"] | None = None,
    bias: Float[Array, " N"] | weights.Split | None = None,
    eps: float = 0.0,
    out_dtype: str | None = None,
    impl: str,
) -> Float[Array, "R N"]:
    """Projects the active rows; padding rows are unspecified.

    Row `r` of the result depends, bit for bit, on row `r` of `x` and of `residual`
    alone; "xla" promises that for a fixed number of rows, all others for any.

    Args:
      num_active: how many rows are real; "native" computes no others.
      norm: weight of an RMSNorm that comes first, with `eps`.
      bias: added to the float32 sums before they are rounded; a `Split` of one piece
        where outputs are cut.
      out_dtype: dtype of the result, that of `x` if None, as a residual requires.
        Logits take float32: they are not rounded.
    """
    dtype = jnp.dtype(out_dtype or x.dtype)
    rows: dict[str, Any] = {"num_active": num_active, "norm": norm, "eps": eps}
    if bias is not None:
        own: Any = bias.pieces[0] if isinstance(bias, weights.Split) else bias
        sums = project(x, w, out_dtype="float32", impl=impl, **rows)
        # Each sum is rounded once, whatever is fused.
        wide = jnp.broadcast_to(own.astype(jnp.float32), sums.shape)
        y = jax.lax.optimization_barrier((sums + wide).astype(dtype))
        return y if residual is None else residual + y
    if residual is not None and dtype != x.dtype:
        raise ValueError(f"a residual of {x.dtype} cannot give {dtype}")
    if isinstance(w, weights.Split):
        split = _project_inputs if w.cut == "inputs" else _project_outputs
        return split(x, w, residual=residual, dtype=dtype, impl=impl, **rows)
    if impl == "native":
        return calls.project(x, w, residual=residual, out_dtype=dtype, **rows)
    if impl in dispatch.PALLAS:
        rows |= {"residual": residual, "out_dtype": dtype, "impl": impl}
        return by_kernels(x, w, **rows)
    if norm is not None:
        x = rms_norm.rms_norm(x, norm, eps=eps)
    y = _product(x, weights.unpacked(w)).astype(dtype)
    # Fused with what comes next, the rounding of a bfloat16 product would be left out
    # or not, as the surrounding program suits XLA.
    y = jax.lax.optimization_barrier(y)
    return y if residual is None else residual + y


def _product(x, w):
    """Returns `x w^T` in float32; for `Blocks`, rows are rounded as `blocks` says."""
    if x.shape[0] < MIN_ROWS:
        raise ValueError(f"a slab needs at least {MIN_ROWS} rows, got {x.shape[0]}")
    if x.dtype != w.dtype:
        raise ValueError(f"rows are {x.dtype} but weights are {w.dtype}")
    if isinstance(w, weights.Blocks):
        return blocks.product(x, w)
    return jax.lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def by_kernels(
    x: jax.Array,  # [R, K]
    w: weights.Weight,  # [N, K]
    *,
    num_active: jax.Array,
    norm: jax.Array | None,
    eps: float,
    impl: str,
    **how: Any,
) -> jax.Array:
    """Norms by one kernel of a GPU and multiplies by `skinny_gemm_triton.project`,
    which takes `how`, too."""
    if norm is not None:
        x = rms_norm.rms_norm(x, norm, num_active=num_active, eps=eps, impl=impl)
    kernel = dispatch.kernel("skinny_gemm", impl, "project")
    return kernel(x, weights.of_kernels(w, impl), num_active=num_active, **how)


def normed(x: jax.Array, norm: jax.Array, *, eps: float) -> jax.Array:
    """Returns the rows that all pieces are multiplied by, compiled for themselves."""
    return jax.lax.optimization_barrier(rms_norm.rms_norm(x, norm, eps=eps))


def products(x: jax.Array, w: weights.Split, **how: Any) -> list[jax.Array]:
    """Returns the products of all rows with each of this device's pieces."""
    return [project(x, piece, **how) for piece in w.pieces]


def _project_outputs(x, w, *, residual, dtype, norm, eps, impl, num_active):
    """Computes outputs on the device that has them; gathers them if all are wanted."""
    if residual is not None:
        raise ValueError("outputs that are cut take no residual")
    if norm is not None and impl == "xla":
        x, norm = normed(x, norm, eps=eps), None
    how = {"num_active": num_active, "norm": norm, "eps": eps, "impl": impl}
    y = w.fuse(products(x, w, out_dtype=str(dtype), **how))
    return y if w.num_outputs is None else collectives.gather(y)[:, : w.num_outputs]


def _project_inputs(x, w, *, residual, dtype, norm, eps, impl, num_active):
    """Sums inputs on the device that has them; adds the sums, and rounds once."""
    if norm is not None:
        raise ValueError("inputs that are cut are normed before they are: no norm here")
    del eps
    if impl == "native" and not weights.is_bytes(w.pieces[0]):
        partials = [calls.project_segments(x, w.pieces, num_active=num_active)]
    else:
        partials = [
            project(part, piece, num_active=num_active, out_dtype="float32", impl=impl)
            for part, piece in zip(
                jnp.split(x, len(w.pieces), axis=1), w.pieces, strict=True
            )
        ]
    y = jax.lax.optimization_barrier(collectives.ordered_sum(partials).astype(dtype))
    return y if residual is None else residual + y
