"""Prompts that the flag `--prompts` names, read and checked.

This module handles files, and the fields of common data sets, but no tokenizers, chat
templates or models. docs/prompts.md describes the flag.
"""

import dataclasses
import hashlib
import itertools
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.lib import files
from spec_jax.model import hub


JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
DATA_SETS = "docs/prompts.md says where common data sets come from"

_SPEC = re.compile(
    r"((?P<path>.+):)?[+]?(?P<limit>-?[0-9]+)(@(?P<seed>[0-9]+))?", re.DOTALL
)

BUNDLED = pathlib.Path(__file__).parents[1] / "prompts" / "python_50.jsonl"
"""Fifty beginnings of Python functions, classes and modules."""

TEXT_KEYS = ("prompt", "question", "text", "turns")
MESSAGES_KEY = "messages"
ID_KEYS = ("id", "task_id", "question_id")
CATEGORY_KEYS = ("category", "kind")
ASSISTANT, USER = "assistant", "user"

Message = Mapping[str, str]
"""A dictionary with a `role` and a `content`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, or the first turn of a conversation."""

    id: str  # the row's own id, else its line number in the file
    # Continued or answered by the model; has a character that is not white space
    text: str
    category: str | None  # the row's `category` or `kind`, where it has one
    history: tuple[Message, ...] = ()  # the messages before `text`
    # Turns of the user after the answer to `text`, after the next answer, and so on
    next_turns: tuple[str, ...] = ()
    # Tokens of the conversation up to `text`, once it is encoded
    ids: list[int] = dataclasses.field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """The conversation up to and including `text`."""
        return [*self.history, {"role": USER, "content": self.text}]


def parse(spec: str) -> list[Prompt]:
    """Reads the prompts that the value of a `--prompts` flag names.

    Args:
      spec: a number N, for the first N bundled prompts; or the path of a file, with an
        optional limit `:N`. `N@SEED` takes a `sample` of N instead of the first. Files
        that end in one of `JSON_SUFFIXES` hold one JSON object a line, with the text
        under one of `TEXT_KEYS` or `messages`, in this order of preference. Other files
        hold one prompt a line. Blank lines are skipped, and without a seed no row is
        read beyond the limit.

    Raises:
      ValueError: no usable prompts; one line says why, and how to mend it.
      MemoryError: a file for which there is no memory.
    """
    match = _SPEC.fullmatch(spec)
    if match is None or (match["path"] and pathlib.Path(spec).is_file()):
        path, limit, seed = pathlib.Path(spec), None, None  # May end in `:N`.
    else:
        path, limit = pathlib.Path(match["path"] or BUNDLED), int(match["limit"])
        seed = match["seed"] and int(match["seed"])
        if limit < 1:
            raise ValueError(
                f"--prompts {spec}: the number of prompts must be at least 1"
            )
    prompts = _prompts(path)
    if seed is not None:
        prompts = list(prompts)
        if limit <= len(prompts):
            prompts = sample(prompts, limit, seed=seed)
    taken = list(itertools.islice(prompts, limit))
    if not taken:
        raise ValueError(f"{path}: no prompts in this file; write one prompt a line")
    if limit is not None and len(taken) < limit:
        raise ValueError(
            f"{path}: {limit} prompts asked for, but the file has {len(taken)}; "
            f"ask for at most {len(taken)}"
        )
    return taken


def sample(prompts: Sequence[Prompt], size: int, *, seed: int) -> list[Prompt]:
    """Draws `size` of the prompts, the same for the same prompts and seed.

    Each category has its share of the sample, rounded so that the shares add up: by
    the largest remainders, the first of equal ones. Within a category each row is as
    likely as any other.

    Args:
      size: at most the number of prompts.

    Returns:
      Prompts in the order in which they were given.
    """
    by_category: dict[str | None, list[int]] = {}
    for place, prompt in enumerate(prompts):
        by_category.setdefault(prompt.category, []).append(place)
    shares = [divmod(size * len(p), len(prompts)) for p in by_category.values()]
    missing = size - sum(whole for whole, _ in shares)
    by_remainder = sorted(range(len(shares)), key=lambda i: -shares[i][1])
    counts = [
        whole + (i in by_remainder[:missing]) for i, (whole, _) in enumerate(shares)
    ]

    def drawn(place: int) -> bytes:
        # A hash, not a generator, draws the same rows in every version of Python.
        return hashlib.sha256(f"{seed}:{place}".encode()).digest()

    chosen = [
        place
        for places, count in zip(by_category.values(), counts, strict=True)
        for place in sorted(places, key=drawn)[:count]
    ]
    return [prompts[place] for place in sorted(chosen)]


def _prompts(path: pathlib.Path) -> Iterator[Prompt]:
    """Yields the file's prompts in order; a faulty row raises when it is reached."""
    # Not `splitlines`: it also splits at U+2028 and form feeds, which may stand
    # inside a prompt.
    lines = _read(path).split("\n")
    if path.suffix.lower() not in JSON_SUFFIXES:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                text = line.removesuffix("\r")
                yield Prompt(id=str(number), text=text, category=None)
        return
    hint = '; write one object a line, such as {"prompt": "..."}'
    for number, row in files.rows_of_lines(path, lines, hint=hint):
        try:
            yield _of_row(row, number=number)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None


def _read(path: pathlib.Path) -> str:
    """Returns the text of a UTF-8 file, without a byte order mark."""
    try:
        data = files.read(path)
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        hint = DATA_SETS
        if path.suffix.lower() not in JSON_SUFFIXES and hub.hint(path):
            call = f"hf download {path} --repo-type dataset --local-dir {path.name}"
            hint = f"for a data set of the hub: `{call}`, then name a JSON file of it"
        raise ValueError(
            f"{path}: no such file; --prompts takes a number or the path of a prompt "
            f"file, with an optional limit as in 'file.jsonl:50' ({hint})"
        ) from None
    except UnicodeDecodeError as error:
        line_number = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line_number}: not UTF-8; convert the file to UTF-8"
        ) from None


def _of_row(row: dict[str, Any], *, number: int) -> Prompt:
    """Returns the prompt of a row.

    Args:
      number: the id of a row that has none.

    Raises:
      ValueError: a row that holds no prompt; the message says how to mend it.
    """
    history, (text, *next_turns) = _turns(row)
    if not all(turn.strip() for turn in (text, *next_turns)):
        raise ValueError("the prompt is empty; remove the line or fill it")
    ids = [row[k] for k in ID_KEYS if type(row.get(k)) in (str, int)]
    categories = [row[k] for k in CATEGORY_KEYS if isinstance(row.get(k), str)]
    return Prompt(
        id=str((*ids, number)[0]),
        text=text,
        category=(*categories, None)[0],
        history=history,
        next_turns=tuple(next_turns),
    )


def _turns(row: dict[str, Any]) -> tuple[tuple[Message, ...], list[str]]:
    """Returns the messages before the user's texts, and these texts, turn by turn; an
    answer to the last one is left out."""
    for key in TEXT_KEYS:
        value = row.get(key)
        if isinstance(value, str) and key != "turns":
            return (), [value]
        if isinstance(value, list) and value and set(map(type, value)) == {str}:
            return (), value
    if not row.get(MESSAGES_KEY):
        raise ValueError(
            f"no usable text (keys found: {', '.join(row) or 'none'}); give the text "
            "as 'prompt', 'question', 'text', 'turns' (a list of texts) or 'messages' "
            "(a list of objects with 'role' and 'content')"
        )
    given = []
    for number, message in enumerate(row[MESSAGES_KEY], start=1):
        own = message if isinstance(message, dict) else {}
        given.append({key: own.get(key) for key in ("role", "content")})
        if set(map(type, given[-1].values())) != {str}:
            raise ValueError(
                f"message {number} is no object with texts as 'role' and 'content'"
            )
    while given and given[-1]["role"] == ASSISTANT:
        given.pop()
    if not given or given[-1]["role"] != USER:
        last = f"of {given[-1]['role']!r}" if given else "missing"
        raise ValueError(
            f"'messages': the last one to be answered is {last}; end with one of 'user'"
        )
    *history, last = given
    return tuple(history), [last["content"]]


def without_folders(source: str) -> str:
    """Returns the path of a prompt source from the file's folder on."""
    return "/".join(pathlib.PurePath(source).parts[-2:])
