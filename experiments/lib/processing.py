"""Logits processors of a command line: the flag `--processor KIND:VALUE`."""

import argparse
import pathlib
from collections.abc import Callable, Mapping

import spec_jax as sj
from spec_jax import processors


PENALTIES = "repetition", "presence", "frequency"

KINDS: Mapping[str, Callable[[str, sj.LanguageModel], processors.Processor]] = {
    "regex": processors.regex,
    "json": lambda text, lm: processors.json_schema(pathlib.Path(text).read_text(), lm),
    # The last ones may be left out.
    "penalties": lambda text, lm: processors.penalties(
        **dict(zip(PENALTIES, map(float, text.split(",", 2)), strict=False))
    ),
    "bias": lambda text, lm: processors.logit_bias(
        {int(t): float(x) for t, x in (part.split("=") for part in text.split(","))}
    ),
    "bad-words": lambda text, lm: processors.bad_words(
        [[int(token) for token in word.split()] for word in text.split(",")]
    ),
    "min-tokens": lambda text, lm: processors.min_tokens(int(text), lm.stop_ids),
}
"""Functions that make a processor from its VALUE, by KIND."""


def of(args: argparse.Namespace, lm: sj.LanguageModel) -> processors.Processor | None:
    """Returns what `--processor` names, in a chain; None where it names nothing.

    Raises:
      ValueError: a value that its kind cannot read, with the flag.
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


def named(text: str) -> str:
    """Parses the value of the flag; the error lists the kinds."""
    if text.partition(":")[0] not in KINDS or ":" not in text:
        raise ValueError(f"{text!r} is not KIND:VALUE, with one of {', '.join(KINDS)}")
    return text
