"""The command line of `sweep.py`: the axes of the grid, and what all cells share."""

import argparse
import math
import pathlib
from collections.abc import Sequence

from experiments.lib import cli, flags
from experiments.support import plan_flags, policies, sweep_rows


def parse(argv: Sequence[str] | None, *, description: str) -> argparse.Namespace:
    """The flags; `argparse` itself exits with status 1 on unusable ones."""
    parser = cli.Parser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_models(parser.add_argument_group("models"))
    _add_grid(parser.add_argument_group("grid: a cell for each combination"))
    _add_shared(parser.add_argument_group("the same in all cells"))
    flags.add_noise(
        parser.add_argument_group("sampling, where the temperature is above 0")
    )
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    args.gamma_max = args.gamma_max or max(args.gamma)
    if max(args.gamma) > args.gamma_max:
        parser.error(
            f"--gamma {max(args.gamma)} is above --gamma-max {args.gamma_max}: raise "
            "the latter, or leave it out"
        )
    flags.check_sampling(parser, args)
    return args


def _add_grid(group: argparse._ArgumentGroup) -> None:
    plan_flags.add_drafters(group, default="draft-model,ngram,suffix,hybrid")
    plan_flags.add_gammas(group, default="1,2,4")
    group.add_argument(
        "--prompts",
        type=cli.text_source,
        nargs="+",
        default=["10"],
        metavar="N|FILE[:N]",
        help="prompt sets: the first N bundled prompts, or files as spec_round.py "
        "takes them; where prompts have a category, each is a cell (default: 10)",
    )
    group.add_argument(
        "--temperature",
        type=_temperatures,
        default="0",
        metavar="T,...",
        help="divides the logits; 0 is greedy (default: %(default)s)",
    )
    group.add_argument(
        "--gamma-policy",
        type=plan_flags.names(policies.POLICIES),
        default=sweep_rows.FIXED,
        metavar="NAME,...",
        help=f"of {', '.join(policies.POLICIES)}; for those that adapt, --gamma is the "
        "most that they may choose (default: %(default)s)",
    )


def _add_shared(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--out",
        type=cli.output,
        required=True,
        metavar="FILE",
        help="JSON lines, one per finished cell; cells that are there already are not "
        "run again",
    )
    group.add_argument(
        "--figures",
        type=pathlib.Path,
        metavar="DIR",
        help="folder of the figures that are drawn at the end; made if it is not there",
    )
    flags.add_gen_tokens(group, default=64)
    flags.add_repeats(group)
    group.add_argument(
        "--gamma-max",
        type=cli.positive,
        metavar="TOKENS",
        help="the largest gamma that the models are built for; give it where larger "
        "ones are to be added to the same file later (default: the largest --gamma)",
    )
    group.add_argument(
        "--ignore-stop",
        action="store_true",
        help="do not end at stop tokens: every prompt yields --gen-tokens",
    )
    group.add_argument(
        "--raw", action="store_true", help="do not apply the model's chat template"
    )


def _temperatures(text: str) -> tuple[float, ...]:
    """The type of a flag that lists temperatures: in order, each of them once."""
    try:
        values = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        values = ()
    if not values or not all(math.isfinite(value) for value in values):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of finite numbers, such as 0,0.7"
        )
    return values
