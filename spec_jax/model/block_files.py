"""Reads and writes published folders of DFlash, DSpark and DFlash2.

Knows the tensors' names; `block_dialects` knows the four layouts of `config.json`.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from spec_jax.model import (
    block_config_keys,
    block_dialects as dialects,
    block_params,
    checkpoint_files as files,
    config as config_lib,
    head_dialects,
    head_files,
    params as params_lib,
)


_PREFIX = "logit_head."  # Early files of SpecForge have it before their names.
_MASK = "mask_embedding.pt"
_BIAS = "confidence_head.proj.bias"
_NAMES = {
    **head_files.NAMES,
    **params_lib.layer_names("layers.{0}."),
    "hidden_norm": "hidden_norm",
    "markov.embed": "markov_head.markov_w1",
    "markov.out": "markov_head.markov_w2",
    "confidence": "confidence_head.proj",
    "confidence_bias": _BIAS,
    **{
        f"layers.{x}_conv.{field}": f"layers.{{0}}.{x}_conv.{name}"
        for x in ("attention", "mlp")
        for field, name in (("base", "base_kernel"), ("kernels", "kernel_projection"))
    },
}
_SELECTOR = {
    "markov.embed": "candidate_selector.predecessor_codebook",
    "markov.out": "candidate_selector.successor_codebook",
    "markov.mix": "candidate_selector.hidden_projection",
}
_MIXES = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}


def load(
    folder: str | pathlib.Path,
    target: config_lib.ModelConfig,
    target_params: params_lib.Params,
    *,
    dtype: str | None = None,
    impl: str | None = None,
    weights: str | None = None,
) -> tuple[block_params.BlockConfig, block_params.BlockParams]:
    """Reads a block drafter and checks that it is this target's.

    Args:
      target_params: the drafter shares its embedding and, unless it has a vocabulary
        of its own, its output projection: the very arrays.
      dtype: of the weights, which must be the target's; None: that one.
      impl: a resolved implementation, for whose kernels the weights are prepared.
      weights: with `impl`, a form to which products' matrices are rounded (`prepare`).

    Raises:
      CheckpointError: as `block_dialects.read_config`; a tensor that is missing,
        unknown, of another shape or not finite; copies that are not the target's.
      ValueError: another dtype than the target's.
    """
    folder = pathlib.Path(folder)
    if dtype not in (None, target.dtype):
        raise ValueError(
            f"{dtype=}, but the drafter shares matrices with a target of "
            f"{target.dtype}: leave it out"
        )
    dialect, config = dialects.read_config(folder / "config.json", target)
    entries = _find(folder, dialect)
    is_whole = config.draft_vocab_size == config.layer.vocab_size
    names = _names(config, with_embed=False, with_lm_head=not is_whole)
    given: dict[str, Any] = {"embed": target_params.embed}
    copies = {head_files.EMBED: target_params.embed}
    if is_whole:
        given["lm_head"] = copies[head_files.LM_HEAD] = target_params.head
    if config.has_confidence and _BIAS not in entries:  # Some files lack it.
        given["confidence_bias"] = jnp.zeros((1,), config.layer.dtype)
        names = names.replace(confidence_bias=None)
    head_files.check_entries(folder, entries, names, config, optional=copies)
    for name, ours in copies.items():
        if name not in entries or head_files.is_copy(entries, name, ours):
            continue
        if not head_files.is_rounded(entries, name, ours):
            raise files.CheckpointError(
                f"{folder}: {name} is not the target's: it is a drafter for another "
                "target"
            )
    given["hot"] = head_files.read_hot(folder, entries, config)
    params = head_files.read(block_params.shapes(config), names, entries, given)
    if impl is not None:
        params = block_params.prepare(params, impl, form=weights)
    return config, params


def _find(folder: pathlib.Path, dialect: str) -> dict[str, files.Entry]:
    """Finds a folder's tensors by the names that all layouts share."""
    if (folder / _MASK).exists():
        raise files.CheckpointError(
            f"{folder / _MASK}: drafters whose mask has an embedding of its own are "
            "not supported"
        )
    entries = head_files.find(folder)
    if dialect != "specforge":
        return entries
    return {name.removeprefix(_PREFIX): entry for name, entry in entries.items()}


def save(
    folder: str | pathlib.Path,
    config: block_params.BlockConfig,
    params: block_params.BlockParams,
    *,
    dialect: dialects.Dialect,
    origin: head_dialects.Origin,
    copies: bool = True,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes what `load` reads back bit for bit, in one of the published layouts.

    Args:
      origin: the target and the training, which some layouts state.
      copies: whether a layout that has copies of the target's embedding and output
        projection gets them. `load` takes both from the target; other readers may not.
      metadata: further entries of the file's `__metadata__`.

    Raises:
      ValueError: no such layout, or a drafter that it cannot describe.
      CheckpointError: the files cannot be written.
    """
    dialects.check_config(config, dialect)
    has_copies = dialect == "deepspec" and copies
    has_own = config.draft_vocab_size < config.layer.vocab_size
    head_files.write(
        folder,
        params,
        _names(config, with_embed=has_copies, with_lm_head=has_copies or has_own),
        block_config_keys.to_dict(config, dialect, origin),
        vocab_size=config.layer.vocab_size,
        metadata=metadata,
    )


def _names(
    config: block_params.BlockConfig, *, with_embed: bool, with_lm_head: bool
) -> block_params.BlockParams:
    """Returns `BlockParams` of `params.Parts`: the tensors that arrays are made of."""
    shapes = block_params.shapes(config).replace(hot=None)
    shapes = shapes if with_embed else shapes.replace(embed=None)
    shapes = shapes if with_lm_head else shapes.replace(lm_head=None)
    mix = _MIXES.get(config.head, "")
    names = _NAMES | {"markov.mix": mix, "markov.mix_bias": f"{mix}.bias"}
    names |= _SELECTOR if config.head == "selector" else {}
    return params_lib.parts(shapes, names, config.layer)
