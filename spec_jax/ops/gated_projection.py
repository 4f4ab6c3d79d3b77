"""The first half of a gated MLP on the row path.

y = swiglu(round(norm(x) w^T)),   the gate's weights in the first half of w
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.native import calls
from spec_jax.ops import dispatch, projection, swiglu, weights
from spec_jax.typing import typed


@typed
def gated_projection(
    x: Float[Array, "R K"],
    w: Float[Array, "F2 K"] | weights.Form | weights.Split,
    *,
    num_active: Int[Array, ""],
    norm: Float[Array, " K"] | None,
    eps: float,
    impl: str,
) -> Float[Array, "R F"]:
    """Norms, projects to gate and up, and gates; padding rows are unspecified.

    Row `r` of the result depends, bit for bit, on row `r` of `x` alone, as in
    `projection.project`.

    Args:
      norm: weight of the RMSNorm. None where the rows are normed already: for kernels
        on a GPU, of weights that are not cut.

    Raises:
      ValueError: no `norm` where one is needed.
    """
    if impl in dispatch.PALLAS and not isinstance(w, weights.Split):
        kernels, interpret = dispatch.kernels("skinny_gemm", impl)
        given = x, weights.of_kernels(w, impl)
        return kernels.gate(
            *given, num_active=num_active, norm=norm, eps=eps, interpret=interpret
        )
    if norm is None:
        raise ValueError(f"impl={impl!r} norms the rows itself: give it the weight")
    if isinstance(w, weights.Split):
        # Piece after piece, all of one shape: see `weights.Split`.
        if impl == "xla":
            x = projection.normed(x, norm, eps=eps)
            products = projection.products(x, w, num_active=num_active, impl=impl)
            gated = [jax.lax.optimization_barrier(swiglu.swiglu(y)) for y in products]
        else:
            gated = [
                gated_projection(
                    x, piece, num_active=num_active, norm=norm, eps=eps, impl=impl
                )
                for piece in w.pieces
            ]
        return gated[0] if len(gated) == 1 else jnp.concatenate(gated, axis=1)
    if impl == "native":
        return calls.gate(x, w, num_active=num_active, norm=norm, eps=eps)
    gate_up = projection.project(
        x, w, num_active=num_active, norm=norm, eps=eps, impl=impl
    )
    return swiglu.swiglu(gate_up)
