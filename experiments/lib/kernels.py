"""The kernels of a model's step at its own shapes, as cases of `kernel_checks`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import kernel_checks, noise
from spec_jax.model import config as config_lib, params as params_lib, rotary
from spec_jax.ops import (
    argmax,
    dispatch,
    draw,
    gated_projection,
    projection,
    rms_norm,
    rope,
    row_attention,
    weights,
)
from spec_jax.paging import index
from spec_jax.rules import sampling


HEIGHT, PAGE_SIZE = kernel_checks.HEIGHT, 16


def cases(
    config: config_lib.Qwen3Config, impl: str, *, contexts: Sequence[int]
) -> dict[str, Callable[[], kernel_checks.Case]]:
    """Returns what a step of the model calls, by name: five products, and attention
    over `contexts`; on a GPU norm, argmax and a draw too, which are kernels there."""
    shapes = params_lib.shapes(config)
    layer, product = shapes.layers[0], functools.partial(_product, config, impl)
    made: dict[str, Callable[[], kernel_checks.Case]] = {
        "qkv": functools.partial(product, layer.qkv, has_norm=True),
        "attention out": functools.partial(
            product, layer.attention_out, has_residual=True
        ),
        "gate and up": functools.partial(
            product, layer.gate_up, has_norm=True, is_gate=True
        ),
        "down": functools.partial(product, layer.down, has_residual=True),
        "head": functools.partial(
            product, shapes.head, has_norm=True, out_dtype="float32"
        ),
    }
    made |= {
        f"context {context}": functools.partial(_attention, config, impl, context)
        for context in contexts
        if context <= config.max_position_embeddings
    }
    if impl in dispatch.PALLAS:
        made |= {
            "norm": functools.partial(_norm, config, impl),
            "argmax": functools.partial(_of_logits, config, impl, _argmax),
            "draw": functools.partial(_of_logits, config, impl, _draw),
        }
    return made


def _product(
    config: config_lib.Qwen3Config,
    impl: str,
    matrix: jax.ShapeDtypeStruct,
    *,
    has_norm: bool = False,
    has_residual: bool = False,
    is_gate: bool = False,
    out_dtype: str | None = None,
) -> kernel_checks.Case:
    """Makes the case of a matrix, with the norm, residual or gate of the model."""
    (num_out, num_in), dtype = matrix.shape, config.dtype
    w = noise.normal(0, matrix.shape, dtype, stddev=num_in**-0.5)
    w = weights.prepare(w, impl)
    inputs = {"x": noise.normal(1, (HEIGHT, num_in), dtype)}
    inputs["num_active"] = jnp.int32(HEIGHT)
    if has_residual:
        inputs["residual"] = noise.normal(2, (HEIGHT, num_out), dtype)
    norm = jnp.ones((num_in,), dtype) if has_norm else None
    shared = {"norm": norm, "eps": config.rms_norm_eps, "impl": impl}

    @jax.jit
    def call(w, inputs):
        how = shared | {"num_active": inputs["num_active"]}
        if is_gate:
            return gated_projection.gated_projection(inputs["x"], w, **how)
        how |= {"residual": inputs.get("residual"), "out_dtype": out_dtype}
        return projection.project(inputs["x"], w, **how)

    return kernel_checks.Case(
        run=lambda inputs, pages: (call(w, inputs), pages), inputs=inputs
    )


def _norm(config: config_lib.Qwen3Config, impl: str) -> kernel_checks.Case:
    """Makes the case of a layer's norm."""
    weight = jnp.ones((config.hidden_size,), config.dtype)
    inputs = {"x": noise.normal(1, (HEIGHT, config.hidden_size), config.dtype)}
    inputs["num_active"] = jnp.int32(HEIGHT)

    @jax.jit
    def call(inputs):
        how = {"num_active": inputs["num_active"], "eps": 1e-6, "impl": impl}
        return rms_norm.row_norm(inputs["x"], weight, **how)

    return kernel_checks.Case(
        run=lambda inputs, pages: (call(inputs), pages), inputs=inputs
    )


def _of_logits(
    config: config_lib.Qwen3Config, impl: str, choose: Callable
) -> kernel_checks.Case:
    """Makes the case of what chooses a token of each row."""
    inputs = {
        "x": noise.normal(1, (HEIGHT, config.vocab_size), "float32"),
        "positions": jnp.arange(HEIGHT, dtype=jnp.int32),
        "num_active": jnp.int32(HEIGHT),
    }
    call = jax.jit(lambda inputs: choose(inputs, impl)[:, None])
    return kernel_checks.Case(
        run=lambda inputs, pages: (call(inputs), pages), inputs=inputs
    )


def _argmax(inputs: dict[str, Any], impl: str) -> jax.Array:
    return argmax.argmax(inputs["x"], num_active=inputs["num_active"], impl=impl)


def _draw(inputs: dict[str, Any], impl: str) -> jax.Array:
    slab = inputs["x"].shape[0]
    settings = sampling.make_settings(temperature=0.7, top_k=20, top_p=0.8)
    settings = jax.tree.map(lambda leaf: jnp.full((slab,), leaf), settings)
    draws = jnp.arange(slab, dtype=jnp.int32) < inputs["num_active"]
    where = {"positions": inputs["positions"], "draws": draws}
    return draw.draw(inputs["x"], settings, **where, impl=impl)


def _attention(
    config: config_lib.Qwen3Config, impl: str, context: int
) -> kernel_checks.Case:
    """Makes the case of a layer's attention over pages in no order: rows of two slots
    in turn, one of them after a third of the context."""
    rows = np.arange(HEIGHT, dtype=np.int32)
    slots, ends = rows % 2, np.asarray([context, context // 3 + 1])
    positions = np.maximum(ends - HEIGHT // 2, 0).astype(np.int32)[slots] + rows // 2
    frequencies, scale = rotary.rope_table(config)
    cos, sin = rope.angles(
        jnp.asarray(positions),
        jnp.asarray(frequencies),
        scale=scale,
        dtype=config.dtype,
    )
    inputs = {
        "x": noise.normal(3, (HEIGHT, config.qkv_size), config.dtype),
        **{"slots": jnp.asarray(slots), "positions": jnp.asarray(positions)},
        **{"cos": cos, "sin": sin, "num_active": jnp.int32(HEIGHT)},
    }
    width = index.pages_for(context, PAGE_SIZE)
    norm = jnp.ones(config.head_dim, config.dtype)
    shape = (2 * width, PAGE_SIZE, config.num_kv_heads, config.head_dim)
    keys = [noise.normal(seed, shape, config.dtype) for seed in (1, 2)]

    def layout(*, seed: int, wider: int = 0) -> kernel_checks.Case:
        """Puts the same keys elsewhere; pages that nobody owns hold NaN."""
        num_pages = 3 * 2 * width
        order = np.random.default_rng(seed).permutation(num_pages)[: 2 * width]
        owned = jnp.asarray(order, jnp.int32)
        empty = jnp.full((num_pages, *shape[1:]), jnp.nan, config.dtype)
        pages = tuple(empty.at[owned].set(own) for own in keys)
        table = owned.reshape(2, width)
        pad = jnp.full((2, wider), num_pages, jnp.int32)
        padded = jnp.concatenate([table, pad], axis=1)

        @jax.jit
        def call(inputs, pages):
            names = ("slots", "positions", "num_active", "cos", "sin")
            own = {name: inputs[name] for name in names}
            y, *pages = row_attention.row_attention(
                *(inputs["x"], norm, norm, *pages),
                page_table=padded,
                eps=config.rms_norm_eps,
                scale=config.head_dim**-0.5,
                impl=impl,
                **own,
            )
            return y, tuple(pages)

        def written(inputs, pages):
            at = table[inputs["slots"], inputs["positions"] // PAGE_SIZE]
            offset = inputs["positions"] % PAGE_SIZE
            return tuple(pool[at, offset] for pool in pages)

        return kernel_checks.Case(run=call, inputs=inputs, pages=pages, written=written)

    case = layout(seed=0)
    others = {
        "other pages": layout(seed=1),
        "a wider table": layout(seed=2, wider=3 * 2 * width),
    }
    return dataclasses.replace(case, others=others)
