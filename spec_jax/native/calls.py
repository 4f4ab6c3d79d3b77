"""The kernels as JAX functions: shapes in, shapes out, and the foreign calls.

The instruction set is part of a call's target, so that one process can compare
several: `isa` is one of `build.ISA_FLAGS`, the widest that runs here if None.

Weights come as `Panels`. A matrix that is none is turned into them by the call itself,
which costs more than the call: for single products, and not for models.

What padding rows of a result hold is unspecified unless it is said: nothing is written.
"""

import functools
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.native import build, panels


MAX_HEAD = 256  # as `kMaxHead` in attention.h

Weight = jax.Array | panels.Panels


def _call(target: str, outputs, *arguments, isa, aliases=None, **attributes):
    return jax.ffi.ffi_call(
        build.target_name(target, build.load(isa)),
        outputs,
        input_output_aliases=aliases or {},
        vmap_method=None,
    )(*arguments, **attributes)


def _same(*arrays: Weight) -> None:
    """Raises unless all weights have one dtype, and one that the kernels take."""
    dtypes = {str(array.dtype) for array in arrays}
    if len(dtypes) != 1 or not dtypes <= {"float32", "bfloat16"}:
        raise NotImplementedError(
            f"the native kernels take float32 or bfloat16, one of them: {dtypes}"
        )


def _shapes(**pairs: tuple[Weight, tuple[int, ...]]) -> None:
    """Raises unless every array has its shape: the kernels do not look."""
    for name, (array, shape) in pairs.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, not {shape}")


@functools.partial(jax.jit, static_argnames="isa")
def pack(w: jax.Array, *, isa: str | None = None) -> panels.Panels:
    """The panels of `w [N, K]`, in memory of their own."""
    _same(w)
    N, K = w.shape
    shape = panels.packed_shape((N, K), w.dtype)
    data = _call("spec_jax_pack", jax.ShapeDtypeStruct(shape, w.dtype), w, isa=isa)
    return panels.Panels(data=data, shape=(N, K))


def _packed(w: Weight, isa: str | None) -> panels.Panels:
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
    w = _packed(w, isa).data
    out_dtype = jnp.dtype(out_dtype)
    if out_dtype not in (x.dtype, jnp.float32):
        raise NotImplementedError(f"a product of {x.dtype} cannot give {out_dtype}")
    output = jax.ShapeDtypeStruct((R, N), out_dtype)
    return _call(
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


def gate(
    x: jax.Array,  # [R, K]
    w: Weight,  # [2F, K]
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
    w = _packed(w, isa).data
    return _call(
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
    if q_norm is None or k_norm is None:  # For the kernel empty, as in `project`.
        q_norm = k_norm = jnp.zeros((0,), heads.dtype)
    else:
        _shapes(q_norm=(q_norm, (H,)), k_norm=(k_norm, (H,)))
    _same(heads, q_norm, k_norm, k_pages, v_pages)
    _shapes(
        heads=(heads, (R, (N + 2 * K) * H)),
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
        _branch(branch, R),
        k_pages,
        v_pages,
        isa=isa,
        aliases={10: 1, 11: 2},
        eps=np.float32(eps),
        scale=np.float32(scale),
    )


def _branch(branch: jax.Array | None, num_rows: int) -> jax.Array:
    """Returns the branches for a kernel, empty where rows are of chains."""
    if branch is None:
        return jnp.zeros((0, 0), jnp.int32)
    _shapes(branch=(branch, (num_rows, branch.shape[1])))
    return branch


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
    table: Weight,  # [V, D]
    index: jax.Array,  # [R] int32
    *,
    num_active: jax.Array,  # [] int32
    isa: str | None = None,
) -> jax.Array:
    """See `ops.embedding.embed`; NaN where there is no such entry."""
    (V, D), (R,) = table.shape, index.shape
    _shapes(num_active=(num_active, ()))
    _same(table)
    output = jax.ShapeDtypeStruct((R, D), table.dtype)
    return _call(
        "spec_jax_take_rows",
        output,
        _data(table),
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
    """See `ops.page_move.page_move`. The pools are updated in place."""
    shape = (slots.shape[0],)
    _shapes(sources=(sources, shape), targets=(targets, shape), moves=(moves, shape))
    for pool in pools:
        _shapes(pool=(pool, pools[0].shape))
    _same(*pools)
    first = page_table, slots, sources, targets, moves
    outputs = [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools]
    aliases = {len(first) + i: i for i in range(len(pools))}
    return tuple(
        _call("spec_jax_move", outputs, *first, *pools, isa=isa, aliases=aliases)
    )


class LayerWeights(typing.NamedTuple):
    """A layer of `step`, in the order of the kernel's arrays; matrices as panels."""

    input_norm: jax.Array  # [D]
    qkv: Weight  # [(N + 2K) * H, D]
    q_norm: jax.Array  # [H]
    k_norm: jax.Array  # [H]
    attention_out: Weight  # [D, N * H]
    mlp_norm: jax.Array  # [D]
    gate_up: Weight  # [2F, D]
    down: Weight  # [D, F]


def step(
    tokens: jax.Array,  # [R] int32
    embed: Weight,  # [V, D]
    layers: Sequence[LayerWeights],
    final_norm: jax.Array,  # [D]
    head: Weight | None,  # [V, D]; None: `embed`, which is then of panels
    pages: Sequence[tuple[jax.Array, jax.Array]],  # keys and values [P, C, K, H]
    cos: jax.Array,  # [R, H / 2]
    sin: jax.Array,  # [R, H / 2]
    *,
    page_table: jax.Array,  # [S, M] int32
    slots: jax.Array,  # [R] int32
    positions: jax.Array,  # [R] int32
    num_active: jax.Array,  # [] int32
    branch: jax.Array | None = None,  # [R, A] int32
    taps: tuple[int, ...],
    with_logits: bool,
    eps: float,
    scale: float,
    isa: str | None = None,
) -> tuple[jax.Array, jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """A whole step in one call: the same bits as the operations one by one.

    Args:
      taps: the layers before which the residual is a feature; their number is the
        output of the last one.
      with_logits: without them `[0, V]` is returned, and the head is not read.

    Returns:
      Logits `[R, V]` float32, features `[R, taps, D]`, and the pages, which are
      updated in place.
    """
    (R,), (V, D) = tokens.shape, embed.shape
    P, C, K, H = pages[0][0].shape
    N, F = layers[0].attention_out.shape[1] // H, layers[0].down.shape[1]
    if H % 2 or H > MAX_HEAD:
        raise NotImplementedError(f"head size {H} is odd, or above {MAX_HEAD}")
    if N < 1 or N % K:
        raise ValueError(f"{N} query heads for {K} key/value heads")
    if not all(0 <= tap <= len(layers) for tap in taps):
        raise ValueError(f"{taps=} of {len(layers)} layers")
    if head is None and not isinstance(embed, panels.Panels):
        raise ValueError("a table that is the head, too, is to be of panels")
    _shapes(
        slots=(slots, (R,)),
        positions=(positions, (R,)),
        cos=(cos, (R, H // 2)),
        sin=(sin, (R, H // 2)),
        final_norm=(final_norm, (D,)),
        num_active=(num_active, ()),
    )
    _same(embed, final_norm)
    if head is not None:
        _shapes(head=(head, (V, D)))
        _same(head, final_norm)
    for layer, (k, v) in zip(layers, pages, strict=True):
        _shapes(
            input_norm=(layer.input_norm, (D,)),
            qkv=(layer.qkv, ((N + 2 * K) * H, D)),
            q_norm=(layer.q_norm, (H,)),
            k_norm=(layer.k_norm, (H,)),
            attention_out=(layer.attention_out, (D, N * H)),
            mlp_norm=(layer.mlp_norm, (D,)),
            gate_up=(layer.gate_up, (2 * F, D)),
            down=(layer.down, (D, F)),
            k_pages=(k, (P, C, K, H)),
            v_pages=(v, (P, C, K, H)),
        )
        _same(*layer, k, v, final_norm)
    first = [
        tokens,
        slots,
        positions,
        num_active,
        page_table,
        _branch(branch, R),
        cos.astype(jnp.float32),
        sin.astype(jnp.float32),
        _data(embed),
        final_norm,
        jnp.zeros((0,), final_norm.dtype) if head is None else _packed(head, isa).data,
    ]
    rest, outputs, aliases = [], [], {}
    outputs.append(jax.ShapeDtypeStruct((R if with_logits else 0, V), jnp.float32))
    outputs.append(jax.ShapeDtypeStruct((R, len(taps), D), final_norm.dtype))
    for layer, pools in zip(layers, pages, strict=True):
        rest += [
            _data(weight) if len(weight.shape) == 1 else _packed(weight, isa).data
            for weight in layer
        ]
        for pool in pools:
            aliases[len(first) + len(rest)] = len(outputs)
            rest.append(pool)
            outputs.append(jax.ShapeDtypeStruct(pool.shape, pool.dtype))
    logits, features, *pools = _call(
        "spec_jax_step",
        outputs,
        *first,
        *rest,
        isa=isa,
        aliases=aliases,
        num_heads=np.int64(N),
        mlp_size=np.int64(F),
        taps=np.asarray(taps, np.int64),
        eps=np.float32(eps),
        scale=np.float32(scale),
    )
    return logits, features, list(zip(pools[::2], pools[1::2], strict=True))


def _data(weight: Weight) -> jax.Array:
    """The one array that a weight is made of."""
    return weight.data if isinstance(weight, panels.Panels) else weight
