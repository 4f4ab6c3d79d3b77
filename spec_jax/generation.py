"""Generation on the host: text in, text out, with origins and metrics.

generate        speculative decoding of one prompt, or of many in slots
stream          the same of one prompt, in pieces as rounds commit them
decode          autoregressive decoding: the baseline, and the oracle
"""

import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import results, run as run_lib
from spec_jax.drafters import tree_shapes
from spec_jax.engine import (
    baseline,
    checks,
    round as round_lib,
    scheduler as scheduler_lib,
    verification,
)
from spec_jax.gamma import policy as policy_lib
from spec_jax.loading import LanguageModel
from spec_jax.model import tokenizer as tokenizer_lib


Piece = results.Piece
Prompt = run_lib.Prompt
Sampling = run_lib.Sampling


def generate(
    lm: LanguageModel,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_tokens: int = 64,
    gamma: int | policy_lib.GammaPolicy | tree_shapes.AnyTree | None = None,
    policy_state: policy_lib.State = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    stop: Sequence[int | str] | None = None,
    num_slots: int | None = None,
    rule: verification.Rule = "coupled",
    page_size: int = run_lib.PAGE_SIZE,
) -> Any:
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

    Args:
      prompt: text, token ids or messages; or a list of these. Messages go through the
        chat template.
      max_tokens: tokens to generate for each prompt, at most.
      gamma: tokens to draft a round, at most `lm.gamma_max`; a policy that chooses it;
        or a `Tree` to draft. None: 4, or as many as the drafter drafts if that is
        fewer; of a drafter of trees, all nodes.
      policy_state: the policy's first state; None: what its `init()` makes.
      sampling: how tokens are drawn, one for all prompts or one for each; None: greedy.
      stop: tokens that end a generation, as ids or as text of one token; None: those of
        the model's folder; (): none.
      num_slots: prompts at once; None: all of them, up to 8.
      rule: how drafts are accepted: "coupled" writes the stream of autoregressive
        decoding; "rejection" and "block" keep its distribution.
      page_size: positions a page of the cache.

    Returns:
      A `Generation` for one prompt, a list of them for a list.

    Raises:
      ValueError: a prompt, a number or a name that cannot be used.
      FloatingPointError: tokens were chosen from logits that are not finite.
      MemoryError: the cache has no page left.
    """
    run, alone = prepare(
        lm,
        prompt,
        max_tokens=max_tokens,
        gamma=gamma,
        policy_state=policy_state,
        sampling=sampling,
        stop=stop,
        num_slots=num_slots,
        rule=rule,
        page_size=page_size,
    )
    started = time.perf_counter()
    finished = {one.number: one for one in run.scheduler.run(run.requests)}
    seconds = time.perf_counter() - started
    outs = [
        run.generation(finished[number].slot, number, seconds)
        for number in range(len(run.prompts))
    ]
    return outs[0] if alone else outs


def stream(lm: LanguageModel, prompt: Prompt, **settings: Any) -> Iterator[Piece]:
    """Generates as `generate` does, and yields pieces as rounds commit them.

    The pieces' tokens are those of `generate`, bit for bit, and their texts make up its
    text. The iterator's return value (`StopIteration.value`) is the `Generation`.

    Examples:
      >>> import spec_jax as sj
      >>> lm = sj.load()
      >>> pieces = list(sj.stream(lm, "import os", max_tokens=8))
      >>> "".join(piece.text for piece in pieces) == sj.generate(
      ...     lm, "import os", max_tokens=8
      ... ).text
      True

    Args:
      prompt: one prompt.
      **settings: as `generate` takes them, but for `num_slots`.

    Raises:
      ValueError: as `generate`, and for several prompts; before anything is generated.
    """
    prompts, alone = run_lib.encode(lm, prompt)
    if not alone:
        raise ValueError(
            f"stream takes one prompt, not {len(prompts)}: call it for each, or "
            "generate them together"
        )
    if lm.tokenizer is None:
        raise ValueError("stream yields text, and the model has no tokenizer")
    run = run_lib.Run.make(lm, prompts, num_slots=1, **settings)
    return _pieces(run, lm.tokenizer)


def _pieces(
    run: run_lib.Run, tokenizer: tokenizer_lib.Tokenizer
) -> Generator[Piece, None, results.Generation]:
    """Runs round after round; yields what each commits, a piece for each origin."""
    started, decoder = time.perf_counter(), tokenizer_lib.PieceDecoder(tokenizer)
    state, seen = run.scheduler.begin(run.requests[0]), len(run.prompts[0])
    while bool(state.slots.running[0]):
        state = round_lib.generate(
            run.scheduler.speculator, state, max_rounds=jnp.int32(1)
        )
        checks.check_pages(state.slots.status, state.slots.length, state.cache)
        length = int(state.slots.length[0])
        tokens = np.asarray(state.slots.tokens[0])[seen:length].tolist()
        origins = np.asarray(state.slots.origins[0])[seen:length].tolist()
        seen = length
        is_last = not bool(state.slots.running[0])
        yield from _by_origin(tokens, origins, decoder, is_last=is_last)
    checks.check_refused([state.cache, state.memory])
    slot = scheduler_lib.slot_of(jax.device_get(state.slots), 0)
    return run.generation(slot, 0, time.perf_counter() - started)


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


def decode(
    lm: LanguageModel,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_tokens: int = 64,
    sampling: Sampling | Sequence[Sampling] | None = None,
    stop: Sequence[int | str] | None = None,
    page_size: int = run_lib.PAGE_SIZE,
) -> Any:
    """Generates text by autoregressive decoding: one token a step, nothing drafted.

    Examples:
      >>> import spec_jax as sj
      >>> sj.decode(sj.load(), "import os", max_tokens=3).metrics["rounds"]
      3

    Args: as `generate` takes them. Raises as it does.

    Returns:
      A `Generation` for one prompt, a list of them for a list; every token is the
      target's own (`Origin.BONUS`), in a round of its own.
    """
    run, alone = prepare(
        lm,
        prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=stop,
        page_size=page_size,
    )
    outs = []
    for number in range(len(run.prompts)):
        started = time.perf_counter()
        state = run.decode(number)
        baseline.check(state, vocab_size=lm.target.config.vocab_size)
        seconds = time.perf_counter() - started
        outs.append(run.decoded(state, number, seconds))
    return outs[0] if alone else outs


def prepare(
    lm: LanguageModel, prompt: Prompt | Sequence[Prompt], **settings: Any
) -> tuple[run_lib.Run, bool]:
    """Settles a call of `generate` without running it.

    Returns:
      The run, and whether there was one prompt and no list.
    """
    prompts, alone = run_lib.encode(lm, prompt)
    return run_lib.Run.make(lm, prompts, **settings), alone
