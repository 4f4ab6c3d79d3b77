"""The flags of a head's training, kept beside its checkpoints, and the head's card."""

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.heads import families
from experiments.lib import cli
from spec_jax.training import loop


def _flags_path(args: argparse.Namespace) -> pathlib.Path:
    return args.work / "flags.json"


def keep_flags(args: argparse.Namespace) -> None:
    """Writes the flags of a drafter's training beside its checkpoints.

    Raises:
      ValueError: there are checkpoints of other flags; more `--steps` go on from them.
    """
    names = families.deciding(args.family)
    flags = {"family": args.family} | {name: getattr(args, name) for name in names}
    flags = json.loads(json.dumps(flags, default=str))
    path = _flags_path(args)
    if path.exists() and loop.num_steps(args.work):
        held = json.loads(path.read_text(encoding="utf-8"))
        _check_same(path, held, {n: x for n, x in flags.items() if n != "steps"})
    whole = path.with_name(f"{path.name}.part")
    whole.write_text(json.dumps(flags, indent=2) + "\n", encoding="utf-8")
    whole.replace(path)  # Which is never half a file.


def as_trained(args: argparse.Namespace) -> dict[str, Any]:
    """Sets the flags of a drafter as they were in its training, and returns them.

    Raises:
      ValueError: no training, or flags that are given (`args.given`) and are others.
    """
    path = _flags_path(args)
    if not path.exists():
        raise ValueError(f"{path}: no such file; run the stage train first")
    held = json.loads(path.read_text(encoding="utf-8"))
    given = {"family": args.family} | {name: getattr(args, name) for name in args.given}
    given.pop("dialect", None)  # The export's own.
    _check_same(path, held, json.loads(json.dumps(given, default=str)))
    vars(args).update(held)
    args.taps = held["taps"] and tuple(held["taps"])
    args.base = held["base"] and pathlib.Path(held["base"])
    return held


def _check_same(path: pathlib.Path, held: dict, asked: dict[str, Any]) -> None:
    """Raises `ValueError` where flags are not those of a training."""
    for name, value in asked.items():
        if held.get(name) != value:
            was, now = (f"{cli.flag_of(name)} {x}" for x in (held.get(name), value))
            raise ValueError(
                f"{path}: of a training with {was}, and this command has {now}: give "
                "the same, or another --work"
            )


def text_of(flags: Mapping[str, Any]) -> str:
    """Returns the flags of a training as on a command line, without what is a place."""
    texts = {
        cli.flag_of(name): ",".join(map(str, x)) if isinstance(x, list) else x
        for name, x in flags.items()
        if x is not None and x is not False and name not in ("family", "base")
    }
    return " ".join(n if x is True else f"{n} {x}" for n, x in texts.items())


def warn(config: Any, dialect: str) -> None:
    """Says of a head that is written as Llama's if other programs refuse it."""
    width, heads = config.hidden_size, config.layer.num_heads
    is_llama = dialect != "deepspec" and not getattr(config, "has_head_norms", True)
    if is_llama and width % heads:
        print(
            f"warning: a head of width {width} with {heads} attention heads is written "
            "as model_type llama, and transformers 5.24 opens no such config unless "
            "the width is a multiple of the heads; nor do programs that read it so",
            file=sys.stderr,
        )


def drafter_card(
    family: str,
    described: Mapping[str, int | str],
    held_out: Mapping[str, float],
    flags: str,
    notes: Sequence[str] = (),
) -> str:
    """Returns the card of a trained drafter, Markdown.

    Args:
      described: facts in the order in which they are stated.
      held_out: the last measurement of the log.
      flags: those of the commands that decide a bit.
      notes: what else the card should say, a sentence each.
    """
    numbers = {
        name.removeprefix("held_out_").replace("_", " "): f"{value:.4f}"
        for name, value in held_out.items()
        if name.startswith("held_out_")
    }
    rows = {
        name: f"{x:,}" if isinstance(x, int) else x for name, x in described.items()
    }
    lines = [
        f"# A drafter of the family {family}",
        "",
        "It reads the hidden states of one target, and is of no use with another. Like",
        "the target that taught it, it is data of that target's licence.",
        "",
        *_table("", rows),
        "",
        "On held-out texts of the target (an agreement is the share of drafts that are",
        "the target's most likely token, after the text's own tokens; the accepted",
        "length is tokens a round of greedy decoding):",
        "",
        *_table("held out", numbers),
        "",
        f"- Made by `python experiments/train_drafter.py --family {family}`, stages",
        f"  `rollouts`, `train` and `export`, with `{flags}`.",
        *(f"- {note}" for note in notes),
    ]
    return "\n".join(lines) + "\n"


def _table(title: str, rows: Mapping[str, str]) -> list[str]:
    return [
        f"| {title} | |",
        "| --- | --- |",
        *(f"| {name} | {x} |" for name, x in rows.items()),
    ]
