"""Continuations of texts by the target, greedy or drawn: texts that a drafter meets.

Texts are decoded in batches by the library's scheduler, without drafts, so that each is
the target's own to the last bit. A text is kept as soon as it ends: after a killed run,
or with more prompts, only the missing texts are written.
"""

import argparse
import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Sequence

import numpy as np

from experiments.heads import own_prompts
from experiments.lib import fan_out, prompt_files, prompts as prompts_lib, terminal
from spec_jax import algorithms, loading
from spec_jax.engine import requests as requests_lib
from spec_jax.model import fingerprint, tokenizer as tokenizer_lib
from spec_jax.ops import dispatch
from spec_jax.rules import sampling


SLOTS = 80  # As many rows as a native forward takes at once.
PAGE_SIZE = 16
SEEDS = 1 << 20  # Seeds of texts, for each --seed: added prompts change none of them.
TASK = 1024
"""Texts that a process of a cluster writes before it asks for others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writer:
    """A target, and prompts that it continues.

    Attributes:
      lm: its stop tokens end a text, and are kept; its drafter is asked for no drafts.
      prompts: token ids of each.
      seeds: one for each prompt, whose text is drawn at temperature 1; one below 0: it
        is greedy.
      length: tokens of a text at most, its prompt included.
    """

    lm: loading.LanguageModel
    prompts: Sequence[Sequence[int]]
    seeds: Sequence[int]
    length: int

    @property
    def digest(self) -> str:
        """Twelve digits of the SHA-256 of all that decides the text of any prompt."""
        target, stop_ids = self.lm.target, self.lm.stop_ids
        isa = dispatch.instruction_set(target.impl)
        told = f"{target.config} {self.length} {target.impl} {isa} {stop_ids}"
        return _digest(fingerprint.of_params(self.lm.params), told)

    def key(self, number: int) -> str:
        """Returns twelve digits of the SHA-256 of a prompt and its seed."""
        return _digest([int(x) for x in self.prompts[number]], int(self.seeds[number]))

    def __call__(self, numbers: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """Yields the number of a prompt and the tokens that follow it, as texts end."""
        requests = [
            requests_lib.Request(
                prompt=[int(token) for token in self.prompts[number]],
                max_tokens=self.length - len(self.prompts[number]),
                gamma=0,
                sampling=sampling.make_settings(
                    temperature=float(self.seeds[number] >= 0),
                    seed=max(int(self.seeds[number]), 0),
                ),
            )
            for number in numbers
        ]
        plain = algorithms.speculative(self.lm.target, self.lm.drafter).scheduler(
            (self.lm.params, None),
            num_slots=min(SLOTS, len(requests)),
            capacity=self.length,
            page_size=PAGE_SIZE,
            stop_ids=self.lm.stop_ids,
        )
        for ended in plain.run(requests):
            yield numbers[ended.number], ended.tokens


def _digest(*values: object) -> str:
    return hashlib.sha256(f"{values}".encode()).hexdigest()[:12]


def writer_of(args: argparse.Namespace) -> Writer:
    """Returns the writer of `--samples` rollouts a prompt, every second one drawn; or,
    for the stage of that name, of `--write` prompts, drawn after a bare user turn.

    Raises:
      ValueError: as `prompt_ids`, and as `own_prompts.bare_turn`.
    """
    lm = loading.load(args.target, drafter="ngram", gamma_max=1, impl=args.impl)
    tokenizer = prompts_lib.with_options(args, lm.tokenizer)
    if args.stage == "prompts":
        ids = [own_prompts.bare_turn(tokenizer)] * args.write
        is_greedy, length = False, len(ids[0]) + own_prompts.LONGEST
    else:
        prompts = prompt_ids(args, tokenizer)
        ids = [prompt for prompt in prompts for _ in range(args.samples)]
        is_greedy, length = np.arange(len(ids)) % args.samples % 2 == 0, args.length
    seeds = np.where(is_greedy, -1, args.seed * SEEDS + np.arange(len(ids)))
    return Writer(lm=lm, prompts=ids, seeds=seeds, length=length)


def write(args: argparse.Namespace, writer: Writer) -> list[list[int]]:
    """Writes the texts that are missing; returns the tokens after each prompt.

    A file of JSON lines in `--work`, named after the writer, gets each text when it has
    ended; texts that it has are not written again.

    Args:
      writer: for this process; each of a cluster has its own `writer_of(args)`.
    """
    kept = args.work / f"texts_{writer.digest}.jsonl"
    text = kept.read_bytes() if kept.exists() else b""
    whole = text[: text.rfind(b"\n") + 1]  # A kill leaves half a line.
    done = dict(map(json.loads, whole.splitlines()))
    keys = [writer.key(number) for number in range(len(writer.prompts))]
    missing = [number for number, key in enumerate(keys) if key not in done]
    size = max(1, len(missing)) if args.ray is None else TASK
    starts = range(0, len(missing), size)
    tasks = [tuple(missing[first : first + size]) for first in starts]
    began, written = time.perf_counter(), 0
    shown = terminal.counted("texts", total=len(keys), done=len(keys) - len(missing))
    with kept.open("a", encoding="utf-8") as file, shown as advance:
        file.truncate(len(whole))
        for _, texts in fan_out.each(args, tasks, writer, writer_of, args):
            for number, tokens in texts:
                done[keys[number]] = tokens
                print(json.dumps([keys[number], tokens]), file=file, flush=True)
                written += len(tokens)
                advance()
    seconds = time.perf_counter() - began
    if written:
        print(f"{written:,} tokens in {seconds:,.0f} s: {written / seconds:,.0f} tok/s")
    return [done[key] for key in keys]


def prompt_ids(
    args: argparse.Namespace, tokenizer: tokenizer_lib.Tokenizer
) -> list[list[int]]:
    """Returns the tokens of prompts: the last `--prefix` of raw text, all of a chat.

    A chat is not cut, because no user sends one without its beginning.

    Raises:
      ValueError: chats that leave nothing to write.
    """
    prompts = prompt_files.parse(args.prompts)
    ids = [one.ids for one in prompts_lib.encode(tokenizer, prompts, raw=args.raw)]
    if not tokenizer.has_chat_template or args.raw:
        # A longer prompt keeps its end, which the continuation follows.
        return [x[-args.prefix :] for x in ids]
    long = [len(x) for x in ids if len(x) >= args.length]
    if long:
        raise ValueError(
            f"{len(long)} of {len(ids)} prompts have up to {max(long)} tokens with the "
            f"chat template, which are not cut, and --length {args.length} leaves "
            f"nothing to write; take --length {max(long) + args.prefix}, say, or leave "
            "these prompts out"
        )
    return ids


def padded(
    writer: Writer, texts: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Joins prompts and their texts, as `targets.Texts` has them.

    Returns:
      The tokens `[n, length] int32`, padded with each text's last one, and which rows
      the target wrote a token after, `[n, length] bool`: from a prompt's last token to
      its text's last but one.
    """
    joined = [[*x, *text] for x, text in zip(writer.prompts, texts, strict=True)]
    tokens = np.array([x + x[-1:] * (writer.length - len(x)) for x in joined], np.int32)
    given = np.array([len(prompt) for prompt in writer.prompts])[:, None]
    ends = np.array([len(x) for x in joined])[:, None]
    places = np.arange(writer.length)
    return tokens, (places >= given - 1) & (places < ends - 1)
