"""Reads weights in Hugging Face's layout; `save` writes them.

A family knows the names of its tensors and how they are fused (`params.Parts`);
`checkpoint_files` knows the files. Files hold `[out, in]`, and so do weights unless
they are loaded for kernels that read them in another order: what is saved and loaded
again is the same, bit for bit.
"""

import collections
import dataclasses
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import psutil

from spec_jax.model import (
    byte_weights,
    checkpoint_files as files,
    config as config_lib,
    families,
    gguf_file,
    hub,
    load_shards,
    params as params_lib,
    tensor_values,
)
from spec_jax.ops import dispatch, weights as weights_lib
from spec_jax.parallel import shard


CheckpointError = files.CheckpointError

_LAYER_NAME = re.compile(r"\w+\.layers\.(\d+)\.")
_GIB = 2**30


class InsufficientMemoryError(CheckpointError, MemoryError):
    """The weights do not fit; nothing has been read."""


def load(
    folder: str | pathlib.Path,
    *,
    dtype: str | None = None,
    weights: str | None = None,
    impl: str | None = None,
    vocab_size: int | None = None,
    layout: shard.Layout | None = None,
) -> tuple[config_lib.ModelConfig, params_lib.Params]:
    """Reads a folder with `config.json` and safetensors, one file or sharded; or a
    GGUF file. A name of `hub.locate` will do.

    All names, shapes, sizes and the free memory are checked before any weight is
    read. Besides the result, loading holds at most what `required_bytes` says.

    Args:
      dtype: of the weights, "float32" or "bfloat16"; that of `config.json` if None.
        The files may be float32, bfloat16 or float16: values are rounded to nearest.
      weights: "q8_0": matrices are rounded to eight bits (`native.blocks`), but for
        those of a GGUF file that are so already; "q4_1": likewise those of layers to
        four bits, see `params.form_of`; "dense": they have the dtype; None: dense,
        unless the folder was saved otherwise.
      impl: a resolved implementation, for whose kernels the weights are prepared as
        by `params.prepare`; arrays if None.
      vocab_size: how many entries of the embedding and of the head are loaded, from
        the first on: the rest is padding, which can then be neither drawn nor drafted.
        All if None.
      layout: of a model on a mesh, whose devices get their own pieces, of the weights
        that `load_shards.CUTS` names; this process reads those of its devices.

    Returns:
      The config, with the dtype and the entries that the weights have, and the weights.

    Raises:
      CheckpointError: a file is missing, truncated or malformed; a tensor is missing,
        unknown, of another shape or not finite; a tied model whose `lm_head` is not
        its embedding.
      InsufficientMemoryError: the weights need more memory than is free.
      ValueError: `config.json` cannot be used, or jax cannot start; or there are fewer
        entries than `vocab_size`.
    """
    folder = hub.locate(folder)
    config = config_lib.read(folder / "config.json", dtype=dtype, weights=weights)
    if impl in dispatch.PALLAS and config.weights == "q4_1":
        raise ValueError(
            f"{folder}: weights={config.weights!r} have no kernels on a GPU: take "
            "weights='q8_0', or another `impl`"
        )
    if impl in dispatch.PALLAS and config.is_bytes and layout is not None:
        raise ValueError(
            f"{folder}: weights={config.weights!r} are not cut over a mesh of GPUs: "
            "leave out `mesh`, or `weights`, or take another `impl`"
        )
    entries = _find(folder, config, on_mesh=layout is not None)
    if vocab_size is not None:
        if vocab_size > config.vocab_size:
            raise ValueError(
                f"{folder}: vocab_size={config.vocab_size} in config.json, but its "
                f"tokenizer has ids up to {vocab_size - 1}; correct it, or take the "
                "tokenizer of this model"
            )
        config = dataclasses.replace(config, vocab_size=vocab_size)
    names = params_lib.tensors(config)
    if layout is not None:
        load_shards.check(config, layout)
    _check_memory(folder, config, layout)
    if layout is not None:
        if any(one.stored is not None for one in entries.values()):
            raise ValueError(
                f"{folder}: blocks in files are not cut over a mesh: load the folder "
                f"that they were made of with weights={config.weights!r}"
            )
        return config, load_shards.read(
            *(params_lib.shapes(config), names, entries, layout),
            form=config.weights,
            impl=impl or "xla",
        )

    # Rows of an embedding that is not the head are only looked up.
    table: Any = None if names.lm_head is None else names.embed
    kinds: dict[str, set[str]] = collections.defaultdict(set)

    def read(
        path: Any, leaf: jax.ShapeDtypeStruct, sources: params_lib.Parts
    ) -> weights_lib.Weight:
        """Reads one weight, as `impl` has it; its buffer is free on return."""
        weight: weights_lib.Weight
        form = params_lib.form_of(path, leaf, config.weights)
        if form != "dense":
            kinds[form] |= {entries[name].kind for name, _ in sources.parts}
            weight = byte_weights.assemble(leaf, sources, entries, form)
            return jax.block_until_ready(weights_lib.prepare(weight, impl or "xla"))
        buffer = load_shards.read_rows(leaf, sources, entries)
        # A copy, and waited for, so that the buffer is free before the next is taken.
        if impl == "native" and len(leaf.shape) == 2 and sources is not table:
            weight = weights_lib.prepare(jnp.asarray(buffer), impl)
        else:
            weight = jnp.array(buffer, copy=True)
        return jax.block_until_ready(weight)

    shapes = params_lib.shapes(config)
    params = jax.tree_util.tree_map_with_path(read, shapes, names)
    byte_weights.say_converted(folder, kinds)
    return config, params


def _find(
    folder: pathlib.Path, config: config_lib.ModelConfig, *, on_mesh: bool
) -> dict[str, files.Entry]:
    """Finds the model's tensors by name, all of them checked but for their values."""
    is_gguf = gguf_file.is_file(folder)
    if is_gguf and on_mesh:
        raise ValueError(
            f"{folder}: a GGUF file is not read on a mesh; load it without `mesh`, "
            "save it as a folder, and load that"
        )
    family = families.of(config)
    ignored = re.compile(family.ignored)
    if is_gguf:
        found = gguf_file.find(folder)
    else:
        blocks = {"U8": files.WHOLE_DTYPES["U8"]} if config.is_bytes else {}
        found = files.find(folder, dtypes=files.DTYPES | blocks)
    entries = {name: one for name, one in found.items() if not ignored.search(name)}
    # Before anything is made for each layer: a config may name a hundred million.
    _check_num_layers(folder, config, entries)
    names: Any = params_lib.tensors(config)
    known = dict(part for leaf in jax.tree.leaves(names) for part in leaf.parts)
    required = list(known)
    if config.is_bytes and not is_gguf:
        entries = byte_weights.of_folder(entries, known)
    lm_head = f"{family.names['lm_head']}.weight"
    ((embed, shape),) = names.embed.parts
    if config.tie_word_embeddings:  # The files may hold the head as a copy.
        known[lm_head] = shape
    files.check_names(folder, entries, required=required, known=known)
    is_copied = config.tie_word_embeddings and lm_head in entries
    if is_copied and not tensor_values.same_values(entries[lm_head], entries[embed]):
        raise CheckpointError(
            f"{folder}: tie_word_embeddings is true, but {lm_head} differs from "
            f"{embed}; set it to false in config.json, or remove the tensor"
        )
    return entries


def required_bytes(
    config: config_lib.ModelConfig, layout: shard.Layout | None = None
) -> tuple[int, int]:
    """Returns the bytes of the weights, and the most that loading takes besides.

    A model on a mesh counts those of one device: a piece of a weight on the host, the
    same on the device, and a copy of it.
    """
    shapes, names = params_lib.shapes(config), params_lib.tensors(config)
    if layout is not None:
        shapes, names = load_shards.whole(shapes), load_shards.whole(names)
    total = largest = 0
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    for (path, leaf), sources in zip(leaves, jax.tree.leaves(names), strict=True):
        form = params_lib.form_of(path, leaf, config.weights)
        held, wide = byte_weights.num_bytes(leaf, form), 4 * math.prod(leaf.shape)
        if layout is not None:
            is_cut = load_shards.cut_of(path, leaf) is not None
            count = layout.devices if is_cut else 1
            read = params_lib.num_bytes(leaf) if form == "dense" else wide
            held, needed = -(-held // count), 3 * -(-read // count)
        else:
            copies = 1 if sources.order is None else 2  # As stored, and in order.
            needed = copies * params_lib.num_bytes(leaf)
            # Bytes are held twice, and beside them their source, float32 at most.
            needed += 2 * wide if config.is_bytes else 0
        total, largest = total + held, max(largest, needed)
    return total, largest + 2 * tensor_values.BLOCK_BYTES


def _check_num_layers(
    folder: pathlib.Path,
    config: config_lib.ModelConfig,
    entries: Mapping[str, files.Entry],
) -> None:
    """Refuses layers that no tensor names, before anything is built for each."""
    held = {match[1] for match in map(_LAYER_NAME.match, entries) if match}
    if config.num_layers > len(held):
        raise CheckpointError(
            f"{folder / 'config.json'}: num_hidden_layers={config.num_layers}, but the "
            f"weights beside it are of {len(held)} layers; correct it, or download the "
            "model again"
        )


def _check_memory(
    folder: pathlib.Path,
    config: config_lib.ModelConfig,
    layout: shard.Layout | None,
) -> None:
    """Refuses weights that do not fit, with both numbers."""
    weights, temporary = required_bytes(config, layout)
    dispatch.backend()  # Says why, where jax cannot start.
    (device,) = jnp.zeros(()).devices()  # Where arrays go unless told otherwise.
    on_host = device.platform == "cpu"
    if layout is not None and on_host:
        weights *= len(list(layout.local()))
    needed = temporary + (weights if on_host else 0)
    needs = [("memory", needed, psutil.virtual_memory().available)]
    stats = None if on_host else device.memory_stats()
    if stats and "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        needs.append((f"memory of {device.device_kind}", weights, free))
    for kind, required, free in needs:
        if required > free:
            raise InsufficientMemoryError(
                f"{folder}: needs {required / _GIB:.2f} GiB of {kind} in "
                f"{config.dtype}, but {free / _GIB:.2f} GiB are free"
            )
