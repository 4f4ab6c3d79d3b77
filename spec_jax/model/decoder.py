"""Runs models of all families on pages: slabs of rows, and prompts.

Functions here know pages and the order of a decoder: embedding, layers, head. A
family's module says what its layer computes. They do not know speculation.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax import pytree
from spec_jax.model import (
    config as config_lib,
    families,
    observe as observe_lib,
    params as params_lib,
    rotary,
    sequence,
)
from spec_jax.ops import (
    bits,
    dispatch,
    embedding,
    page_write,
    projection,
    rms_norm,
    rope,
    weights,
)
from spec_jax.paging import allocator, cache
from spec_jax.typing import typed


MIN_BUCKET = 64


class Rows(pytree.Node):
    """A slab of rows. The first `num_active` are active; the others are padding.

    A row comes after the rows of the slab whose keys it sees.
    """

    tokens: jax.Array  # [R] int32
    slots: jax.Array  # [R] int32
    positions: jax.Array  # [R] int32
    num_active: jax.Array  # [] int32
    # [R, A] int32, for rows of trees: places of the row's last A keys, its own last
    # (`tree.layout`); None: every key is stored at its position.
    branch: jax.Array | None = None


class RowOutputs(pytree.Node):
    """Outputs of a slab, beside its keys and values."""

    logits: jax.Array  # [R, V] float32; [0, V] without `with_logits`
    features: jax.Array  # [R, taps, D]


def run_rows(
    params: params_lib.Params,
    config: config_lib.ModelConfig,
    rows: Rows,
    kv: cache.PagedKV,
    *,
    impl: str,
    taps: tuple[int, ...],
    with_logits: bool,
    observe: observe_lib.Observe | None,
    run_layer: Callable,
    run_head: Callable,
) -> tuple[cache.PagedKV, RowOutputs]:
    """Runs a slab of rows operation by operation; see `qwen3.forward_rows`.

    Args:
      params: as `params.prepare` makes them.
      run_layer: the family's: takes a layer's weights, the weight of the norm after
        it, the residual (`projection.Residual`), the rows, the layer's pages and the
        angles; returns the residual and the pages of keys and of values.
      run_head: the family's: takes weights, residual and rows; returns logits.
    """
    see = observe or observe_lib.pass_on
    x = embedding.embed(
        params.embed, rows.tokens, num_active=rows.num_active, impl=impl
    )
    x = see(None, "embed", x)
    angles = row_angles(config, rows.positions, dtype=x.dtype, impl=impl)
    run = functools.partial(run_layer, config=config, impl=impl)
    # Layers differ only in their arrays: one is traced and lowered for all. A hook
    # gets the number of the layer, so with a hook each layer is traced.
    run_layer = jax.jit(run) if observe is None else run
    boundaries, residual = [x], projection.Residual(x=x)
    if impl in dispatch.PALLAS and observe is None:
        # Normed, as each layer leaves it: all layers are one function. GPT-NeoX has
        # other norms, which its layers compute.
        first, eps = params.layers[0], getattr(config, "rms_norm_eps", None)
        if eps is not None and not isinstance(first.qkv, weights.Split):
            how = {"num_active": rows.num_active, "eps": eps, "impl": impl}
            normed = rms_norm.row_norm(x, first.input_norm, **how)
            residual = residual.replace(normed=normed)
    norms = [*(layer.input_norm for layer in params.layers), params.final_norm]
    for number, layer in enumerate(params.layers):
        hook = {"observe": functools.partial(observe, number)} if observe else {}
        # XLA may fuse and round differently in another surrounding program: each
        # layer is compiled for itself.
        residual = jax.lax.optimization_barrier(residual)
        pages = kv.k[number], kv.v[number], kv.page_table
        residual, k, v = run_layer(
            layer, norms[number + 1], residual, rows, pages, angles, **hook
        )
        kv = cache.replace_layer(kv, number, k=k, v=v)
        boundaries.append(residual.x)
    logits = jnp.zeros((0, config.vocab_size), jnp.float32)
    if with_logits:
        residual = jax.lax.optimization_barrier(residual)
        logits = run_head(params, residual, rows, config=config, impl=impl)
        logits = see(None, "logits", jax.lax.optimization_barrier(logits))
    features = jnp.zeros((x.shape[0], 0, config.hidden_size), x.dtype)
    if taps:
        features = jnp.stack([boundaries[tap] for tap in taps], axis=1)
    return kv, RowOutputs(logits=logits, features=features)


def row_angles(
    config: config_lib.ModelConfig,
    positions: jax.Array,
    *,
    dtype: jnp.dtype,
    impl: str,
) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines `[R, H/2]` at `positions`, see `rope.angles`."""
    frequencies, scale = rotary.rope_table(config)
    return rope.row_angles(
        # So that the angles' bits do not depend on how positions are computed.
        jax.lax.optimization_barrier(positions),
        jnp.asarray(frequencies),
        scale=scale,
        dtype=dtype,
        impl=impl,
    )


def chain_angles(
    config: config_lib.ModelConfig, starts: jax.Array, count: int, *, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines of `count` positions from each start on, for native
    chains: `[S * count, H/2]`."""
    positions = starts[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]
    return row_angles(config, positions.reshape(-1), dtype=dtype, impl="native")


def observe_heads(heads, config, observe):
    """Shows queries, keys and values to the hook; returns the fused projection."""
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    parts = jnp.split(heads, (N * H, (N + K) * H), axis=1)
    seen = [observe(name, part) for name, part in zip("qkv", parts, strict=True)]
    return jnp.concatenate(seen, axis=1)


def observe_written(pool, name, observe, *, page_table, slots, positions, num_active):
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


def bucket(length: int) -> int:
    """Returns the padded length of a prompt: a power of two, at least `MIN_BUCKET`.

    Prompts of different lengths in one bucket share one executable.
    """
    return max(MIN_BUCKET, 1 << (length - 1).bit_length())


@typed
def prefill(
    params: params_lib.Params,
    config: config_lib.ModelConfig,
    kv: cache.PagedKV,
    *,
    tokens: Int[Array, " T"],
    length: Int[Array, ""],
    slot: Int[Array, ""],
    taps: tuple[int, ...] = (),
) -> tuple[cache.PagedKV, Float[Array, "T taps D"]]:
    """Writes the K/V of `tokens[:length]` at positions `[0, length)` of a slot.

    `T` is a `bucket`; tokens past `length` are padding and write nowhere. Runs
    `sequence.forward`, whose bits differ from those of rows; the baseline and
    speculative decoding share it. The pages must have been reserved.

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
    config: config_lib.ModelConfig,
    kv: cache.PagedKV,
    *,
    tokens: Int[Array, " T"],
    length: Int[Array, ""],
    slot: Int[Array, ""],
    slab: int,
    impl: str,
    forward: Callable | None = None,
    taps: tuple[int, ...] = (),
    begun: Int[Array, ""] | int = 0,
    before: Float[Array, "T0 taps D"] | None = None,
) -> tuple[cache.PagedKV, Float[Array, "T taps D"] | None]:
    """Implements `prefill` by `forward_rows`: K/V and features are those of decoding.

    Args:
      forward: `RowModel.forward_rows`; None: the family's, with weights prepared.
      begun: number of positions that the slot has already.
      before: features of at least these positions; None: zeros.

    Returns:
      The cache, and the features of the prompt; None without `taps`.
    """
    padded = jnp.pad(tokens, (0, slab))
    if forward is None:  # A given `forward` prepares the weights itself.
        params = params_lib.prepare(params, impl)

        def forward(params, rows, kv, **how):
            return families.of(config).forward_rows(
                params, config, rows, kv, impl=impl, **how
            )

    features = None
    if taps:
        shape = padded.shape[0], len(taps), config.hidden_size
        features = jnp.zeros(shape, config.dtype)
        if before is not None:
            most = min(before.shape[0], tokens.shape[0])
            features = features.at[:most].set(before[:most])

    def tile(number, carry):
        """Runs slab `number` of the prompt."""
        kv, features = carry
        start = begun + number * slab
        rows = Rows(
            tokens=jax.lax.dynamic_slice_in_dim(padded, start, slab),
            slots=jnp.full((slab,), slot, jnp.int32),
            positions=start + jnp.arange(slab, dtype=jnp.int32),
            num_active=jnp.minimum(length - start, slab),
        )
        kv, outputs = forward(params, rows, kv, taps=taps, with_logits=False)
        if features is not None:
            features = jax.lax.dynamic_update_slice_in_dim(
                features, outputs.features, start, axis=0
            )
        return kv, features

    num_tiles = (length - begun + slab - 1) // slab
    kv, features = jax.lax.fori_loop(0, num_tiles, tile, (kv, features))
    kv = allocator.extend(kv, slot, length)
    return kv, None if features is None else features[: tokens.shape[0]]
