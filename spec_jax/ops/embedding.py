"""The embeddings of a slab's tokens."""

from jaxtyping import Array, Float, Int

from spec_jax.native import calls
from spec_jax.ops import weights
from spec_jax.typing import typed


@typed
def embed(
    table: Float[Array, "V D"] | weights.Panels,
    tokens: Int[Array, " R"],
    *,
    num_live: Int[Array, ""],
    impl: str,
) -> Float[Array, "R D"]:
    """The table's row of each live token; dead rows are unspecified.

    Live tokens are entries of the table, which is checked where text comes in
    (`engine.checks.check_prompt`). One that is none has NaN with native kernels, and
    another entry's row with XLA.
    """
    if impl == "native":
        return calls.take_rows(table, tokens, num_live=num_live)
    return weights.take_rows(table, tokens)
