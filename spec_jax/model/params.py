"""The weights of a model as a pytree: shapes, sizes, random initialisation.

Every projection is `[out, in]`, as in the checkpoints. Query, key and value are fused
by rows, and so are gate and up. A projection is an array, or what the kernels of an
implementation read instead (`ops.weights`): `prepare` makes the one into the other.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import pytree
from spec_jax.model import config as config_lib, families
from spec_jax.ops import weights


class LayerParams(pytree.Node):
    """A decoder layer with a gated MLP, as Qwen3 has."""

    input_norm: jax.Array  # [D]
    qkv: weights.Weight  # [(N + 2K) * H, D]
    q_norm: Any  # [H]; None: queries and keys are not normed
    k_norm: Any  # [H]
    attention_out: weights.Weight  # [D, N * H]
    mlp_norm: jax.Array  # [D]
    gate_up: weights.Weight  # [2F, D], gate first
    down: weights.Weight  # [D, F]
    qkv_bias: Any = None  # [(N + 2K) * H], of Qwen2


class Params(pytree.Node):
    """A whole model. `lm_head` is None where the embedding is tied to it."""

    embed: weights.Weight  # [V, D]; an array unless it is the head or of eight bits
    layers: tuple[Any, ...]  # each a `LayerParams`, or what a family has instead
    final_norm: Any  # [D], or what a family's norm has
    lm_head: weights.Weight | None  # [V, D]

    @property
    def head(self) -> weights.Weight:
        """The output projection, `[V, D]`."""
        return self.embed if self.lm_head is None else self.lm_head


@dataclasses.dataclass(frozen=True)
class Parts:
    """The tensors of a checkpoint that make up one array of `Params`.

    Attributes:
      parts: names and shapes, stacked by rows.
      order: the stacked row that each row of the array is, `[matrices, rows]` by the
        matrices of one height that are fused; None: as they are stacked, each tensor a
        matrix.
    """

    parts: tuple[tuple[str, tuple[int, ...]], ...]
    order: np.ndarray | None = None

    @property
    def heights(self) -> tuple[int, ...]:
        """Rows of the matrices that the array fuses."""
        if self.order is not None:
            return (self.order.shape[1],) * len(self.order)
        return tuple(shape[0] for _, shape in self.parts)


def layer_names(prefix: str, *, path: str = "layers.") -> dict[str, str]:
    """Returns the tensors of a layer's fields, for `parts`, as most families have them.

    Args:
      prefix: of the tensors, with `{0}` in the place of the layer's number.
      path: of the fields.
    """
    names = {
        "input_norm": ["input_layernorm"],
        "qkv": [f"self_attn.{x}_proj" for x in "qkv"],
        "qkv_bias": [f"self_attn.{x}_proj.bias" for x in "qkv"],
        "q": ["self_attn.q_proj"],
        "kv": [f"self_attn.{x}_proj" for x in "kv"],
        "q_norm": ["self_attn.q_norm"],
        "k_norm": ["self_attn.k_norm"],
        "attention_out": ["self_attn.o_proj"],
        "mlp_norm": ["post_attention_layernorm"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
    }
    return {path + k: " ".join(prefix + x for x in names[k]) for k in names}


_WHOLE = (".weight", ".bias", "_codebook", "base_kernel", "mask_hidden")
"""Ends of the names of tensors that are not those of a module with one weight."""


def parts(
    shapes: Any,
    names: Mapping[str, str],
    config: config_lib.ModelConfig,
    *,
    orders: Mapping[str, np.ndarray] | None = None,
) -> Any:
    """Returns a tree like `shapes` of `Parts`: the tensors that arrays are made of.

    Args:
      names: the tensors of each field, by its path without indices; with spaces
        between queries, keys and values, or other matrices of one height, that are
        fused. ".weight" is added, unless the name ends as one in `_WHOLE`, and the
        layer's number takes the place of `{0}`.
      config: of the layers.
      orders: `Parts.order` of fields that have one, by their paths.
    """
    key_size = config.num_kv_heads * config.head_dim

    def one(path: Any, leaf: jax.ShapeDtypeStruct) -> Parts:
        field = ".".join(key.name for key in path if hasattr(key, "name"))
        index = [key.idx for key in path if hasattr(key, "idx")]
        found = names[field].format(*index).split()
        rows, *rest = leaf.shape
        heights = [rows // len(found)] * len(found)
        if len(found) == 3:
            heights = [rows - 2 * key_size, key_size, key_size]
        full = [x if x.endswith(_WHOLE) else f"{x}.weight" for x in found]
        pairs = zip(full, heights, strict=True)
        named = tuple((x, (height, *rest)) for x, height in pairs)
        return Parts(named, (orders or {}).get(field))

    return jax.tree_util.tree_map_with_path(one, shapes)


def shapes(config: config_lib.ModelConfig) -> Params:
    """Returns `config`'s `Params` as `jax.ShapeDtypeStruct`s: no memory is taken."""
    return families.of(config).shapes(config)


def tensors(config: config_lib.ModelConfig) -> Params:
    """Returns a tree like `shapes`, of `Parts`: the tensors of checkpoints."""
    family = families.of(config)
    orders = family.orders(config)
    return parts(family.shapes(config), family.names, config, orders=orders)


def prepared_shapes(config: config_lib.ModelConfig, impl: str) -> Params:
    """Returns `shapes` as `prepare` lays them out, of blocks where they are."""

    def one(path: Any, leaf: Any) -> Any:
        form = form_of(path, leaf, config.weights)
        return leaf if form == "dense" else weights.byte_shapes(leaf, form)

    made = jax.tree_util.tree_map_with_path(one, shapes(config))
    return jax.eval_shape(lambda params: prepare(params, impl), made)


def num_bytes(tree) -> int:
    """Sums the bytes of all arrays (or shapes) of a pytree."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def init(
    key: jax.Array, config: config_lib.ModelConfig, *, stddev: float = 0.02
) -> Params:
    """Draws random weights, see `draw`. Consumes `key`."""
    return draw(key, shapes(config), stddev=stddev)


def draw(key: jax.Array, tree: Any, *, stddev: float) -> Any:
    """Draws arrays of a tree's shapes, normal with `stddev`; norm weights are one,
    biases of a field named so are zero. Consumes `key`."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    keys = jax.random.split(key, len(leaves))

    def one(key: jax.Array, path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jax.tree_util.keystr(path).endswith("bias"):
            return jnp.zeros(leaf.shape, leaf.dtype)
        if len(leaf.shape) == 1:
            return jnp.ones(leaf.shape, leaf.dtype)
        noise = jax.random.normal(key, leaf.shape, jnp.float32) * stddev
        return noise.astype(leaf.dtype)

    drawn = [one(key, *leaf) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def cast(params: Params, dtype: str) -> Params:
    """Casts the weights to another dtype, not prepared, one at a time.

    Weights of blocks stay what they are, for rows of that dtype.
    """
    return map_matrices(lambda leaf: weights.cast(leaf, dtype), params)


def form_of(path: Any, leaf: Any, form: str) -> str:
    """Returns the form of a weight of a model whose config has `form`.

    Norms and biases are dense. Where matrices of layers are of four bits, the embedding
    and the output projection are of eight, as llama.cpp's files give them more.
    """
    if len(leaf.shape) != 2:
        return "dense"
    is_outer = getattr(path[-1], "name", "") in ("embed", "lm_head") if path else False
    return "q8_0" if form == "q4_1" and is_outer else form


def to_bytes(params: Any, form: str = "q8_0") -> Any:
    """Rounds every matrix to blocks of a form (`native.blocks`), outside jit.

    The config of such a model has it as its `weights`.
    """
    return prepare_matrices(params, "xla", form=form)


def map_matrices(function: Callable, params: Any) -> Any:
    """Applies `function` to every weight of a pytree, in whichever form it is."""
    return jax.tree.map(function, params, is_leaf=weights.is_weight)


def prepare_matrices(
    params: Any, impl: str, *, form: str | None = None, but: Collection[str] = ()
) -> Any:
    """Returns a pytree with each matrix as the kernels of a resolved `impl` read it.

    Args:
      form: rounded to it first, outside jit; None: as they are.
      but: names of fields whose matrices stay as they are.
    """

    def one(path: Any, leaf: weights.Weight) -> weights.Weight:
        if len(leaf.shape) != 2 or getattr(path[-1], "name", None) in but:
            return leaf
        wanted = form_of(path, leaf, form or "dense")
        if wanted != "dense" and not weights.is_bytes(leaf):
            leaf = weights.to_bytes(leaf, wanted)
        return weights.prepare(leaf, impl)

    is_leaf = weights.is_weight
    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_leaf)


def prepare(params: Params, impl: str) -> Params:
    """Lays the weights out as the kernels of a resolved `impl` read them.

    Where that is another form than theirs, every projection is copied: to be done once,
    where the weights are loaded (`load.load` does), and the given ones dropped. Inside
    a compiled step it is done at every step.
    """
    # Rows of a table are looked up; where it is the head, too, they are multiplied.
    if params.lm_head is None or weights.is_bytes(params.embed):
        return prepare_matrices(params, impl)
    embed = weights.matrix(params.embed)
    return prepare_matrices(params.replace(embed=None), impl).replace(embed=embed)
