"""Generation on the host: text in, text out, with origins and metrics.

generate        speculative decoding of one prompt, or of many in slots
stream          the same of one prompt, in pieces as rounds commit them
decode          autoregressive decoding: the baseline, and the oracle
"""

import dataclasses
import html
import inspect
import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.analysis import metrics as metrics_lib
from spec_jax.drafters import each, tree_shapes
from spec_jax.engine import (
    baseline,
    checks,
    protocols,
    round as round_lib,
    rows,
    scheduler as scheduler_lib,
    state as states,
    verification,
)
from spec_jax.gamma import policy as policy_lib
from spec_jax.loading import LanguageModel
from spec_jax.model import tokenizer as tokenizer_lib
from spec_jax.ops import dispatch
from spec_jax.rules import sampling as sampling_lib


Origin = states.Origin
Status = states.Status

PAGE_SIZE = 16
"""Positions a page, unless another number is given."""

DEFAULT_GAMMA = 4
"""Tokens drafted a round where no number is given, or `lm.gamma_max` if fewer."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or the messages of a chat."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn; see `sampling.make_settings` for the order of filters.

    Attributes:
      temperature: divides the logits; 0 is greedy, and takes no filter.
      top_k: how many tokens stay; None keeps all.
      top_p: the mass that stays, in `(0, 1]`.
      min_p: the least probability that stays, as a share of the highest, in `[0, 1]`.
      seed: of all noise, in `[0, 2**32)`: with it a stream is drawn again, bit for bit.

    Raises:
      ValueError: a value outside its range, or a filter at temperature 0.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.settings()

    def settings(self) -> sampling_lib.SamplingSettings:
        """Returns the settings as arrays."""
        return sampling_lib.make_settings(**dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What was generated for one prompt.

    Attributes:
      tokens: generated, without the prompt.
      pieces: the text of each token, special tokens included: a character that spans
        tokens belongs to the one that completes it. Empty without a tokenizer.
      origins: where each of them came from.
      prompt_tokens: the prompt's token ids.
      status: why the generation ended.
      metrics: names and numbers, see `metrics.summarise`; `e2e_s` is the seconds that
        the whole call took, compilation included where it was the first of its kind.
      provenance: what decides bits: versions, device, implementation, dtype, slab.
    """

    tokens: list[int]
    pieces: list[str]
    origins: list[Origin]
    prompt_tokens: list[int]
    status: Status
    metrics: metrics_lib.Metrics
    provenance: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The text of `tokens`; "" without a tokenizer."""
        return "".join(self.pieces)

    def _repr_html_(self) -> str:
        """Returns the text with accepted drafts, corrections and bonus tokens told
        apart by colour, as notebooks show it."""
        spans = [
            f'<span style="background:{_COLOURS[origin]}">{html.escape(piece)}</span>'
            for piece, origin in zip(self.pieces, self.origins, strict=False)
        ]
        legend = " ".join(
            f'<span style="background:{colour}">{origin.name.lower()}</span>'
            for origin, colour in _COLOURS.items()
        )
        return f"<pre>{''.join(spans)}</pre><small>{legend}</small>"


_COLOURS = {
    Origin.ACCEPTED: "#b7e4c7",
    Origin.CORRECTION: "#ffd6a5",
    Origin.BONUS: "#bde0fe",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of tokens of one origin that a round committed.

    Attributes:
      text: whole characters; one that spans tokens is in the piece that completes it.
      tokens: token ids.
      origin: where they came from.
    """

    text: str
    tokens: list[int]
    origin: Origin


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
    page_size: int = PAGE_SIZE,
) -> Any:
    """Generates text speculatively; every token is what `decode` would have written.

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
      num_slots: prompts at once; None: one prompt after the other, or all of up to 8.
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
    prompts, alone = _prompts(lm, prompt)
    run = Run.make(
        lm,
        prompts,
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
        for number in range(len(prompts))
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
    prompts, alone = _prompts(lm, prompt)
    if not alone:
        raise ValueError(
            f"stream takes one prompt, not {len(prompts)}: call it for each, or "
            "generate them together"
        )
    if lm.tokenizer is None:
        raise ValueError("stream yields text, and the model has no tokenizer")
    run = Run.make(lm, prompts, num_slots=1, **settings)
    return _pieces(run, lm.tokenizer)


def _pieces(
    run: "Run", tokenizer: tokenizer_lib.Tokenizer
) -> Generator[Piece, None, Generation]:
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
        yield Piece(text=text, tokens=tokens[start:end], origin=Origin(origins[start]))
        start = end


def decode(
    lm: LanguageModel,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_tokens: int = 64,
    sampling: Sampling | Sequence[Sampling] | None = None,
    stop: Sequence[int | str] | None = None,
    page_size: int = PAGE_SIZE,
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
    prompts, alone = _prompts(lm, prompt)
    run = Run.make(
        lm,
        prompts,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=stop,
        page_size=page_size,
    )
    outs = []
    for number in range(len(prompts)):
        started = time.perf_counter()
        state = run.decode(number)
        baseline.check(state, vocab_size=lm.target.config.vocab_size)
        seconds = time.perf_counter() - started
        outs.append(run.decoded(state, number, seconds))
    return outs[0] if alone else outs


def prepare(
    lm: LanguageModel, prompt: Prompt | Sequence[Prompt], **settings: Any
) -> tuple["Run", bool]:
    """Settles a call of `generate` without running it.

    Returns:
      The run, and whether there was one prompt and no list.
    """
    prompts, alone = _prompts(lm, prompt)
    return Run.make(lm, prompts, **settings), alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a call settles before it runs; `prepare` makes one."""

    lm: LanguageModel
    prompts: list[list[int]]
    requests: list[scheduler_lib.Request]
    scheduler: scheduler_lib.Scheduler

    @classmethod
    def make(
        cls,
        lm: LanguageModel,
        prompts: list[list[int]],
        *,
        max_tokens: int = 64,
        gamma: int | policy_lib.GammaPolicy | tree_shapes.AnyTree | None = None,
        policy_state: policy_lib.State = None,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: Sequence[int | str] | None = None,
        num_slots: int | None = None,
        rule: verification.Rule = "coupled",
        page_size: int = PAGE_SIZE,
    ) -> "Run":
        """Checks everything, and raises before anything is allocated."""
        verification.check_rule(rule)
        checks.check_max_tokens(max_tokens)
        if isinstance(gamma, tree_shapes.AnyTree):
            lm, gamma = lm.with_tree(gamma), gamma.nodes
        policy: Any = gamma if _is_policy(gamma) else None
        number = None if _is_policy(gamma) else cast(int | None, gamma)
        if policy is not None and policy_state is None:
            policy_state = _first_state(policy)
        if policy is None and number is None:
            number = lm.gamma_max
            if not protocols.is_tree(lm.drafter):
                number = min(DEFAULT_GAMMA, number)
        if num_slots is None:
            num_slots = min(len(prompts), 8)
        num_slots = min(num_slots, len(prompts))
        speculator = round_lib.Speculator(
            params=(lm.params, lm.drafter_params),
            target=rows.SlotRows(model=lm.target, num_slots=num_slots),
            drafter=each.lift(lm.drafter, num_slots, rule=rule, gamma_policy=policy),
            rule=rule,
            gamma_policy=policy,
        )
        stop_ids = lm.stop_ids if stop is None else _stop_ids(lm, stop)
        scheduler = scheduler_lib.Scheduler(
            speculator=speculator,
            capacity=_capacity(lm, prompts, max_tokens),
            page_size=page_size,
            stop_ids=stop_ids,
            policy_state=policy_state,
        )
        requests = [
            scheduler_lib.Request(
                prompt=prompt, max_tokens=max_tokens, gamma=number, sampling=settings
            )
            for prompt, settings in zip(
                prompts, _settings(sampling, len(prompts)), strict=True
            )
        ]
        for request in requests:
            scheduler.check(request)
        return cls(lm=lm, prompts=prompts, requests=requests, scheduler=scheduler)

    def decode(self, number: int) -> baseline.DecodeState:
        """Decodes one prompt without drafts; the state as the loop leaves it."""
        return baseline.generate(
            self.lm.target,
            self.lm.params,
            self.begin_decoding(number),
            max_steps=jnp.int32(self.requests[number].max_tokens),
        )

    def begin_decoding(self, number: int) -> baseline.DecodeState:
        """Prefills one prompt into a cache of its own."""
        request, target = self.requests[number], self.lm.target
        kv = target.new_cache(
            capacity=self.scheduler.capacity, page_size=self.scheduler.page_size
        )
        return baseline.begin(
            target,
            self.lm.params,
            kv,
            request.prompt,
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            stop_ids=self.scheduler.stop_ids,
        )

    def generation(self, slot: states.Slots, number: int, seconds: float) -> Generation:
        """Returns the result of a finished slot; raises as `checks.check_slot`."""
        checks.check_slot(slot, vocab_size=self.lm.target.config.vocab_size)
        tokens = scheduler_lib.generated(slot)
        origins = np.asarray(slot.origins)
        origins = origins[origins != int(Origin.PROMPT)].tolist()
        counters = metrics_lib.of_slot(slot, num_tokens=len(tokens))
        return self._result(tokens, origins, counters, slot.status, number, seconds)

    def decoded(
        self, state: baseline.DecodeState, number: int, seconds: float
    ) -> Generation:
        """Returns the result of autoregressive decoding."""
        num_prompt, length = len(self.prompts[number]), int(state.length)
        tokens = np.asarray(state.tokens)[num_prompt:length].tolist()
        counters = metrics_lib.Counters(
            tokens=len(tokens),
            rounds=len(tokens),
            accepted_hist=(len(tokens),),
            nonfinite=int(state.num_nonfinite),
        )
        origins = [Origin.BONUS] * len(tokens)
        return self._result(tokens, origins, counters, state.status, number, seconds)

    def _result(self, tokens, origins, counters, status, number, seconds):
        lm = self.lm
        summary = metrics_lib.summarise(
            counters,
            prompts=1,
            texts=[metrics_lib.text_counts(tokens, counters)],
            matched=None,
            verify_decode_mismatches=None,
        )
        return Generation(
            tokens=tokens,
            pieces=[] if lm.tokenizer is None else lm.tokenizer.decode_pieces(tokens),
            origins=[Origin(origin) for origin in origins],
            prompt_tokens=self.prompts[number],
            status=Status(int(status)),
            metrics=summary | {"e2e_s": seconds},
            provenance=provenance(lm) | {"rule": self.scheduler.speculator.rule},
        )


def provenance(lm: LanguageModel) -> dict[str, Any]:
    """Returns what decides bits: where it is equal, the results are."""
    device, layout = jax.devices()[0], lm.target.layout
    found = {
        "jax_version": jax.__version__,
        "device_kind": device.device_kind,
        "platform": device.platform,
        "impl": lm.target.impl,
        "instruction_set": dispatch.instruction_set(lm.target.impl),
        "dtype": lm.target.config.dtype,
        "slab": lm.target.slab,
    }
    return found if layout is None else found | layout.describe()


def _is_policy(gamma: Any) -> bool:
    return hasattr(gamma, "choose") and hasattr(gamma, "update")


def _first_state(policy: policy_lib.GammaPolicy) -> policy_lib.State:
    """Returns what the policy's `init` makes of nothing.

    Raises:
      ValueError: it wants to be told something.
    """
    init: Any = getattr(policy, "init", None)
    if init is None:
        raise ValueError(
            f"{type(policy).__name__} has no `init` that makes its first state: give "
            "it as policy_state"
        )
    wanted = inspect.signature(init).parameters.values()
    names = [one.name for one in wanted if one.default is one.empty]
    if names:
        raise ValueError(
            f"{type(policy).__name__} makes no first state of nothing: give "
            f"policy_state=policy.init({', '.join(names)})"
        )
    return init()


def _prompts(lm: LanguageModel, prompt: Any) -> tuple[list[list[int]], bool]:
    """Returns the token ids of each prompt, and whether there was one and no list."""
    if _is_one(prompt):
        return [_encode(lm, prompt)], True
    prompts = list(prompt)
    if not prompts:
        raise ValueError("the list of prompts is empty: give at least one")
    return [_encode(lm, one) for one in prompts], False


def _is_one(prompt: Any) -> bool:
    """Whether this is one prompt: text, a row of ids, or a chat's messages."""
    if isinstance(prompt, str | np.ndarray | jax.Array):
        return True
    if not isinstance(prompt, Sequence):
        raise ValueError(
            f"a prompt of type {type(prompt).__name__}: give text, token ids, messages "
            "or a list of these"
        )
    return bool(prompt) and isinstance(prompt[0], int | np.integer | Mapping)


def _encode(lm: LanguageModel, prompt: Any) -> list[int]:
    """Returns the token ids of one prompt."""
    is_chat = not isinstance(prompt, str) and len(prompt) > 0
    is_chat = is_chat and isinstance(prompt[0], Mapping)
    if not isinstance(prompt, str) and not is_chat:
        return checks.token_list(prompt)
    if lm.tokenizer is None:
        raise ValueError("the model has no tokenizer: give token ids")
    text = lm.tokenizer.apply_chat(prompt) if is_chat else prompt
    return lm.tokenizer.encode(text)


def _settings(
    sampling: Sampling | Sequence[Sampling] | None, count: int
) -> list[sampling_lib.SamplingSettings | None]:
    """Returns the settings of each prompt."""
    if sampling is None:
        return [None] * count
    if isinstance(sampling, Sampling):
        return [sampling.settings()] * count
    if len(sampling) != count:
        raise ValueError(
            f"{len(sampling)} settings of sampling for {count} prompts: give one for "
            "all, or one for each"
        )
    return [one.settings() for one in sampling]


def _stop_ids(lm: LanguageModel, stop: Sequence[int | str]) -> tuple[int, ...]:
    """Returns the ids of stop tokens."""
    ids: list[int] = []
    for one in [stop] if isinstance(stop, str | int) else stop:
        encoded = _encode(lm, one) if isinstance(one, str) else [one]
        if len(encoded) != 1:
            raise ValueError(
                f"stop text {one!r} is {len(encoded)} tokens: give text of one token, "
                "or an id"
            )
        ids += encoded
    return tuple(checks.token_list(ids, what="stop"))


def _capacity(lm: LanguageModel, prompts: list[list[int]], max_tokens: int) -> int:
    """Returns positions of a slot: enough for the longest prompt and its answer.

    Rounded up, to within a quarter, so that prompts of about one length share their
    programs.
    """
    longest = max(map(len, prompts))
    needed, most = longest + max_tokens, lm.target.config.max_position_embeddings
    if needed > most:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_tokens=} make {needed} positions, "
            f"and the model has {most} (max_position_embeddings): shorten one of them"
        )
    step = max(64, 1 << (int(math.log2(needed)) - 2))
    return min(-(-needed // step) * step, most)
