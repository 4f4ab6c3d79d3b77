"""The embeddings of a slab's tokens."""

from jaxtyping import Array, Float, Int

from spec_jax.native import calls
from spec_jax.ops import weights
from spec_jax.typing import typed


@typed
def embed(
    table: Float[Array, "V D"] | weights.Form,
    tokens: Int[Array, " R"],
    *,
    num_active: Int[Array, ""],
    impl: str,
) -> Float[Array, "R D"]:
    """Returns the table's row of each active token; padding rows are unspecified.

    Active tokens are entries of the table, which is checked where text comes in
    (`engine.checks.check_prompt`). Another token has NaN with native kernels, and
    another entry's row with XLA.
    """
    if impl == "native":
        return calls.take_rows(table, tokens, num_active=num_active)
    return weights.take_rows(table, tokens)
