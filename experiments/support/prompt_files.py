"""Prompts: what the flag `--prompts N|FILE[:N]` names, read and checked.

Knows files and their rows. Knows nothing of tokenizers, chat templates or models.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any


TEXT_KEYS = ("prompt", "question", "text", "turns")
ID_KEYS = ("id", "task_id", "question_id")
CATEGORY_KEYS = ("category", "kind")
JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".json")

_NUMBER = re.compile(r"[+-]?[0-9]+")
_LIMIT = re.compile(r"(?P<path>.+):(?P<limit>[0-9]+)", re.DOTALL)


BUNDLED = pathlib.Path(__file__).parents[1] / "prompts" / "python_50.jsonl"
"""Fifty beginnings of Python functions, classes and modules."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt.

    Attributes:
      id: the row's own id, else its line number in the file.
      text: what the model continues; has a character that is not white space.
      category: the row's `category` or `kind`, where it has one.
    """

    id: str
    text: str
    category: str | None


def parse(spec: str, *, default_file: str | pathlib.Path) -> list[Prompt]:
    """Reads the prompts that the value of a `--prompts` flag names.

    Args:
      spec: a number N, for the first N prompts of `default_file`; or the path of a
        file, with an optional limit `:N`. Files that end in `.jsonl`, `.ndjson` or
        `.json` hold one JSON object a line, with the text under `prompt`,
        `question`, `text` or `turns` (whose first turn is used), in this order of
        preference. Other files hold one prompt a line. Blank lines are skipped, and
        nothing is read beyond the limit.
      default_file: the bundled prompts.

    Raises:
      ValueError: nothing usable is named; one line says what and how to mend it.
    """
    if _NUMBER.fullmatch(spec):
        path, limit = pathlib.Path(default_file), int(spec)
        if limit < 1:
            available = len(list(_prompts(path)))
            raise ValueError(
                f"--prompts {spec}: the number of prompts must lie in 1..{available}"
            )
    else:
        path, limit = _split_limit(spec)
        if limit is not None and limit < 1:
            raise ValueError(
                f"--prompts {spec}: the limit {limit} must be at least 1; "
                f"leave out ':{limit}' to use the whole file"
            )
    return _take(_prompts(path), limit, path)


def _split_limit(spec: str) -> tuple[pathlib.Path, int | None]:
    """Splits `FILE:N`; a file whose name really ends in `:N` is taken whole."""
    match = _LIMIT.fullmatch(spec)
    if match is None or pathlib.Path(spec).is_file():
        return pathlib.Path(spec), None
    return pathlib.Path(match["path"]), int(match["limit"])


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
    """The file's prompts in order; a faulty line raises when it is reached."""
    is_json = path.suffix.lower() in JSON_LINES_SUFFIXES
    # Not `splitlines`: it also splits at U+2028 and form feeds, which may stand
    # inside a prompt.
    for line_number, line in enumerate(_read(path).split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        if is_json:
            yield _prompt_of_row(line, f"{path}, line {line_number}", line_number)
        else:
            yield Prompt(id=str(line_number), text=line, category=None)


def _read(path: pathlib.Path) -> str:
    """The text of a UTF-8 file, without a byte order mark."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no such file; --prompts takes a number or the path of a "
            "prompt file, with an optional limit as in 'file.jsonl:50'"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name.
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{path}: cannot be read ({reason}); --prompts needs a readable file"
        ) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line_number = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line_number}: not UTF-8 (byte 0x{data[error.start]:02x} "
            f"at offset {error.start}); convert the file to UTF-8"
        ) from None


def _prompt_of_row(line: str, where: str, line_number: int) -> Prompt:
    """One line of a JSON-lines file as a `Prompt`."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: invalid JSON ({error.msg} at column {error.colno}); "
            "write one JSON object a line"
        ) from None
    except (ValueError, RecursionError) as error:  # Huge integers, deep nesting.
        raise ValueError(
            f"{where}: unreadable JSON ({error}); write one JSON object a line"
        ) from None
    if not isinstance(row, dict):
        raise ValueError(
            f"{where}: a JSON {type(row).__name__}, not an object; "
            'write one object a line, such as {"prompt": "..."}'
        )
    return Prompt(
        id=_id(row) or str(line_number),
        text=_checked_text(row, where),
        category=next(
            (row[key] for key in CATEGORY_KEYS if isinstance(row.get(key), str)), None
        ),
    )


def _id(row: dict[str, Any]) -> str | None:
    """The first id of the row that is a text or a whole number."""
    for key in ID_KEYS:
        value = row.get(key)
        if isinstance(value, str | int) and not isinstance(value, bool):
            return str(value)
    return None


def _checked_text(row: dict[str, Any], where: str) -> str:
    """The row's text: not empty, and encodable."""
    text = _text(row)
    if text is None:
        found = ", ".join(row) or "none"
        raise ValueError(
            f"{where}: no usable text (keys found: {found}); give the text as "
            "'prompt', 'question', 'text' or 'turns' (a list of texts)"
        )
    if not text.strip():
        raise ValueError(f"{where}: the prompt is empty; remove the line or fill it")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: character {error.start} of the prompt is half of a surrogate "
            "pair; write the character itself, or both halves"
        ) from None
    return text


def _text(row: dict[str, Any]) -> str | None:
    """The text under the first key that holds one."""
    for key in TEXT_KEYS:
        value = row.get(key)
        if key == "turns" and isinstance(value, list) and value:
            value = value[0]
        elif key == "turns":
            continue
        if isinstance(value, str):
            return value
    return None
