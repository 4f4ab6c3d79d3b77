"""Prompts on their way to tokens: conversations turn by turn, templates, lengths."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence

from experiments.lib import prompt_files, runs
from spec_jax import loading
from spec_jax.engine import checks
from spec_jax.model import tokenizer as tokenizer_lib
from spec_jax.paging import index
from spec_jax.rules import sampling as sampling_lib


JOINT = "\n\n"
"""Between the messages of a conversation where there is no chat template."""


def prepare(
    lm: loading.LanguageModel,
    prompts: Sequence[prompt_files.Prompt],
    *,
    raw: bool,
    gen_tokens: int,
    page_size: int,
    sampling: sampling_lib.SamplingSettings | None = None,
) -> list[prompt_files.Prompt]:
    """Makes every turn of every conversation a prompt, and encodes them all.

    A turn's prompt holds the turns before it and their answers, which the target's
    autoregressive decoding writes here, before any clock runs, up to a stop token or
    `gen_tokens`. All runs of these prompts thus answer the same text.

    Args:
      raw: leave out the chat template.
      sampling: settings by which answers are drawn; None is greedy.
    """
    sizes = {"gen_tokens": gen_tokens, "page_size": page_size}
    words, turns = lm.tokenizer, [[prompt] for prompt in prompts]
    while asked := [own for own in turns if own[-1].next_turns]:
        latest = encode(words, [own[-1] for own in asked], raw=raw)
        settings = runs.Settings(
            lm=lm,
            gamma=1,
            capacity=capacity_for(lm, latest, **sizes),
            stop_ids=words.stop_ids,
            sampling=sampling,
            **sizes,
        )
        for own, prompt in zip(asked, latest, strict=True):
            answer = runs.run_plain(settings, prompt.ids).tokens
            if answer and answer[-1] in words.stop_ids:
                answer.pop()
            said = {"role": prompt_files.ASSISTANT, "content": words.decode(answer)}
            text, *rest = prompt.next_turns
            history = (*prompt.messages, said)
            change = {"text": text, "history": history, "next_turns": tuple(rest)}
            own.append(dataclasses.replace(prompt, **change))
    flat = [
        dataclasses.replace(one, id=f"{one.id} turn {number}") if len(own) > 1 else one
        for own in turns
        for number, one in enumerate(own, 1)
    ]
    return encode(words, flat, raw=raw)


def with_options(
    args: argparse.Namespace, words: tokenizer_lib.Tokenizer
) -> tokenizer_lib.Tokenizer:
    """Returns the tokenizer with the options of `--chat-option` for its template.

    Raises:
      ValueError: there is no template, or `--raw` leaves it out.
    """
    options = getattr(args, "chat_option", None)
    if not options:
        return words
    if args.raw or not words.has_chat_template:
        why = "--raw leaves it out" if args.raw else "the model has none"
        raise ValueError(f"--chat-option is of the chat template, and {why}")
    return dataclasses.replace(words, chat_options=options)


def encode(
    words: tokenizer_lib.Tokenizer, prompts: Sequence[prompt_files.Prompt], *, raw: bool
) -> list[prompt_files.Prompt]:
    """Returns prompts with their tokens, by the chat template where the model has one.

    Without one, the messages of a conversation are joined by `JOINT`. Turns that come
    after an answer are left out: `prepare` makes prompts of them.
    """
    use_chat = words.has_chat_template and not raw
    texts = [
        words.apply_chat(prompt.messages)
        if use_chat
        else JOINT.join(message["content"] for message in prompt.messages)
        for prompt in prompts
    ]
    return [
        dataclasses.replace(prompt, ids=words.encode(text, begins=not use_chat))
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def capacity_for(
    lm: loading.LanguageModel,
    prompts: Sequence[prompt_files.Prompt],
    *,
    gen_tokens: int,
    page_size: int,
) -> int:
    """Returns the positions of a cache that fits the longest prompt: whole pages.

    Raises:
      ValueError: a prompt that the model's positions do not fit.
    """
    positions = lm.target.config.max_position_embeddings
    for prompt in prompts:
        name, tokens = f"prompt {prompt.id!r}", prompt.ids
        if len(tokens) > positions - gen_tokens:
            raise ValueError(
                f"{name} has {len(tokens)} tokens, and {gen_tokens} are to come: the "
                f"model has {positions} positions (max_position_embeddings). Shorten "
                f"the prompt to {max(positions - gen_tokens, 0)}, or --gen-tokens to "
                f"{max(positions - len(tokens), 0)}"
            )
        size = lm.target.config.vocab_size
        checks.check_prompt(tokens, vocab_size=size, capacity=positions, what=name)
    longest = max(len(prompt.ids) for prompt in prompts) + gen_tokens
    checks.warn_positions(lm.drafter, longest)
    return index.pages_for(longest, page_size) * page_size


LENGTHS = ("short", "medium", "long")
"""Classes of prompts."""

PER_CONTEXT = 6
"""Prompts of each length in a sweep over contexts, which spends most of its time on
prefill; they lie evenly in the file, and the others are put before them."""

_SEPARATOR = "\n\n\n"


def of_lengths(
    lm: loading.LanguageModel,
    prompts: Sequence[prompt_files.Prompt],
    *,
    lengths: Mapping[str, int],
    per_length: int,
    raw: bool,
) -> list[prompt_files.Prompt]:
    """Returns `per_length` prompts of each class, with the same ends in each; the class
    is their category.

    A prompt that is too long loses its beginning. One that is too short is put after
    the prompts before it in the file (the last ones come before the first), so that it
    ends where its text ends. Later turns of conversations are left out.

    Args:
      lengths: tokens of each class by its name; a chat template's come on top.
      raw: leave the model's chat template out, where it has one.

    Raises:
      ValueError: more prompts than there are, or more tokens than they have.
    """
    if per_length > len(prompts):
        raise ValueError(
            f"{per_length} prompts of each length asked for, but there are "
            f"{len(prompts)} to make them of; ask for fewer or name a larger file"
        )
    words, made = lm.tokenizer, []
    # Evenly through the file, since neighbours may be alike.
    ends = [(i + 1) * len(prompts) // per_length - 1 for i in range(per_length)]
    for name, num_tokens in lengths.items():
        for end in ends:
            ids = _last_tokens(prompts, words, end, num_tokens)
            if words.has_chat_template and not raw:
                ids = words.encode(words.apply_chat(words.decode(ids)))
            own = {"id": prompts[end].id, "text": words.decode(ids), "category": name}
            made.append(prompt_files.Prompt(**own, ids=ids))
    return made


def _last_tokens(
    prompts: Sequence[prompt_files.Prompt],
    tokenizer: tokenizer_lib.Tokenizer,
    end: int,
    num_tokens: int,
) -> list[int]:
    """Returns the last tokens of as many prompts, up to `end`, as are needed."""
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
