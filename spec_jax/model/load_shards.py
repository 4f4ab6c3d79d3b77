"""Weights of a model on a mesh: each device's pieces, and no others, from the files.

Queries, keys and values go with their key/value head, gate and up with their unit of
the MLP, the head with its tokens: cut by outputs, each device computes its own, and has
the biases of these. The products after them are cut by their inputs, which are those
outputs; their biases are added once, to whole sums. These, the embedding and the norms
are on every device.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.model import (
    checkpoint_files as files,
    config as config_lib,
    params as params_lib,
    tensor_values,
)
from spec_jax.native import blocks
from spec_jax.ops import weights
from spec_jax.parallel import shard


CUTS: Mapping[str, weights.Cut] = {
    "qkv": "outputs",
    "qkv_bias": "outputs",
    "attention_out": "inputs",
    "gate_up": "outputs",
    "up": "outputs",
    "down": "inputs",
    "lm_head": "outputs",
}
"""How each weight is cut, and its bias where outputs are; all others are on every
device."""

_SUMMED = ("num_heads * head_dim", "intermediate_size")
"""Sizes that products add up over segments."""


def check(config: config_lib.ModelConfig, layout: shard.Layout) -> None:
    """Refuses a model that cannot be cut so.

    Raises:
      ValueError: heads or sizes that the devices, or the segments, do not divide; or
        segments that are not of whole blocks.
    """
    layout.check_divides(
        num_kv_heads=config.num_kv_heads, intermediate_size=config.intermediate_size
    )
    H = config.head_dim
    for name, size in {
        "num_heads * head_dim": config.num_heads * H,
        "num_kv_heads * head_dim": config.num_kv_heads * H,
        "intermediate_size": config.intermediate_size,
    }.items():
        if size % layout.segments:
            raise ValueError(
                f"{name}={size} cannot be cut into segments={layout.segments}: take "
                f"fewer, such as segments={layout.devices}"
            )
        width = size // layout.segments
        if config.is_bytes and name in _SUMMED and width % blocks.BLOCK:
            raise ValueError(
                f"{name}={size} in segments={layout.segments} is {width} a segment, "
                f"and blocks of weights={config.weights!r} have {blocks.BLOCK}: take "
                "fewer segments"
            )


def cut_of(path: Any, leaf: jax.ShapeDtypeStruct) -> weights.Cut | None:
    """Returns how the leaf at a path of weights is cut; None: it is on every device."""
    names = [getattr(key, "name", "") for key in path]
    cut = next((CUTS[name] for name in names if name in CUTS), None)
    is_bias = len(leaf.shape) == 1
    return None if is_bias and cut == "inputs" else cut


def whole(tree: params_lib.Params) -> params_lib.Params:
    """Returns a tree like weights with the head in a place of its own, tied or not."""
    return tree.replace(lm_head=tree.head)


def with_whole_head(
    params: params_lib.Params, config: config_lib.ModelConfig, layout: shard.Layout
) -> params_lib.Params:
    """Returns weights whose output projection, as the embedding, is on every device.

    For what multiplies by the head itself; where they are tied, it is the embedding.
    """
    if config.tie_word_embeddings:
        return params.replace(lm_head=None)

    def join(head: Any) -> jax.Array:
        """Joins the pieces of all devices: consecutive rows, but for padding."""
        pieces = [jax.vmap(weights.matrix)(piece) for piece in head.pieces]
        rows = jnp.stack(pieces, axis=1)
        return rows.reshape(-1, rows.shape[-1])[: head.num_outputs]

    replicated = layout.sharding(shard.REPLICATED)
    joined = jax.jit(join, out_shardings=replicated)(params.lm_head)
    return params.replace(lm_head=joined)


def read(
    shapes: params_lib.Params,
    names: params_lib.Params,
    entries: Mapping[str, files.Entry],
    layout: shard.Layout,
    *,
    form: str,
    impl: str,
) -> params_lib.Params:
    """Reads the weights; besides them at most one device's share of one is held.

    Args:
      shapes: of whole weights.
      names: a tree like it: what the files hold, no blocks.
      form: that matrices are rounded to, as `params.form_of` says; each piece for
        itself, which has whole blocks.
      impl: a resolved implementation, for whose kernels pieces are prepared.

    Raises:
      CheckpointError: a tensor cannot be read, or holds a value that is not finite.
    """

    def one(path: Any, leaf: jax.ShapeDtypeStruct, sources: params_lib.Parts) -> Any:
        """Reads the pieces of one weight."""
        cut, own = cut_of(path, leaf), params_lib.form_of(path, leaf, form)
        make: Any = lambda read: read
        if own != "dense":
            of = str(leaf.dtype)
            make = lambda read: weights.to_bytes(jnp.asarray(read), own).replace(of=of)
            leaf = jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
        if cut is None:
            read = make(read_rows(leaf, sources, entries))
            return jax.block_until_ready(jax.tree.map(layout.replicated, read))
        return _split(cut, leaf, sources, entries, layout, impl, make, len(path) == 1)

    return jax.tree_util.tree_map_with_path(one, whole(shapes), whole(names))


def _split(cut, leaf, sources, entries, layout, impl, make, gathers):
    """Splits a weight by rows, where each piece has some rows of every tensor, or by
    columns, where there is a piece for each segment."""
    # The native kernels compute each output for itself, and so does a sum with a bias:
    # one piece is enough.
    is_one = cut == "outputs" and (impl == "native" or len(leaf.shape) == 1)
    per_device = 1 if is_one else layout.segments // layout.devices
    count, sizes = per_device * layout.devices, leaf.shape[:1]
    if cut == "outputs":
        sizes = tuple(-(-height // count) for height in sources.heights)

    def read_piece(device, piece):
        number = device * per_device + piece
        if cut == "outputs":
            ends = [(number * size, (number + 1) * size) for size in sizes]
            return make(read_rows(leaf, sources, entries, ends))
        ((name, _),) = sources.parts
        out = np.empty((leaf.shape[0], leaf.shape[1] // count), leaf.dtype)
        first, stop = number * out.shape[1], (number + 1) * out.shape[1]
        tensor_values.read_into(entries[name], out, np.s_[:, first:stop])
        tensor_values.check_finite(entries[name], out)
        return make(out)

    return weights.Split(
        pieces=_place(layout, impl, per_device, read_piece),
        cut=cut,
        sizes=sizes,
        num_outputs=leaf.shape[0] if gathers else None,
    )


def read_rows(
    leaf: jax.ShapeDtypeStruct,
    sources: params_lib.Parts,
    entries: Mapping[str, files.Entry],
    ends: Sequence[tuple[int, int]] = (),
) -> np.ndarray:
    """Reads rows of an array of the shape and dtype of `leaf`, with values checked.

    Args:
      ends: rows `[start, stop)` of each matrix, zeros past a tensor's end; none: all.

    Raises:
      CheckpointError: a tensor cannot be read, or holds a value that is not finite.
    """
    ends = ends or [(0, height) for height in sources.heights]
    if sources.order is not None:
        parts = zip(sources.order, ends, strict=True)
        wanted = np.concatenate([order[start:stop] for order, (start, stop) in parts])
        first = wanted.min()
        stored = params_lib.Parts(sources.parts)
        held = read_rows(leaf, stored, entries, [(first, wanted.max() + 1)])
        return held[wanted - first]
    height = sum(stop - start for start, stop in ends)
    out, at = np.zeros((height, *leaf.shape[1:]), leaf.dtype), 0
    for (name, shape), (start, stop) in zip(sources.parts, ends, strict=True):
        kept = max(0, min(stop, shape[0]) - start)
        entry, part = entries[name], out[at : at + kept]
        tensor_values.read_into(entry, part, np.s_[start : start + kept])
        tensor_values.check_finite(entry, part)
        at += stop - start
    return out


def _place(layout, impl, per_device, read_piece):
    """Reads the pieces of all devices of this process, and puts them there."""

    def one(number, device, piece):
        read = jax.device_put(read_piece(number, piece), device)
        made = weights.prepare(read, impl) if len(read.shape) == 2 else read
        return jax.block_until_ready(made)

    local = list(layout.local())
    return tuple(
        jax.tree.map(
            lambda *parts: layout.stacked(parts),
            *(one(number, device, piece) for number, device in local),
        )
        for piece in range(per_device)
    )
