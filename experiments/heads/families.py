"""The families of drafters that `train_drafter.py` trains, each a row of a table."""

import argparse
import dataclasses
import types
from typing import Any

import jax

from experiments.lib import cli
from spec_jax import loading
from spec_jax.model import (
    block_dialects,
    block_files,
    block_params,
    config as config_lib,
    eagle3_files,
    eagle3_params,
    head_files,
    hub,
    load as load_lib,
    params as params_lib,
    tokenizer,
)
from spec_jax.training import batches, block, eagle3, peagle


BLOCKS = ("dflash", "dflash2", "dspark")

OF_SOME = ("width", "target_head", "first_alone", "causal")
OF_SOME += ("head", "no_tv", "no_confidence", "no_copies")
"""Flags that families without them refuse; other flags are then ignored."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The properties of a family; its flags are those of `train_drafter.py`."""

    training: types.ModuleType  # has `init`, `loss` and `measure`
    files: head_files.Family
    dialect: str  # the published format unless another is named
    flags: tuple[str, ...]  # the family's own; all but `no_copies` decide bits


_BLOCK: dict[str, Any] = {"training": block, "files": block_files.FAMILY}
_OF_BLOCKS = ("block", "layers", "window", "causal", "mask_token", "anchors", "decay")
_OF_DSPARK = ("rank", "head", "no_tv", "no_confidence", "no_copies")

FAMILIES = {
    "eagle3": Family(
        files=eagle3_files.FAMILY,
        training=eagle3,
        dialect="midlayer",
        flags=("width", "window", "target_head", "ttt_steps", "first_alone"),
    ),
    "peagle": Family(
        files=eagle3_files.FAMILY,
        training=peagle,
        dialect="speculators",
        flags=("layers", "window", "ttt_steps", "mask_token", "anchors", "decay"),
    ),
    "dflash": Family(**_BLOCK, dialect="z-lab", flags=_OF_BLOCKS),
    "dflash2": Family(**_BLOCK, dialect="z-lab", flags=(*_OF_BLOCKS, "rank")),
    "dspark": Family(**_BLOCK, dialect="deepspec", flags=_OF_BLOCKS + _OF_DSPARK),
}


TOP_K, CONV_GROUP = 16, 16
"""Sizes of DFlash2, as published."""

DRAFT_VOCAB = 32_000
"""The default size of a draft vocabulary, in dialects that have one."""


def _layer(args, target, num_layers: int, **changes) -> config_lib.Qwen3Config:
    """Returns the config of layers of the target's sizes; they are always Qwen3's."""
    sizes = {
        field.name: getattr(target, field.name)
        for field in dataclasses.fields(config_lib.Qwen3Config)
        if hasattr(target, field.name)
    }
    sizes |= {"num_layers": num_layers, "tie_word_embeddings": False}
    sizes["intermediate_size"] = args.mlp or target.intermediate_size
    return config_lib.Qwen3Config(**sizes | changes)


def _draft_vocab(args, target) -> int:
    """Returns the size of the draft vocabulary; by default the dialect decides.

    Raises:
      ValueError: a smaller vocabulary in a dialect that has the target's whole one.
    """
    V = target.vocab_size
    if args.dialect not in FAMILIES[args.family].files.whole:
        return min(args.draft_vocab or DRAFT_VOCAB, V)
    if args.draft_vocab and args.draft_vocab < V:
        raise ValueError(
            f"--draft-vocab {args.draft_vocab} with --dialect {args.dialect}, which "
            f"has the target's whole vocabulary of {V}: leave --draft-vocab out, or "
            "take --dialect speculators"
        )
    return V


def _eagle3(args, target) -> eagle3_params.Eagle3Config:
    is_parallel = args.family == "peagle"
    width, layers = args.width or target.hidden_size, args.layers if is_parallel else 1
    return eagle3_params.Eagle3Config(
        layer=_layer(args, target, layers, hidden_size=width),
        draft_vocab_size=_draft_vocab(args, target),
        target_hidden_size=target.hidden_size,
        taps=args.taps or eagle3_params.default_taps(target.num_layers),
        has_head_norms=args.dialect == "deepspec",
        window=args.window or 0,
        shares_head=bool(args.target_head),
        mask_token_id=args.mask_token if is_parallel else None,
    )


def _attention(args) -> tuple[block_params.LayerAttention, ...]:
    """Returns the attention of each layer, the same in all; () is the default one."""
    window = args.window or 0
    sees = block_params.LayerAttention(
        window=window,
        is_causal=bool(args.causal),
        from_anchor=window > 0 and args.dialect == "speculators",
    )
    is_all = sees == block_params.LayerAttention()
    return () if is_all else (sees,) * args.layers


def _block(args, target) -> block_params.BlockConfig:
    is_dspark, is_dflash2 = args.family == "dspark", args.family == "dflash2"
    head = "selector" if is_dflash2 else "none"
    head = (args.head or "vanilla") if is_dspark else head
    has_confidence = is_dspark and not args.no_confidence
    outputs = block_dialects.default_layer_ids(target.num_layers, args.layers)
    return block_params.BlockConfig(
        layer=_layer(args, target, args.layers),
        draft_vocab_size=_draft_vocab(args, target),
        taps=args.taps or tuple(output + 1 for output in outputs),
        block_size=args.block,
        slots=block_dialects.SLOTS.get(args.dialect, "anchor-first"),
        mask_token_id=args.mask_token,
        head=head,
        markov_rank=0 if head == "none" else args.rank,
        top_k=TOP_K if is_dflash2 else 0,
        conv_group=CONV_GROUP if is_dflash2 else 0,
        has_confidence=has_confidence,
        confidence_with_markov=has_confidence and head != "none",
        attention=_attention(args),
    )


def shape(family: str, config: Any) -> dict[str, Any]:
    """Returns the flags that describe a config, with their values."""
    sees = config.attention_of(0) if family in BLOCKS else config
    found = {
        "taps": config.taps,
        "draft_vocab": config.draft_vocab_size,
        "mlp": config.layer.intermediate_size,
        "layers": config.layer.num_layers,
        "mask_token": config.mask_token_id,
        "window": sees.window,
    }
    if family in BLOCKS:
        found |= {"block": config.block_size, "causal": sees.is_causal}
        found |= {"head": config.head, "no_confidence": not config.has_confidence}
        found |= {"rank": config.markov_rank} if config.markov_rank else {}
    else:
        width = config.hidden_size if config.has_own_embed else None
        found |= {"target_head": config.shares_head, "width": width}
    own = ("taps", "draft_vocab", "mlp", *FAMILIES[family].flags)
    return {name: found[name] for name in own if name in found}


def draw_of(
    args: argparse.Namespace, config: Any, hot: jax.Array | None
) -> batches.Draw | None:
    """Returns what each step of a training draws: anchors of blocks, or of masks.

    Args:
      hot: the draft vocabulary.
    """
    if "anchors" not in FAMILIES[args.family].flags:
        return None
    is_block = args.family in BLOCKS
    return (block.Anchors if is_block else peagle.Anchors)(
        num_drafts=config.num_drafts if is_block else args.ttt_steps,
        seed=args.seed,
        count=args.anchors,
        decay=args.decay,
        draftable=block.draftable(hot, config.layer.vocab_size),
    )


def of_loss(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the further arguments of a family's loss."""
    if args.family not in BLOCKS:
        return {"steps": args.ttt_steps}
    weights = block.DSPARK if args.family == "dspark" else block.DFLASH
    cross, total_variation, confidence = weights
    if args.no_tv:  # Cross-entropy gets its weight, too.
        cross, total_variation = cross + total_variation, 0.0
    return {"terms": (cross, total_variation, confidence)}


_DECIDING = (
    "taps length draft_vocab mlp steps compute batch part learning_rate seed".split()
)


def deciding(family: str) -> list[str]:
    """Returns the names of the flags that decide the bits of a family's training."""
    own = (name for name in FAMILIES[family].flags if name != "no_copies")
    return [*_DECIDING, *own, "dialect", "base"]


def target_config(args: argparse.Namespace) -> config_lib.ModelConfig:
    """Returns the config of `--target`, with the vocabulary of `spec_jax.load`."""
    config = config_lib.read(hub.locate(args.target) / "config.json")
    entries = loading.entries(tokenizer.load(args.target), [config])
    return dataclasses.replace(config, vocab_size=entries or config.vocab_size)


def load_target(
    args: argparse.Namespace, *, impl: str | None = None
) -> tuple[config_lib.ModelConfig, params_lib.Params]:
    """Loads `--target` as `spec_jax.load` does, so that its drafters fit it there."""
    vocab_size = target_config(args).vocab_size
    return load_lib.load(args.target, impl=impl, vocab_size=vocab_size)


def plan(args: argparse.Namespace, target: config_lib.ModelConfig) -> Any:
    """Returns the config of the drafter that the flags describe, checked.

    With `--base`, sets the flags of the shape to those of the drafter there.

    Raises:
      CheckpointError: `--base` is not a drafter of this family for this target.
      ValueError: a drafter that no dialect describes or this target cannot have, or
        texts that are too short for it.
    """
    files, found = FAMILIES[args.family].files, None
    if args.base:
        _, found = files.read_config(args.base / "config.json", target)
        for name, value in shape(args.family, found).items():
            setattr(args, name, value)
    config = (_block if args.family in BLOCKS else _eagle3)(args, target)
    files.check_config(config, args.dialect, target)
    if isinstance(found, block_params.BlockConfig):
        # A calibration does not hold for weights that are trained on.
        none = dict.fromkeys(("confidence_temperatures", "confidence_shifts"), ())
        found = dataclasses.replace(found, **none)
    if found not in (None, config):
        raise ValueError(
            f"{args.base}: {found} cannot be trained on as --dialect {args.dialect}, "
            f"which makes it {config}"
        )
    name = "block" if args.family in BLOCKS else "ttt_steps"
    depth = getattr(args, name)
    if args.length < depth + 2:
        raise ValueError(
            f"texts of {args.length} tokens are too short for {cli.flag_of(name)} "
            f"{depth}: make rollouts of --length {depth + 2} or more"
        )
    return config


def check_flags(args: argparse.Namespace) -> None:
    """Checks that the flags go together.

    Raises:
      ValueError: a flag that the family or the dialect does not have; or a
        `--first-alone` that does not end at a checkpoint before the last step.
    """
    own = FAMILIES[args.family].flags
    lacks = [n for n in OF_SOME if getattr(args, n) and n not in own]
    if lacks:
        flags = ", ".join(map(cli.flag_of, lacks))
        has = [name for name, x in FAMILIES.items() if {*lacks}.intersection(x.flags)]
        raise ValueError(
            f"{flags} with --family {args.family}: of {', '.join(has)} alone"
        )
    check_copies(args.no_copies, args.dialect)
    alone = args.first_alone or 0
    if alone % args.save_every or alone >= args.steps:
        raise ValueError(
            f"--first-alone {alone} must be a multiple of --save-every "
            f"{args.save_every}, since it ends at a checkpoint, and below --steps "
            f"{args.steps}"
        )


def check_copies(no_copies: bool, dialect: str) -> None:
    """Raises `ValueError` for `--no-copies` with a dialect that has no copies."""
    if no_copies and dialect != "deepspec":
        raise ValueError(
            f"--no-copies with --dialect {dialect}: copies are of deepspec alone"
        )
