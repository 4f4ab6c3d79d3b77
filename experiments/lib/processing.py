"""Logits processors of a command line: `--processor KIND:VALUE`, and what it makes."""

import argparse
import pathlib
from collections.abc import Callable, Mapping

import spec_jax as sj
from spec_jax import processors


KINDS: Mapping[str, Callable[[str, sj.LanguageModel], processors.Processor]] = {
    "regex": processors.regex,
    "json": lambda text, lm: processors.json_schema(pathlib.Path(text).read_text(), lm),
    "penalties": lambda text, lm: _penalties(*map(float, text.split(","))),
    "bias": lambda text, lm: processors.logit_bias(
        {int(token): float(value) for token, value in _pairs(text)}
    ),
    "bad-words": lambda text, lm: processors.bad_words(
        [[int(token) for token in word.split()] for word in text.split(",")]
    ),
    "min-tokens": lambda text, lm: processors.min_tokens(int(text), lm.stop_ids),
}
"""What makes a processor of its VALUE, by KIND."""


def add_flag(group: argparse._ActionsContainer) -> None:
    """`--processor`, any number of times, for `of`."""
    group.add_argument(
        "--processor",
        metavar="KIND:VALUE",
        type=_named,
        action="append",
        help="what logits go through before a token is chosen; given again, in order: "
        "regex:PATTERN, json:FILE (a schema), penalties:REPETITION,PRESENCE,FREQUENCY, "
        "bias:TOKEN=VALUE,.., bad-words:A B,C (token ids), min-tokens:N",
    )


def of(args: argparse.Namespace, lm: sj.LanguageModel) -> processors.Processor | None:
    """Returns what `--processor` names, in a chain; None where it names nothing.

    Raises:
      ValueError: a value that is none of its kind, with the flag.
      OSError: a file that cannot be read.
    """
    made = []
    for text in getattr(args, "processor", None) or ():
        kind, _, value = text.partition(":")
        try:
            made.append(KINDS[kind](value, lm))
        except (TypeError, ValueError) as error:
            raise ValueError(f"--processor {text}: {error}") from None
    return processors.chain(*made) if made else None


def _named(text: str) -> str:
    """The type of the flag: says which kinds there are."""
    if text.partition(":")[0] not in KINDS or ":" not in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not KIND:VALUE, with one of {', '.join(KINDS)}"
        )
    return text


def _penalties(repetition: float, presence: float = 0.0, frequency: float = 0.0):
    """Returns the penalties, of which the last may be left out."""
    return processors.penalties(
        repetition=repetition, presence=presence, frequency=frequency
    )


def _pairs(text: str) -> list[list[str]]:
    """Returns the parts of `A=B,C=D`."""
    return [part.split("=") for part in text.split(",")]
