"""The kernels as JAX functions: shapes in, shapes out, and the foreign calls.

The instruction set is part of a call's target, so that one process can compare
several: `isa` is one of `build.ISA_FLAGS`, the widest that runs here if None.
"""

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.native import build


MAX_HEAD = 256  # as `kMaxHead` in attention.h


def _call(target: str, outputs, *arguments, isa, aliases=None, **attributes):
    attributes = {name: np.float32(value) for name, value in attributes.items()}
    return jax.ffi.ffi_call(
        build.target_name(target, build.load(isa)),
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


def _shapes(**pairs: tuple[jax.Array, tuple[int, ...]]) -> None:
    """Raises unless every array has its shape: the kernels do not look."""
    for name, (array, shape) in pairs.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, not {shape}")


def project(
    x: jax.Array,  # [R, K]
    w: jax.Array,  # [N, K]
    *,
    num_active: jax.Array,  # [] int32
    norm: jax.Array | None,  # [K]
    residual: jax.Array | None,  # [R, N]
    eps: float,
    out_dtype: jnp.dtype,
    isa: str | None = None,
) -> jax.Array:
    """See `ops.projection.project`."""
    (R, K), N = x.shape, w.shape[0]
    _shapes(w=(w, (N, K)), num_active=(num_active, ()))
    if norm is None:
        norm = jnp.zeros((0,), x.dtype)
    else:
        _shapes(norm=(norm, (K,)))
    if residual is None:
        residual = jnp.zeros((0, 0), x.dtype)
    else:
        _shapes(residual=(residual, (R, N)))
    _same(x, w, norm, residual)
    out_dtype = jnp.dtype(out_dtype)
    if out_dtype not in (x.dtype, jnp.float32):
        raise NotImplementedError(f"a product of {x.dtype} cannot give {out_dtype}")
    output = jax.ShapeDtypeStruct((R, N), out_dtype)
    return _call(
        "spec_jax_project", output, x, norm, w, residual, num_active, isa=isa, eps=eps
    )


def gate(
    x: jax.Array,  # [R, K]
    w: jax.Array,  # [2F, K]
    *,
    num_active: jax.Array,  # [] int32
    norm: jax.Array,  # [K]
    eps: float,
    isa: str | None = None,
) -> jax.Array:
    """See `ops.gated_projection.gated_projection`."""
    (R, K), F = x.shape, w.shape[0] // 2
    _shapes(w=(w, (2 * F, K)), norm=(norm, (K,)), num_active=(num_active, ()))
    _same(x, w, norm)
    output = jax.ShapeDtypeStruct((R, F), x.dtype)
    return _call("spec_jax_gate", output, x, norm, w, num_active, isa=isa, eps=eps)


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
    num_active: jax.Array,  # [] int32
    eps: float,
    scale: float,
    isa: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `ops.row_attention.row_attention`. The pages are updated in place.

    An active row whose slot, position or pages do not exist writes nothing, and its
    result is NaN.
    """
    R, K, H = heads.shape[0], *k_pages.shape[2:]
    N = heads.shape[1] // H - 2 * K
    if H % 2 or H > MAX_HEAD:
        raise NotImplementedError(f"head size {H} is odd, or above {MAX_HEAD}")
    if N < 1 or N % K:
        raise ValueError(f"{N} query heads for {K} key/value heads")
    _same(heads, q_norm, k_norm, k_pages, v_pages)
    _shapes(
        heads=(heads, (R, (N + 2 * K) * H)),
        q_norm=(q_norm, (H,)),
        k_norm=(k_norm, (H,)),
        v_pages=(v_pages, k_pages.shape),
        cos=(cos, (R, H // 2)),
        sin=(sin, (R, H // 2)),
        slots=(slots, (R,)),
        positions=(positions, (R,)),
        num_active=(num_active, ()),
    )
    outputs = (
        jax.ShapeDtypeStruct((R, N * H), heads.dtype),
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
        num_active,
        k_pages,
        v_pages,
        isa=isa,
        aliases={9: 1, 10: 2},
        eps=eps,
        scale=scale,
    )


def argmax(
    x: jax.Array,  # [R, N] float32
    *,
    num_active: jax.Array,  # [] int32
    isa: str | None = None,
) -> jax.Array:
    """See `ops.argmax.argmax`; 0 for padding rows."""
    R, N = x.shape
    if N < 1:
        raise ValueError("the largest of no values")
    if x.dtype != jnp.float32:
        raise NotImplementedError(f"the native argmax takes float32, not {x.dtype}")
    _shapes(num_active=(num_active, ()))
    output = jax.ShapeDtypeStruct((R,), jnp.int32)
    return _call("spec_jax_argmax", output, x, num_active, isa=isa)


def take_rows(
    table: jax.Array,  # [V, D]
    index: jax.Array,  # [R] int32
    *,
    num_active: jax.Array,  # [] int32
    isa: str | None = None,
) -> jax.Array:
    """See `ops.embedding.embed`; 0 for padding rows, NaN where there is no entry."""
    (_, D), (R,) = table.shape, index.shape
    _shapes(num_active=(num_active, ()))
    _same(table)
    output = jax.ShapeDtypeStruct((R, D), table.dtype)
    return _call("spec_jax_take_rows", output, table, index, num_active, isa=isa)
