"""Qwen3: its config, its weights, its layer.

The names of slabs and prompts that all families share (`decoder`) are here too.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from spec_jax.model import (
    config as config_lib,
    decoder,
    observe as observe_lib,
    params as params_lib,
    sequence,
)
from spec_jax.native import steps
from spec_jax.ops import (
    causal_attention,
    dispatch,
    gated_projection,
    projection,
    rope,
    row_attention,
    weights,
)
from spec_jax.paging import cache
from spec_jax.typing import IMPLS as ALL_IMPLS, typed


IMPLS = ALL_IMPLS[1:]  # All but "auto".
AUTO = IMPLS
CHAIN_IMPLS: tuple[str, ...] = ("native",)
LM_HEAD = "lm_head.weight"
NAMES = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
} | params_lib.layer_names("model.layers.{0}.")
IGNORED = r"(?!)"  # Nothing.
KEEPS_PADDING = True

Rows = decoder.Rows
bucket, row_angles = decoder.bucket, decoder.row_angles
prefill, prefill_rows = decoder.prefill, decoder.prefill_rows


def read_config(raw: Mapping[str, Any], *, dtype: str | None) -> config_lib.Qwen3Config:
    """Implements `families.Family.read_config`."""
    config_lib.check_features(
        raw,
        {
            "attention_bias": (False, None),
            "use_sliding_window": (False, None),
            "hidden_act": ("silu",),
            "partial_rotary_factor": (1, None),
        },
    )
    return read_plain(config_lib.Qwen3Config, raw, dtype=dtype)


def read_plain(kind: Any, raw: Mapping[str, Any], *, dtype: str | None) -> Any:
    """Reads a config of this kind: all that Qwen3's and Llama's have."""
    theta, scaling = config_lib.read_scaled_rope(raw)
    return kind(
        **config_lib.read_sizes(raw, config_lib.SIZES),
        rms_norm_eps=config_lib.positive("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        scaling=scaling,
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        dtype=config_lib.read_dtype(raw, dtype),
    )


def write_plain(config: Any) -> dict[str, Any]:
    """Writes what `read_plain` reads."""
    return {
        **{key: getattr(config, name) for key, name in config_lib.SIZES.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config_lib.write_scaling(config.scaling),
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": config.dtype,
    }


def write_config(config: config_lib.Qwen3Config) -> dict[str, Any]:
    """Implements `families.Family.write_config`."""
    without = {"attention_bias": False, "use_sliding_window": False}
    return write_plain(config) | without


def shapes(config: config_lib.ModelConfig) -> params_lib.Params:
    """Implements `families.Family.shapes`."""
    dtype = jnp.dtype(config.dtype)
    D, F, H = config.hidden_size, config.intermediate_size, config.head_dim

    def leaf(*shape: int) -> Any:  # in the place of an array
        return jax.ShapeDtypeStruct(shape, dtype)

    layer = params_lib.LayerParams(
        input_norm=leaf(D),
        qkv=leaf(config.qkv_size, D),
        q_norm=leaf(H),
        k_norm=leaf(H),
        attention_out=leaf(D, config.attention_size),
        mlp_norm=leaf(D),
        gate_up=leaf(2 * F, D),
        down=leaf(D, F),
    )
    embed = leaf(config.vocab_size, D)
    return params_lib.Params(
        embed=embed,
        layers=(layer,) * config.num_layers,
        final_norm=leaf(D),
        lm_head=None if config.tie_word_embeddings else embed,
    )


def tensors(config: config_lib.ModelConfig) -> params_lib.Params:
    """Implements `families.Family.tensors`."""
    return params_lib.parts(shapes(config), NAMES, config)


def rope_table(config: Any) -> tuple[np.ndarray, float]:
    """Implements `families.Family.rope_table`, for Llama's configs too."""
    scaling, theta = config.scaling, config.rope_theta
    if scaling is None:
        return rope.inverse_frequencies(config.head_dim, theta), 1.0
    stated = dataclasses.asdict(scaling)
    stated["original_length"] = stated.pop("original_max_position_embeddings")
    if isinstance(scaling, config_lib.Llama3Scaling):
        return rope.llama3_inverse_frequencies(config.head_dim, theta, **stated), 1.0
    scale, *mscales = map(stated.pop, ("attention_factor", "mscale", "mscale_all_dim"))
    if scale is None:
        scale = rope.yarn_attention_factor(scaling.factor, *mscales)
    return rope.yarn_inverse_frequencies(config.head_dim, theta, **stated), scale


@typed
def forward_rows(
    params: params_lib.Params,
    config: config_lib.Qwen3Config,
    rows: decoder.Rows,
    kv: cache.PagedKV,
    *,
    impl: str,
    taps: tuple[int, ...] = (),
    with_logits: bool = True,
    observe: observe_lib.Observe | None = None,
) -> tuple[cache.PagedKV, decoder.RowOutputs]:
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
    is_split = isinstance(params.layers[0].qkv, weights.Split)
    if dispatch.is_fused(impl) and observe is None and not is_split:
        dtype = params.final_norm.dtype
        logits, features, pages = steps.step(
            rows,
            steps.Model.of(params, params.layers, config, kv),
            decoder.row_angles(config, rows.positions, dtype=dtype, impl=impl),
            taps=taps,
            with_logits=with_logits,
        )
        outputs = decoder.RowOutputs(logits=logits, features=features)
        return cache.with_pages(kv, pages), outputs
    return decoder.run_rows(
        params,
        config,
        rows,
        kv,
        impl=impl,
        taps=taps,
        with_logits=with_logits,
        observe=observe,
        run_layer=run_layer,
        run_head=run_head,
    )


def run_chains(
    params: params_lib.Params,
    config: config_lib.Qwen3Config,
    kv: cache.PagedKV,
    *,
    tokens: Int[Array, "S W"],
    starts: Int[Array, " S"],
    pending: Int[Array, " S"],
    counts: Int[Array, " S"],
    most: int,
) -> tuple[cache.PagedKV, Int[Array, "S most"]]:
    """Continues texts greedily, in one call of native kernels; see `steps.chains`.

    Tokens and K/V are those of `forward_rows`, one row at a time. The pages must have
    been reserved; lengths do not change.
    """
    params = params_lib.prepare(params, "native")
    count, dtype = tokens.shape[1] + most - 1, params.final_norm.dtype
    drafts, _, pages = steps.chains(
        tokens,
        steps.Model.of(params, params.layers, config, kv),
        decoder.chain_angles(config, starts, count, dtype=dtype),
        starts=starts,
        pending=pending,
        counts=counts,
        most=most,
    )
    return cache.with_pages(kv, pages), drafts


def run_head(params, residual, rows, *, config, impl):
    """Returns logits `[R, V]` of the residual after the last layer."""
    x, norm = residual.before(params.final_norm)
    return projection.project(
        x,
        params.head,
        num_active=rows.num_active,
        norm=norm,
        eps=config.rms_norm_eps,
        out_dtype="float32",
        impl=impl,
    )


def run_layer(
    layer, next_norm, residual, rows, pages, angles, *, config, impl, observe=None
):
    """Runs a decoder layer: five operations, each of which reads its weights once.

    Args:
      next_norm: weight of the norm after the layer.
      residual: see `projection.Residual`.
      pages: keys and values of the layer `[P, C, K, H]`, and the page table.
      angles: cosines and sines, see `decoder.row_angles`.
      observe: the hook of `forward_rows`, for this layer.

    Returns:
      The residual, and the pages of keys and values.
    """
    see = observe or (lambda operation, value: value)
    shared = {"num_active": rows.num_active, "eps": config.rms_norm_eps, "impl": impl}
    x, norm = residual.before(layer.input_norm)
    heads = projection.project(x, layer.qkv, norm=norm, bias=layer.qkv_bias, **shared)
    if observe is not None:
        heads = decoder.observe_heads(heads, config, observe)
    attended, k, v = row_attention.row_attention(
        heads,
        layer.q_norm,
        layer.k_norm,
        pages,
        rows,
        angles,
        eps=config.rms_norm_eps,
        scale=config.head_dim**-0.5,
        by_head=isinstance(layer.qkv, weights.Split),
        impl=impl,
    )
    if observe is not None:
        where = {"page_table": pages[2], "num_active": rows.num_active}
        places = rows.positions if rows.branch is None else rows.branch[:, -1]
        where |= {"slots": rows.slots, "positions": places}
        k = decoder.observe_written(k, "k_cache", observe, **where)
        v = decoder.observe_written(v, "v_cache", observe, **where)

    def add(name, y, w, norm):
        """Adds `y w^T` to the residual; a hook may change it before it is normed."""
        if observe is None:
            return projection.add(y, w, residual.x, norm=norm, **shared)
        x = see(name, projection.project(y, w, residual=residual.x, **shared))
        return projection.Residual(x=x)

    residual = add(
        "attention_residual",
        see("attention", attended),
        layer.attention_out,
        layer.mlp_norm,
    )
    x, norm = residual.before(layer.mlp_norm)
    hidden = gated_projection.gated_projection(x, layer.gate_up, norm=norm, **shared)
    hidden = see("swiglu", hidden)
    residual = add("mlp_residual", hidden, layer.down, next_norm)
    return residual, k, v


def sequence_layer(layer, config, x, positions):
    """Implements `families.Family.sequence_layer`."""
    normed = sequence.norm(x, layer.input_norm, config.rms_norm_eps)
    q, k, v = sequence.heads(layer, config, normed, positions, bias=layer.qkv_bias)
    attended = causal_attention.causal_attention(q, k, v, scale=config.head_dim**-0.5)
    x = x + sequence.matmul(attended.reshape(*x.shape[:2], -1), layer.attention_out)
    return sequence.gated_mlp(layer, x, eps=config.rms_norm_eps), k, v


def sequence_norm(params, config, x):
    """Implements `families.Family.sequence_norm`."""
    return sequence.norm(x, params.final_norm, config.rms_norm_eps)
