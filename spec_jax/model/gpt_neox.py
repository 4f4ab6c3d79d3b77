"""GPT-NeoX, the family of Pythia: its config, its weights, its layer.

Black et al. (2022), https://arxiv.org/abs/2204.06745. Only the first dimensions of a
head are rotated (`rotary_pct`). The others are turned by an angle of zero. Loading puts
the rows of queries and keys in an order in which the two dimensions of a pair are half
a head apart, as in all families here: attention and caches are shared with them, and
scores are the same sums in another order.
"""

import dataclasses
import functools
import reprlib
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import pytree
from spec_jax.model import (
    config as config_lib,
    families,
    params as params_lib,
    sequence,
)
from spec_jax.ops import (
    causal_attention,
    gelu,
    layer_norm,
    projection,
    rope,
    row_attention,
    weights,
)


_APPROXIMATE = {
    "gelu": False,
    "gelu_new": True,
    "gelu_fast": True,
    "gelu_pytorch_tanh": True,
}
_MODULES = {
    "final_norm": "gpt_neox.final_layer_norm",
    "layers.input_norm": "gpt_neox.layers.{0}.input_layernorm",
    "layers.qkv": "gpt_neox.layers.{0}.attention.query_key_value",
    "layers.attention_out": "gpt_neox.layers.{0}.attention.dense",
    "layers.mlp_norm": "gpt_neox.layers.{0}.post_attention_layernorm",
    "layers.up": "gpt_neox.layers.{0}.mlp.dense_h_to_4h",
    "layers.down": "gpt_neox.layers.{0}.mlp.dense_4h_to_h",
}
NAMES = {"embed": "gpt_neox.embed_in", "lm_head": "embed_out"} | {
    f"{field}.{kind}": f"{name}.{kind}"
    for field, name in _MODULES.items()
    for kind in ("weight", "bias")
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(config_lib.ModelConfig):
    """A GPT-NeoX model.

    Attributes:
      rotary_size: dimensions of a head that are rotated, the first ones; if it is odd,
        one more is rotated, as in Hugging Face.
      has_parallel_residual: attention and MLP read the same residual, and both are
        added to it; otherwise the MLP reads what attention was added to.
      hidden_act: a GELU, by Hugging Face's name.
    """

    model_type = "gpt_neox"
    KEYS = config_lib.ModelConfig.KEYS | {
        "layer_norm_eps": "layer_norm_eps",
        "use_parallel_residual": "has_parallel_residual",
        "hidden_act": "hidden_act",
    }

    layer_norm_eps: float = 1e-5
    rotary_size: int
    has_parallel_residual: bool = True
    hidden_act: str = "gelu"

    def validate(self) -> Self:
        """Implements `ModelConfig.validate`."""
        super().validate()
        config_lib.positive("layer_norm_eps", self.layer_norm_eps)
        config_lib.check_flag("use_parallel_residual", self.has_parallel_residual)
        if self.hidden_act not in [*_APPROXIMATE]:  # A file may state a list.
            raise ValueError(
                f"hidden_act={reprlib.repr(self.hidden_act)} is not supported (need "
                f"{', '.join(_APPROXIMATE)})"
            )
        if not 0 < self.rotary_size <= self.head_dim:
            raise ValueError(
                f"rotary_pct rotates {self.rotary_size} of the {self.head_dim} "
                "dimensions of a head: it must be from 1 to all of them; correct "
                "rotary_pct"
            )
        return self


class Affine(pytree.Node):
    """Parameters of a projection with a bias, or of a LayerNorm."""

    weight: weights.Weight  # [N, K], or [D]
    bias: jax.Array  # [N], or [D]


class Layer(pytree.Node):
    """A decoder layer."""

    input_norm: Affine
    qkv: Affine  # [3 * N * H, D]: queries, keys, values
    attention_out: Affine  # [D, N * H]
    mlp_norm: Affine
    up: Affine  # [F, D]
    down: Affine  # [D, F]


def read_config(raw: Mapping[str, Any], *, dtype: str | None) -> GPTNeoXConfig:
    """Implements `families.Family.read_config`; float16 is read as float32."""
    allowed = {"attention_bias": (True, None), "is_decoder": (False, True, None)}
    config_lib.check_features(raw, allowed)
    for key in ("hidden_size", "num_attention_heads"):
        config_lib.check_size(key, raw.get(key))
    width, heads = raw["hidden_size"], raw["num_attention_heads"]
    if width % heads:
        raise ValueError(
            f"hidden_size={width} must be a multiple of num_attention_heads={heads}"
        )
    theta, _, stated = config_lib.read_rope(
        raw, kinds=("default",), default_theta=raw.get("rotary_emb_base", 10_000.0)
    )
    share = raw.get("partial_rotary_factor", raw.get("rotary_pct", 0.25))
    share = stated.get("partial_rotary_factor", share)
    own = config_lib.read_dtype(raw, dtype)
    return config_lib.read_fields(
        GPTNeoXConfig,
        raw,
        num_kv_heads=heads,
        head_dim=width // heads,
        rope_theta=theta,
        # Rounded down, as in Hugging Face.
        rotary_size=int(width // heads * config_lib.positive("rotary_pct", share)),
        dtype="float32" if own == "float16" else own,
    )


def write_config(config: GPTNeoXConfig) -> dict[str, Any]:
    """Implements `families.Family.write_config`."""
    stated = config_lib.write_fields(config) | {
        "attention_bias": True,
        "rotary_emb_base": config.rope_theta,
        "rotary_pct": config.rotary_size / config.head_dim,
    }
    derived = ("num_key_value_heads", "head_dim")
    return {key: stated[key] for key in stated if key not in derived}


def shapes(config: GPTNeoXConfig) -> params_lib.Params:
    """Implements `families.Family.shapes`."""
    dtype = jnp.dtype(config.dtype)
    D, F = config.hidden_size, config.intermediate_size

    def leaf(*shape: int) -> Any:  # in the place of an array
        return jax.ShapeDtypeStruct(shape, dtype)

    def linear(N: int, K: int) -> Affine:
        return Affine(weight=leaf(N, K), bias=leaf(N))

    norm = Affine(weight=leaf(D), bias=leaf(D))
    layer = Layer(
        input_norm=norm,
        qkv=linear(3 * D, D),
        attention_out=linear(D, D),
        mlp_norm=norm,
        up=linear(F, D),
        down=linear(D, F),
    )
    embed = leaf(config.vocab_size, D)
    return params_lib.Params(
        embed=embed,
        layers=(layer,) * config.num_layers,
        final_norm=norm,
        lm_head=None if config.tie_word_embeddings else embed,
    )


def orders(config: GPTNeoXConfig) -> dict[str, np.ndarray]:
    """Implements `families.Family.orders`.

    In a checkpoint's fused projection each head's queries, keys and values follow one
    another.
    """
    N, H = config.num_heads, config.head_dim
    turned, rest = np.split(np.arange(H), [config.rotary_size + config.rotary_size % 2])
    pairs = (np.split(half, 2) for half in (turned, rest))
    paired = np.concatenate([np.concatenate(half) for half in zip(*pairs, strict=True)])
    stored = np.arange(3 * N * H).reshape(N, 3, H)
    kinds = stored[:, 0, paired], stored[:, 1, paired], stored[:, 2]
    order = np.stack([kind.reshape(-1) for kind in kinds])
    return {"layers.qkv.weight": order, "layers.qkv.bias": order}


def rope_table(config: GPTNeoXConfig) -> tuple[np.ndarray, float]:
    """Implements `families.Family.rope_table`: 0 for pairs that do not rotate."""
    table = np.zeros((config.head_dim // 2,), np.float32)
    turned = rope.inverse_frequencies(config.rotary_size, config.rope_theta)
    table[: len(turned)] = turned
    return table, 1.0


def run_layer(
    layer, next_norm, residual, rows, pages, angles, *, config, impl, observe=None
):
    """Runs a decoder layer, as `qwen3.run_layer` does."""
    if observe is not None:
        raise NotImplementedError(
            "observe knows the operations of Qwen3 (model.observe), and a gpt_neox "
            "model has others; leave it out"
        )
    del next_norm
    x = residual.x
    shared = {"num_active": rows.num_active, "impl": impl}
    norm = functools.partial(_norm, config=config, impl=impl)

    def linear(x, linear):
        return projection.project(x, linear.weight, bias=linear.bias, **shared)

    attended, k, v = row_attention.row_attention(
        linear(norm(x, layer.input_norm), layer.qkv),
        None,
        None,
        pages,
        rows,
        angles,
        eps=0.0,
        scale=config.head_dim**-0.5,
        by_head=isinstance(layer.qkv.weight, weights.Split),
        impl=impl,
    )
    attended = linear(attended, layer.attention_out)
    if not config.has_parallel_residual:
        x = _add(attended, x)
    hidden = linear(norm(x, layer.mlp_norm), layer.up)
    act = functools.partial(_act, config=config, impl=impl)
    if isinstance(layer.down.weight, weights.Split):
        # Each segment by itself: all have one shape, so XLA compiles them alike.
        parts = jnp.split(hidden, len(layer.down.weight.pieces), axis=1)
        hidden = jnp.concatenate([act(part) for part in parts], axis=1)
    else:
        hidden = act(hidden)
    down = linear(hidden, layer.down)
    if config.has_parallel_residual:
        down = _add(down, attended)
    return projection.Residual(x=_add(down, x)), k, v


def run_head(params, residual, num_active, *, config, impl):
    """Returns logits `[R, V]` of the residual after the last layer."""
    return projection.project(
        _norm(residual.x, params.final_norm, config=config, impl=impl),
        params.head,
        num_active=num_active,
        out_dtype="float32",
        impl=impl,
    )


# Barriers: XLA may round differently, or not at all, if it fuses these with others.


def _norm(x, norm, *, config, impl="xla"):
    def normed(x):
        eps = config.layer_norm_eps
        return layer_norm.layer_norm(x, norm.weight, norm.bias, eps=eps)

    return _of_rows(normed, x, impl)


def _act(x, *, config, impl="xla"):
    approximate = _APPROXIMATE[config.hidden_act]
    return _of_rows(lambda x: gelu.gelu(x, approximate=approximate), x, impl)


def _of_rows(function, x, impl):
    """Applies `function` to a slab; with native kernels, to one row after another.

    XLA's code for it depends on the slab's height. Native kernels take slabs of any
    height, so each row is run by a program of one shape.
    """
    if impl == "native":
        one = lambda row: jax.lax.optimization_barrier(function(row[None]))[0]
        return jax.lax.optimization_barrier(jax.lax.map(one, x))
    return jax.lax.optimization_barrier(function(x))


def _add(x, y):
    return jax.lax.optimization_barrier(x + y)


def sequence_layer(layer, config, x, positions):
    """Implements `families.Family.sequence_layer`."""
    N, H = config.num_heads, config.head_dim

    def linear(x, linear):
        return sequence.matmul(x, linear.weight, linear.bias)

    heads = linear(_norm(x, layer.input_norm, config=config), layer.qkv)
    q, k, v = jnp.split(heads.reshape(*x.shape[:-1], 3 * N, H), 3, axis=-2)
    table, scale = rope_table(config)
    q, k = (
        rope.rope(each, positions, jnp.asarray(table), scale=scale) for each in (q, k)
    )
    attended = causal_attention.causal_attention(q, k, v, scale=H**-0.5)
    attended = linear(attended.reshape(x.shape), layer.attention_out)
    if not config.has_parallel_residual:
        x = attended + x
    hidden = linear(_norm(x, layer.mlp_norm, config=config), layer.up)
    down = linear(_act(hidden, config=config), layer.down)
    if config.has_parallel_residual:
        down = down + attended
    return down + x, k, v


def sequence_norm(params, config, x):
    """Implements `families.Family.sequence_norm`."""
    return _norm(x, params.final_norm, config=config)


FAMILY = families.Family(
    read_config=read_config,
    write_config=write_config,
    shapes=shapes,
    names=NAMES,
    orders=orders,
    rope_table=rope_table,
    run_layer=run_layer,
    run_head=run_head,
    sequence_layer=sequence_layer,
    sequence_norm=sequence_norm,
    # Triton's kernels have not run this family on a GPU.
    auto=("native", "xla"),
    ignored=r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",
)
