"""The best children of a tree's rows as a JAX function, one foreign call."""

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.native import calls, draws as draws_lib


def children(
    logits: jax.Array,  # [S, K, N] float32
    counts: jax.Array,  # [S] int32
    numbers: jax.Array,  # [K] int32
    *,
    most: int,
    tau: float,
    names: jax.Array | None,  # [N] int32
    draws: draws_lib.Draws | None,
    isa: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Finds the best children of rows; see `ops.children.children`."""
    S, K, N = logits.shape
    if not 1 <= most <= N:
        raise ValueError(f"{most} children of {N} tokens: take from 1 to as many")
    if logits.dtype != jnp.float32:
        raise NotImplementedError(f"logits of {logits.dtype}: children take float32")
    calls.check_shapes(counts=(counts, (S,)), numbers=(numbers, (K,)))
    if names is None:
        names = jnp.zeros((0,), jnp.int32)
    else:
        calls.check_shapes(names=(names, (N,)))
    # No slot returns the distribution that was drawn from: it is left out.
    how, _, attributes = draws_lib.arguments(draws, (S, K, N))
    scores, tokens, _ = calls.call(
        "spec_jax_children",
        [
            jax.ShapeDtypeStruct((S, K, most), jnp.float32),
            jax.ShapeDtypeStruct((S, K, most), jnp.int32),
            jax.ShapeDtypeStruct((0, 0, 0), jnp.float32),
        ],
        *(logits, counts, numbers, names, *how),
        isa=isa,
        tau=np.float32(tau),
        **attributes,
    )
    return scores, tokens
