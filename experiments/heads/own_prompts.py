"""Prompts that a chat model writes itself, from the bare user turn of its template.

As in Xu et al., "Magpie" (arXiv 2406.08464): the texts that a chat model was tuned on
begin with a user's turn, and so it can write one. No data set is needed.
"""

import collections
import json
import pathlib
import re
from collections.abc import Iterable, Sequence

from experiments.lib import files, prompt_files
from spec_jax.model import tokenizer as tokenizer_lib


LONGEST = 256
"""Tokens after which a prompt that has not ended is given up."""

SHORTEST = 3  # words
SHINGLE = 4  # words
DISTINCT = 0.7
"""The least share of different shingles of a text: below it the text repeats itself."""

ALIKE = 0.5
"""The least share of a text's shingles in another text by which both are alike."""

_MARK = "the user's turn begins here"


def bare_turn(tokenizer: tokenizer_lib.Tokenizer) -> list[int]:
    """Returns the tokens of a chat before the first words of the user.

    Raises:
      ValueError: there is no chat template, or it lacks the words or text before them.
    """
    rendered = tokenizer.apply_chat(_MARK)
    head, found, _ = rendered.partition(_MARK)
    if not found or not head:
        raise ValueError(
            f"{tokenizer.path.parent}: its chat template shows nothing before the "
            "user's words, or not the words: name --prompts of your own"
        )
    return tokenizer.encode(head)


def _shingles(text: str) -> list[tuple[str, ...]]:
    """Returns runs of `SHINGLE` words, or all words of a shorter text as one."""
    words = re.findall(r"\w+", text.lower())
    last = max(1, len(words) - SHINGLE + 1)
    return [tuple(words[first : first + SHINGLE]) for first in range(last)]


def choose(
    tokenizer: tokenizer_lib.Tokenizer,
    texts: Sequence[Sequence[int]],
    avoided: Sequence[str] = (),
) -> tuple[list[str], collections.Counter[str]]:
    """Returns the usable prompts, and counts of why other texts were dropped.

    Args:
      texts: token ids behind the bare turn, each with the stop token that ended it.
      avoided: prompts that none may be like: files, as `--prompts` takes them.
    """
    sources = [prompt_files.parse(x) for x in avoided]
    written, dropped = [], collections.Counter[str]()
    for *words, last in texts:
        if last not in tokenizer.stop_ids:
            dropped["does not end"] += 1
        elif tokenizer.special_ids.intersection(words):
            dropped["has special tokens"] += 1
        else:
            written.append(tokenizer.decode(words).strip())
    kept, more = distinct(written, [x.text for source in sources for x in source])
    return kept, dropped + more


def distinct(
    texts: Iterable[str], avoided: Sequence[str] = ()
) -> tuple[list[str], collections.Counter[str]]:
    """Returns the texts that are not short, do not repeat themselves, and are not like
    an earlier or avoided one; and how many were dropped, by reason."""
    kept, dropped = [], collections.Counter[str]()
    holders = collections.defaultdict[tuple[str, ...], list[int]](list)
    for number, text in enumerate([*avoided, *texts]):
        shingles = _shingles(text)
        own = set(shingles)
        shared = collections.Counter(one for x in own for one in holders.get(x, ()))
        why = ""
        if len(text.split()) < SHORTEST or not any(map(str.isalpha, text)):
            why = "short"
        elif len(own) < DISTINCT * len(shingles):
            why = "repeats itself"
        elif max(shared.values(), default=0) >= ALIKE * len(own):
            why = "like another"
        is_avoided = number < len(avoided)
        if why and not is_avoided:
            dropped[why] += 1
            continue
        for one in own:
            holders[one].append(number)
        kept += [] if is_avoided else [text]
    return kept, dropped


def save(kept: Sequence[str], path: pathlib.Path) -> None:
    """Writes one JSON object a line, as `--prompts` reads them."""
    lines = (json.dumps({"prompt": text}, ensure_ascii=False) for text in kept)
    with files.replacing(path) as part:
        part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
