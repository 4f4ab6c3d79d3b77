"""Values that never leave a fused kernel, read through that very kernel.

Nothing is recomputed by other code: the kernel is run again on inputs for which what
it writes *is* the value that it otherwise keeps to itself. Whether it is what the
kernel used inside the whole model, is checked each time: `unexplained` feeds what was
read to what comes next, and counts the bits that do not come out. (For kernels of our
own there are none. XLA may keep in float32 what it fuses, and then says otherwise.)
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.model import config as config_lib, params as params_lib
from spec_jax.ops import dispatch, projection, rms_norm, row_attention, swiglu
from spec_jax.typing import typed


MIN_PAGE = 16

Angles = tuple[jax.Array, jax.Array]
"""Cosines and sines of a slab's rows, `[R, H/2]` each."""


@typed
def normed(
    x: Float[Array, "R D"],
    weight: Float[Array, " D"],
    *,
    num_active: Int[Array, ""],
    eps: float,
    impl: str,
) -> Float[Array, "R D"]:
    """Norms the rows as `projection.project` does inside.

    On a GPU the norm is a kernel before the product's. Elsewhere they are its product
    with the identity: each sum has one term that is not zero, so that the product is
    exact. (The sign of a zero is lost, and a row with an element that is not finite
    becomes NaN.)
    """
    if impl in dispatch.PALLAS:
        return rms_norm.row_norm(x, weight, num_active=num_active, eps=eps, impl=impl)
    identity = jnp.eye(x.shape[1], dtype=x.dtype)
    return projection.project(
        x, identity, num_active=num_active, norm=weight, eps=eps, impl=impl
    )


@typed
def rotated(
    heads: Float[Array, "R width"],
    weight: Float[Array, " H"],
    *,
    angles: Angles,
    num_active: Int[Array, ""],
    eps: float,
    impl: str,
) -> Float[Array, "R width"]:
    """Returns heads normed and rotated as `row_attention` does; padding rows are 0.

    They stand in for the keys of a scratch page: what it then holds is what the
    kernel made of them. Queries and keys are treated alike by all kernels; the
    softmax's scale comes after the rotation.
    """
    R, H = heads.shape[0], weight.shape[0]
    page_size = max(MIN_PAGE, 1 << (R - 1).bit_length())
    num_heads = heads.shape[1] // H
    pages = jnp.zeros((1, page_size, num_heads, H), heads.dtype)
    cos, sin = angles
    _, keys, _ = row_attention.row_attention(
        jnp.concatenate([heads] * 3, axis=1),
        weight,
        weight,
        pages,
        pages,
        page_table=jnp.zeros((1, 1), jnp.int32),
        slots=jnp.zeros((R,), jnp.int32),
        # Where on the scratch page; the angles alone say by how much to rotate.
        positions=jnp.arange(R, dtype=jnp.int32),
        num_active=num_active,
        cos=cos,
        sin=sin,
        eps=eps,
        scale=1.0,
        impl=impl,
    )
    return keys[0, :R].reshape(heads.shape)


def layer_values(
    layer: params_lib.LayerParams,
    config: config_lib.Qwen3Config,
    seen: dict[str, jax.Array],
    *,
    x: jax.Array,
    q_angles: Angles,
    k_angles: Angles,
    num_active: jax.Array,
    impl: str,
) -> dict[str, jax.Array]:
    """Computes what stays inside the kernels of a layer of `qwen3.forward_rows`.

    Args:
      seen: the layer's values that did leave its kernels, `[R, ...]` by operation.
      x: `[R, D]`, the residual that enters the layer.

    Returns:
      By operation the values `[R, width]` that `seen` lacks.
    """
    shared: dict[str, Any] = {
        "num_active": num_active,
        "eps": config.rms_norm_eps,
        "impl": impl,
    }
    none = jnp.ones_like(q_angles[0]), jnp.zeros_like(q_angles[1])  # no rotation
    middle = seen["attention_residual"]
    gate_up = projection.project(middle, layer.gate_up, norm=layer.mlp_norm, **shared)
    gate, up = jnp.split(gate_up, 2, axis=1)
    q, k = seen["q"], seen["k"]
    return {
        "input_norm": normed(x, layer.input_norm, **shared),
        "q_norm": rotated(q, layer.q_norm, angles=none, **shared),
        "k_norm": rotated(k, layer.k_norm, angles=none, **shared),
        "q_rope": rotated(q, layer.q_norm, angles=q_angles, **shared),
        "k_rope": rotated(k, layer.k_norm, angles=k_angles, **shared),
        "attention_out": projection.project(
            seen["attention"], layer.attention_out, **shared
        ),
        "mlp_norm": normed(middle, layer.mlp_norm, **shared),
        "gate": gate,
        "up": up,
        "down": projection.project(seen["swiglu"], layer.down, **shared),
    }


def unexplained(
    layer: params_lib.LayerParams,
    config: config_lib.Qwen3Config,
    values: dict[str, jax.Array],
    *,
    x: jax.Array,
    num_active: jax.Array,
    impl: str,
) -> dict[str, jax.Array]:
    """Finds outputs of a layer's kernels that the values inside do not lead to.

    Args:
      values: all of the layer's operations, without a fault; `x` as in `layer_values`.

    Returns:
      By operation `[R, width]` bool: the elements of `q`, `k`, `v`, `k_cache`,
      `attention_residual`, `gate`, `up`, `swiglu` and `mlp_residual` that come out
      differently when computed from the values before them.
    """
    shared: dict[str, Any] = {"num_active": num_active, "impl": impl}
    heads = projection.project(values["input_norm"], layer.qkv, **shared)
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    q, k, v = jnp.split(heads, (N * H, (N + K) * H), axis=1)
    gate_up = projection.project(values["mlp_norm"], layer.gate_up, **shared)
    gate, up = jnp.split(gate_up, 2, axis=1)
    halves = jnp.concatenate([values["gate"], values["up"]], axis=1)
    expected = {
        "q": q,
        "k": k,
        "v": v,
        "k_cache": values["k_rope"],
        "attention_residual": x + values["attention_out"],
        "gate": gate,
        "up": up,
        "swiglu": swiglu.swiglu(halves),
        "mlp_residual": values["attention_residual"] + values["down"],
    }
    return {name: value != values[name] for name, value in expected.items()}
