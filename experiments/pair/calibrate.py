"""Calibrates an exported DSpark: the scaling of its confidences, stored with it."""

import argparse
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from experiments.lib import (
    confidences,
    models,
    prompt_files,
    prompts as prompts_lib,
    records,
    tables,
    terminal,
)
from experiments.pair import families
from spec_jax import loading
from spec_jax.drafters import block
from spec_jax.model import block_dialects
from spec_jax.ops import dispatch


CARD = "README.md"
_HEADING = "\n## Calibration\n"


def run(args: argparse.Namespace) -> None:
    """Fits the confidences of the drafter in `args.out`, and writes them there.

    Its card and `calibration.jsonl` in `args.work` have what was found.

    Args:
      args: flags of `train_drafter.py`.

    Raises:
      ValueError: a drafter without a confidence head, or too few prompts.
    """
    path = args.out / "config.json"
    target = families.target_config(args)
    _, config = block_dialects.read_config(path, target)
    if not config.has_confidence:
        raise ValueError(f"{path}: of a drafter without a confidence head")
    lm = loading.load(
        args.target,
        drafter=str(args.out),
        gamma_max=config.num_drafts,
        impl=args.impl,
    )
    assert isinstance(lm.drafter, block.BlockDrafter)
    # Of logits as the head gives them, whatever an earlier calibration found.
    head = dataclasses.replace(config, confidence_temperatures=(), confidence_shifts=())
    drafter = dataclasses.replace(lm.drafter, head=head)
    words = prompts_lib.with_options(args, lm.tokenizer)
    sizes = argparse.Namespace(
        raw=args.raw, gen_tokens=args.length - args.prefix, page_size=16
    )
    lm = dataclasses.replace(lm, drafter=drafter, tokenizer=words)
    subject = models.prepare(sizes, lm, args.prompts)
    confidences.check_prompts(subject)
    row = confidences.fit(subject, args.temperature, seed=args.seed)
    found = {name: row[name] for name in ("temperatures", "shifts")}
    block_dialects.write_scaling(path, target, **found)
    _add_to_card(args.out / CARD, row)
    row |= {"drafter": args.family, "prompts": len(subject.ids)}
    row |= {"gen_tokens": sizes.gen_tokens, **records.provenance()}
    row |= {"target": str(args.target), "dtype": lm.target.config.dtype}
    row |= {"impl": lm.target.impl, "seed": args.seed, "raw": args.raw}
    row["native_isa"] = dispatch.instruction_set(lm.target.impl)
    row["prompt_source"] = prompt_files.without_folders(args.prompts)
    with records.open_rows(args.work / "calibration.jsonl", allow_dirty=True) as out:
        out.write(row)
    lines = confidences.by_draft(row)
    tables.print_rows(lines, confidences.COLUMNS, terminal.console())


def _add_to_card(path: pathlib.Path, row: Mapping[str, Any]) -> None:
    """Writes what was found into a card, in the place of an older calibration."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    table = [
        "Its confidences are `sigmoid(logit / temperature + shift)` (Platt scaling), "
        f"fitted to {row['fitted_rounds']:,} rounds at temperature "
        f"{row['temperature']:g}; errors of calibration (ECE) and ROC-AUC of "
        f"{row['rounds']:,} others.",
        "",
        "| draft | temperature | shift | ECE before | ECE | ROC-AUC |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    names = ("temperatures", "shifts", "ece_before", "ece", "roc_auc")
    for draft, values in enumerate(zip(*(row[n] for n in names), strict=True), 1):
        shown = ["-" if value is None else f"{value:.3f}" for value in values]
        table.append(f"| {draft} | {' | '.join(shown)} |")
    kept = text.partition(_HEADING)[0]
    path.write_text(f"{kept}{_HEADING}\n" + "\n".join(table) + "\n", encoding="utf-8")
