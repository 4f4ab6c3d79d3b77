"""Generates text from prompts, called on the host, with origins and metrics.

generate        speculative decoding of one prompt, or of many in slots
stream          the same for one prompt, in pieces as rounds commit them
decode          autoregressive decoding: the baseline, and the oracle
score           log-probabilities of given texts
"""

import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Unpack, overload

import jax
import numpy as np

from spec_jax import inputs, keywords, results, run as run_lib, scoring
from spec_jax.engine import (
    checks,
    ends as ends_lib,
    requests as requests_lib,
    round as round_lib,
)
from spec_jax.language_model import LanguageModel
from spec_jax.model import tokenizer as tokenizer_lib
from spec_jax.typing import check_whole


Piece = results.Piece
Prompt = inputs.Prompt
Completion = str | Sequence[int] | np.ndarray
Sampling = run_lib.Sampling
Generation = results.Generation
Settings = keywords.Settings
StreamSettings = keywords.StreamSettings
SpeculativeSettings = keywords.SpeculativeSettings


# A str is a sequence of str too, but no list of prompts: hence the ignored overlaps.
@overload
def generate(  # type: ignore[overload-overlap]
    lm: LanguageModel, prompt: Prompt, **settings: Unpack[SpeculativeSettings]
) -> Generation: ...
@overload
def generate(
    lm: LanguageModel, prompt: Sequence[Prompt], **settings: Unpack[SpeculativeSettings]
) -> list[Generation]: ...
@overload
def generate(  # type: ignore[overload-overlap]
    lm: LanguageModel,
    prompt: Prompt,
    *,
    n: int,
    **settings: Unpack[SpeculativeSettings],
) -> list[Generation]: ...
@overload
def generate(
    lm: LanguageModel,
    prompt: Sequence[Prompt],
    *,
    n: int,
    **settings: Unpack[SpeculativeSettings],
) -> list[list[Generation]]: ...
@keywords.takes(SpeculativeSettings, run_lib.Run.make)
def generate(
    lm: LanguageModel,
    prompt: Any,
    *,
    n: int | None = None,
    **settings: Unpack[SpeculativeSettings],
) -> Generation | list[Generation] | list[list[Generation]]:
    """Generates text speculatively; by default every token is what `decode` writes.

    Examples:
      >>> import spec_jax as sj
      >>> lm = sj.load()
      >>> out = sj.generate(lm, "import os", max_tokens=8, gamma=4)
      >>> len(out.tokens), out.tokens == sj.decode(lm, "import os", max_tokens=8).tokens
      (8, True)
      >>> outs = sj.generate(lm, ["def f(", "class A"], max_tokens=4, num_slots=2)
      >>> [len(out.tokens) for out in outs]
      [4, 4]
      >>> outs = sj.generate(lm, "x", max_tokens=4, sampling=sj.Sampling(), n=2)
      >>> outs[0].tokens == outs[1].tokens
      False

    Args:
      prompt: text, token ids or messages; or a list of these. Messages go through the
        chat template.
      n: samples of each prompt, which is prefilled once if the cache is paged.
      max_tokens: tokens to generate for each prompt, at most.
      gamma: tokens to draft a round, at most `lm.gamma_max`; a policy that chooses it;
        a `Tree` to draft; or what rounds cost (`gamma.RoundCosts`), by which a policy
        drafts where that pays, and slows no text of 64 tokens or more by over 2 %. None
        is that policy, with costs that the first such call for a model and a number of
        slots measures in a fraction of a second, once all is compiled: counts of rounds
        then depend on times, and tokens do not. With other rules than "coupled" they
        would: there, and with several processes, None is 4, or `lm.gamma_max` if that
        is less; for a drafter of trees, all nodes.
      policy_state: the policy's first state; None: what its `init()` makes.
      sampling: how tokens are drawn, one for all prompts or one for each; None: greedy.
        Noise depends on seed and position alone. One seed for all prompts is folded
        with the prompt's number in the list and the sample's number
        (`settings.folded_seed`); sample 0 of prompt 0 has the seed itself. A seed given
        for one prompt is folded with the sample's number alone.
      processors: of the logits, before a token is drawn, one for all prompts or one for
        each; `sj.processors` has penalties, biases, bad words and grammars.
      stop: what ends a generation besides the stop tokens of the model's folder: an id,
        a text, or a list of these. A text is found inside a token and across tokens,
        special ones included. `text` ends before the one that is complete first, and
        `tokens` with the token that ended the generation: an id of `stop`, or the one
        in which the text is complete (as in vLLM). With texts the host looks after
        each round, and tokens that the round committed after the end are dropped.
      ignore_eos: whether the folder's own stop tokens are left out.
      chat: options of the chat template, such as `{"enable_thinking": True}`.
      skip_special_tokens: whether special tokens are left out of `text` and `pieces`;
        `tokens` always has them.
      log_probs: whether the result has log-probabilities of its tokens, as `score` has,
        by a second pass over the text, a slab of rows at a time (one row in `decode`).
      top_logprobs: how many of the most likely tokens are named at each place, with
        their log-probabilities by the model's own distribution; gives `log_probs` too.
      prefix: what every prompt begins with, such as a system prompt: a text or ids,
        encoded by itself, or the first messages of chats. Prompts are then prefilled by
        rows, as in decoding; slots share the prefix's pages if the cache is paged.
      num_slots: samples at once; None: all of them, up to 8.
      rule: how drafts are accepted: "coupled" writes the stream of autoregressive
        decoding; "rejection", "block" and "multipath" keep its distribution.
      page_size: positions per page of the cache.

    Returns:
      A `Generation` for one prompt, a list of them for a list; with `n`, a list of `n`
      in place of each `Generation`, even if `n` is 1.

    Raises:
      ValueError: a prompt or a value that cannot be used.
      TypeError: an argument of another name.
      FloatingPointError: tokens were chosen from logits that are not finite.
      MemoryError: the cache has no page left.
    """
    run = run_lib.Run.make(lm, prompt, n=n, **settings)
    run.warn()
    started = time.perf_counter()
    run = run.adapted()
    finished = list(run.scheduler.run(run.requests, ends=run.ends()))
    seconds = time.perf_counter() - started
    finished.sort(key=lambda one: one.number)
    return run.shaped([run.generation(one, seconds) for one in finished])


@keywords.takes(StreamSettings, run_lib.Run.make)
def stream(
    lm: LanguageModel, prompt: Prompt, **settings: Unpack[StreamSettings]
) -> Generator[Piece, None, Generation]:
    """Generates as `generate` does, and yields pieces as rounds commit them.

    The pieces' tokens are those of `generate`, bit for bit, and their texts make up its
    text: text that may begin a stop text is held back. The iterator's return
    value (`StopIteration.value`) is the `Generation`.

    Examples:
      >>> import spec_jax as sj
      >>> lm = sj.load()
      >>> pieces = list(sj.stream(lm, "import os", max_tokens=8))
      >>> "".join(piece.text for piece in pieces) == sj.generate(
      ...     lm, "import os", max_tokens=8
      ... ).text
      True

    Args:
      prompt: one prompt, for which one sample is drawn.

    The other arguments are those of `generate`.

    Raises:
      ValueError: as `generate`, and for several prompts or no tokenizer; at the call.
      TypeError: an argument of another name.
    """
    run = run_lib.Run.make(lm, prompt, num_slots=1, **settings)
    if not run.alone:
        raise ValueError(
            f"stream takes one prompt, not {len(run.requests)}: call it for each, or "
            "generate them together"
        )
    if lm.tokenizer is None:
        raise ValueError("stream yields text, and the model has no tokenizer")
    run.warn()
    return _pieces(run, lm.tokenizer)


def _pieces(
    run: run_lib.Run, tokenizer: tokenizer_lib.Tokenizer
) -> Generator[Piece, None, results.Generation]:
    """Runs round after round; yields a piece for each run of tokens of one origin."""
    started = time.perf_counter()
    run = run.adapted()
    decoder = tokenizer_lib.PieceDecoder(
        tokenizer, skip_special_tokens=run.skip_special_tokens, stops=run.stops
    )
    ends = run.ends()
    state, seen = run.scheduler.begin(run.requests[0]), len(run.requests[0].prompt)
    while bool(state.slots.running[0]):
        state = round_lib.run(run.scheduler.speculator, state, max_rounds=1)
        slots = jax.device_get(state.slots)
        checks.check_pages(slots.status, slots.length, state.cache)
        if ends is not None:
            state, slots = ends_lib.apply(state, slots, {0: 0}, ends)
        slot = requests_lib.slot_of(slots, 0)
        length = int(slot.length)
        tokens = slot.tokens[seen:length].tolist()
        origins = slot.origins[seen:length].tolist()
        seen = length
        yield from _by_origin(tokens, origins, decoder, is_last=not slot.running)
    checks.check_refused([state.cache, state.memory])
    size = run.scheduler.vocab_size
    finished = requests_lib.Finished(number=0, slot=slot, vocab_size=size)
    return run.generation(finished, time.perf_counter() - started)


def _by_origin(tokens, origins, decoder, *, is_last) -> Iterator[Piece]:
    """Yields runs of tokens of one origin."""
    start = 0
    for end in range(1, len(tokens) + 1):
        if end < len(tokens) and origins[end] == origins[start]:
            continue
        text = decoder.decode(tokens[start:end], final=is_last and end == len(tokens))
        origin = results.Origin(origins[start])
        yield Piece(text=text, tokens=tokens[start:end], origin=origin)
        start = end


@overload
def decode(  # type: ignore[overload-overlap]
    lm: LanguageModel, prompt: Prompt, **settings: Unpack[Settings]
) -> Generation: ...
@overload
def decode(
    lm: LanguageModel, prompt: Sequence[Prompt], **settings: Unpack[Settings]
) -> list[Generation]: ...
@overload
def decode(  # type: ignore[overload-overlap]
    lm: LanguageModel, prompt: Prompt, *, n: int, **settings: Unpack[Settings]
) -> list[Generation]: ...
@overload
def decode(
    lm: LanguageModel, prompt: Sequence[Prompt], *, n: int, **settings: Unpack[Settings]
) -> list[list[Generation]]: ...
@keywords.takes(Settings, run_lib.Run.make)
def decode(
    lm: LanguageModel,
    prompt: Any,
    *,
    n: int | None = None,
    **settings: Unpack[Settings],
) -> Generation | list[Generation] | list[list[Generation]]:
    """Generates text by autoregressive decoding: one token a step, nothing drafted.

    Examples:
      >>> import spec_jax as sj
      >>> sj.decode(sj.load(), "import os", max_tokens=3).metrics["rounds"]
      3

    Args: as for `generate`, without those of drafts and slots. Raises as it does. Each
    sample has a cache of its own, into which its whole prompt is prefilled.

    Returns:
      The same as `generate`; every token is the target's own (`Origin.BONUS`), in a
      round of its own.
    """
    run = run_lib.Run.make(lm, prompt, n=n, **settings)
    outs = []
    for number in range(len(run.requests)):
        started = time.perf_counter()
        state = run.decode(number)
        seconds = time.perf_counter() - started
        outs.append(run.decoded(state, number, seconds))
    return run.shaped(outs)


# As for `generate`: a str is a sequence of str too.
@overload
def score(  # type: ignore[overload-overlap]
    lm: LanguageModel,
    prompt: Prompt,
    completion: Completion,
    *,
    sampling: Sampling | None = None,
    processors: requests_lib.Processors = None,
    chat: Any = None,
    prefix: Prompt | None = None,
    top_logprobs: int = 0,
) -> scoring.Scores: ...
@overload
def score(
    lm: LanguageModel,
    prompt: Sequence[Prompt],
    completion: Sequence[Completion],
    *,
    sampling: Sampling | Sequence[Sampling] | None = None,
    processors: requests_lib.Processors = None,
    chat: Any = None,
    prefix: Prompt | None = None,
    top_logprobs: int = 0,
) -> list[scoring.Scores]: ...
def score(
    lm: LanguageModel,
    prompt: Any,
    completion: Any,
    *,
    sampling: Any = None,
    processors: requests_lib.Processors = None,
    chat: Any = None,
    prefix: Prompt | None = None,
    top_logprobs: int = 0,
) -> scoring.Scores | list[scoring.Scores]:
    """Returns the log-probabilities of completions, given their prompts.

    The bits are those of generating the same tokens after the prompt, so that the
    importance ratio of a text and its own score is exactly one.

    Examples:
      >>> import spec_jax as sj
      >>> lm = sj.load()
      >>> out = sj.generate(lm, "import os", max_tokens=4, log_probs=True)
      >>> found = sj.score(lm, "import os", out.tokens)
      >>> found.log_probs.tobytes() == out.log_probs.tobytes()
      True

    Args:
      prompt: as `generate` takes it; or a list of prompts.
      completion: token ids, or a text, which is encoded by itself; or a list of these.
      sampling: how the tokens were drawn, one for all or one for each; None: greedily.
      processors: of the logits that they were drawn from, one for all or one for each.
      chat: options of the chat template.
      prefix: as `generate` took it; begins each prompt, and has it prefilled by rows.
      top_logprobs: how many of the most likely tokens are named at each place.

    Raises:
      ValueError: a prompt, a completion or settings that cannot be used.
      FloatingPointError: logits that are not finite.
    """
    prompts, alone = inputs.encode(lm, prompt, chat, prefix)
    check_whole(top_logprobs=top_logprobs, least=0, most=lm.target.config.vocab_size)
    completions = [completion] if alone else list(completion)
    if len(completions) != len(prompts):
        raise ValueError(
            f"{len(completions)} completions of {len(prompts)} prompts: give each "
            "prompt one"
        )
    texts = [_ids(lm, one) for one in completions]
    each = requests_lib.settings_of(sampling, len(prompts))
    by_rows = None if prefix is None else True
    parts = requests_lib.processors_of(processors, len(prompts))
    found = [
        scoring.of_tokens(
            lm, one, text, drawn, processor=part, top=top_logprobs, by_rows=by_rows
        )
        for one, text, drawn, part in zip(prompts, texts, each, parts, strict=True)
    ]
    return found[0] if alone else found


def _ids(lm: LanguageModel, completion: Any) -> list[int]:
    """Returns the token ids of a completion; raises `ValueError`."""
    if isinstance(completion, str):
        if lm.tokenizer is None:
            raise ValueError("the model has no tokenizer: give token ids")
        completion = lm.tokenizer.encode(completion, begins=False)
    size, most = lm.target.config.vocab_size, lm.target.config.max_position_embeddings
    return checks.check_prompt(
        completion, vocab_size=size, capacity=most, what="completion"
    )
