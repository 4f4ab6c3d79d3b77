"""Runs of prompts, plain and speculative in turn: tokens, counters and times.

`Settings` has all that a run needs but the prompt; `results` compares runs. Every run
gets a fresh cache, allocated outside the timed region. The time of one sequence is that
of its prompt's prefill and of one call that generates everything; that of several slots
is the time of the whole batch. Compilation is done before, by `results.warm_up`.
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import forced_drafter
from spec_jax import algorithms, loading, processors
from spec_jax.analysis import metrics
from spec_jax.drafters import oracle
from spec_jax.engine import (
    baseline,
    checks,
    requests as requests_lib,
    round as round_lib,
    rows,
    scheduler as scheduler_lib,
    state as states,
    verification,
)
from spec_jax.gamma import policy
from spec_jax.paging import cache as paged
from spec_jax.rules import sampling as sampling_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The models, and everything else that decides a run of a prompt."""

    lm: loading.LanguageModel
    gamma: int
    gen_tokens: int
    capacity: int
    page_size: int
    stop_ids: tuple[int, ...] = ()
    prefill_by_rows: bool | None = None  # None: what the models do by default
    sampling: sampling_lib.SamplingSettings | None = None  # None: greedy
    gamma_policy: policy.GammaPolicy | None = None  # None: always `gamma`
    policy_state: policy.State = None  # before each prompt's first round
    rule: verification.Rule = "coupled"
    num_slots: int = 1
    processor: processors.Processor | None = None  # of logits
    is_adversarial: bool = False  # whether no draft is right, see `forced_drafter`

    @property
    def is_exact(self) -> bool:
        """Whether tokens, and not just their distribution, are those of decoding."""
        return self.rule == "coupled" or self.sampling is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a prompt: autoregressive decoding, which drafts nothing, or rounds."""

    tokens: list[int]  # generated, without the prompt
    prefill_s: float  # until the prompt is in the cache, without compilation
    decode_s: float  # of everything after that, the first token included
    counters: metrics.Counters = metrics.Counters()
    origins: Sequence[states.Origin] = ()  # of tokens, in runs of rounds
    policy_state: policy.State = None  # of the gamma policy, after the last round

    @property
    def e2e_s(self) -> float:
        """Seconds for prefill and decoding together."""
        return self.prefill_s + self.decode_s

    @property
    def nonfinite(self) -> int:
        """Tokens that were chosen from logits that are not finite."""
        return self.counters.nonfinite


def matches(run: Run, plain: Run) -> bool:
    """Returns whether a run's tokens are decoding's, from finite logits alone."""
    return run.tokens == plain.tokens and not run.nonfinite and not plain.nonfinite


def run_plain(settings: Settings, prompt: list[int]) -> Run:
    """Decodes one prompt, one token a step."""
    lm = settings.lm
    kv, max_steps = new_cache(settings), jnp.int32(settings.gen_tokens)
    jax.block_until_ready((kv, max_steps))
    started = time.perf_counter()
    state = jax.block_until_ready(begin_plain(settings, prompt, kv))
    prefilled = time.perf_counter()
    state = jax.block_until_ready(
        baseline.generate(lm.target, lm.params, state, max_steps=max_steps)
    )
    finished = time.perf_counter()
    with contextlib.suppress(FloatingPointError):  # Such logits are counted.
        baseline.check(state, vocab_size=lm.target.config.vocab_size)
    tokens = np.asarray(state.tokens)[len(prompt) : int(state.length)].tolist()
    return Run(
        tokens=tokens,
        prefill_s=prefilled - started,
        decode_s=finished - prefilled,
        counters=metrics.Counters(nonfinite=int(state.num_nonfinite)),
    )


def new_cache(settings: Settings) -> paged.PagedKV:
    """Returns an empty cache of the target, of the settings' sizes."""
    sizes = {"capacity": settings.capacity, "page_size": settings.page_size}
    return rows.of(settings.lm.target, 1).new_cache(**sizes)


def begin_plain(
    settings: Settings, prompt: list[int], kv: paged.PagedKV
) -> baseline.DecodeState:
    """Returns autoregressive decoding before its first step; `kv` is empty, and
    donated."""
    return baseline.begin(
        settings.lm.target,
        settings.lm.params,
        kv,
        prompt,
        max_tokens=settings.gen_tokens,
        prefill_by_rows=settings.prefill_by_rows,
        sampling=settings.sampling,
        stop_ids=settings.stop_ids,
        processor=settings.processor,
    )


def make_scheduler(settings: Settings) -> scheduler_lib.Scheduler:
    """Returns the scheduler of `settings.num_slots` slots."""
    lm, drafter, policy = settings.lm, settings.lm.drafter, settings.gamma_policy
    if settings.is_adversarial:
        how = {"vocabulary": lm.target.config.vocab_size, "gamma_policy": policy}
        drafter = forced_drafter.lift(drafter, settings.num_slots, **how)
    algo = algorithms.speculative(lm.target, drafter, rule=settings.rule, policy=policy)
    return algo.scheduler(
        (lm.params, lm.drafter_params),
        num_slots=settings.num_slots,
        capacity=settings.capacity,
        page_size=settings.page_size,
        stop_ids=settings.stop_ids,
        prefill_by_rows=settings.prefill_by_rows,
        policy_state=settings.policy_state,
    )


def make_request(
    settings: Settings,
    prompt: list[int],
    text: Sequence[int] | None = None,
    *,
    rate: float = 1.0,
) -> requests_lib.Request:
    """Returns a prompt's request.

    Args:
      text: for a drafter that is told it, the prompt and what autoregressive decoding
        writes after it; None: it is decoded here.
      rate: the share of an oracle's drafts that are right.
    """
    known, is_forced = None, settings.is_adversarial
    if is_forced or isinstance(settings.lm.drafter, oracle.Oracle):
        if text is None:
            text = [*prompt, *run_plain(settings, prompt).tokens]
        known = oracle.make_trace(text, rate=rate)
    if is_forced:  # None of its drafts is kept.
        size = settings.capacity - len(text)  # One for all: nothing compiles anew.
        trace = jnp.asarray(np.pad(np.int32(text), (0, size)))
        parts = {"draft": settings.lm.drafter_params, "kept": jnp.zeros_like(trace)}
        known = forced_drafter.ForcedParams(trace=trace, **parts)
    return requests_lib.Request(
        prompt=prompt,
        max_tokens=settings.gen_tokens,
        gamma=settings.gamma,
        sampling=settings.sampling,
        draft_params=known,
        processor=settings.processor,
    )


def run_speculative(settings: Settings, prompt: list[int]) -> Run:
    """Generates one prompt by rounds."""
    scheduler = make_scheduler(dataclasses.replace(settings, num_slots=1))
    request = make_request(settings, prompt)
    scheduler.check(request)
    state = scheduler.empty(
        draws=settings.sampling is not None, processor=settings.processor
    )
    max_rounds = jnp.int32(settings.gen_tokens)
    jax.block_until_ready((state, request.draft_params, max_rounds))
    started = time.perf_counter()
    state = jax.block_until_ready(scheduler.admit(state, 0, request, refills=False))
    prefilled = time.perf_counter()
    state = jax.block_until_ready(
        round_lib.generate(scheduler.speculator, state, max_rounds=max_rounds)
    )
    finished = time.perf_counter()
    checks.check_refused([state.cache, state.memory])
    checks.check_pages(state.slots.status, state.slots.length, state.cache)
    slot = requests_lib.slot_of(jax.device_get(state.slots), 0)
    one = requests_lib.Finished(number=0, slot=slot, vocab_size=scheduler.vocab_size)
    return _as_run(one, prefilled - started, finished - prefilled)


def _as_run(one: requests_lib.Finished, prefill_s: float, decode_s: float) -> Run:
    """Returns the run of a request; logits that are not finite are counted."""
    slot = one.slot
    with contextlib.suppress(FloatingPointError):
        checks.check_slot(slot, vocab_size=one.vocab_size)
    tokens, origins = requests_lib.generated(slot), np.asarray(slot.origins)
    return Run(
        tokens=tokens,
        origins=[states.Origin(o) for o in origins if o != states.Origin.PROMPT],
        prefill_s=prefill_s,
        decode_s=decode_s,
        counters=metrics.of_slot(slot, num_tokens=len(tokens)),
        policy_state=slot.policy,
    )


def run_batch(
    settings: Settings,
    prompts: Sequence[list[int]],
    *,
    after_prompt: Callable[[], None] = lambda: None,
) -> list[Run]:
    """Generates all prompts, `settings.num_slots` at a time.

    The batch is timed as a whole, from the first prefill to the last token. Its seconds
    are shared out over the prompts by the tokens that each generated, so that totals
    are those of the batch; prefill and decoding overlap and are not told apart.
    """
    scheduler = make_scheduler(settings)
    requests = [make_request(settings, prompt) for prompt in prompts]
    state = scheduler.empty(
        draws=settings.sampling is not None, processor=settings.processor
    )
    jax.block_until_ready((state, [request.draft_params for request in requests]))
    started, finished = time.perf_counter(), []
    for one in scheduler.run(requests, state=state):
        finished.append(one)
        after_prompt()
    seconds = time.perf_counter() - started
    finished.sort(key=lambda one: one.number)
    counts = [len(requests_lib.generated(one.slot)) for one in finished]
    return [
        _as_run(one, 0.0, seconds * count / sum(counts))
        for one, count in zip(finished, counts, strict=True)
    ]


def mismatches(
    settings: Settings, prompt: list[int], tokens: Sequence[int]
) -> int | None:
    """Returns how many tokens of a generated text decoding would not have chosen; None
    where a rule keeps decoding's distribution alone.

    Replays the text through decoding: every position is decided after the prefix that
    was really committed, whatever came before it.
    """
    if not settings.is_exact:
        return None
    state = begin_plain(settings, prompt, new_cache(settings))
    new = slice(len(prompt), len(prompt) + len(tokens))
    text = np.array(state.tokens)
    text[new] = tokens
    _, chosen = baseline.replay(
        settings.lm.target,
        settings.lm.params,
        state.cache,
        tokens=jnp.asarray(text),
        start=jnp.int32(new.start),
        stop=jnp.int32(new.stop),
        sampling=settings.sampling,
        processing=state.processing,
    )
    return int(np.sum(np.asarray(chosen)[new] != text[new]))


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Returns the first place where two texts differ or one of them ends; or None."""
    pairs = enumerate(itertools.zip_longest(ours, theirs))
    return next((place for place, (a, b) in pairs if a != b), None)
