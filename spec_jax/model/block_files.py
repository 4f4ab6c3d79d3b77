"""Reads and writes published folders of DFlash, DSpark and DFlash2.

Knows the tensors' names; `block_dialects` knows the four layouts of `config.json`.
"""

import pathlib

import jax.numpy as jnp

from spec_jax.model import (
    block_config_keys,
    block_dialects as dialects,
    block_params,
    checkpoint_files as files,
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


def _open(folder, dialect, config, target, target_params):
    """Implements `head_files.Family.open`."""
    entries = _find(folder, dialect)
    is_whole = config.draft_vocab_size == config.layer.vocab_size
    names = _names(config, with_embed=False, with_lm_head=not is_whole)
    given = {"embed": target_params.embed}
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
    return entries, names, given


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


def _saved_names(config, dialect, copies):
    """Implements `head_files.Family.names`."""
    has_copies = copies and dialect == "deepspec"
    has_own = config.draft_vocab_size < config.layer.vocab_size
    return _names(config, with_embed=has_copies, with_lm_head=has_copies or has_own)


FAMILY = head_files.Family(
    shapes=block_params.shapes,
    prepare=block_params.prepare,
    dialects=dialects,
    to_dict=block_config_keys.to_dict,
    names=_saved_names,
    open=_open,
    has_targets_dtype=True,
)
load, save = FAMILY.load, FAMILY.save
