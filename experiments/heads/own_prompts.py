"""Prompts that a chat model writes itself, from the bare user turn of its template.

After Xu et al., "Magpie" (arXiv 2406.08464): what a model was tuned on begins with a
user's turn, and so it can write one. No data set is needed.
"""

import collections
import json
import pathlib
import re
from collections.abc import Iterable, Sequence

from experiments.lib import prompt_files
from spec_jax.model import tokenizer as tokenizer_lib


LONGEST = 256
"""Tokens after which a prompt that has not ended is given up."""

SHORTEST = 3  # words
SHINGLE = 4  # words
DISTINCT = 0.7
"""The least share of different shingles of a text: below it the text repeats itself."""

ALIKE = 0.5
"""The share of a text's shingles in another text from which both are one prompt."""

_MARK = "the user's turn begins here"


def bare_turn(tokenizer: tokenizer_lib.Tokenizer) -> list[int]:
    """Returns the tokens of a chat up to where the user begins to write.

    Raises:
      ValueError: there is no chat template, or it does not show the user's words.
    """
    rendered = tokenizer.apply_chat(_MARK)
    head, found, _ = rendered.partition(_MARK)
    if not found or not head:
        raise ValueError(
            f"{tokenizer.path.parent}: its chat template shows nothing before the "
            "user's words, or not the words: name --prompts of your own"
        )
    return tokenizer.encode(head)


class Kept:
    """Prompts that were kept, none like another.

    Args:
      avoided: texts that no prompt may be like, such as those of an evaluation.
    """

    def __init__(self, avoided: Iterable[str] = ()) -> None:
        self.texts: list[str] = []
        self.dropped: collections.Counter[str] = collections.Counter()
        self._holders: dict[tuple[str, ...], list[int]] = {}
        self._count = 0
        for text in avoided:
            self._remember(_shingles(text))

    def add(self, text: str) -> bool:
        """Keeps a prompt unless it is short, repeats itself, or is like another."""
        shingles = _shingles(text)
        why = self._fault(text, shingles)
        if why:
            self.dropped[why] += 1
            return False
        self._remember(shingles)
        self.texts.append(text)
        return True

    def _fault(self, text: str, shingles: list[tuple[str, ...]]) -> str:
        if len(text.split()) < SHORTEST or not any(map(str.isalpha, text)):
            return "short"
        distinct = set(shingles)
        if len(distinct) < DISTINCT * len(shingles):
            return "repeats itself"
        shared = collections.Counter(
            holder for one in distinct for holder in self._holders.get(one, ())
        )
        if shared and max(shared.values()) >= ALIKE * len(distinct):
            return "like another"
        return ""

    def _remember(self, shingles: list[tuple[str, ...]]) -> None:
        for one in set(shingles):
            self._holders.setdefault(one, []).append(self._count)
        self._count += 1


def _shingles(text: str) -> list[tuple[str, ...]]:
    """Returns runs of `SHINGLE` words, or all words of a shorter text as one."""
    words = re.findall(r"\w+", text.lower())
    last = max(1, len(words) - SHINGLE + 1)
    return [tuple(words[first : first + SHINGLE]) for first in range(last)]


def choose(
    tokenizer: tokenizer_lib.Tokenizer,
    texts: Sequence[Sequence[int]],
    avoided: Sequence[str] = (),
) -> Kept:
    """Chooses prompts among what the model wrote.

    Args:
      texts: token ids behind the bare turn, each with the stop token that ended it.
      avoided: file specs of prompts, as `--prompts` takes them.
    """
    sources = [prompt_files.parse(x) for x in avoided]
    kept = Kept(prompt.text for source in sources for prompt in source)
    for tokens in texts:
        *words, last = tokens
        if last not in tokenizer.stop_ids:
            kept.dropped["does not end"] += 1
        elif tokenizer.special_ids.intersection(words):
            kept.dropped["has special tokens"] += 1
        else:
            kept.add(tokenizer.decode(words).strip())
    return kept


def save(kept: Kept, path: pathlib.Path) -> None:
    """Writes one JSON object a line, as `--prompts` reads them."""
    part = path.with_name(path.name + ".part")
    lines = (json.dumps({"prompt": text}, ensure_ascii=False) for text in kept.texts)
    part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    part.replace(path)  # Which is never half a file.
