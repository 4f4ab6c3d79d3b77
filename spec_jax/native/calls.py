"""The kernels as JAX functions: shapes in, shapes out, and the foreign calls.

The instruction set is fixed when the kernels are loaded; its name is part of every
call's target, so that one process can compare several.
"""

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.native import build


def _call(target: str, outputs, *arguments, aliases=None, **attributes):
    isa = build.load()
    attributes = {name: np.float32(value) for name, value in attributes.items()}
    return jax.ffi.ffi_call(
        build.target_name(target, isa),
        outputs,
        input_output_aliases=aliases or {},
        vmap_method=None,
    )(*arguments, **attributes)


def _same(*arrays: jax.Array) -> None:
    """Raises unless all arrays have one dtype, and one that the kernels take."""
    dtypes = {str(array.dtype) for array in arrays}
    if len(dtypes) != 1 or not dtypes <= {"float32", "bfloat16"}:
        raise NotImplementedError(
            f"the native kernels take float32 or bfloat16, one of them: {dtypes}"
        )


def project(
    x: jax.Array,  # [R, K]
    w: jax.Array,  # [N, K]
    *,
    num_live: jax.Array,  # [] int32
    norm: jax.Array | None,  # [K]
    residual: jax.Array | None,  # [R, N]
    eps: float,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """See `ops.projection.project`."""
    norm = jnp.zeros((0,), x.dtype) if norm is None else norm
    residual = jnp.zeros((0, 0), x.dtype) if residual is None else residual
    _same(x, w, norm, residual)
    output = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), out_dtype)
    return _call("spec_jax_project", output, x, norm, w, residual, num_live, eps=eps)


def gate(
    x: jax.Array,  # [R, K]
    w: jax.Array,  # [2F, K]
    *,
    num_live: jax.Array,  # [] int32
    norm: jax.Array,  # [K]
    eps: float,
) -> jax.Array:
    """See `ops.gated_projection.gated_projection`."""
    _same(x, w, norm)
    output = jax.ShapeDtypeStruct((x.shape[0], w.shape[0] // 2), x.dtype)
    return _call("spec_jax_gate", output, x, norm, w, num_live, eps=eps)


def attend(
    heads: jax.Array,  # [R, (N + 2K) * H]
    q_norm: jax.Array,  # [H]
    k_norm: jax.Array,  # [H]
    k_pages: jax.Array,  # [P, C, K, H]
    v_pages: jax.Array,  # [P, C, K, H]
    cos: jax.Array,  # [R, H / 2]
    sin: jax.Array,  # [R, H / 2]
    *,
    page_table: jax.Array,  # [S, M] int32
    slots: jax.Array,  # [R] int32
    positions: jax.Array,  # [R] int32
    num_live: jax.Array,  # [] int32
    eps: float,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `ops.row_attention.row_attention`. The pages are updated in place."""
    _same(heads, q_norm, k_norm, k_pages, v_pages)
    K, H = k_pages.shape[2:]
    attention = heads.shape[1] - 2 * K * H
    outputs = (
        jax.ShapeDtypeStruct((heads.shape[0], attention), heads.dtype),
        jax.ShapeDtypeStruct(k_pages.shape, k_pages.dtype),
        jax.ShapeDtypeStruct(v_pages.shape, v_pages.dtype),
    )
    return _call(
        "spec_jax_attend",
        outputs,
        heads,
        q_norm,
        k_norm,
        cos.astype(jnp.float32),
        sin.astype(jnp.float32),
        page_table,
        slots,
        positions,
        num_live,
        k_pages,
        v_pages,
        aliases={9: 1, 10: 2},
        eps=eps,
        scale=scale,
    )
