"""The kernels as JAX functions: shapes in, shapes out, and the foreign calls.

The instruction set is part of a call's target, so that one process can compare
several: `isa` is one of `build.ISA_FLAGS`, that of `build.load` if None.

Weights come as `Panels`. Another matrix is turned into them by the call itself,
which costs more than the product: do so for single products, not in models.

Padding rows of a result are not written: unspecified unless a function says more.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.native import blocks, build, panels, tiles


MAX_HEAD = 256  # as `kMaxHead` in attention.h

Weight = jax.Array | panels.Panels | blocks.Blocks | tiles.Tiles


def call(
    target: str,
    outputs,
    *arguments,
    isa=None,
    aliases=None,
    **attributes,
):
    """Calls a kernel of an instruction set; the rest is as in `jax.ffi.ffi_call`.

    Under `vmap` each element is a call of its own, with the bits that it has alone.
    """
    return jax.ffi.ffi_call(
        build.target_name(target, build.load(isa)),
        outputs,
        input_output_aliases=aliases or {},
        vmap_method="sequential",
    )(*arguments, **attributes)


def check_dtypes(*arrays: Weight | None) -> None:
    """Raises unless all weights have one dtype, and one that the kernels take; passes
    over those of None."""
    dtypes = {str(array.dtype) for array in arrays if array is not None}
    if len(dtypes) != 1 or not dtypes <= {"float32", "bfloat16"}:
        raise NotImplementedError(
            f"the native kernels take float32 or bfloat16, one of them: {dtypes}"
        )


def check_shapes(**pairs: tuple[Weight | None, tuple[int, ...]]) -> None:
    """Raises unless every array has its shape, or is None: the kernels do not look."""
    for name, (array, shape) in pairs.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, not {shape}")


def check_heads(
    sizes: tuple[int, int, int], q_norm: jax.Array | None, k_norm: jax.Array | None
) -> None:
    """Raises unless attention takes `N` and `K` heads of size `H`, and these norms."""
    N, K, H = sizes
    if H % 2 or H > MAX_HEAD:
        raise NotImplementedError(f"head size {H} is odd, or above {MAX_HEAD}")
    if N < 1 or N % K:
        raise ValueError(f"{N} query heads for {K} key/value heads")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("norms of queries and of keys: both, or neither")


def or_empty(
    name: str, array: jax.Array | None, shape: tuple[int, ...], dtype
) -> jax.Array:
    """Returns an array of this shape as kernels take it: for None an empty one, of the
    dtype and as many axes. Raises for another shape."""
    check_shapes(**{name: (array, shape)})
    return jnp.zeros((0,) * len(shape), dtype) if array is None else array


@functools.partial(jax.jit, static_argnames="isa")
def pack(
    w: jax.Array | blocks.Blocks | tiles.Tiles, *, isa: str | None = None
) -> panels.Panels:
    """Copies `w [N, K]` into panels."""
    check_dtypes(w)
    w = tiles.unpack(w) if isinstance(w, tiles.Tiles) else w
    if isinstance(w, blocks.Blocks):
        return blocks.pack(w)
    N, K = w.shape
    shape = panels.packed_shape((N, K), w.dtype)
    data = call("spec_jax_pack", jax.ShapeDtypeStruct(shape, w.dtype), w, isa=isa)
    return panels.Panels(data=data, shape=(N, K))


def packed(w: Weight, isa: str | None) -> panels.Panels:
    return w if isinstance(w, panels.Panels) else pack(w, isa=isa)


def project(
    x: jax.Array,  # [R, K]
    w: Weight,  # [N, K]
    *,
    num_active: jax.Array,  # [] int32
    norm: jax.Array | None,  # [K]
    residual: jax.Array | None,  # [R, N]
    eps: float,
    out_dtype: jnp.dtype,
    isa: str | None = None,
) -> jax.Array:
    """Implements `ops.projection.project`."""
    (R, K), N = x.shape, w.shape[0]
    check_shapes(w=(w, (N, K)), num_active=(num_active, ()))
    norm = or_empty("norm", norm, (K,), x.dtype)
    residual = or_empty("residual", residual, (R, N), x.dtype)
    check_dtypes(x, w, norm, residual)
    w = packed(w, isa).data
    out_dtype = jnp.dtype(out_dtype)
    if out_dtype not in (x.dtype, jnp.float32):
        raise NotImplementedError(f"a product of {x.dtype} cannot give {out_dtype}")
    output = jax.ShapeDtypeStruct((R, N), out_dtype)
    return call(
        "spec_jax_project",
        output,
        x,
        norm,
        w,
        residual,
        num_active,
        isa=isa,
        eps=np.float32(eps),
    )


def project_segments(
    x: jax.Array,  # [R, S * K]
    pieces: Sequence[Weight],  # S times [N, K]
    *,
    num_active: jax.Array,  # [] int32
    isa: str | None = None,
) -> jax.Array:
    """Adds the products of `S` segments in a balanced tree, float32 `[R, N]`.

    In one call the bits of `project` for each and `parallel.collectives.tree_sum`.
    """
    (N, K), count, rows = pieces[0].shape, len(pieces), x.shape[0]
    if count & (count - 1):
        raise ValueError(f"{count} segments: their number must be a power of two")
    check_shapes(x=(x, (rows, count * K)), num_active=(num_active, ()))
    for piece in pieces:
        check_shapes(piece=(piece, (N, K)))
    check_dtypes(x, *pieces)
    missing = -K % panels.word_of(x.dtype)  # Each segment is of whole words.
    if missing:
        x = jnp.pad(x.reshape(rows, count, K), ((0, 0), (0, 0), (0, missing)))
        x = x.reshape(rows, -1)
    data = [packed(piece, isa).data for piece in pieces]
    output = jax.ShapeDtypeStruct((rows, N), jnp.float32)
    return call("spec_jax_project_segments", output, x, num_active, *data, isa=isa)


def gate(
    x: jax.Array,  # [R, K]
    w: Weight,  # [2F, K]
    *,
    num_active: jax.Array,  # [] int32
    norm: jax.Array,  # [K]
    eps: float,
    isa: str | None = None,
) -> jax.Array:
    """Implements `ops.gated_projection.gated_projection`."""
    (R, K), F = x.shape, w.shape[0] // 2
    check_shapes(w=(w, (2 * F, K)), norm=(norm, (K,)), num_active=(num_active, ()))
    check_dtypes(x, w, norm)
    output = jax.ShapeDtypeStruct((R, F), x.dtype)
    w = packed(w, isa).data
    return call(
        "spec_jax_gate", output, x, norm, w, num_active, isa=isa, eps=np.float32(eps)
    )


def attend(
    heads: jax.Array,  # [R, (N + 2K) * H]
    q_norm: jax.Array | None,  # [H]
    k_norm: jax.Array | None,  # [H]
    k_pages: jax.Array,  # [P, C, K, H]
    v_pages: jax.Array,  # [P, C, K, H]
    cos: jax.Array,  # [R, H / 2]
    sin: jax.Array,  # [R, H / 2]
    *,
    page_table: jax.Array,  # [S, M] int32
    slots: jax.Array,  # [R] int32
    positions: jax.Array,  # [R] int32
    num_active: jax.Array,  # [] int32
    branch: jax.Array | None = None,  # [R, A] int32
    firsts: jax.Array | None = None,  # [R] int32
    eps: float,
    scale: float,
    isa: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Implements `ops.row_attention.row_attention`. The pages are updated in place.

    An active row whose slot, position or pages do not exist writes nothing, and its
    result is NaN.
    """
    R, K, H = heads.shape[0], *k_pages.shape[2:]
    N = heads.shape[1] // H - 2 * K
    check_heads((N, K, H), q_norm, k_norm)
    q_norm = or_empty("q_norm", q_norm, (H,), heads.dtype)
    k_norm = or_empty("k_norm", k_norm, (H,), heads.dtype)
    check_dtypes(heads, q_norm, k_norm, k_pages, v_pages)
    check_shapes(
        heads=(heads, (R, (N + 2 * K) * H)),
        v_pages=(v_pages, k_pages.shape),
        page_table=(page_table, (page_table.shape[0], page_table.shape[-1])),
        cos=(cos, (R, H // 2)),
        sin=(sin, (R, H // 2)),
        slots=(slots, (R,)),
        positions=(positions, (R,)),
        num_active=(num_active, ()),
    )
    firsts = or_empty("firsts", firsts, (R,), jnp.int32)
    outputs = (
        jax.ShapeDtypeStruct((R, N * H), heads.dtype),
        jax.ShapeDtypeStruct(k_pages.shape, k_pages.dtype),
        jax.ShapeDtypeStruct(v_pages.shape, v_pages.dtype),
    )
    return call(
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
        branch_of(branch, R),
        firsts,
        k_pages,
        v_pages,
        isa=isa,
        aliases={11: 1, 12: 2},
        eps=np.float32(eps),
        scale=np.float32(scale),
    )


def branch_of(branch: jax.Array | None, num_rows: int) -> jax.Array:
    """Returns the branches for a kernel, empty if there are none."""
    width = 0 if branch is None else branch.shape[1]
    return or_empty("branch", branch, (num_rows, width), jnp.int32)


def argmax(
    x: jax.Array,  # [R, N] float32
    *,
    num_active: jax.Array,  # [] int32
    isa: str | None = None,
) -> jax.Array:
    """Implements `ops.argmax.argmax`; 0 for padding rows."""
    R, N = x.shape
    if N < 1:
        raise ValueError("the largest of no values")
    if x.dtype != jnp.float32:
        raise NotImplementedError(f"the native argmax takes float32, not {x.dtype}")
    check_shapes(num_active=(num_active, ()))
    output = jax.ShapeDtypeStruct((R,), jnp.int32)
    return call("spec_jax_argmax", output, x, num_active, isa=isa)


def take_rows(
    table: Weight,  # [V, D]
    index: jax.Array,  # [R] int32
    *,
    num_active: jax.Array,  # [] int32
    isa: str | None = None,
) -> jax.Array:
    """Implements `ops.embedding.embed`; NaN where there is no such entry."""
    (V, D), (R,) = table.shape, index.shape
    check_shapes(num_active=(num_active, ()))
    check_dtypes(table)
    output = jax.ShapeDtypeStruct((R, D), table.dtype)
    return call(
        "spec_jax_take_rows",
        output,
        data_of(table),
        index,
        num_active,
        isa=isa,
        entries=np.int64(V),
    )


def move(
    pools: Sequence[jax.Array],  # each [P, C, K, H]
    *,
    page_table: jax.Array,  # [S, M] int32
    slots: jax.Array,  # [Q] int32
    sources: jax.Array,  # [Q] int32
    targets: jax.Array,  # [Q] int32
    moves: jax.Array,  # [Q] bool
    isa: str | None = None,
) -> tuple[jax.Array, ...]:
    """Implements `ops.page_move.page_move`. The pools are updated in place."""
    shape = (slots.shape[0],)
    check_shapes(
        page_table=(page_table, (page_table.shape[0], page_table.shape[-1])),
        sources=(sources, shape),
        targets=(targets, shape),
        moves=(moves, shape),
    )
    for pool in pools:
        check_shapes(pool=(pool, pools[0].shape))
    check_dtypes(*pools)
    first = page_table, slots, sources, targets, moves
    outputs = [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools]
    aliases = {len(first) + i: i for i in range(len(pools))}
    return tuple(
        call("spec_jax_move", outputs, *first, *pools, isa=isa, aliases=aliases)
    )


def data_of(weight: Weight) -> jax.Array:
    """Returns the one array that a kernel reads of a weight."""
    if isinstance(weight, panels.Panels | blocks.Blocks | tiles.Tiles):
        return packed(weight, None).data
    return weight
