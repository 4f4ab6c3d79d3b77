"""Which operation is the first to differ between two ways to run the same window?

Runs autoregressive decoding and a verify path (or two implementations, slabs, dtypes)
over one window of tokens after one text, records every operation of both, and compares
bits.
The K/V of that text is what decoding wrote, or (`--history own`) what windows of
the second path wrote before this one: then it is compared first.
Exit status: 0 no value differs, 2 one does, 1 the input was unusable. With `--inject`:
0 if the first difference is where the fault was planted. Whether a mismatch is met
again is said, and does not change it.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import sys
from collections.abc import Sequence

from experiments.lib import (
    exact_cells,
    flags,
    questions,
    records,
    scenes,
    sight as sight_lib,
    terminal,
)
from spec_jax.debug.microscope import compare, faults, record as record_lib
from spec_jax.drafters import tree_shapes
from spec_jax.model import config as config_lib
from spec_jax.ops import dispatch
from spec_jax.typing import IMPLS


AS_EXPECTED, NOT_AS_EXPECTED = 0, 2


OF_TEXT = ("prompt", "prompts", "cache_length", "gamma")
"""Flags of what a line of a mismatch says."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    text = "--target DIR  Hugging Face Qwen3 folder (default: the embedded target)"
    cli.add(parser, text)
    _add_text_flags(parser.add_argument_group("the window"))
    _add_run_flags(parser.add_argument_group("the two runs"))
    group = parser.add_argument_group("results")
    flags.add_out(group, rows="one, what was seen")
    args = parser.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else list(argv)
    _check_together(parser, args)
    return args


def _add_text_flags(group: argparse._ActionsContainer) -> None:
    cli.add(
        group,
        f"""
        --prompt TEXT  a prompt
        --prompts N|FILE[:N]  prompts, as of spec_round.py, of which the last is taken
            (default: 1)
        --cache-length I  positions before the window: the prompt is cut, or continued
            by decoding (default: all of the prompt but its last token)
        --gamma I  how many of decoding's own tokens to draft (default:
            {questions.GAMMA})
        --mismatch FILE[:LINE]  a window that history.py --dump-verify-mismatches
            wrote, and how it was run; lines count from 1
        """,
        **{"N|FILE[:N]": cli.text_source, "FILE[:LINE]": cli.text_source},
    )
    flags.add_raw(group)


def _parents(text: str) -> tuple[int, ...]:
    """The type of `--tree`: the parents of its columns."""
    try:
        tree = tree_shapes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not isinstance(tree, tree_shapes.FixedTree):
        raise argparse.ArgumentTypeError(
            f"{text!r} is a search, whose nodes depend on what is drafted: give a "
            "fixed tree, such as 4-2-1"
        )
    return (0, *tree.parents.tolist())


def _add_run_flags(group: argparse._ActionsContainer) -> None:
    sides = (
        ("reference-path", "", "the first run", "decode"),
        ("verify-path", "verify-", "the second run", "paged-decode, or the mismatch's"),
    )
    for path, prefix, what, default in sides:
        same = "that of the first run" if prefix else "as in spec_round.py"
        cli.add(
            group,
            f"""
            --{path} PATH  how {what} goes over the window (default: {default})
            --{prefix}impl IMPL  kernels of {what} (default: {same})
            --{prefix}dtype TYPE  dtype of {what} (default: {same})
            --{prefix}slab ROWS  slab height of {what} (default: {same})
            --{prefix}page-size TOKENS  positions per page of {what} (default: {same})
            """,
            PATH=scenes.PATHS,
            IMPL=IMPLS,
            TYPE=config_lib.DTYPES,
        )
    cli.add(
        group,
        f"""
        --prefill HOW  how the prompt enters the caches that both runs start from
            (default: the mismatch's, or the faster, as in spec_round.py)
        --history WHO  who wrote the K/V between the prompt and the window of the second
            run: decoding, as that of the first, or windows of its own path, as in the
            rounds (default: own for a mismatch of a path that is not by rows,
            otherwise decode)
        --tree SHAPE  the second run verifies the window as a path of a tree, the one to
            its last node, among other tokens: a fixed tree, as 4-2-1 or NAME.json; as
            many drafts as that path has (default: a chain)
        --inject LAYER:OPERATION[:KIND]  plant a fault in the second run, which must be
            named; kinds: {", ".join(faults.KINDS)} (default: ulp); the last
            {len(faults.OF_TREES)} are of trees
        --layers L,L-L,...  layers to look at (default: all)
        """,
        HOW=exact_cells.PREFILLS,
        WHO=scenes.HISTORIES,
        **{"LAYER:OPERATION[:KIND]": str, "L,L-L,...": str, "SHAPE": _parents},
    )


def _check_together(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with a usage error where flags contradict each other."""
    given = [name for name in OF_TEXT if getattr(args, name) is not None]
    if args.mismatch is not None and given:
        flag = cli.flag_of(given[0])
        parser.error(f"--mismatch says already what {flag} would")
    if None not in (args.prompt, args.prompts):
        parser.error("--prompt and --prompts exclude each other")


def look(question: questions.Question) -> sight_lib.Sight:
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
    comparison = compare.compare(
        *taken, dtypes=(first.dtype, second.dtype), layers=question.layers
    )
    return sight_lib.Sight(
        question=question,
        prefix=compare.compare_prefixes(*question.scenes),
        records=tuple(taken),
        comparison=comparison,
    )


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    console = terminal.console()
    with records.open_out(args) as out:
        question = questions.from_flags(args)
        sight = look(question)
        provenance = records.provenance() | {
            "native_isa": dispatch.instruction_set(question.sides[0].impl),
            "argv": args.argv,
        }
        row = sight_lib.to_row(sight) | {
            "target": str(args.target or "embedded"),
            "weights_sha256": question.weights_sha256,
        }
        out.write(row | provenance)
    sight_lib.print_sight(sight, row, console)
    is_planted = question.fault is not None
    expected = sight.names_the_fault if is_planted else sight.is_equal
    return AS_EXPECTED if expected else NOT_AS_EXPECTED


main = cli.script("parity.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
