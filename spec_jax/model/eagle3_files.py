"""Reads and writes published folders of EAGLE-3 heads.

Knows the tensors' names; `eagle3_dialects` knows the three dialects of `config.json`.
"""

from spec_jax.model import (
    eagle3_dialects as dialects,
    eagle3_params,
    head_files,
    params as params_lib,
)


_NAMES = (
    head_files.NAMES
    | {
        "features_norm": "input_norm",
        "fc_norms": "fc_norm.{0}",
        "mask_hidden": "mask_hidden",
    }
    | params_lib.layer_names("layers.{0}.", path="more.")
)


def _parts(
    config: eagle3_params.Eagle3Config, dialect: str, shapes: eagle3_params.Eagle3Params
) -> eagle3_params.Eagle3Params:
    """Implements `head_files.Family.names`."""
    is_middle = dialect == "midlayer" and not config.is_parallel
    prefix = "midlayer." if is_middle else "layers.0."
    names = _NAMES | params_lib.layer_names(prefix, path="")
    # The first layer's fields are the head's own.
    made = params_lib.parts(
        shapes.replace(more=(None, *shapes.more)),
        names | {"hidden_norm": f"{prefix}hidden_norm"},
        config.layer,
    )
    return made.replace(more=made.more[1:])


FAMILY = head_files.Family(
    dialects=dialects,
    to_dict=dialects.to_dict,
    names=_parts,
    copies=("speculators", "deepspec"),
)
load, save = FAMILY.load, FAMILY.save
