"""The operations of a forward pass by name, and the hook that sees them.

`decoder.forward_rows` calls a hook, `observe(layer, operation, value)`, with what
leaves Qwen3's kernels, all of `LEAVES_ROWS`; what the hook returns is what goes on.
Values have a row of the slab first and any shape after it; padding rows are
unspecified.

    operation            a row holds
    embed                D        of the token
    q, k, v              N * H, K * H, K * H, projected
    k_cache, v_cache     K * H    as the pages hold them after the write
    attention            N * H    attended values of all heads
    attention_residual   D        the residual after it was added
    swiglu               F        silu(gate) * up
    mlp_residual         D        the residual after it was added: the layer's output
    logits               V        float32

What belongs to no layer (`embed`, `logits`) has `layer` None.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from spec_jax.ops import bits, page_write


LEAVES_ROWS = (
    "embed",
    "q",
    "k",
    "v",
    "k_cache",
    "v_cache",
    "attention",
    "attention_residual",
    "swiglu",
    "mlp_residual",
    "logits",
)
"""Values that `decoder.forward_rows` shows the hook: no others leave its kernels."""

Observe = Callable[[int | None, str, jax.Array], jax.Array]
"""`(layer, operation, value) -> value`: sees a value, and says what goes on."""


def heads(values, config, observe):
    """Shows queries, keys and values to the hook; returns the fused projection."""
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    parts = jnp.split(values, (N * H, (N + K) * H), axis=1)
    seen = [observe(name, part) for name, part in zip("qkv", parts, strict=True)]
    return jnp.concatenate(seen, axis=1)


def written(pool, name, observe, *, page_table, slots, positions, num_active):
    """Shows the hook the rows' stored values; returns pages with what it returns."""
    pages, offsets = page_write.locate(page_table, pool.shape[1], slots, positions)
    read = bits.to_bits(pool).at[pages, offsets].get(mode="fill", fill_value=0)
    return page_write.page_write(
        pool,
        observe(name, bits.from_bits(read, pool.dtype)),
        page_table=page_table,
        slots=slots,
        positions=positions,
        num_active=num_active,
    )
