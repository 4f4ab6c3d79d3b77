"""The operations of a forward pass by name, those that leave no kernel among them.

As `model.observe` says it of those that do; a design of separate operations
(`superseded`) shows its hook all of them.

    operation            a row holds
    embed                D        of the token
    input_norm           D        normed residual, what is projected to q, k, v
    q, k, v              N * H, K * H, K * H, projected
    q_norm, k_norm       normed per head
    q_rope, k_rope       rotated by the row's position
    k_cache, v_cache     K * H    as the pages hold them after the write
    attention            N * H    attended values of all heads
    attention_out        D        their projection
    attention_residual   D        the residual after it was added
    mlp_norm             D        normed, what is projected to gate and up
    gate, up             F
    swiglu               F        silu(gate) * up
    down                 D        its projection
    mlp_residual         D        the residual after it was added: the layer's output
    final_norm           D
    logits               V        float32
"""

OUTSIDE = ("embed", "final_norm", "logits")
"""Operations that belong to no layer: the hook's `layer` is None."""

LAYER_OPERATIONS = (
    "input_norm",
    "q",
    "k",
    "v",
    "q_norm",
    "k_norm",
    "q_rope",
    "k_rope",
    "k_cache",
    "v_cache",
    "attention",
    "attention_out",
    "attention_residual",
    "mlp_norm",
    "gate",
    "up",
    "swiglu",
    "down",
    "mlp_residual",
)
"""Operations of every layer, in an order in which they can be computed."""

OPERATIONS = ("embed", *LAYER_OPERATIONS, "final_norm", "logits")
"""All operations, in order."""


def key(layer: int | None, operation: str) -> str:
    """Names an operation of a layer: "3:q", or "embed" outside of layers."""
    return operation if layer is None else f"{layer}:{operation}"


def keys(num_layers: int) -> tuple[str, ...]:
    """Lists the `key` of every operation of a model, in an order of computation."""
    layers = (
        key(layer, name) for layer in range(num_layers) for name in LAYER_OPERATIONS
    )
    return ("embed", *layers, "final_norm", "logits")
