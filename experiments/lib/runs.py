"""Runs of prompts, plain and speculative in turn: tokens, counters and times.

`Settings` says what a run does with a prompt; a `LanguageModel` brings the models.
Every run gets a fresh cache, allocated outside the timed region. The clock of one
sequence runs over the prompt's prefill and over one call that generates everything,
that of several slots over all of a batch. Compilation is done before, by `warm_up`.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import prompt_files
from spec_jax import loading
from spec_jax.analysis import metrics
from spec_jax.drafters import each, oracle
from spec_jax.engine import (
    baseline,
    checks,
    round as round_lib,
    rows,
    scheduler as scheduler_lib,
    state as states,
    verdicts,
)
from spec_jax.gamma import policy
from spec_jax.model import qwen3
from spec_jax.rules import sampling as sampling_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run does with a prompt, beside the models."""

    gamma: int
    gen_tokens: int
    capacity: int
    page_size: int
    stop_ids: tuple[int, ...] = ()
    prefill_by_rows: bool | None = None  # None: what the models do by default
    sampling: sampling_lib.SamplingSettings | None = None  # None: greedy
    gamma_policy: policy.GammaPolicy | None = None  # None: always `gamma`
    policy_state: policy.State = None  # before each prompt's first round
    rule: verdicts.Rule = "coupled"
    num_slots: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
    """A run of autoregressive decoding."""

    tokens: list[int]  # generated, without the prompt
    timing: metrics.Timing
    nonfinite: int = 0  # tokens chosen from logits that are not finite


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculative:
    """A speculative run.

    Attributes:
      mismatches: counted on the way, by designs that decode too; None where only a
        replay can tell.
      policy_state: of the gamma policy, after the last round.
    """

    tokens: list[int]
    origins: list[states.Origin]
    counters: metrics.Counters
    timing: metrics.Timing
    mismatches: int | None = None
    policy_state: policy.State = None


def run_plain(
    lm: loading.LanguageModel, settings: Settings, prompt: list[int]
) -> Plain:
    """Decodes one prompt, one token a step.

    Raises:
      ValueError: a prompt that cannot be used.
      MemoryError: out of pages.
    """
    kv = lm.target.new_cache(capacity=settings.capacity, page_size=settings.page_size)
    max_steps = jnp.int32(settings.gen_tokens)
    jax.block_until_ready((kv, max_steps))
    started = time.perf_counter()
    state = jax.block_until_ready(_begin_plain(lm, settings, prompt, kv))
    prefilled = time.perf_counter()
    state = jax.block_until_ready(
        baseline.generate(lm.target, lm.params, state, max_steps=max_steps)
    )
    finished = time.perf_counter()
    with contextlib.suppress(FloatingPointError):  # They are counted.
        baseline.check(state, vocab_size=lm.target.config.vocab_size)
    tokens = np.asarray(state.tokens)[len(prompt) : int(state.length)].tolist()
    return Plain(
        tokens=tokens,
        timing=metrics.Timing(
            prefill_s=prefilled - started,
            decode_s=finished - prefilled,
            tokens=len(tokens),
        ),
        nonfinite=int(state.num_nonfinite),
    )


def _begin_plain(lm, settings, prompt, kv) -> baseline.DecodeState:
    return baseline.begin(
        lm.target,
        lm.params,
        kv,
        prompt,
        max_tokens=settings.gen_tokens,
        prefill_by_rows=settings.prefill_by_rows,
        sampling=settings.sampling,
        stop_ids=settings.stop_ids,
    )


def make_scheduler(
    lm: loading.LanguageModel, settings: Settings
) -> scheduler_lib.Scheduler:
    """Returns the scheduler of `settings.num_slots` slots.

    Raises:
      ValueError, NotImplementedError: a drafter or a setting that does not fit.
    """
    speculator = round_lib.Speculator(
        params=(lm.params, lm.drafter_params),
        target=rows.SlotRows(model=lm.target, num_slots=settings.num_slots),
        drafter=each.lift(lm.drafter, settings.num_slots, rule=settings.rule),
        rule=settings.rule,
        gamma_policy=settings.gamma_policy,
    )
    return scheduler_lib.Scheduler(
        speculator=speculator,
        capacity=settings.capacity,
        page_size=settings.page_size,
        stop_ids=settings.stop_ids,
        prefill_by_rows=settings.prefill_by_rows,
        policy_state=settings.policy_state,
    )


def make_request(
    lm: loading.LanguageModel, settings: Settings, prompt: list[int]
) -> scheduler_lib.Request:
    """Returns a prompt's request; an oracle's has the trace of decoding, made here."""
    trace = None
    if isinstance(lm.drafter, oracle.Oracle):
        trace = oracle.make_trace([*prompt, *run_plain(lm, settings, prompt).tokens])
    return scheduler_lib.Request(
        prompt=prompt,
        max_tokens=settings.gen_tokens,
        gamma=settings.gamma,
        sampling=settings.sampling,
        draft_params=trace,
    )


def run_speculative(
    lm: loading.LanguageModel, settings: Settings, prompt: list[int]
) -> Speculative:
    """Generates one prompt by rounds; raises as `run_plain`."""
    scheduler = make_scheduler(lm, dataclasses.replace(settings, num_slots=1))
    request = make_request(lm, settings, prompt)
    scheduler.check(request)
    state = scheduler.empty(draws=settings.sampling is not None)
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
    slot = scheduler_lib.slot_of(jax.device_get(state.slots), 0)
    return as_run(
        slot,
        vocab_size=lm.target.config.vocab_size,
        prefill_s=prefilled - started,
        decode_s=finished - prefilled,
    )


def as_run(
    slot: states.Slots, *, vocab_size: int | None, prefill_s: float, decode_s: float
) -> Speculative:
    """Returns the run of ONE finished slot.

    Logits that are not finite are counted, and a run with any of them is not matched:
    what came out before them is shown, as what differs is.
    """
    with contextlib.suppress(FloatingPointError):
        checks.check_slot(slot, vocab_size=vocab_size)
    tokens, origins = scheduler_lib.generated(slot), np.asarray(slot.origins)
    return Speculative(
        tokens=tokens,
        origins=[states.Origin(o) for o in origins if o != states.Origin.PROMPT],
        counters=metrics.of_slot(slot, num_tokens=len(tokens)),
        timing=metrics.Timing(
            prefill_s=prefill_s, decode_s=decode_s, tokens=len(tokens)
        ),
        policy_state=slot.policy,
    )


def run_batch(
    lm: loading.LanguageModel,
    settings: Settings,
    prompts: Sequence[list[int]],
    *,
    after_prompt: Callable[[], None] = lambda: None,
) -> list[Speculative]:
    """Generates all prompts, `settings.num_slots` at a time.

    The batch is timed as a whole, from the first prefill to the last token. Its seconds
    are shared out over the prompts by the tokens that each generated, so that totals
    are those of the batch; prefill and decoding overlap and are not told apart.
    """
    scheduler = make_scheduler(lm, settings)
    requests = [make_request(lm, settings, prompt) for prompt in prompts]
    state = scheduler.empty(draws=settings.sampling is not None)
    jax.block_until_ready((state, [request.draft_params for request in requests]))
    started, finished = time.perf_counter(), []
    for one in scheduler.run(requests, state=state):
        finished.append(one)
        after_prompt()
    seconds = time.perf_counter() - started
    total = sum(len(scheduler_lib.generated(one.slot)) for one in finished)
    return [
        as_run(
            one.slot,
            vocab_size=one.vocab_size,
            prefill_s=0.0,
            decode_s=seconds * len(scheduler_lib.generated(one.slot)) / total,
        )
        for one in sorted(finished, key=lambda one: one.number)
    ]


def count_mismatches(
    lm: loading.LanguageModel, settings: Settings, prompt: list[int], tokens: list[int]
) -> int:
    """Returns the positions of a generated text at which decoding chooses otherwise.

    Replays the text through decoding: every position is decided after the prefix that
    was really committed, whatever came before it.
    """
    kv = lm.target.new_cache(capacity=settings.capacity, page_size=settings.page_size)
    state = _begin_plain(lm, settings, prompt, kv)
    new = slice(len(prompt), len(prompt) + len(tokens))
    text = np.array(state.tokens)
    text[new] = tokens
    _, chosen = baseline.replay(
        lm.target,
        lm.params,
        state.cache,
        tokens=jnp.asarray(text),
        start=jnp.int32(new.start),
        stop=jnp.int32(new.stop),
        sampling=settings.sampling,
    )
    return int(np.sum(np.asarray(chosen)[new] != np.asarray(tokens)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptResult:
    """One prompt: what both runs produced, and `repeats` times of each.

    Attributes:
      mismatches: verified positions with another argmax than decoding's.
      reference: the tokens to match where they are not those of `plain`: a design
        that is timed against our decoding, and compared with a decoding of its own.
    """

    prompt: prompt_files.Prompt
    prompt_ids: list[int]
    plain: list[Plain]
    spec: list[Speculative]
    mismatches: int
    reference: list[int] | None = None

    @property
    def matched(self) -> bool:
        """Whether every run of either kind produced the same tokens.

        Tokens that were chosen from logits that are not finite match nothing.
        """
        if self.nonfinite:
            return False
        if self.reference is not None:
            return all(run.tokens == self.reference for run in self.spec)
        reference = self.plain[0].tokens
        return all(run.tokens == reference for run in (*self.plain, *self.spec))

    @property
    def text(self) -> metrics.TextCounts:
        """What was counted of the first speculative run's text."""
        return metrics.text_counts(self.spec[0].tokens, self.spec[0].counters)

    @property
    def nonfinite(self) -> int:
        """The most tokens of a run that were chosen from logits that are not finite."""
        plain = [run.nonfinite for run in self.plain]
        return max(plain + [run.counters.nonfinite for run in self.spec])

    def row(self) -> dict:
        """Returns the JSON line."""
        counters = self.spec[0].counters
        summary = metrics.summarise(
            counters,
            prompts=1,
            texts=[self.text],
            matched=None,
            verify_decode_mismatches=None,
        )
        return {
            "kind": "prompt",
            "id": self.prompt.id,
            "category": self.prompt.category,
            "prompt_tokens": len(self.prompt_ids),
            "tokens": counters.tokens,
            "matched": self.matched,
            "verify_decode_mismatches": self.mismatches,
            "nonfinite_logits": self.nonfinite,
            "rounds": counters.rounds,
            "proposed": counters.proposed,
            "accepted": counters.accepted,
            "acceptance_rate": summary["acceptance_rate"],
            "repetition": summary["repetition"],
            "accepted_hist": counters.accepted_hist,
            "baseline_e2e_s": [run.timing.e2e_s for run in self.plain],
            "spec_e2e_s": [run.timing.e2e_s for run in self.spec],
            "plain_ids": self.plain[0].tokens,
            "spec_ids": self.spec[0].tokens,
        }


def run_prompts(
    lm: loading.LanguageModel,
    settings: Settings,
    prompts: Sequence[prompt_files.Prompt],
    ids: Sequence[list[int]],
    *,
    repeats: int,
    after_prompt: Callable[[], None] = lambda: None,
) -> list[PromptResult]:
    """Runs every prompt plain and speculatively in turn, `repeats` times.

    With several slots: every prompt plain and alone, then all in a batch, in turn.
    Afterwards each text is replayed through decoding.
    """
    plain: list[list[Plain]] = [[] for _ in ids]
    spec: list[list[Speculative]] = [[] for _ in ids]
    for _ in range(repeats):
        if settings.num_slots > 1:
            for number, one in enumerate(ids):
                plain[number].append(run_plain(lm, settings, one))
            batch = run_batch(lm, settings, ids, after_prompt=after_prompt)
            for number, run in enumerate(batch):
                spec[number].append(run)
            continue
        for number, one in enumerate(ids):
            plain[number].append(run_plain(lm, settings, one))
            spec[number].append(run_speculative(lm, settings, one))
            after_prompt()
    return [
        PromptResult(
            prompt=prompt,
            prompt_ids=list(prompt_ids),
            plain=plain[number],
            spec=spec[number],
            mismatches=mismatches_of(lm, settings, prompt_ids, spec[number][0]),
        )
        for number, (prompt, prompt_ids) in enumerate(zip(prompts, ids, strict=True))
    ]


def mismatches_of(
    lm: loading.LanguageModel,
    settings: Settings,
    prompt_ids: list[int],
    run: Speculative,
) -> int:
    """Returns what the run counted on its way, or what a replay of its text finds."""
    if run.mismatches is not None:
        return run.mismatches
    return count_mismatches(lm, settings, prompt_ids, run.tokens)


def warm_up(
    lm: loading.LanguageModel, settings: Settings, prompts: Sequence[list[int]]
) -> float:
    """Compiles everything that `run_prompts` needs; returns the seconds it took."""
    started = time.perf_counter()
    brief = dataclasses.replace(settings, gen_tokens=1)
    for prompt in one_a_bucket(prompts):
        plain = run_plain(lm, brief, prompt)
        if settings.num_slots > 1:
            run_batch(lm, brief, [prompt])
        else:
            run_speculative(lm, brief, prompt)
        count_mismatches(lm, brief, prompt, plain.tokens)
    return time.perf_counter() - started


def one_a_bucket(prompts: Sequence[list[int]]) -> list[list[int]]:
    """Returns prompts that between them need every executable that all of them need."""
    by_bucket = {qwen3.bucket(max(1, len(prompt) - 1)): prompt for prompt in prompts}
    return list(by_bucket.values())


def summarise(results: Sequence[PromptResult]) -> metrics.Metrics:
    """Returns the metric dictionary of finished prompts."""
    return metrics.summarise(
        metrics.total(result.spec[0].counters for result in results),
        prompts=len(results),
        texts=[result.text for result in results],
        baseline=_by_repeat([result.plain for result in results]),
        spec=_by_repeat([result.spec for result in results]),
        matched=all(result.matched for result in results),
        verify_decode_mismatches=sum(result.mismatches for result in results),
    )


NO_CATEGORY = "none"
"""What the prompts are called that have no category, where others have one."""


def by_category(results: Sequence[PromptResult]) -> dict[str, metrics.Metrics]:
    """Summarises each category apart; empty unless there are several."""
    grouped: dict[str, list[PromptResult]] = {}
    for result in results:
        grouped.setdefault(result.prompt.category or NO_CATEGORY, []).append(result)
    if len(grouped) < 2:
        return {}
    return {name: summarise(of_one) for name, of_one in sorted(grouped.items())}


def _by_repeat(runs: list[list]) -> list[list[metrics.Timing]]:
    """Returns the timings of each repeat, prompt by prompt."""
    return [[run.timing for run in repeat] for repeat in zip(*runs, strict=True)]
