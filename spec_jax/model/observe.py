"""The operations of a forward pass by name, and the hook that sees them.

`qwen3.forward_rows` takes `observe`, and calls `observe(layer, operation, value)` with
what leaves its kernels, all of `LEAVES_ROWS`; what the hook returns is what goes on.
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
"""Values that `qwen3.forward_rows` shows the hook: no others leave its kernels."""

Observe = Callable[[int | None, str, jax.Array], jax.Array]
"""`(layer, operation, value) -> value`: sees a value, and says what goes on."""


def pass_on(layer: int | None, operation: str, value: jax.Array) -> jax.Array:
    """Returns the value unchanged: a hook that leaves no trace in the program."""
    del layer, operation
    return value
