"""The command line of `replay.py`: what goes with recording, what with judging."""

import argparse
from collections.abc import Collection, Sequence

from experiments.lib import cli, flags
from experiments.support import drafters, policies, traces


RECORDED = (
    *("dtype", "impl", "prompts", "raw", "gen_tokens", "page_size"),
    *traces.SAMPLING,
)
"""Flags that decide what is recorded. Judging takes them from the traces: they may be
given again, and must then agree."""

JUDGING = (
    *("draft", "drafter", "gamma_policy", "confidence"),
    *("costs", "ignore_stop", "check", "out"),
)
"""Flags that recording has no use for."""


def parse(argv: Sequence[str] | None, *, description: str) -> argparse.Namespace:
    """The flags; `argparse` itself exits with status 1 on unusable ones.

    Returns:
      All flags with their values, and `given`: the names of those of `RECORDED` that
      the command line has.
    """
    parser = _parser(description)
    # Values that are there already are no defaults: None marks what was not given.
    absent = argparse.Namespace(**dict.fromkeys((*RECORDED, *JUDGING)))
    args = parser.parse_args(argv, namespace=absent)
    flags.check_isa(parser, args)
    given = [name for name in (*RECORDED, *JUDGING) if getattr(args, name) is not None]
    for name in {*RECORDED, *JUDGING} - set(given):
        setattr(args, name, parser.get_default(name))
    args.given = [name for name in given if name in RECORDED]
    if (args.traces is None) == (args.record is None):
        parser.error("name one file: FILE to judge drafters on, or --record FILE")
    if args.record is not None:
        for name in given:
            if name in JUDGING:
                parser.error(
                    f"{cli.flag_of(name)} judges traces: leave it out of --record"
                )
        flags.check_sampling(parser, args)
    elif not args.check and args.target is not None:
        parser.error("--target is run by --record and --check alone: leave it out")
    elif args.check:
        flags.check_models(parser, args)
    return args


def _parser(description: str) -> cli.Parser:
    parser = cli.Parser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "traces",
        nargs="?",
        type=cli.source,
        metavar="FILE",
        help="traces to judge drafters on, written by --record",
    )
    flags.add_models(parser.add_argument_group("models"))
    _add_recording(parser.add_argument_group("recording"))
    flags.add_sampling(parser.add_argument_group("sampling of what is recorded"))
    _add_judging(parser.add_argument_group("judging"))
    return parser


def _add_recording(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--record",
        type=cli.output,
        metavar="FILE",
        help="decode the prompts plainly, once, and write their traces; the largest "
        "--gamma is the largest that they can be checked with. An interrupted "
        "recording is taken up",
    )
    flags.add_prompts(group, default="10")
    flags.add_gen_tokens(group, default=64)
    group.add_argument(
        "--page-size",
        type=cli.positive,
        default=16,
        metavar="TOKENS",
        help="positions per page of the cache (default: %(default)s)",
    )
    group.add_argument(
        "--raw", action="store_true", help="do not apply the model's chat template"
    )


def _add_judging(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--drafter",
        type=_drafters,
        default=tuple(drafters.DRAFTERS),
        metavar="NAMES",
        help=f"drafters to judge, of {', '.join(drafters.DRAFTERS)} (default: all)",
    )
    group.add_argument(
        "--gamma",
        type=cli.positives,
        default=(1, 2, 4, 7),
        metavar="LIST",
        help="tokens drafted per round, at most: a row for each (default: 1,2,4,7)",
    )
    group.add_argument(
        "--gamma-policy",
        "--policy",
        type=_policies,
        default=("fixed",),
        metavar="NAMES",
        help=f"what chooses each round's gamma, up to --gamma, of "
        f"{', '.join(policies.POLICIES)}: a row for each (default: fixed)",
    )
    group.add_argument(
        "--confidence",
        type=float,
        default=0.0,
        metavar="P",
        help="a draft model ends its draft before a token that it gives less than "
        "this probability (default: %(default)s, never)",
    )
    group.add_argument(
        "--costs",
        type=cli.source,
        metavar="FILE",
        help="expect speeds from these step costs: rows of latency.py --out, or a "
        "JSON object with plain_s, verify_s by rows, and draft_s",
    )
    group.add_argument(
        "--ignore-stop",
        action="store_true",
        help="judge all that was recorded: rounds do not end at stop tokens",
    )
    group.add_argument(
        "--check",
        action="store_true",
        help="run the target live, too, and compare every counter",
    )
    flags.add_out(group, rows="one per drafter and gamma, as the table shows them")


def _drafters(text: str) -> tuple[str, ...]:
    """The type of a flag that lists drafters."""
    return _names(text, "drafter", drafters.DRAFTERS)


def _policies(text: str) -> tuple[str, ...]:
    """The type of a flag that lists policies of gamma."""
    return _names(text, "gamma policy", policies.POLICIES)


def _names(text: str, what: str, known: Collection[str]) -> tuple[str, ...]:
    """In the order given, each of them once."""
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(
                f"{name!r} is no {what}: name some of {','.join(known)}"
            )
    return names
