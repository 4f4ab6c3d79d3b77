"""Plans of the exactness suite: from flags, or from a certificate.

This module turns files, flags and certificates into cells, prompts and the header that
describes the run.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.lib import (
    certificates,
    exact_cells as cells_lib,
    policies,
    prompt_files,
    prompts as prompts_lib,
    records,
    suite,
)
from spec_jax import loading
from spec_jax.drafters import registry
from spec_jax.model import config as config_lib, fingerprint, hub, row_model
from spec_jax.ops import dispatch
from spec_jax.typing import IMPLS


EMBEDDED = "embedded"


class Axis(NamedTuple):
    """An axis of cells: its flag, and the values that are run without the flag."""

    what: str
    kinds: Sequence[str] | None  # allowed values; None: numbers
    brief: tuple  # the base first
    full: tuple | None = None  # with --full; None: as `brief`


# Compilation takes most of the time: brief has one cell of each kind, but several
# gammas, which are data. Where auto is xla, both are one. Oracles draft what is right.
AXES: Mapping[str, Axis] = {
    "dtype": Axis(
        "of both models", config_lib.DTYPES, ("bfloat16", "float32"), ("bfloat16",)
    ),
    "weights": Axis("of the target", config_lib.WEIGHTS, ("dense",)),
    "impl": Axis("kernels", IMPLS, ("auto", "xla"), ("auto",)),
    "slab": Axis("rows of every call of the target", None, (8,)),
    "page_size": Axis("positions per page", None, (16, 64)),
    "cache": Axis("kind of cache", row_model.CACHE_KINDS, ("paged", "static")),
    # Both runs of a cell fill their caches in the same way.
    "prefill": Axis(
        "how prompts enter the cache", cells_lib.PREFILLS, ("rows",), cells_lib.PREFILLS
    ),
    "drafter": Axis(
        "what proposes tokens, or package.module:Name",
        cells_lib.DRAFTERS,
        ("draft-model", "oracle", "ngram"),
        ("draft-model", *cells_lib.FORCED, "ngram", "suffix", "hybrid", "oracle"),
    ),
    "gamma": Axis("tokens drafted per round, or the most of them", None, (4, 1, 2, 7)),
    "sampling": Axis(
        "of tokens; how is in the certificate", cells_lib.SAMPLINGS, cells_lib.SAMPLINGS
    ),
    "gamma_policy": Axis(
        "what chooses each round's gamma",
        cells_lib.GAMMA_POLICIES,
        ("fixed", "threshold"),
        policies.POLICIES,
    ),
    "batch": Axis("prompts that share a forward", None, (1, 4)),
}
BRIEF, FULL = ("4", 48), ("50", 512)
"""Number of prompts, and of tokens generated for each."""

ON_GPU = {"dtype": ("bfloat16",), "impl": ("auto",), "prefill": ("rows",)}
"""Values of these axes on a GPU, where only its own kernels are run.

The library's products, of `xla` and of batched prefill, are chosen there by timing:
another process may get other bits.
"""


def default_axes(*, is_full: bool) -> dict[str, tuple]:
    """Returns the values that are run without flags, in the order of a cell's axes."""
    axes = {
        name: (one.full if is_full and one.full else one.brief)
        for name, one in AXES.items()
    }
    return {name: axes.get(name, (cells_lib.NO_TREE,)) for name in cells_lib.AXES}


def default_text(axis: str) -> str:
    """Returns an axis's defaults, for the help of its flag."""
    brief, full = (
        ",".join(map(str, default_axes(is_full=is_full)[axis]))
        for is_full in (False, True)
    )
    text = brief if brief == full else f"{brief}; {full} with --full"
    return f"{text}; {ON_GPU[axis][0]} on a GPU" if axis in ON_GPU else text


def from_flags(args: argparse.Namespace) -> suite.Plan:
    """Returns the plan of a run with these flags."""
    is_gpu = dispatch.backend() == "gpu"
    axes = default_axes(is_full=args.full) | (ON_GPU if is_gpu else {})
    axes = {axis: getattr(args, axis) or values for axis, values in axes.items()}
    if args.drafter is None and args.target is not None and args.draft is None:
        names = axes["drafter"]
        axes["drafter"] = tuple(n for n in names if n not in registry.NEED_DRAFT)
    axes["impl"] = tuple(dict.fromkeys(map(dispatch.resolve, axes["impl"])))
    cells = cells_lib.of_axes(axes, is_product=args.product)
    if is_gpu and args.certificate:
        _check_repeatable(cells)
    prompts, gen_tokens = FULL if args.full else BRIEF
    source = told = args.prompts or prompts
    if pathlib.PurePath(source).is_absolute():  # Only this machine has its folders.
        told = prompt_files.without_folders(source)
    settings = {
        "target": _folder_name(args.target),
        "draft": _folder_name(args.draft) if _has_draft(args, cells) else None,
        "prompt_source": told,
        "gen_tokens": args.gen_tokens or gen_tokens,
        "stop": args.stop,
        "raw": args.raw,
    }
    if args.chat_option:
        settings["chat_option"] = args.chat_option
    if args.head is not None:
        is_shipped = args.head.resolve().parent == loading.ASSETS.resolve()
        settings["head"] = EMBEDDED if is_shipped else _folder_name(args.head)
    planned = _plan(args, cells, settings, source=source)
    count, slots = len(planned.prompts), max(cell.batch for cell in cells)
    if count < slots:
        raise ValueError(
            f"batch={slots} needs {slots} prompts, for a prompt to have neighbours, "
            f"and {count} are to be run; name more with --prompts, or take less slots"
        )
    return planned


def _has_draft(args: argparse.Namespace, cells: Sequence[cells_lib.Cell]) -> bool:
    """Returns whether there is a draft model, and a cell whose drafter may load it."""
    without = {*registry.NEED_NOTHING, *cells_lib.FORCED}
    is_given = args.draft is not None or args.target is None
    return is_given and not {cell.drafter for cell in cells} <= without


def from_certificate(
    args: argparse.Namespace, certificate: Mapping[str, Any]
) -> suite.Plan:
    """Returns the plan that runs a certificate again, with its first `args.limit`
    prompts, but no fewer than its largest batch has.

    A target that was fetched and a head that is shipped are found by their names in the
    certificate; hashes of their weights are compared, as those of all models.
    """
    settings = certificate["settings"]
    if args.target is None and settings["target"] in hub.FETCHED:
        args.target = pathlib.Path(settings["target"])
    cells, heads = certificates.cells_of(certificate), loading.heads_for(args.target)
    if args.head is None and settings.get("head") in (
        EMBEDDED,
        *registry.shipped(heads),
    ):
        (kind,) = {cell.drafter for cell in cells} & set(registry.NEED_TARGET)
        args.head = registry.shipped_head(kind, heads)
    for name in ("target", "draft", "head"):
        told = settings.get(name)
        if told not in (None, EMBEDDED) and getattr(args, name) is None:
            raise ValueError(
                f"{args.verify}: a certificate of {name} {told}; give its folder with "
                f"--{name}"
            )
    for impl in {cell.impl for cell in cells}:
        dispatch.resolve(impl)
    planned = _plan(
        args, cells, settings, source=args.prompts or settings["prompt_source"]
    )
    for name, mend in (
        ("weights", "give the folders of its models with --target and --draft"),
        ("prompts", "name its prompts with --prompts"),
        ("constants", "verify it with the code that wrote it"),
    ):
        # A certificate whose cells name no constants lacks them.
        then, now = certificate.get(name, {}), planned.header[name]
        if then != now:
            raise ValueError(
                f"{args.verify}: was written with other {name}; {mend} "
                f"({_first_change(then, now)})"
            )
    # Prompts of a batch need neighbours.
    limit = args.limit and max(args.limit, *(cell.batch for cell in cells))
    return dataclasses.replace(planned, prompts=planned.prompts[:limit])


def _check_repeatable(cells: Sequence[cells_lib.Cell]) -> None:
    """Raises `ValueError` for cells that another process on a GPU may not repeat."""
    for cell in cells:
        if cell.uses_library:
            raise ValueError(
                f"--certificate with impl={cell.impl} and prefill={cell.prefill}: on a "
                "GPU the library's products are chosen by timing, so that another "
                "process would not verify it; give --impl triton --prefill rows, or "
                "run without --certificate"
            )


def _first_change(then: Any, now: Any) -> str:
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for name in then:
            if then[name] != now.get(name):
                return f"{name}: {_first_change(then[name], now.get(name))}"
    return " and ".join(str(value)[:16] for value in (then, now))


def _plan(
    args: argparse.Namespace,
    cells: Sequence[cells_lib.Cell],
    settings: Mapping[str, Any],
    *,
    source: str,
) -> suite.Plan:
    """Returns the plan; loads the models, to hash their weights, and the prompts."""
    models = suite.Models(
        target=args.target or loading.EMBEDDED_TARGET,
        draft=args.draft or loading.EMBEDDED_DRAFT if settings["draft"] else None,
        head=args.head,
    )
    weights = {}
    for kind, cell in {cell.kind_of_weights: cell for cell in cells}.items():
        lm = models.load(cell)
        weights[kind] = {"target": fingerprint.of_params(lm.params)}
        if settings["draft"]:
            weights[kind]["draft"] = fingerprint.of_params(lm.drafter_params)
        if args.head is not None:
            name = registry.kind_of(args.head)
            named = dataclasses.replace(cell, drafter=name, tree=cells_lib.NO_TREE)
            with_head = models.with_drafter(lm, named)
            weights[kind]["head"] = fingerprint.of_params(with_head.drafter_params)
    kinds = {(c.slab, c.drafter, c.tree): c for c in cells}
    for cell in kinds.values():
        is_tree = cell.tree != cells_lib.NO_TREE
        if is_tree or cell.slab == lm.gamma_max + 1:  # Raises if it lacks a part.
            models.with_drafter(lm, cell)
    words = prompts_lib.with_options(argparse.Namespace(**settings), lm.tokenizer)
    named = prompt_files.parse(source)
    prompts = prompts_lib.encode(words, named, raw=settings["raw"])
    encoded = [prompt.ids for prompt in prompts]
    # For the longest, whatever the pages; raises if it does not fit the model.
    sizes = {"gen_tokens": settings["gen_tokens"], "page_size": 1}
    longest = prompts_lib.capacity_for(lm, prompts, **sizes)
    kernels = {cell.impl: dispatch.instruction_set(cell.impl) for cell in cells}
    header = {
        "settings": settings,
        # Code and machine, and the instruction set of native kernels, if any are run.
        "environment": records.provenance() | {"instruction_set": kernels},
        "weights": weights,
        "prompts": {
            "count": len(prompts),
            "tokens": sum(map(len, encoded)),
            "sha256": certificates.sha256_of(encoded),
        },
        "constants": cells_lib.constants_of(cells),
        "cells": [cell.to_row() for cell in cells],
    }
    return suite.Plan(
        models=models,
        cells=cells,
        prompts=prompts,
        gen_tokens=settings["gen_tokens"],
        longest=longest,
        stop_ids=lm.stop_ids if settings["stop"] else (),
        header=header,
    )


def _folder_name(folder: pathlib.Path | None) -> str:
    return EMBEDDED if folder is None else folder.resolve().name
