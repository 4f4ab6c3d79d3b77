"""Flags that list things, for the scripts that run a grid of them."""

import argparse
from collections.abc import Callable, Collection

from experiments.lib import cli
from experiments.support import drafters


def names(choices: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of a flag that lists names: in the order given, each of them once."""

    def parse(text: str) -> tuple[str, ...]:
        given = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
        unknown = [name for name in given if name not in choices]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"{unknown[0]!r} is not one of {', '.join(choices)}"
            )
        return given

    return parse


def add_drafters(group: argparse._ActionsContainer, *, default: str) -> None:
    """`--drafter`, a list."""
    group.add_argument(
        "--drafter",
        type=names(tuple(drafters.DRAFTERS)),
        default=default,
        metavar="NAME,...",
        help=f"what proposes tokens: of {', '.join(drafters.DRAFTERS)} "
        "(default: %(default)s)",
    )


def add_gammas(group: argparse._ActionsContainer, *, default: str) -> None:
    """`--gamma`, a list, and `--page-size`."""
    group.add_argument(
        "--gamma",
        type=cli.positives,
        default=default,
        metavar="TOKENS,...",
        help="tokens drafted per round, at most (default: %(default)s)",
    )
    group.add_argument(
        "--page-size",
        type=cli.positive,
        default=16,
        metavar="TOKENS",
        help="positions per page of the cache (default: %(default)s)",
    )
