"""Qwen3 on pages: `forward_rows` for everything that decodes, `prefill` for prompts.

Functions here know Qwen3 and pages; they do not know speculation.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax import pytree
from spec_jax.model import (
    config as config_lib,
    observe as observe_lib,
    params as params_lib,
    rotary,
    sequence,
)
from spec_jax.ops import (
    bits,
    embedding,
    gated_projection,
    page_write,
    projection,
    rope,
    row_attention,
    step,
)
from spec_jax.paging import allocator, cache, index
from spec_jax.typing import typed


MIN_BUCKET = 64


class Rows(pytree.Node):
    """A slab of rows. The first `num_active` are real; what the others hold is ignored.

    A row comes after the rows of the slab whose keys it sees.
    """

    tokens: jax.Array  # [R] int32
    slots: jax.Array  # [R] int32
    positions: jax.Array  # [R] int32
    num_active: jax.Array  # [] int32
    # [R, A] int32, of rows of trees: places of the row's last A keys, its own last
    # (`tree.layout`); None: every key is stored at its position.
    branch: jax.Array | None = None


class RowOutputs(pytree.Node):
    """What a row leaves behind, beside its keys and values."""

    logits: jax.Array  # [R, V] float32; [0, V] where they are not asked for
    features: jax.Array  # [R, taps, D]


@typed
def forward_rows(
    params: params_lib.Params,
    config: config_lib.Qwen3Config,
    rows: Rows,
    kv: cache.PagedKV,
    *,
    impl: str,
    taps: tuple[int, ...] = (),
    with_logits: bool = True,
    observe: observe_lib.Observe | None = None,
) -> tuple[cache.PagedKV, RowOutputs]:
    """Runs a slab of rows through the model, writing their keys and values.

    The row contract: with weights, config, `impl` and slab height fixed, the logits,
    the features and the K/V of an active row depend, bit for bit, only on its token,
    its position and the K/V it may see. They do not depend on which row of the slab it
    is, how many are active, what the others hold, which pages hold its prefix, or who
    is calling. Decoding a token and verifying it are therefore the same thing.

    The pages must have been reserved (`allocator.reserve`); lengths do not change.

    Args:
      taps: `hidden_states` indices to return as features, see `sequence.forward`.
      with_logits: without them `logits` is `[0, V]`, and the head is not read.
      observe: sees what leaves each kernel, all of `observe.LEAVES_ROWS`, and may
        change it; without it the traced program holds nothing of this.
    """
    params = params_lib.prepare(params, impl)
    if step.is_fused(impl) and observe is None:
        return _fused_step(params, config, rows, kv, taps, with_logits)
    see = observe or observe_lib.pass_on
    x = embedding.embed(
        params.embed, rows.tokens, num_active=rows.num_active, impl=impl
    )
    x = see(None, "embed", x)
    angles = row_angles(config, rows.positions, dtype=x.dtype)
    run = functools.partial(_run_layer, config=config, impl=impl)
    # Layers differ in their arrays alone: one is traced and lowered for all. A hook
    # is told the number of the layer, and so each is traced.
    run_layer = jax.jit(run) if observe is None else run
    boundaries = [x]
    for number, layer in enumerate(params.layers):
        hook = {"observe": functools.partial(observe, number)} if observe else {}
        # XLA may fuse and round differently in another surrounding program: each
        # layer is compiled for itself.
        x = jax.lax.optimization_barrier(x)
        pages = kv.k[number], kv.v[number], kv.page_table
        x, k, v = run_layer(layer, x, rows, pages, angles, **hook)
        kv = cache.replace_layer(kv, number, k=k, v=v)
        boundaries.append(x)
    logits = jnp.zeros((0, config.vocab_size), jnp.float32)
    if with_logits:
        logits = projection.project(
            jax.lax.optimization_barrier(x),
            params.head,
            num_active=rows.num_active,
            norm=params.final_norm,
            eps=config.rms_norm_eps,
            out_dtype="float32",
            impl=impl,
        )
        logits = see(None, "logits", jax.lax.optimization_barrier(logits))
    features = jnp.zeros((x.shape[0], 0, config.hidden_size), x.dtype)
    if taps:
        features = jnp.stack([boundaries[tap] for tap in taps], axis=1)
    return kv, RowOutputs(logits=logits, features=features)


def _fused_step(params, config, rows, kv, taps, with_logits):
    """`forward_rows` in one call of native kernels."""
    logits, features, pages = step.step(
        rows.tokens,
        params.embed,
        [
            step.Layer(**{name: getattr(layer, name) for name in step.Layer._fields})
            for layer in params.layers
        ],
        params.final_norm,
        params.lm_head,
        list(zip(kv.k, kv.v, strict=True)),
        angles=row_angles(config, rows.positions, dtype=params.final_norm.dtype),
        page_table=kv.page_table,
        slots=rows.slots,
        positions=rows.positions,
        num_active=rows.num_active,
        branch=rows.branch,
        taps=taps,
        with_logits=with_logits,
        eps=config.rms_norm_eps,
        scale=config.head_dim**-0.5,
        impl="native",
    )
    for number, (k, v) in enumerate(pages):
        kv = cache.replace_layer(kv, number, k=k, v=v)
    return kv, RowOutputs(logits=logits, features=features)


def row_angles(
    config: config_lib.Qwen3Config, positions: jax.Array, *, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[R, H/2]` of the rows at `positions`, see `rope.angles`."""
    frequencies, scale = rotary.rope_table(config)
    return rope.angles(
        # The angles are compiled for themselves too, however positions are made.
        jax.lax.optimization_barrier(positions),
        jnp.asarray(frequencies),
        scale=scale,
        dtype=dtype,
    )


def _run_layer(layer, x, rows, pages, angles, *, config, impl, observe=None):
    """One decoder layer: five operations, each of which reads its weights once.

    Args:
      pages: keys and values of the layer `[P, C, K, H]`, and the page table.
      angles: cosines and sines, see `row_angles`.
      observe: the hook of `forward_rows`, for this layer.

    Returns:
      The residual `[R, D]`, and the pages of keys and values.
    """
    see = observe or (lambda operation, value: value)
    k, v, page_table = pages
    cos, sin = angles
    shared = {"num_active": rows.num_active, "eps": config.rms_norm_eps, "impl": impl}
    heads = projection.project(x, layer.qkv, norm=layer.input_norm, **shared)
    if observe is not None:
        heads = _observe_heads(heads, config, observe)
    attended, k, v = row_attention.row_attention(
        heads,
        layer.q_norm,
        layer.k_norm,
        k,
        v,
        page_table=page_table,
        slots=rows.slots,
        positions=rows.positions,
        cos=cos,
        sin=sin,
        scale=config.head_dim**-0.5,
        branch=rows.branch,
        **shared,
    )
    if observe is not None:
        where = {"page_table": page_table, "num_active": rows.num_active}
        places = rows.positions if rows.branch is None else rows.branch[:, -1]
        where |= {"slots": rows.slots, "positions": places}
        k = _observe_written(k, "k_cache", observe, **where)
        v = _observe_written(v, "v_cache", observe, **where)
    attended = see("attention", attended)
    x = projection.project(attended, layer.attention_out, residual=x, **shared)
    x = see("attention_residual", x)
    hidden = gated_projection.gated_projection(
        x, layer.gate_up, norm=layer.mlp_norm, **shared
    )
    hidden = see("swiglu", hidden)
    x = projection.project(hidden, layer.down, residual=x, **shared)
    return see("mlp_residual", x), k, v


def _observe_heads(heads, config, observe):
    """The fused projection, after the hook saw queries, keys and values apart."""
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    parts = jnp.split(heads, (N * H, (N + K) * H), axis=1)
    seen = [observe(name, part) for name, part in zip("qkv", parts, strict=True)]
    return jnp.concatenate(seen, axis=1)


def _observe_written(pool, name, observe, *, page_table, slots, positions, num_active):
    """The pages, after the hook saw what they hold where the rows are stored."""
    pages, offsets = index.locate(page_table, pool.shape[1], slots, positions)
    read = bits.to_bits(pool).at[pages, offsets].get(mode="fill", fill_value=0)
    return page_write.page_write(
        pool,
        observe(name, bits.from_bits(read, pool.dtype)),
        page_table=page_table,
        slots=slots,
        positions=positions,
        num_active=num_active,
    )


def bucket(length: int) -> int:
    """The padded length of a prompt of `length` tokens: the next power of two.

    Prompts of different lengths in one bucket share one executable.
    """
    return max(MIN_BUCKET, 1 << (length - 1).bit_length())


@typed
def prefill(
    params: params_lib.Params,
    config: config_lib.Qwen3Config,
    kv: cache.PagedKV,
    *,
    tokens: Int[Array, " T"],
    length: Int[Array, ""],
    slot: Int[Array, ""],
    taps: tuple[int, ...] = (),
) -> tuple[cache.PagedKV, Float[Array, "T taps D"]]:
    """Writes the K/V of `tokens[:length]` at positions `[0, length)` of a slot.

    `T` is a `bucket`; tokens past `length` are padding and write nowhere. Uses the
    library's batched products: other numerics than rows, shared by plain and
    speculative decoding. The slot must be registered and have the pages reserved.

    Returns:
      The cache, of length `length`, and the features `[T, taps, D]`.
    """
    outputs = sequence.forward(params, config, tokens[None], taps=taps)
    T = tokens.shape[0]
    positions = jnp.arange(T, dtype=jnp.int32)
    for number in range(config.num_layers):
        kv = cache.write(
            kv,
            number,
            slots=jnp.full((T,), slot, jnp.int32),
            positions=positions,
            num_active=length,
            k=outputs.k[number][0],
            v=outputs.v[number][0],
        )
    return allocator.extend(kv, slot, length), outputs.features[0]


@typed
def prefill_rows(
    params: params_lib.Params,
    config: config_lib.Qwen3Config,
    kv: cache.PagedKV,
    *,
    tokens: Int[Array, " T"],
    length: Int[Array, ""],
    slot: Int[Array, ""],
    slab: int,
    impl: str,
) -> cache.PagedKV:
    """As `prefill`, through `forward_rows`: the prompt's K/V is that of decoding."""
    padded = jnp.pad(tokens, (0, slab))
    params = params_lib.prepare(params, impl)

    def tile(number, kv):
        start = number * slab
        rows = Rows(
            tokens=jax.lax.dynamic_slice_in_dim(padded, start, slab),
            slots=jnp.full((slab,), slot, jnp.int32),
            positions=start + jnp.arange(slab, dtype=jnp.int32),
            num_active=jnp.minimum(length - start, slab),
        )
        kv, _ = forward_rows(params, config, rows, kv, impl=impl, with_logits=False)
        return kv

    kv = jax.lax.fori_loop(0, (length + slab - 1) // slab, tile, kv)
    return allocator.extend(kv, slot, length)
