"""Reads and writes published folders of EAGLE-3 heads.

Knows the tensors' names; `eagle3_dialects` knows the three dialects of `config.json`.
"""

from spec_jax.model import (
    checkpoint_files as files,
    eagle3_dialects as dialects,
    eagle3_params,
    head_files,
    params as params_lib,
)
from spec_jax.ops import weights


_NAMES = (
    head_files.NAMES
    | {
        "features_norm": "input_norm",
        "fc_norms": "fc_norm.{0}",
        "mask_hidden": "mask_hidden",
    }
    | params_lib.layer_names("layers.{0}.", path="more.")
)


def _open(folder, dialect, config, target, target_params):
    """Implements `head_files.Family.open`."""
    entries = head_files.find(folder)
    has_embed = head_files.EMBED in entries
    names = _names(config, dialect, has_embed=config.has_own_embed or has_embed)
    head_files.check_entries(folder, entries, names, config)
    given, embed, lm_head = {}, target_params.embed, target_params.head
    if not has_embed or head_files.is_copy(entries, head_files.EMBED, embed):
        given["embed"] = embed
    elif dialect == "deepspec":
        raise files.CheckpointError(
            f"{folder}: {head_files.EMBED} is not the target's: it is a head for "
            "another target"
        )
    if config.shares_head:
        rows = weights.matrix(lm_head)
        hot = head_files.read_hot(folder, entries, config)
        rows = rows if hot is None else rows[hot]
        given["lm_head"] = rows.astype(config.layer.dtype)
    elif config.layer.dtype == target.dtype:
        if head_files.is_copy(entries, head_files.LM_HEAD, lm_head):
            given["lm_head"] = lm_head
    return entries, names, given


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


def _saved_names(config, dialect, copies):
    """Implements `head_files.Family.names`; a head's own embedding is no copy."""
    has_copy = copies and dialect != "midlayer"
    return _names(config, dialect, has_embed=config.has_own_embed or has_copy)


FAMILY = head_files.Family(
    shapes=eagle3_params.shapes,
    prepare=eagle3_params.prepare,
    dialects=dialects,
    to_dict=dialects.to_dict,
    names=_saved_names,
    open=_open,
)
load, save = FAMILY.load, FAMILY.save
