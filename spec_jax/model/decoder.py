"""Runs models of all families on pages: slabs of rows, and prompts.

Functions here know pages and the order of a decoder: embedding, layers, head. A
family's module says what its layer computes. They do not know speculation.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax import pytree
from spec_jax.model import (
    config as config_lib,
    families,
    observe as observe_lib,
    params as params_lib,
)
from spec_jax.native import steps
from spec_jax.ops import dispatch, embedding, projection, rms_norm, rope, weights
from spec_jax.paging import cache
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
    # [R] int32, the first position that each row sees, not past its own; None: 0.
    # `row_attention` reads it, and no native step.
    firsts: jax.Array | None = None


class RowOutputs(pytree.Node):
    """Outputs of a slab, beside its keys and values."""

    logits: jax.Array  # [R, V] float32; [0, V] without `with_logits`
    features: jax.Array  # [R, taps, D]


@typed
def forward_rows(
    params: params_lib.Params,
    config: config_lib.ModelConfig,
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
      observe: sees what leaves each kernel of Qwen3, all of `observe.LEAVES_ROWS`, and
        may change it; without it the traced program holds nothing of this.

    Raises:
      NotImplementedError: with `observe`, a family with other operations.
    """
    params = params_lib.prepare(params, impl)
    is_split = isinstance(params.layers[0].qkv, weights.Split)
    if impl in families.of(config).fused and observe is None and not is_split:
        dtype = params.final_norm.dtype
        kv, logits, features = steps.step(
            rows,
            steps.Model(params, config, kv),
            row_angles(config, rows.positions, dtype=dtype, impl=impl),
            taps=taps,
            with_logits=with_logits,
        )
        return kv, RowOutputs(logits=logits, features=features)
    return _run_operations(params, config, rows, kv, impl, taps, with_logits, observe)


def _run_operations(params, config, rows, kv, impl, taps, with_logits, observe):
    """Runs a slab of rows operation by operation, with prepared weights."""
    family = families.of(config)
    see = observe or (lambda layer, operation, value: value)
    x = embedding.embed(
        params.embed, rows.tokens, num_active=rows.num_active, impl=impl
    )
    x = see(None, "embed", x)
    angles = row_angles(config, rows.positions, dtype=x.dtype, impl=impl)
    run_layer: Any = functools.partial(family.run_layer, config=config, impl=impl)
    # Layers differ only in their arrays: one is traced and lowered for all. A hook
    # gets the number of the layer, so with a hook each layer is traced.
    run_layer = jax.jit(run_layer) if observe is None else run_layer
    boundaries, residual = [x], projection.Residual(x=x)
    if impl in dispatch.PALLAS and observe is None:
        # Normed, as each layer leaves it: all layers are one function. GPT-NeoX has
        # other norms, which its layers compute.
        first, eps = params.layers[0], getattr(config, "rms_norm_eps", None)
        if eps is not None and not isinstance(first.qkv, weights.Split):
            how = {"num_active": rows.num_active, "eps": eps, "impl": impl}
            normed = rms_norm.rms_norm(x, first.input_norm, **how)
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
        head = functools.partial(family.run_head, config=config, impl=impl)
        logits = head(params, residual, rows.num_active)
        logits = see(None, "logits", jax.lax.optimization_barrier(logits))
    features = jnp.zeros((x.shape[0], 0, config.hidden_size), x.dtype)
    if taps:
        features = jnp.stack([boundaries[tap] for tap in taps], axis=1)
    return kv, RowOutputs(logits=logits, features=features)


def run_chains(
    params: params_lib.Params,
    config: config_lib.ModelConfig,
    kv: cache.PagedKV,
    *,
    tokens: Int[Array, "S W"],
    starts: Int[Array, " S"],
    pending: Int[Array, " S"],
    counts: Int[Array, " S"],
    most: int,
) -> tuple[cache.PagedKV, Int[Array, "S most"]]:
    """Continues texts greedily, in one call of native kernels; see `steps.chains`.

    Only of a family that is `fused` with these kernels.

    Tokens and K/V are those of `forward_rows`, one row at a time. The pages must have
    been reserved; lengths do not change.
    """
    params = params_lib.prepare(params, "native")
    count, dtype = tokens.shape[1] + most - 1, params.final_norm.dtype
    kv, drafts, _ = steps.chains(
        tokens,
        steps.Model(params, config, kv),
        chain_angles(config, starts, count, dtype=dtype),
        starts=starts,
        pending=pending,
        counts=counts,
        most=most,
    )
    return kv, drafts


def row_angles(
    config: config_lib.ModelConfig,
    positions: jax.Array,
    *,
    dtype: jnp.dtype,
    impl: str,
) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines `[R, H/2]` at `positions`, see `rope.angles`."""
    frequencies, scale = families.of(config).rope_table(config)
    return rope.angles(
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


def bucket(length: int) -> int:
    """Returns the padded length of a prompt: a power of two, at least `MIN_BUCKET`.

    Prompts of different lengths in one bucket share one executable.
    """
    return max(MIN_BUCKET, 1 << (length - 1).bit_length())
