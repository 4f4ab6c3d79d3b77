"""Which operation is the first to differ between two ways to run the same window?

Runs autoregressive decoding and a verify path (or two implementations, slabs, dtypes)
over one window of tokens after one text, records every operation of both, and compares
bits.
The K/V of that text is what decoding wrote; where a mismatch is of a path that is not
by rows, the second run's is what its own windows wrote, and is compared first.
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
    flags,
    questions,
    records,
    sight,
    terminal,
)
from experiments.lib.microscope import faults
from spec_jax.drafters import tree_shapes
from spec_jax.model import config as config_lib
from spec_jax.ops import dispatch
from spec_jax.typing import IMPLS


AS_EXPECTED, NOT_AS_EXPECTED = 0, 2


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    text = "--target DIR  Hugging Face Qwen3 folder (default: the embedded target)"
    cli.add(parser, text)
    group = parser.add_argument_group("the window")
    cli.add(
        group,
        f"""
        --prompts N|FILE[:N]  prompts, as of spec_round.py, of which the last is taken
            (default: 1)
        --gamma TOKENS  how many of decoding's own tokens to draft (default:
            {questions.GAMMA})
        --mismatch FILE[:LINE]  a window that history.py --dump-verify-mismatches or
            exactness.py --out wrote, and how it was run; lines count from 1
        """,
        **{"N|FILE[:N]": cli.text_source, "FILE[:LINE]": cli.text_source},
    )
    flags.add_raw(group)
    _add_run_flags(parser.add_argument_group("the two runs"))
    group = parser.add_argument_group("results")
    flags.add_out(group, rows="one, what was seen")
    args = parser.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else list(argv)
    if args.mismatch is not None:
        for name in ("prompts", "gamma"):
            if getattr(args, name) is not None:
                parser.error(f"--mismatch says already what --{name} would")
    return args


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
            """,
            PATH=questions.PATHS,
            IMPL=IMPLS,
            TYPE=config_lib.DTYPES,
        )
    cli.add(
        group,
        f"""
        --tree SHAPE  the second run verifies the window as a path of a tree, the one to
            its last node, among other tokens: a fixed tree, as 4-2-1 or NAME.json; as
            many drafts as that path has (default: a chain)
        --inject LAYER:OPERATION[:KIND]  plant a fault in the second run, which must be
            named; kinds: {", ".join(faults.KINDS)} (default: ulp); the last is of trees
        """,
        **{"LAYER:OPERATION[:KIND]": str, "SHAPE": _parents},
    )


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    console = terminal.console()
    with records.open_out(args) as out:
        question = questions.from_flags(args)
        row = sight.look(question) | {
            "target": str(args.target or "embedded"),
            **records.provenance(),
            "native_isa": dispatch.instruction_set(question.paths[0].model.impl),
            "argv": args.argv,
        }
        out.write(row)
    sight.print_row(row, console)
    is_planted = question.fault is not None
    expected = sight.names_the_fault(row) if is_planted else row["equal"]
    return AS_EXPECTED if expected else NOT_AS_EXPECTED


main = cli.script("parity.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
