"""Prompts in batches: the rounds of several at once, and what each would be alone.

A batch is timed as a whole, from the first prefill to the last token; the clock stands
still for nothing in between. Its seconds are shared out over the prompts by the tokens
that each generated, so that totals are those of the batch. Prefill and decoding overlap
and are not told apart.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from spec_jax.batch import drafters, queue, rows

from experiments.support import model_pair, paired_runs, prompt_files, prompt_runs
from spec_jax import rounds
from spec_jax.analysis import metrics
from spec_jax.drafters import oracle


def make(
    pair: model_pair.ModelPair, settings: paired_runs.Settings, *, num_slots: int
) -> queue.Batch:
    """The pair in so many slots.

    Raises:
      ValueError: fewer than one slot.
      NotImplementedError: a drafter that has no form for batches.
    """
    return queue.Batch(
        target=rows.RowBatch(model=pair.target, num_slots=num_slots),
        drafter=drafters.of(pair.drafter, num_slots),
        params=pair.params,
        capacity=settings.capacity,
        page_size=settings.page_size,
        stop_ids=settings.stop_ids,
        prefill_by_rows=settings.prefill_by_rows,
        gamma_policy=settings.gamma_policy,
        policy_state=settings.policy_state,
    )


def run_batch(
    pair: model_pair.ModelPair,
    settings: paired_runs.Settings,
    prompts: Sequence[list[int]],
    *,
    num_slots: int,
    after_prompt: Callable[[], None] = lambda: None,
) -> list[paired_runs.Speculative]:
    """All prompts, `num_slots` at a time; raises as `queue.Batch.run`."""
    batch = make(pair, settings, num_slots=num_slots)
    requests = [_request(pair, settings, prompt) for prompt in prompts]
    state = batch.empty(draws=settings.sampling is not None)
    jax.block_until_ready((state, [request.draft_params for request in requests]))
    started = time.perf_counter()
    finished = []
    for one in batch.run(requests, state=state):
        finished.append(one)
        after_prompt()
    seconds = time.perf_counter() - started
    total = sum(len(_tokens(one)) for one in finished)
    ordered = sorted(finished, key=lambda one: one.number)
    return [_as_run(one, seconds / total) for one in ordered]


def _request(pair, settings, prompt) -> queue.Request:
    trace = None
    if isinstance(pair.drafter, oracle.Oracle):
        trace = paired_runs.make_trace(pair, settings, prompt)
    return queue.Request(
        prompt=prompt,
        max_tokens=settings.gen_tokens,
        gamma=settings.gamma,
        settings=settings.sampling,
        draft_params=trace,
    )


def _tokens(one: queue.Finished) -> list[int]:
    """As `one.tokens`, which raises where logits are not finite: that is counted."""
    paired_runs.check_state(one.state)
    is_new = np.asarray(one.state.origins) != int(rounds.Origin.PROMPT)
    return np.asarray(one.state.tokens)[is_new].tolist()


def _as_run(one: queue.Finished, seconds_per_token: float) -> paired_runs.Speculative:
    tokens, origins = _tokens(one), np.asarray(one.state.origins)
    return paired_runs.Speculative(
        tokens=tokens,
        origins=[rounds.Origin(o) for o in origins if o != rounds.Origin.PROMPT],
        counters=paired_runs.count(one.state, len(tokens)),
        timing=metrics.Timing(
            prefill_s=0.0,
            decode_s=seconds_per_token * len(tokens),
            tokens=len(tokens),
        ),
        mismatches=None,
    )


def run_prompts(
    pair: model_pair.ModelPair,
    settings: paired_runs.Settings,
    prompts: Sequence[prompt_files.Prompt],
    ids: Sequence[list[int]],
    *,
    num_slots: int,
    repeats: int,
    after_prompt: Callable[[], None] = lambda: None,
) -> list[prompt_runs.PromptResult]:
    """Every prompt plain and alone, then all in batches; `repeats` times in turn."""
    plain, spec = [], []
    for _ in range(repeats):
        plain.append([paired_runs.run_plain(pair, settings, one) for one in ids])
        spec.append(
            run_batch(
                pair, settings, ids, num_slots=num_slots, after_prompt=after_prompt
            )
        )
    return [
        prompt_runs.PromptResult(
            prompt=prompt,
            prompt_ids=prompt_ids,
            plain=[runs[number] for runs in plain],
            spec=[runs[number] for runs in spec],
            mismatches=prompt_runs.mismatches_of(
                pair, settings, prompt_ids, spec[0][number]
            ),
        )
        for number, (prompt, prompt_ids) in enumerate(zip(prompts, ids, strict=True))
    ]


def warm_up(
    pair: model_pair.ModelPair,
    settings: paired_runs.Settings,
    prompts: Sequence[list[int]],
    *,
    num_slots: int,
) -> float:
    """Compiles everything that `run_prompts` needs; returns the seconds it took."""
    started = time.perf_counter()
    brief = dataclasses.replace(settings, gen_tokens=1)
    for prompt in paired_runs.one_a_bucket(list(prompts)):
        plain = paired_runs.run_plain(pair, brief, prompt)
        run_batch(pair, brief, [prompt], num_slots=num_slots)
        paired_runs.count_mismatches(pair, brief, prompt, plain.tokens)
    return time.perf_counter() - started


def without_decode_times(summary: metrics.Metrics) -> metrics.Metrics:
    """The metrics that a batch has: none that leaves prefill out."""
    missing = ("spec_decode_", "speedup_decode")
    return {k: v for k, v in summary.items() if not k.startswith(missing)}
