"""Rows of prompt files: a JSON value -> a `Prompt`, or what is wrong with it.

Knows the fields of common data sets. Knows nothing of files or of models.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


TEXT_KEYS = ("prompt", "question", "text", "turns")
MESSAGES_KEY = "messages"
ID_KEYS = ("id", "task_id", "question_id")
CATEGORY_KEYS = ("category", "kind")
ASSISTANT, USER = "assistant", "user"

Message = Mapping[str, str]
"""A `role` and a `content`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, or the first turn of a conversation.

    Attributes:
      id: the row's own id, else its line number in the file.
      text: what the model continues or answers; has a character that is not white
        space.
      category: the row's `category` or `kind`, where it has one.
      history: the messages before `text`.
      next_turns: what the user says after the answer to `text`, after the answer to
        that, and so on.
    """

    id: str
    text: str
    category: str | None
    history: tuple[Message, ...] = ()
    next_turns: tuple[str, ...] = ()

    @property
    def messages(self) -> list[Message]:
        """The conversation up to and including `text`."""
        return [*self.history, {"role": USER, "content": self.text}]


def of_text(text: str, *, number: int) -> Prompt:
    """Makes a prompt of a text without a row.

    Args:
      number: of its line.
    """
    return Prompt(id=str(number), text=text, category=None)


def of_row(row: Any, *, number: int) -> Prompt:
    """Reads a row.

    Args:
      row: a JSON value.
      number: the id of a row that has none.

    Raises:
      ValueError: a row that holds no prompt; says what and how to mend it.
    """
    if not isinstance(row, dict):
        raise ValueError(
            f"a JSON {type(row).__name__}, not an object; "
            'write one object a line, such as {"prompt": "..."}'
        )
    turns, history = _turns(row)
    for turn, text in enumerate(turns, start=1):
        check_text(text, what="prompt" if len(turns) == 1 else f"turn {turn}")
    return Prompt(
        id=_id(row) or str(number),
        text=turns[0],
        category=next(
            (row[key] for key in CATEGORY_KEYS if isinstance(row.get(key), str)), None
        ),
        history=history,
        next_turns=tuple(turns[1:]),
    )


def check_text(text: str, *, what: str = "prompt") -> None:
    """Raises `ValueError` for a text that is empty, or that UTF-8 cannot hold."""
    if not text.strip():
        raise ValueError(f"the {what} is empty; remove the line or fill it")
    _check_encodable(text, what)


def _check_encodable(text: str, what: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} of the {what} is half of a surrogate pair; "
            "write the character itself, or both halves"
        ) from None


def _id(row: dict[str, Any]) -> str | None:
    """The first id of the row that is a text or a whole number."""
    for key in ID_KEYS:
        value = row.get(key)
        if isinstance(value, str | int) and not isinstance(value, bool):
            return str(value)
    return None


def _turns(row: dict[str, Any]) -> tuple[list[str], tuple[Message, ...]]:
    """What the user says, turn by turn, and the messages before that."""
    for key in TEXT_KEYS:
        value = row.get(key)
        if isinstance(value, str) and key != "turns":
            return [value], ()
        if isinstance(value, list) and value:
            if all(isinstance(turn, str) for turn in value):
                return value, ()
    if row.get(MESSAGES_KEY):
        return _of_messages(row[MESSAGES_KEY])
    found = ", ".join(row) or "none"
    raise ValueError(
        f"no usable text (keys found: {found}); give the text as 'prompt', "
        "'question', 'text', 'turns' (a list of texts) or 'messages' (a list of "
        "objects with 'role' and 'content')"
    )


def _of_messages(messages: Any) -> tuple[list[str], tuple[Message, ...]]:
    """The last message of the user, and those before; an answer to it is left out."""
    if not isinstance(messages, list):
        raise ValueError(f"'messages' is a JSON {type(messages).__name__}, not a list")
    read = [_message(message, i) for i, message in enumerate(messages, start=1)]
    while read and read[-1]["role"] == ASSISTANT:
        read.pop()
    if not read or read[-1]["role"] != USER:
        last = f"of {read[-1]['role']!r}" if read else "missing"
        raise ValueError(
            f"'messages': the last one to be answered is {last}; end with one of 'user'"
        )
    *history, last = read
    return [last["content"]], tuple(history)


def _message(message: Any, number: int) -> Message:
    """A message with its content as one text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {number} is no object with 'role' and 'content'")
    content = message.get("content")
    if isinstance(content, list):
        content = _joined(content)
    if not isinstance(content, str):
        raise ValueError(
            f"message {number} ({message['role']}): 'content' is no text, nor a list "
            "of parts of type 'text'"
        )
    _check_encodable(content, f"message {number}")
    return {"role": message["role"], "content": content}


def _joined(parts: list) -> str | None:
    """The text of a content in parts; None where a part is no text."""
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        return None
    return "".join(texts)
