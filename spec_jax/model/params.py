"""The weights of a Qwen3 model as a pytree: shapes, sizes, random initialisation.

Every projection is stored `[out, in]`, as in the checkpoints, so that loading needs
no transposition and a kernel reads each output's weights in one stream. Query, key
and value are fused by rows, and so are gate and up.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax import pytree
from spec_jax.model import config as config_lib


class LayerParams(pytree.Node):
    """One decoder layer."""

    input_norm: jax.Array  # [D]
    qkv: jax.Array  # [(N + 2K) * H, D]
    q_norm: jax.Array  # [H]
    k_norm: jax.Array  # [H]
    attention_out: jax.Array  # [D, N * H]
    mlp_norm: jax.Array  # [D]
    gate_up: jax.Array  # [2F, D], gate first
    down: jax.Array  # [D, F]


class Params(pytree.Node):
    """A whole model. `lm_head` is None where the embedding is tied to it."""

    embed: jax.Array  # [V, D]
    layers: tuple[LayerParams, ...]
    final_norm: jax.Array  # [D]
    lm_head: jax.Array | None  # [V, D]

    @property
    def head(self) -> jax.Array:
        """The output projection, `[V, D]`."""
        return self.embed if self.lm_head is None else self.lm_head


def shapes(config: config_lib.Qwen3Config) -> Params:
    """The `Params` of `config` as `jax.ShapeDtypeStruct`s: no memory is taken."""
    dtype = jnp.dtype(config.dtype)
    D, F, H = config.hidden_size, config.intermediate_size, config.head_dim

    def leaf(*shape: int) -> Any:  # in the place of an array
        return jax.ShapeDtypeStruct(shape, dtype)

    layer = LayerParams(
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
    return Params(
        embed=embed,
        layers=(layer,) * config.num_layers,
        final_norm=leaf(D),
        lm_head=None if config.tie_word_embeddings else embed,
    )


def num_bytes(tree) -> int:
    """Bytes of all arrays (or shapes) of a pytree."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def init(
    key: jax.Array, config: config_lib.Qwen3Config, *, stddev: float = 0.02
) -> Params:
    """Random weights, normal with `stddev`; norm weights are one. Consumes `key`."""
    leaves, structure = jax.tree.flatten(shapes(config))
    keys = jax.random.split(key, len(leaves))

    def draw(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if len(leaf.shape) == 1:
            return jnp.ones(leaf.shape, leaf.dtype)
        noise = jax.random.normal(key, leaf.shape, jnp.float32) * stddev
        return noise.astype(leaf.dtype)

    drawn = [draw(key, leaf) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def cast(params: Params, dtype: str) -> Params:
    """The same weights in another dtype, one array at a time."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)
