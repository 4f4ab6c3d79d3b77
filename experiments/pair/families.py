"""The families of drafters that `train_drafter.py` trains, each a row of a table."""

import argparse
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax

from spec_jax.model import (
    block_dialects,
    block_files,
    block_params,
    config as config_lib,
    eagle3_dialects,
    eagle3_files,
    eagle3_params,
    params as params_lib,
)
from spec_jax.training import block, eagle3, loop


OF_EAGLE3 = ("width",)
"""Flags of that family alone."""

OF_DSPARK = ("head", "no_tv", "no_confidence", "no_copies")
"""Flags of that family alone: its ablations, and what its layout may leave out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What sets a family apart; the flags are those of `train_drafter.py`."""

    training: types.ModuleType  # has `init`, `loss`, `measure` and `complete`
    files: types.ModuleType  # has `save`
    dialect: str  # the published format unless another is named
    depth: str  # the flag of how many drafts are trained
    flags: tuple[str, ...]  # those of its own that decide a bit
    # `(args, target, size of the draft vocabulary) -> config`, checked.
    config: Callable[[argparse.Namespace, config_lib.Qwen3Config, int], Any]
    # The flags that give `config` back.
    shape: Callable[[Any], dict[str, Any]]
    # What else `loss` and `measure` are told.
    of_loss: Callable[[argparse.Namespace], dict[str, Any]]
    of_measure: Callable[[argparse.Namespace], dict[str, Any]] = lambda args: {}
    # `(args, config, draft vocabulary) -> what each step draws`.
    draw: Callable[[argparse.Namespace, Any, jax.Array | None], loop.Draw | None] = (
        lambda args, config, hot: None
    )


def _layer(args, target, num_layers: int) -> config_lib.Qwen3Config:
    return dataclasses.replace(
        target,
        num_layers=num_layers,
        intermediate_size=args.mlp or target.intermediate_size,
        tie_word_embeddings=False,
    )


def _eagle3(args, target, size) -> eagle3_params.Eagle3Config:
    config = eagle3_params.Eagle3Config(
        layer=dataclasses.replace(
            _layer(args, target, 1), hidden_size=args.width or target.hidden_size
        ),
        draft_vocab_size=size,
        target_hidden_size=target.hidden_size,
        taps=args.taps or eagle3_params.default_taps(target.num_layers),
        has_head_norms=args.dialect == "deepspec",
    )
    eagle3_dialects.check_config(config, args.dialect)
    return config


def _shape(config) -> dict[str, Any]:
    return {
        "taps": config.taps,
        "draft_vocab": config.draft_vocab_size,
        "mlp": config.layer.intermediate_size,
    }


def _eagle3_shape(config) -> dict[str, Any]:
    return _shape(config) | {
        "width": config.hidden_size if config.has_own_embed else None
    }


def _block(args, target, size) -> block_params.BlockConfig:
    is_dspark = args.family == "dspark"
    head = (args.head or "vanilla") if is_dspark else "none"
    has_confidence = is_dspark and not args.no_confidence
    outputs = block_dialects.default_layer_ids(target.num_layers, args.layers)
    config = block_params.BlockConfig(
        layer=_layer(args, target, args.layers),
        draft_vocab_size=size,
        taps=args.taps or tuple(output + 1 for output in outputs),
        block_size=args.block,
        slots=block_dialects.SLOTS.get(args.dialect, "anchor-first"),
        mask_token_id=args.mask_token,
        head=head,
        markov_rank=0 if head == "none" else args.rank,
        has_confidence=has_confidence,
        confidence_with_markov=has_confidence and head != "none",
    )
    block_dialects.check_config(config, args.dialect)
    return config


def _block_shape(config) -> dict[str, Any]:
    return _shape(config) | {
        "layers": config.layer.num_layers,
        "block": config.block_size,
        "mask_token": config.mask_token_id,
    }


def _dspark_shape(config) -> dict[str, Any]:
    return _block_shape(config) | {
        "head": config.head,
        **({"rank": config.markov_rank} if config.head != "none" else {}),
        **({} if config.has_confidence else {"no_confidence": True}),
    }


def _anchors(args, config, hot) -> block.Anchors:
    return block.anchors_of(
        config, seed=args.seed, count=args.anchors, decay=args.decay, hot=hot
    )


def _steps(args) -> dict[str, Any]:
    return {"steps": args.ttt_steps}


def _dspark_terms(args) -> dict[str, Any]:
    cross, total_variation, confidence = block.DSPARK
    if args.no_tv:  # Cross-entropy takes its share.
        cross, total_variation = cross + total_variation, 0.0
    return {"terms": (cross, total_variation, confidence)}


_BLOCK: dict[str, Any] = {
    "training": block,
    "files": block_files,
    "depth": "block",
    "config": _block,
    "shape": _block_shape,
    "draw": _anchors,
    "flags": ("block", "layers", "mask_token", "anchors", "decay", "rank", *OF_DSPARK),
}

FAMILIES = {
    "eagle3": Family(
        training=eagle3,
        files=eagle3_files,
        dialect="midlayer",
        depth="ttt_steps",
        flags=("width", "ttt_steps"),
        config=_eagle3,
        shape=_eagle3_shape,
        of_loss=_steps,
        of_measure=_steps,
    ),
    "dflash": Family(
        **_BLOCK, dialect="z-lab", of_loss=lambda args: {"terms": block.DFLASH}
    ),
    "dspark": Family(
        **_BLOCK | {"shape": _dspark_shape}, dialect="deepspec", of_loss=_dspark_terms
    ),
}


def base(
    args: argparse.Namespace,
    target: config_lib.Qwen3Config,
    params: params_lib.Params,
) -> Any:
    """Reads the drafter of `--base`, and sets the flags of its shape as it has them.

    Raises:
      CheckpointError: not a drafter of this family for this target.
      ValueError: a shape that the flags cannot describe.
    """
    family = FAMILIES[args.family]
    config, head = family.files.load(args.base, target, params)
    for name, value in family.shape(config).items():
        setattr(args, name, value)
    if isinstance(config, block_params.BlockConfig):
        # Of a calibration nothing is left once the weights move.
        config = dataclasses.replace(
            config, confidence_temperatures=(), confidence_shifts=()
        )
    made = family.config(args, target, config.draft_vocab_size)
    if config != made:
        raise ValueError(
            f"{args.base}: {config} cannot be trained on as --dialect {args.dialect}, "
            f"which makes it {made}"
        )
    return head


def check_flags(args: argparse.Namespace) -> None:
    """Passes if the flags go together.

    Raises:
      ValueError: a flag of one family's with another, or of one layout's.
    """
    for family, names in (("dspark", OF_DSPARK), ("eagle3", OF_EAGLE3)):
        given = [name for name in names if getattr(args, name)]
        if given and args.family != family:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ValueError(f"{flags} with --family {args.family}: of {family} alone")
    if args.no_copies and args.dialect != "deepspec":
        raise ValueError(
            f"--no-copies with --dialect {args.dialect}: copies are of deepspec alone"
        )
