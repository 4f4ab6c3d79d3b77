"""The kernels as JAX functions: shapes in, shapes out, and the foreign calls.

The instruction set is part of a call's target, so that one process can compare
several: `isa` is one of `build.ISA_FLAGS`, that of `build.load` if None.

Weights come as `Panels`. Another matrix is turned into them by the call itself,
which costs more than the product: do so for single products, not in models.

Padding rows of a result are not written: unspecified unless a function says more.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.native import blocks, build, panels, tiles


MAX_HEAD = 256  # as `kMaxHead` in attention.h

Form = panels.Panels | blocks.Blocks | tiles.Tiles
Weight = jax.Array | Form


def call(
    target: str,
    outputs: Sequence[tuple[tuple[int, ...], Any]],
    given: Mapping[str, Any],
    *rest: jax.Array,
    updated: Sequence[jax.Array] = (),
    isa: str | None = None,
    **attributes: Any,
) -> tuple[jax.Array, ...]:
    """Calls a kernel of an instruction set.

    Under `vmap` each element is a call of its own, with the bits that it has alone.

    Args:
      outputs: their shapes and dtypes.
      given: the kernel's first arrays, see `arrays`, and `rest` those after them.
      updated: pools of pages, its last arrays and last results: updated in place.
      attributes: floats are passed as float32, integers as int64.

    Returns:
      The outputs, and the pools.
    """
    inputs = [*arrays(given, isa), *rest, *updated]
    results = [*outputs, *((pool.shape, pool.dtype) for pool in updated)]
    first, kinds = len(inputs) - len(updated), {float: np.float32, int: np.int64}
    for name, value in attributes.items():
        if kind := kinds.get(type(value)):
            attributes[name] = kind(value)
    run = jax.ffi.ffi_call(
        build.target_name(f"spec_jax_{target}", build.load(isa)),
        [jax.ShapeDtypeStruct(*result) for result in results],
        input_output_aliases={first + i: len(outputs) + i for i in range(len(updated))},
        vmap_method="sequential",
    )
    return tuple(run(*inputs, **attributes))


def arrays(given: Mapping[str, Any], isa: str | None = None) -> list[jax.Array]:
    """Returns arrays in their order, as the kernels take them, which look at no shape.

    Args:
      given: by name an array or a weight, or a pair of it and the shape that it must
        have, None for any size. For None in its place a kernel gets an empty array:
        float32, or of the dtype that a third entry says.
    """
    taken = []
    for name, entry in given.items():
        array, *more = entry if type(entry) is tuple else (entry,)
        if array is None:  # Of NumPy, which takes no time to trace.
            array = np.zeros((0,) * len(more[0]), *more[1:] or [np.float32])
        elif more:
            check_shapes(**{name: (array, more[0])})
        taken.append(matrix(array, isa).data if isinstance(array, Form) else array)
    return taken


def check_dtypes(*arrays: Weight | None) -> None:
    """Raises unless all weights have one dtype, and one that the kernels take; passes
    over those of None."""
    dtypes = {str(array.dtype) for array in arrays if array is not None}
    if len(dtypes) != 1 or not dtypes <= {"float32", "bfloat16"}:
        raise NotImplementedError(
            f"the native kernels take float32 or bfloat16, one of them: {dtypes}"
        )


def check_shapes(**pairs: tuple[Weight | None, tuple[int | None, ...]]) -> None:
    """Raises unless every array has its shape, whose None is any size, or is None."""
    for name, (array, shape) in pairs.items():
        if array is None or array.shape == shape:
            continue
        fits = [y in (None, x) for x, y in zip(array.shape, shape, strict=False)]
        if len(array.shape) != len(shape) or not all(fits):
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
    (data,) = call("pack", [(shape, w.dtype)], {"w": w}, isa=isa)
    return panels.Panels(data=data, shape=(N, K))


def matrix(w: Weight | None, isa: str | None = None) -> Any:
    """Returns panels of a weight, by which the kernels multiply; None for None."""
    return w if w is None or isinstance(w, panels.Panels) else pack(w, isa=isa)


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
    check_dtypes(x, w, norm, residual)
    out_dtype = jnp.dtype(out_dtype)
    if out_dtype not in (x.dtype, jnp.float32):
        raise NotImplementedError(f"a product of {x.dtype} cannot give {out_dtype}")
    given = {
        "x": x,
        "norm": (norm, (K,)),
        "w": (matrix(w, isa), (N, K)),
        "residual": (residual, (R, N)),
        "num_active": (num_active, ()),
    }
    (y,) = call("project", [((R, N), out_dtype)], given, isa=isa, eps=eps)
    return y


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
    check_shapes(x=(x, (rows, count * K)))
    check_dtypes(x, *pieces)
    missing = -K % panels.word_of(x.dtype)  # Each segment is of whole words.
    if missing:
        x = jnp.pad(x.reshape(rows, count, K), ((0, 0), (0, 0), (0, missing)))
        x = x.reshape(rows, -1)
    given = {"x": x, "num_active": (num_active, ())}
    given |= {f"w{i}": (matrix(w, isa), (N, K)) for i, w in enumerate(pieces)}
    (y,) = call("project_segments", [((rows, N), jnp.float32)], given, isa=isa)
    return y


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
    check_dtypes(x, w, norm)
    given = {
        "x": x,
        "norm": (norm, (K,)),
        "w": (matrix(w, isa), (2 * F, K)),
        "num_active": (num_active, ()),
    }
    (y,) = call("gate", [((R, F), x.dtype)], given, isa=isa, eps=eps)
    return y


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
    check_dtypes(heads, q_norm, k_norm, k_pages, v_pages)
    check_shapes(v_pages=(v_pages, k_pages.shape))
    given = {
        "heads": (heads, (R, (N + 2 * K) * H)),
        "q_norm": (q_norm, (H,)),
        "k_norm": (k_norm, (H,)),
        "cos": (cos.astype(jnp.float32), (R, H // 2)),
        "sin": (sin.astype(jnp.float32), (R, H // 2)),
        "page_table": (page_table, (None, None)),
        "slots": (slots, (R,)),
        "positions": (positions, (R,)),
        "num_active": (num_active, ()),
        "branch": (branch, (R, None), jnp.int32),
        "firsts": (firsts, (R,), jnp.int32),
    }
    how: dict[str, Any] = {"updated": (k_pages, v_pages), "isa": isa}
    how |= {"eps": eps, "scale": scale}
    out, *pools = call("attend", [((R, N * H), heads.dtype)], given, **how)
    return out, pools[0], pools[1]


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
    given = {"x": x, "num_active": (num_active, ())}
    (indices,) = call("argmax", [((R,), jnp.int32)], given, isa=isa)
    return indices


def take_rows(
    table: Weight,  # [V, D]
    index: jax.Array,  # [R] int32
    *,
    num_active: jax.Array,  # [] int32
    isa: str | None = None,
) -> jax.Array:
    """Implements `ops.embedding.embed`; NaN where there is no such entry."""
    (V, D), (R,) = table.shape, index.shape
    check_dtypes(table)
    given = {"table": table, "index": index, "num_active": (num_active, ())}
    outputs = [((R, D), table.dtype)]
    (rows,) = call("take_rows", outputs, given, isa=isa, entries=V)
    return rows


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
    for pool in pools:
        check_shapes(pool=(pool, pools[0].shape))
    check_dtypes(*pools)
    given = {
        "page_table": (page_table, (None, None)),
        "slots": slots,
        "sources": (sources, slots.shape),
        "targets": (targets, slots.shape),
        "moves": (moves, slots.shape),
    }
    return call("move", [], given, updated=pools, isa=isa)
