"""Reads and writes published folders of EAGLE-3 heads.

Knows the tensors' names; `eagle3_dialects` knows the three dialects of `config.json`.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from spec_jax.model import (
    checkpoint_files as files,
    config as config_lib,
    eagle3_dialects as dialects,
    eagle3_params,
    head_dialects,
    head_files,
    params as params_lib,
)
from spec_jax.ops import weights as weights_lib


_NAMES = (
    head_files.NAMES
    | {
        "features_norm": "input_norm",
        "fc_norms": "fc_norm.{0}",
        "mask_hidden": "mask_hidden",
    }
    | params_lib.layer_names("layers.{0}.", path="more.")
)


def load(
    folder: str | pathlib.Path,
    target: config_lib.ModelConfig,
    target_params: params_lib.Params,
    *,
    dtype: str | None = None,
    impl: str | None = None,
    weights: str | None = None,
) -> tuple[eagle3_params.Eagle3Config, eagle3_params.Eagle3Params]:
    """Reads a head and checks that it is this target's.

    Args:
      target_params: the head shares its embedding and its output projection, the very
        arrays, where the folder has copies of them or no embedding; with `shares_head`
        it takes rows of the projection.
      dtype: of the weights; the target's if None.
      impl: a resolved implementation, for whose kernels the weights are prepared.
      weights: with `impl`, a form to which products' matrices are rounded (`prepare`).

    Raises:
      CheckpointError: as `eagle3_dialects.read_config`; a tensor that is missing,
        unknown, of another shape or not finite; a draft vocabulary that contradicts
        itself; in deepspec an embedding that is not the target's.
    """
    folder = pathlib.Path(folder)
    dialect, config = dialects.read_config(folder / "config.json", target, dtype=dtype)
    entries = head_files.find(folder)
    has_embed = head_files.EMBED in entries
    names = _names(config, dialect, has_embed=config.has_own_embed or has_embed)
    head_files.check_entries(folder, entries, names, config)
    given: dict[str, Any] = {"hot": head_files.read_hot(folder, entries, config)}
    embed, lm_head = target_params.embed, target_params.head
    if not has_embed or head_files.is_copy(entries, head_files.EMBED, embed):
        given["embed"] = embed
    elif dialect == "deepspec":
        raise files.CheckpointError(
            f"{folder}: {head_files.EMBED} is not the target's: it is a head for "
            "another target"
        )
    if config.shares_head:
        rows = weights_lib.matrix(lm_head)
        rows = rows if given["hot"] is None else rows[given["hot"]]
        given["lm_head"] = rows.astype(config.layer.dtype)
    elif config.layer.dtype == target.dtype:
        if head_files.is_copy(entries, head_files.LM_HEAD, lm_head):
            given["lm_head"] = lm_head
    params = head_files.read(eagle3_params.shapes(config), names, entries, given)
    if impl is not None:
        params = eagle3_params.prepare(params, impl, form=weights)
    return config, params


def save(
    folder: str | pathlib.Path,
    config: eagle3_params.Eagle3Config,
    params: eagle3_params.Eagle3Params,
    *,
    dialect: dialects.Dialect,
    origin: head_dialects.Origin,
    with_embed: bool | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes what `load` reads back bit for bit, in one of the published dialects.

    Args:
      origin: the target and the training, which some dialects state.
      with_embed: whether the embedding is written; None: if the dialect has it, or
        it is the head's own.
      metadata: further entries of the file's `__metadata__`.

    Raises:
      ValueError: no such dialect, or a head that it cannot describe.
      CheckpointError: the files cannot be written.
    """
    dialects.check_config(config, dialect)
    if with_embed is None:
        with_embed = config.has_own_embed or dialect != "midlayer"
    head_files.write(
        folder,
        params,
        _names(config, dialect, has_embed=with_embed),
        dialects.to_dict(config, dialect, origin),
        vocab_size=config.layer.vocab_size,
        metadata=metadata,
    )


def _names(
    config: eagle3_params.Eagle3Config, dialect: dialects.Dialect, *, has_embed: bool
) -> eagle3_params.Eagle3Params:
    """Returns `Eagle3Params` of `params.Parts`: the tensors that arrays are made of."""
    is_middle = dialect == "midlayer" and not config.is_parallel
    prefix = "midlayer." if is_middle else "layers.0."
    shapes = eagle3_params.shapes(config).replace(hot=None)
    if not has_embed:
        shapes = shapes.replace(embed=None)
    if config.shares_head:
        shapes = shapes.replace(lm_head=None)
    names = _NAMES | params_lib.layer_names(prefix, path="")
    # The first layer's fields are the head's own.
    made = params_lib.parts(
        shapes.replace(more=(None, *shapes.more)),
        names | {"hidden_norm": f"{prefix}hidden_norm"},
        config.layer,
    )
    return made.replace(more=made.more[1:])
