"""Prompts of stated lengths, made of the prompts of a file.

Knows texts, tokens and lengths; knows nothing of models.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from experiments.lib import prompt_files
from spec_jax.model import tokenizer as tokenizer_lib


NAMES = ("short", "medium", "long")

_SEPARATOR = "\n\n\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthPrompt:
    """A prompt of one class of lengths.

    Attributes:
      length: the name of the class.
      id: of the prompt of the file that stands last in it.
      tokens: as many as the class says, and a chat template's besides.
    """

    length: str
    id: str
    tokens: list[int]


def make(
    prompts: Sequence[prompt_files.Prompt],
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    lengths: Mapping[str, int],
    per_length: int,
    raw: bool,
) -> list[LengthPrompt]:
    """`per_length` prompts of each class, the same ends in each of them.

    A prompt that is too long loses its beginning. One that is too short gets the
    prompts before it in the file, the last ones before the first, so that it ends
    where its text ends.

    Args:
      lengths: tokens of each class by its name.
      raw: leave the model's chat template out, where it has one.

    Raises:
      ValueError: more prompts than there are, or more tokens than they have.
    """
    if per_length > len(prompts):
        raise ValueError(
            f"{per_length} prompts of each length asked for, but there are "
            f"{len(prompts)} to make them of; ask for fewer or name a larger file"
        )
    # Evenly through the file, whose neighbours may be alike.
    ends = [(i + 1) * len(prompts) // per_length - 1 for i in range(per_length)]
    made = []
    for name, num_tokens in lengths.items():
        for end in ends:
            tokens = _last_tokens(prompts, tokenizer, end, num_tokens)
            if tokenizer.has_chat_template and not raw:
                text = tokenizer.apply_chat(tokenizer.decode(tokens))
                tokens = tokenizer.encode(text)
            made.append(LengthPrompt(length=name, id=prompts[end].id, tokens=tokens))
    return made


def _last_tokens(
    prompts: Sequence[prompt_files.Prompt],
    tokenizer: tokenizer_lib.Tokenizer,
    end: int,
    num_tokens: int,
) -> list[int]:
    """The last tokens of as many prompts, up to `end`, as are needed."""
    text = ""
    tokens: list[int] = []
    for back in range(len(prompts)):
        part = prompts[end - back].text
        text = part + _SEPARATOR + text if back else part
        tokens = tokenizer.encode(text)
        if len(tokens) >= num_tokens:
            return tokens[-num_tokens:]
    raise ValueError(
        f"prompts of {num_tokens} tokens asked for, but all {len(prompts)} together "
        f"have {len(tokens)}; ask for less or name a larger file"
    )
