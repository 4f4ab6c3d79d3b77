"""The first half of a gated MLP on the row path.

y = swiglu(round(norm(x) w^T)),   the gate's weights in the first half of w
"""

from jaxtyping import Array, Float, Int

from spec_jax.native import calls
from spec_jax.ops import dispatch, projection, swiglu, weights
from spec_jax.typing import typed


@typed
def gated_projection(
    x: Float[Array, "R K"],
    w: Float[Array, "F2 K"] | weights.Panels,
    *,
    num_active: Int[Array, ""],
    norm: Float[Array, " K"],
    eps: float,
    impl: str,
) -> Float[Array, "R F"]:
    """Norms, projects to gate and up, and gates; padding rows are unspecified.

    Row `r` of the result depends, bit for bit, on row `r` of `x` alone, as in
    `projection.project`.
    """
    if impl == "native":
        return calls.gate(x, w, num_active=num_active, norm=norm, eps=eps)
    w = weights.matrix(w)
    if impl in dispatch.PALLAS:
        kernels, interpret = dispatch.products(impl)
        return kernels.gate(
            x, w, num_active=num_active, norm=norm, eps=eps, interpret=interpret
        )
    gate_up = projection.project(
        x, w, num_active=num_active, norm=norm, eps=eps, impl=impl
    )
    return swiglu.swiglu(gate_up)
