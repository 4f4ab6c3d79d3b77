"""The first half of a gated MLP on the row path.

y = swiglu(round(norm(x) w^T)),   the gate's weights in the first half of w
"""

from typing import Any

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
    how: dict[str, Any] = {"num_active": num_active, "eps": eps, "impl": impl}
    if impl in dispatch.PALLAS and not isinstance(w, weights.Split):
        return projection.by_kernels(x, w, norm=norm, parts=2, **how)
    if norm is None:
        raise ValueError(f"impl={impl!r} norms the rows itself: give it the weight")
    if isinstance(w, weights.Split):
        # Piece after piece, all of one shape: see `weights.Split`.
        if impl == "xla":
            x = projection.normed(x, norm, eps=eps)
            products = projection.products(x, w, num_active=num_active, impl=impl)
            gated = [jax.lax.optimization_barrier(swiglu.swiglu(y)) for y in products]
        else:
            gated = [gated_projection(x, part, norm=norm, **how) for part in w.pieces]
        return gated[0] if len(gated) == 1 else jnp.concatenate(gated, axis=1)
    if impl == "native":
        return calls.gate(x, w, num_active=num_active, norm=norm, eps=eps)
    return swiglu.swiglu(projection.project(x, w, norm=norm, **how))
