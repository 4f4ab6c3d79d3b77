"""Qwen3, and Llama and Qwen2 as far as they are the same: weights and the layer."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.model import (
    config as config_lib,
    families,
    observe as observe_lib,
    params as params_lib,
    sequence,
)
from spec_jax.ops import (
    causal_attention,
    gated_projection,
    projection,
    rope,
    row_attention,
    weights,
)


NAMES = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
} | params_lib.layer_names("model.layers.{0}.")


def read_as(
    kind: type[config_lib.GatedConfig],
    allowed: Mapping[str, tuple],
    raw: Mapping[str, Any],
    *,
    dtype: str | None,
    fills_heads: bool = False,
) -> config_lib.GatedConfig:
    """Reads a config of this kind.

    Args:
      allowed: values of keys, as `config.check_features` takes them, beside those of
        every kind.
      fills_heads: whether a file may leave out the two sizes of heads, as old ones do.
    """
    if fills_heads:
        for key in ("hidden_size", "num_attention_heads"):
            config_lib.check_size(key, raw.get(key))
        heads = raw["num_attention_heads"]
        sizes = {"head_dim": raw["hidden_size"] // heads, "num_key_value_heads": heads}
        raw = {**raw, **{key: sizes[key] for key in sizes if raw.get(key) is None}}
    every = {"hidden_act": ("silu",), "partial_rotary_factor": (1, None)}
    config_lib.check_features(raw, {**allowed, **every})
    theta, scaling = config_lib.read_scaled_rope(raw)
    dtype = config_lib.read_dtype(raw, dtype)
    own = {"rope_theta": theta, "scaling": scaling, "dtype": dtype}
    return config_lib.read_fields(kind, raw, **own)


def write(config: config_lib.GatedConfig, **more: Any) -> dict[str, Any]:
    """Writes what `read_as` reads, and `more`."""
    return config_lib.write_fields(config) | {
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_scaling": config_lib.write_scaling(config.scaling),
        **more,
    }


def shapes(config: config_lib.GatedConfig) -> params_lib.Params:
    """Implements `families.Family.shapes`."""
    dtype = jnp.dtype(config.dtype)
    D, F, H = config.hidden_size, config.intermediate_size, config.head_dim

    def leaf(*shape: int) -> Any:  # in the place of an array
        return jax.ShapeDtypeStruct(shape, dtype)

    head_norm = leaf(H) if config.has_head_norms else None
    layer = params_lib.LayerParams(
        input_norm=leaf(D),
        qkv=leaf(config.qkv_size, D),
        q_norm=head_norm,
        k_norm=head_norm,
        attention_out=leaf(D, config.attention_size),
        mlp_norm=leaf(D),
        gate_up=leaf(2 * F, D),
        down=leaf(D, F),
        qkv_bias=leaf(config.qkv_size) if config.has_biases else None,
    )
    embed = leaf(config.vocab_size, D)
    return params_lib.Params(
        embed=embed,
        layers=(layer,) * config.num_layers,
        final_norm=leaf(D),
        lm_head=None if config.tie_word_embeddings else embed,
    )


def rope_table(config: config_lib.GatedConfig) -> tuple[np.ndarray, float]:
    """Implements `families.Family.rope_table`."""
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


def run_head(params, residual, num_active, *, config, impl):
    """Returns logits `[R, V]` of the residual after the last layer."""
    x, norm = residual.before(params.final_norm)
    return projection.project(
        x,
        params.head,
        num_active=num_active,
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
      rows: `decoder.Rows`.
      pages, angles: as `row_attention` takes them.
      observe: the hook of `decoder.forward_rows`, for this layer.

    Returns:
      The residual, and the pages of keys and values.
    """
    see = observe or (lambda operation, value: value)
    shared = {"num_active": rows.num_active, "eps": config.rms_norm_eps, "impl": impl}
    x, norm = residual.before(layer.input_norm)
    heads = projection.project(x, layer.qkv, norm=norm, bias=layer.qkv_bias, **shared)
    if observe is not None:
        heads = observe_lib.heads(heads, config, observe)
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
        k = observe_lib.written(k, "k_cache", observe, **where)
        v = observe_lib.written(v, "v_cache", observe, **where)

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
    eps = config.rms_norm_eps
    return sequence.after_attention(layer, x, attended, eps=eps), k, v


def sequence_norm(params, config, x):
    """Implements `families.Family.sequence_norm`."""
    return sequence.norm(x, params.final_norm, config.rms_norm_eps)


_ALLOWED = {"attention_bias": (False, None), "use_sliding_window": (False, None)}

FAMILY = families.Family(
    read_config=functools.partial(read_as, config_lib.Qwen3Config, _ALLOWED),
    write_config=functools.partial(
        write, attention_bias=False, use_sliding_window=False
    ),
    shapes=shapes,
    names=NAMES,
    rope_table=rope_table,
    run_layer=run_layer,
    run_head=run_head,
    sequence_layer=sequence_layer,
    sequence_norm=sequence_norm,
    fused=("native",),
    keeps_padding=True,
)
