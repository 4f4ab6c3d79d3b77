"""Prompts: what the flag `--prompts` names, read and checked.

Knows files, and which of their rows are asked for; `prompt_rows` knows the rows. Knows
nothing of tokenizers, chat templates or models. docs/prompts.md is for the reader.
"""

import dataclasses
import hashlib
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.lib import files, prompt_rows
from spec_jax.model import hub


JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
STANDARD_INPUT = "-"
DATA_SETS = "docs/prompts.md says where common data sets come from"

_COUNT = r"(?P<limit>[0-9]+)(@(?P<seed>[0-9]+))?"
_NUMBER = re.compile(r"(?P<sign>[+-]?)" + _COUNT)
_LIMIT = re.compile(r"(?P<path>.+):" + _COUNT, re.DOTALL)
_BLANK = re.compile(r"[ \t\r\n]*")

BUNDLED = pathlib.Path(__file__).parents[1] / "prompts" / "python_50.jsonl"
"""Fifty beginnings of Python functions, classes and modules."""

Prompt = prompt_rows.Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    """What a spec names.

    Attributes:
      limit: prompts to take; None for all of them.
      seed: of the sample that is taken; None for the first ones.
    """

    path: pathlib.Path
    limit: int | None = None
    seed: int | None = None


def parse(spec: str, *, default_file: str | pathlib.Path) -> list[Prompt]:
    """Reads the prompts that the value of a `--prompts` flag names.

    Args:
      spec: a number N, for the first N prompts of `default_file`; or the path of a
        file, or `-` for standard input, with an optional limit `:N`. `N@SEED` takes a
        sample of N instead of the first, in the order of the file and, where rows
        have a category, from each category in proportion. Files that end in
        `.jsonl`, `.ndjson` or `.json` hold one JSON object a line, or one JSON array
        of objects or texts, with the text under `prompt`, `question`, `text`,
        `turns` (all turns of a conversation) or `messages`, in this order of
        preference. Other files hold one prompt a line. Standard input is JSON where
        it begins with `{` or `[`. Blank lines are skipped, and no row is read beyond
        the limit of the first ones.
      default_file: the bundled prompts.

    Raises:
      ValueError: nothing usable is named; one line says what and how to mend it.
      MemoryError: a file for which there is no memory.
    """
    source = _source(spec, pathlib.Path(default_file))
    prompts = _prompts(source.path)
    if source.seed is not None:
        prompts = list(prompts)
        if source.limit <= len(prompts):
            prompts = sample(prompts, source.limit, seed=source.seed)
    return _take(iter(prompts), source.limit, source.path)


def sample(prompts: Sequence[Prompt], size: int, *, seed: int) -> list[Prompt]:
    """Draws `size` of the prompts, the same for the same prompts and seed.

    Each category has its share of the sample, rounded so that the shares add up: by
    the largest remainders, of equal ones the first. Within a category each row is as
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
        # A hash and no generator: the same rows in every version of Python.
        return hashlib.sha256(f"{seed}:{place}".encode()).digest()

    chosen = [
        place
        for places, count in zip(by_category.values(), counts, strict=True)
        for place in sorted(places, key=drawn)[:count]
    ]
    return [prompts[place] for place in sorted(chosen)]


def _source(spec: str, default_file: pathlib.Path) -> _Source:
    """Splits a spec; a file whose name really ends in `:N` is taken whole."""
    number = _NUMBER.fullmatch(spec)
    if number is not None:
        if number["sign"] == "-" or int(number["limit"]) < 1:
            available = len(list(_prompts(default_file)))
            raise ValueError(
                f"--prompts {spec}: the number of prompts must lie in 1..{available}"
            )
        return _Source(path=default_file, **_counts(number))
    match = _LIMIT.fullmatch(spec)
    if match is None or pathlib.Path(spec).is_file():
        return _Source(path=pathlib.Path(spec))
    if int(match["limit"]) < 1:
        raise ValueError(
            f"--prompts {spec}: the limit {match['limit']} must be at least 1; "
            f"leave out ':{match['limit']}' to use the whole file"
        )
    return _Source(path=pathlib.Path(match["path"]), **_counts(match))


def _counts(match: re.Match) -> dict[str, int | None]:
    seed = match["seed"]
    return {"limit": int(match["limit"]), "seed": None if seed is None else int(seed)}


def _take(
    prompts: Iterator[Prompt], limit: int | None, path: pathlib.Path
) -> list[Prompt]:
    """The first `limit` prompts; fewer than asked for is an error, not a shrug."""
    taken = []
    for prompt in prompts:
        taken.append(prompt)
        if len(taken) == limit:
            break
    if not taken:
        raise ValueError(f"{path}: no prompts in this file; write one prompt a line")
    if limit is not None and len(taken) < limit:
        raise ValueError(
            f"{path}: {limit} prompts asked for, but the file has {len(taken)}; "
            f"ask for at most {len(taken)}"
        )
    return taken


def _prompts(path: pathlib.Path) -> Iterator[Prompt]:
    """The file's prompts in order; a faulty row raises when it is reached."""
    text = _read(path)
    first = text[_BLANK.match(text).end() :][:1]
    is_json = path.suffix.lower() in JSON_SUFFIXES
    if str(path) == STANDARD_INPUT:
        is_json = first in ("{", "[")
    if is_json and first == "[":
        rows = _array(text, path)
    elif is_json:
        rows = _json_lines(text, path)
    else:
        for number, line in _lines(text):
            yield prompt_rows.of_text(line, number=number)
        return
    for number, row in rows:
        try:
            yield prompt_rows.of_row(row, number=number)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    # Not `splitlines`: it also splits at U+2028 and form feeds, which may stand
    # inside a prompt.
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if line.strip():
            yield number, line


def _json_lines(text: str, path: pathlib.Path) -> Iterator[tuple[int, Any]]:
    """The values of a file of JSON lines, with the numbers of their lines."""
    for number, line in _lines(text):
        value, end = _value(line, 0, path, number)
        rest = line[end:].strip()
        if rest:
            raise ValueError(
                f"{path}, line {number}: invalid JSON (extra text at column "
                f"{end + 1}); write one JSON object a line"
            )
        yield number, value


def _array(text: str, path: pathlib.Path) -> Iterator[tuple[int, Any]]:
    """The entries of a JSON array, texts as rows, with the lines they begin on."""
    at, seen, number = text.index("[") + 1, 0, 1
    while True:
        at = _BLANK.match(text, at).end()
        number += text.count("\n", seen, at)
        seen = at
        if text[at : at + 1] == "]":
            return
        value, at = _value(text, at, path, number)
        yield number, {"prompt": value} if isinstance(value, str) else value
        at = _BLANK.match(text, at).end()
        if text[at : at + 1] == ",":
            at += 1
        elif text[at : at + 1] != "]":
            number += text.count("\n", seen, at)
            raise ValueError(
                f"{path}, line {number}: invalid JSON (a comma or the end of the array "
                "is missing); write a JSON array, or one JSON object a line"
            )


def _value(text: str, at: int, path: pathlib.Path, number: int) -> tuple[Any, int]:
    """The JSON value at a place on line `number`, and where it ends."""
    at = _BLANK.match(text, at).end()
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        line = number + text.count("\n", at, error.pos)
        raise ValueError(
            f"{path}, line {line}: invalid JSON ({error.msg} at column {error.colno}); "
            "write one JSON object a line"
        ) from None
    except (ValueError, RecursionError) as error:  # Huge integers, deep nesting.
        raise ValueError(
            f"{path}, line {number}: unreadable JSON ({error}); write one JSON object "
            "a line"
        ) from None


_DECODER = json.JSONDecoder()


def _read(path: pathlib.Path) -> str:
    """The text of a UTF-8 file, without a byte order mark."""
    try:
        data = _bytes(path)
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no such file; --prompts takes a number or the path of a prompt "
            f"file, with an optional limit as in 'file.jsonl:50' ({_hint(path)})"
        ) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line_number = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line_number}: not UTF-8 (byte 0x{data[error.start]:02x} "
            f"at offset {error.start}); convert the file to UTF-8"
        ) from None


def _bytes(path: pathlib.Path) -> bytes:
    if str(path) != STANDARD_INPUT:
        if "\0" in str(path):
            raise ValueError(f"{path!r}: cannot be read (a null byte in the name)")
        return files.read(path)
    data = sys.stdin.buffer.read(files.MAX_BYTES + 1)
    if len(data) > files.MAX_BYTES:
        raise ValueError(
            f"standard input has more than {files.MAX_BYTES:,} bytes, the most that "
            "are read; give fewer prompts"
        )
    return data


def _hint(path: pathlib.Path) -> str:
    """Where a file that is not there may come from."""
    if path.suffix.lower() in JSON_SUFFIXES:
        return DATA_SETS
    return hub.hint(path, kind="dataset") or DATA_SETS
