"""Which operation is the first to differ between two ways to run the same window?

Runs plain decoding and a verify path (or two implementations, slabs, dtypes) over one
window of tokens after one text, records every operation of both, and compares bits.
The K/V of that text is what plain decoding wrote, or (`--history own`) what windows of
the second path wrote before this one: then it is compared first.
Exit status: 0 no value differs, 2 one does, 1 the input was unusable. With `--inject`:
0 if the first difference is where the fault was planted. With `--bundle`: 0 if every
value of both runs is the one that the bundle was written with. Whether a mismatch is
met again is said, and does not change it.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from rich import console as rich_console

from experiments.lib import records, terminal
from experiments.support import (
    parity_bundle,
    parity_flags,
    parity_question,
    parity_report,
)
from spec_jax.debug.microscope import compare, record as record_lib
from spec_jax.model import config as config_lib
from spec_jax.ops import dispatch


AS_EXPECTED, NOT_AS_EXPECTED = 0, 2


def look(question: parity_question.Question) -> parity_report.Sight:
    """Runs and records both sides, and compares."""
    taken, planted = [], (None, question.fault)
    for side, scene, fault in zip(
        question.sides, question.scenes, planted, strict=True
    ):
        path, params = side.record_path(question.config), question.params_of(side)
        if fault is None:
            taken.append(record_lib.take(path, params, scene))
        else:
            taken.append(record_lib.take_with_fault(path, params, scene, fault))
    first, second = question.sides
    return parity_report.Sight(
        name=question.name,
        scene=question.scenes[0],
        history=question.history,
        prefix=compare.compare_prefixes(*question.scenes),
        sides=question.sides,
        layers=question.layers,
        fault=question.fault,
        mismatch=question.mismatch,
        records=tuple(taken),
        comparison=compare.compare(
            *taken, dtypes=(first.dtype, second.dtype), layers=question.layers
        ),
        tokenizer=question.tokenizer,
    )


def _bundle_of(
    question: parity_question.Question,
    sight: parity_report.Sight,
    provenance: dict[str, Any],
) -> parity_bundle.Bundle:
    return parity_bundle.Bundle(
        scenes=question.scenes,
        history=question.history,
        sides=question.sides,
        fault=question.fault,
        layers=question.layers,
        config=config_lib.to_dict(question.config),
        weights_sha256=question.weights_sha256,
        digests=tuple(map(parity_bundle.digest_of, sight.records)),
        provenance=provenance,
    )


def _draw(row: dict[str, Any], path: pathlib.Path) -> None:
    # Needs matplotlib, an extra; the flags have checked that it is there.
    from experiments.support import figures

    row = records.to_json(row, "row")  # As it stands in the file.
    figures.save(figures.divergence(row), path, rows=[row])


def _agrees(
    bundle: parity_bundle.Bundle,
    sight: parity_report.Sight,
    provenance: dict[str, Any],
    console: rich_console.Console,
) -> bool:
    """Whether both runs came out as in the bundle; says so, and what else differs."""
    same = [
        parity_bundle.digest_of(record) == digest
        for record, digest in zip(sight.records, bundle.digests, strict=True)
    ]
    for name, is_same in zip(("reference", "verify"), same, strict=True):
        outcome = "every value is the bundle's" if is_same else "other values"
        console.print(f"{name}: {outcome}", style=None if is_same else "bold red")
    for key, here in provenance.items():
        there = bundle.provenance.get(key)
        if there != here and key != "argv":
            console.print(f"{key}: {there} in the bundle, {here} here", highlight=False)
    return all(same)


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Runs everything and shows it; returns the exit status."""
    console, bundle = terminal.console(), None
    with records.JsonLines(args.out) as out:
        if args.bundle is not None:
            bundle = parity_bundle.load(args.bundle)
            question = parity_question.from_bundle(args, bundle)
        else:
            question = parity_question.from_flags(args)
        sight = look(question)
        provenance = records.provenance() | {
            "native_isa": dispatch.instruction_set(question.sides[0].impl),
            "argv": list(argv),
        }
        row = parity_report.to_row(sight) | {
            "target": str(args.target or "embedded"),
            "weights_sha256": question.weights_sha256,
        }
        out.write(row | provenance)
    if args.save_bundle is not None:
        parity_bundle.save(args.save_bundle, _bundle_of(question, sight, provenance))
    if args.heatmap is not None:
        _draw(row | provenance, args.heatmap)
    parity_report.print_sight(sight, console)
    expected = sight.is_equal
    if bundle is not None:
        expected = _agrees(bundle, sight, provenance, console)
    elif question.fault is not None:
        expected = sight.names_the_fault
    return AS_EXPECTED if expected else NOT_AS_EXPECTED


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    return cli.run(
        "parity.py",
        lambda: parity_flags.parse(argv, description=__doc__),
        lambda args: run(args, argv),
    )


if __name__ == "__main__":
    cli.end(main)
