"""Models of a command line: a `LanguageModel` and settings from flags, and a row."""

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.lib import (
    processing,
    prompt_files,
    prompts as prompts_lib,
    records,
    runs,
    terminal,
)
from spec_jax import loading
from spec_jax.drafters import draft_model, each, registry, tree_shapes
from spec_jax.engine import protocols
from spec_jax.model import fingerprint
from spec_jax.ops import dispatch
from spec_jax.parallel import shard


def load(
    args: argparse.Namespace, *, drafter: str, gamma_max: int, **how: Any
) -> loading.LanguageModel:
    """Loads the models that flags name, on their mesh and with their tree.

    Args:
      how: arguments of `loading.load`; the slab defaults to the window of a chain.

    Raises:
      ValueError: as `loading.load`, `with_tree`, and `check_gamma` of chains.
    """
    how = {"slab": gamma_max + 1, **how}
    if getattr(args, "devices", None) is not None:
        how |= {"mesh": shard.mesh(args.devices), "segments": args.segments}
    lm = loading.load(
        args.target,
        draft=args.draft,
        drafter=drafter,
        gamma_max=gamma_max,
        dtype=args.dtype,
        weights=args.weights,
        draft_weights=args.draft_weights,
        impl=args.impl,
        **how,
    )
    words = prompts_lib.with_options(args, lm.tokenizer)
    lm = dataclasses.replace(lm, tokenizer=words)
    tree = getattr(args, "tree", None)
    if isinstance(tree, tree_shapes.AnyTree):
        return with_tree(args, lm, tree)
    check_gamma(drafter, lm.drafter, gamma_max)
    return lm


def with_tree(
    args: argparse.Namespace, lm: loading.LanguageModel, tree: tree_shapes.AnyTree | str
) -> loading.LanguageModel:
    """Returns the same models with a drafter of trees.

    Raises:
      ValueError: a drafter that drafts chains alone.
      NotImplementedError: a tree that would bias the rule.
    """
    rule = getattr(args, "rule", "coupled")
    lm = lm.with_tree(tree)
    each.lift(lm.drafter, 1, rule=rule)  # Raises if it lacks what the rule needs.
    return lm


def check_gamma(name: str, drafter: protocols.Drafter, gamma: int) -> None:
    """Raises `ValueError` for a gamma above the most that a drafter drafts."""
    if gamma > drafter.gamma_max:
        raise ValueError(
            f"--gamma {gamma}: {name} drafts {drafter.gamma_max} tokens at most"
        )


Drafters = dict[str, loading.LanguageModel]
"""One target with each of several drafters, by the drafters' names."""


def load_drafters(
    args: argparse.Namespace, names: Sequence[str], *, gamma_max: int, **how: Any
) -> Drafters:
    """Loads one target with each of the drafters, by their names; raises as `load`, and
    as `check_gamma`."""
    first = load(args, drafter=names[0], gamma_max=gamma_max, **how)
    sizes = {"gamma_max": gamma_max, "dtype": args.dtype, "weights": args.draft_weights}
    parts = parts_of(first, folder=args.target, draft=args.draft, **sizes)
    others = {
        name: first.with_drafter(*registry.build(name, parts)) for name in names[1:]
    }
    made = {names[0]: first} | others
    for name, lm in made.items():
        check_gamma(name, lm.drafter, gamma_max)
    return made


def parts_of(lm: loading.LanguageModel, **how: Any) -> registry.Parts:
    """Returns the parts of drafters for a loaded target; its draft model is read once.

    Args:
      how: arguments of `loading.drafter_parts`.
    """
    parts = loading.drafter_parts(lm.target, lm.params, lm.tokenizer, **how)
    read = functools.cache(parts.load_draft)
    if isinstance(lm.drafter, draft_model.DraftModel):
        read = lambda: (lm.drafter, lm.drafter_params)
    return dataclasses.replace(parts, load_draft=read)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """Prompts that are ready to run, and the settings of their runs."""

    prompts: list[prompt_files.Prompt]
    settings: runs.Settings  # of all runs, with the largest gamma


def prepare(
    args: argparse.Namespace,
    lm: loading.LanguageModel,
    prompts: str,
    *,
    lengths: Mapping[str, int] | None = None,
    per_length: int | None = None,
    **settings: Any,
) -> Subject:
    """Reads and encodes the prompts that a flag names, and makes the settings of runs.

    Scripts without the flag --ignore-stop end no text at stop tokens.

    Args:
      prompts: the value of `--prompts`.
      lengths, per_length: lengths in tokens that so many prompts get each, as in
        `prompts.of_lengths`; None: `prompts.PER_CONTEXT`, if there are so many.
      settings: fields of `runs.Settings`, instead of those of the flags.
    """
    read = prompt_files.parse(prompts)
    sizes = {"gen_tokens": args.gen_tokens, "page_size": args.page_size}
    raw, drawn = getattr(args, "raw", False), settings.get("sampling")
    if lengths:
        count = per_length or min(len(read), prompts_lib.PER_CONTEXT)
        how = {"lengths": lengths, "per_length": count, "raw": raw}
        ready = prompts_lib.of_lengths(lm, read, **how)
    else:
        ready = prompts_lib.prepare(lm, read, sampling=drawn, raw=raw, **sizes)
    of_flags = {
        "rule": getattr(args, "rule", "coupled"),
        "stop_ids": () if getattr(args, "ignore_stop", True) else lm.stop_ids,
    }
    made = runs.Settings(
        lm=lm,
        gamma=lm.gamma_max,
        capacity=prompts_lib.capacity_for(lm, ready, **sizes),
        processor=processing.of(args, lm),
        **sizes | of_flags | settings,
    )
    return Subject(prompts=ready, settings=made)


def announce(args: argparse.Namespace, subject: Subject, *words: str) -> None:
    """Prints what will be run, before anything is compiled."""
    target = subject.settings.lm.target
    sizes = f"{len(subject.prompts)} prompts x {args.gen_tokens} tokens"
    how = (target.config.dtype, f"impl {target.impl}")
    terminal.show(f"{', '.join((sizes, *words, *how))}; compiling ...")


def drafter_sha256(lm: loading.LanguageModel) -> str:
    """Returns a hash of the drafter's weights."""
    return fingerprint.of_params(lm.drafter_params)


def draft_of(args: argparse.Namespace, drafter: str | None = None) -> str | None:
    """Returns the name of the draft in rows; None where no drafter loads one.

    Args:
      drafter: replaces the drafters of `--drafter`.
    """
    chosen = drafter or getattr(args, "drafter", "draft-model")
    draft = args.draft or ("embedded" if args.target is None else None)
    for name in (chosen,) if isinstance(chosen, str) else chosen:
        # A drafter of another package may read a draft that is named.
        is_known = name in registry.BUILDERS or registry.is_folder(name)
        if name not in registry.NEED_NOTHING and (is_known or args.draft is not None):
            return None if draft is None else str(draft)
    return None


def describe(
    args: argparse.Namespace, lm: loading.LanguageModel, drafter: str | None = None
) -> dict[str, Any]:
    """Returns the fields of rows that name models, and settings that decide bits.

    Args:
      drafter: as in `draft_of`.
    """
    found = {
        "target": str(args.target or "embedded"),
        "draft": draft_of(args, drafter),
        "dtype": lm.target.config.dtype,
        "impl": lm.target.impl,
        "native_isa": dispatch.instruction_set(lm.target.impl),
        "slab": lm.target.slab,
    }
    if lm.target.config.is_bytes:
        found["weights"] = lm.target.config.weights
    if getattr(args, "draft_weights", None):
        found["draft_weights"] = args.draft_weights
    if lm.target.layout is not None:
        found |= lm.target.layout.describe()
    names = ("page_size", "gen_tokens", "repeats", "temperature", "rule", "seed")
    names += ("top_k", "top_p", "min_p", "ignore_stop", "raw")
    for name in ("chat_option", "processor"):
        names += (name,) * bool(getattr(args, name, None))
    return found | {name: getattr(args, name) for name in names if hasattr(args, name)}


def common(
    args: argparse.Namespace, lm: loading.LanguageModel, *names: str
) -> dict[str, Any]:
    """Returns the fields that all rows of a script have: those of `describe`, of flags
    with these names, of the prompts, if any, and of where the numbers are from."""
    about = describe(args, lm) | {name: getattr(args, name) for name in names}
    if hasattr(args, "prompts"):
        about["prompt_source"] = prompt_files.without_folders(args.prompts)
    return about | records.provenance()
