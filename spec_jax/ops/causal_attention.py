"""Causal attention over whole sequences: for prefill, training and parity.

Not on the row path: its bits depend on the sequence length it is compiled for.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spec_jax.typing import typed


MIN_BLOCK = 128
MAX_BLOCKS = 8


@typed
def causal_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
) -> Float[Array, "B T N H"]:
    """Attends from each position to itself and those before it.

    Query head `n` reads key/value head `n // (N / K)`. Scores and softmax are
    float32; the probabilities are cast to `v.dtype` before the second product, as
    Hugging Face's eager attention does. Queries go in at most `MAX_BLOCKS` blocks,
    each of which sees only the keys up to its own end: on a CPU that is more than
    twice as fast as one masked square.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    G = N // K
    block = max(MIN_BLOCK, -(-T // MAX_BLOCKS))
    # Heads before positions: one contiguous matrix per key/value head.
    queries = q.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4)  # [B, K, G, T, H]
    keys = k.transpose(0, 2, 1, 3).reshape(B * K, T, H)
    values = v.transpose(0, 2, 1, 3).reshape(B * K, T, H)

    outputs = []
    for start in range(0, T, block):
        stop = min(start + block, T)
        rows = stop - start
        scores = jnp.einsum(
            "bqh,bth->bqt",
            queries[:, :, :, start:stop].reshape(B * K, G * rows, H),
            keys[:, :stop],
            preferred_element_type=jnp.float32,
        ).reshape(B * K, G, rows, stop)
        visible = (
            jnp.arange(stop, dtype=jnp.int32)[None, :]
            <= jnp.arange(start, stop, dtype=jnp.int32)[:, None]
        )
        visible = jnp.broadcast_to(visible, scores.shape)
        scores = jnp.where(visible, scores * scale, -jnp.inf)
        probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        attended = jnp.einsum(
            "bqt,bth->bqh", probs.reshape(B * K, G * rows, stop), values[:, :stop]
        )
        outputs.append(attended.reshape(B, K, G, rows, H))
    merged = jnp.concatenate(outputs, axis=3)  # [B, K, G, T, H]
    return merged.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
