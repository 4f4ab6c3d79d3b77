"""Writes weights in Hugging Face's layout; `load` reads them back, bit for bit."""

import contextlib
import functools
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.model import (
    byte_weights,
    checkpoint_files as files,
    config as config_lib,
    params as params_lib,
    tokenizer as tokenizer_lib,
)
from spec_jax.ops import weights as weights_lib


_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def save(
    folder: str | pathlib.Path,
    config: config_lib.ModelConfig,
    params: params_lib.Params,
    *,
    tokenizer: tokenizer_lib.Tokenizer | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Writes what `load` reads back bit for bit, and Hugging Face's loader too.

    A checkpoint that is already in `folder` is replaced, after the new one is written
    in full; other files there stay.

    Args:
      tokenizer: written beside the weights, with its chat template and its stop tokens;
        None: none is written, and `spec_jax.load` refuses the folder.
      max_shard_bytes: most in a file, unless one tensor is larger; None: one file.

    Raises:
      ValueError: `params` have not the shapes, dtype and form of weights of `config`,
        or `max_shard_bytes` is below 1.
      CheckpointError: the files cannot be written.
    """
    folder = pathlib.Path(folder)
    _check_params(config, params)
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise ValueError(f"{max_shard_bytes=} must be positive")
    tensors = pending(params, params_lib.tensors(config))
    shards = _shards(tensors, max_shard_bytes)
    texts = {"config.json": config_lib.to_dict(config)}
    if tokenizer is not None:
        texts |= tokenizer.to_files(
            num_positions=config.max_position_embeddings, vocab_size=config.vocab_size
        )
        # Hugging Face's configs of some families have ids of other tokens otherwise.
        texts["config.json"] |= texts["generation_config.json"]
    if max_shard_bytes is not None:
        texts[files.INDEX_FILE] = {
            "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)},
            "weight_map": {
                tensor.name: file_name
                for file_name, shard in shards.items()
                for tensor in shard
            },
        }
    write_folder(folder, shards, texts)
    for name in tokenizer_lib.OLD_FILES if tokenizer is not None else ():
        (folder / name).unlink(missing_ok=True)


def write_folder(
    folder: pathlib.Path,
    shards: Mapping[str, list[files.Pending]],
    texts: Mapping[str, Any],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes files of tensors and of JSON, and replaces an older checkpoint by them.

    Args:
      metadata: further entries of each file's `__metadata__`.

    Raises:
      CheckpointError: the files cannot be written.
    """
    details = {"format": "pt"} | dict(metadata or {})  # Hugging Face asks for "pt".
    new = {*shards, *texts}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file_name, shard in shards.items():
            files.write(_partial(folder / file_name), shard, metadata=details)
        for file_name, contents in texts.items():
            text = json.dumps(contents, indent=2) + "\n"
            _partial(folder / file_name).write_text(text, encoding="utf-8")
        _replace(folder, new)
    except OSError as error:
        raise files.CheckpointError(f"{folder}: {error.strerror}") from None
    finally:
        for file_name in new:
            with contextlib.suppress(OSError):  # The failure above is what is told.
                _partial(folder / file_name).unlink(missing_ok=True)


def _check_params(config: config_lib.ModelConfig, params: params_lib.Params) -> None:
    """Refuses to write weights that the config beside them would not describe."""
    wanted, is_weight = params_lib.shapes(config), weights_lib.is_weight
    leaves, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_weight)
    if len({structure, jax.tree.structure(wanted)}) > 1:
        raise ValueError(
            f"the weights have {len(params.layers)} layers and "
            f"{'no' if params.lm_head is None else 'an'} lm_head, the config says "
            f"{config.num_layers=}, {config.tie_word_embeddings=}"
        )
    for (path, leaf), shape in zip(leaves, jax.tree.leaves(wanted), strict=True):
        form = params_lib.form_of(path, leaf, config.weights)
        if len(leaf.shape) == 2 and weights_lib.form(leaf) != form:
            raise ValueError(
                f"the config says {config.weights=}, the weights are others"
            )
        if (leaf.shape, leaf.dtype) != (shape.shape, shape.dtype):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {leaf.dtype} "
                f"{list(leaf.shape)}, the config says {shape.dtype} {list(shape.shape)}"
            )


def pending(params: Any, names: Any) -> list[files.Pending]:
    """Lists the tensors to write, in the order of `params`; copies no weight yet.

    Args:
      names: a tree like `params` that holds `params.Parts`.
    """
    tensors = []
    leaves = jax.tree.leaves(params, is_leaf=weights_lib.is_weight)
    for leaf, sources in zip(leaves, jax.tree.leaves(names), strict=True):
        start = 0
        back = None if sources.order is None else np.argsort(sources.order.reshape(-1))
        is_bytes, dtype = weights_lib.is_bytes(leaf), np.dtype(leaf.dtype)
        fetch_rows = byte_weights.to_store if is_bytes else _matrix_rows
        for name, shape in sources.parts:
            stop = start + shape[0]
            rows = slice(start, stop) if back is None else back[start:stop]
            fetch = functools.partial(fetch_rows, leaf, rows)
            if is_bytes:
                blocks = byte_weights.stored_shape(shape[1], weights_lib.form(leaf))
                shape, dtype = (shape[0], *blocks), np.dtype(np.uint8)
            tensors.append(
                files.Pending(name=name, dtype=dtype, shape=shape, fetch=fetch)
            )
            start = stop
    return tensors


def _matrix_rows(leaf: weights_lib.Weight, rows: slice | np.ndarray) -> np.ndarray:
    # A copy, because an array keeps the host value that was asked of it: the whole
    # model would be held twice in the end.
    return np.asarray(jnp.array(weights_lib.matrix(leaf)[rows], copy=True))


def _shards(
    tensors: list[files.Pending], max_shard_bytes: int | None
) -> dict[str, list[files.Pending]]:
    """Groups consecutive tensors into files, as many as fit, and names the files."""
    if max_shard_bytes is None:
        return {files.SINGLE_FILE: tensors}
    shards: list[list[files.Pending]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    return {
        f"model-{number:05}-of-{len(shards):05}.safetensors": shard
        for number, shard in enumerate(shards, start=1)
    }


def _partial(path: pathlib.Path) -> pathlib.Path:
    """Returns the path of a file that is being written."""
    return path.with_name(path.name + ".partial")


def _replace(folder: pathlib.Path, names: set[str]) -> None:
    """Gives the new files their names and removes those of an older checkpoint."""
    for name in sorted(names):
        _partial(folder / name).replace(folder / name)
    for path in folder.iterdir():
        is_weights = path.name in (files.SINGLE_FILE, files.INDEX_FILE)
        if path.name not in names and (is_weights or _SHARD_NAME.fullmatch(path.name)):
            path.unlink()
