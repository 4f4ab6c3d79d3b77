"""Whether replay counts what live rounds count: the same prompts, with the target."""

import pathlib

from experiments.support import (
    model_pair,
    paired_runs,
    policies,
    replay_runs,
    traces,
)
from spec_jax.analysis import metrics
from spec_jax.model import fingerprint
from spec_jax.ops import dispatch


def load_pair(
    header: traces.Header,
    target: pathlib.Path,
    draft: pathlib.Path,
    *,
    drafter: str,
    gamma_max: int,
    min_confidence: float = 0.0,
) -> model_pair.ModelPair:
    """The pair that a live run of these traces has, as `spec_round.py` loads it.

    Raises:
      ValueError: a target other than that of the traces, or as `model_pair.load_pair`.
      NotImplementedError: an implementation that cannot run here.
    """
    pair = model_pair.load_pair(
        target,
        draft,
        gamma_max=gamma_max,
        slab=header.slab,
        dtype=header.dtype,
        impl=header.impl,
        drafter=drafter,
        min_confidence=min_confidence,
        sampling_settings=replay_runs.sampling_of(header),
    )
    changes = header.changes(
        {
            "vocabulary": pair.tokenizer.fingerprint,
            "vocab_size": pair.target.config.vocab_size,
            "fingerprint": fingerprint.of_params(pair.params[0]),
            "native_isa": dispatch.instruction_set(pair.target.impl),
        }
    )
    if changes:
        raise ValueError(
            f"{target}: not the target of the traces, or not as it ran for them "
            f"({'; '.join(changes)}); give the --target that they were recorded with, "
            f"{header.target}, or record again"
        )
    return pair


def run_live(
    pair: model_pair.ModelPair,
    header: traces.Header,
    replayer: replay_runs.Replayer,
    prompt: traces.PromptTrace,
    *,
    gamma: int,
    chosen: policies.Chosen = replay_runs.CONSTANT,
) -> paired_runs.Speculative:
    """The rounds of a prompt with the target, and all else as `replayer` has it.

    Raises:
      ValueError: a prompt that cannot be used.
      MemoryError: out of pages.
    """
    settings = paired_runs.Settings(
        gamma=gamma,
        gen_tokens=header.gen_tokens,
        capacity=replayer.capacity,
        page_size=replayer.page_size,
        stop_ids=replayer.stop_ids,
        prefill_by_rows=header.prefill == "rows",
        sampling=replay_runs.sampling_of(header),
        gamma_policy=chosen.gamma_policy,
        policy_state=chosen.state,
    )
    return paired_runs.run_speculative(pair, settings, prompt.prompt_ids)


def differences(
    live: paired_runs.Speculative,
    replayed: metrics.Counters,
    plain_tokens: list[int],
) -> list[str]:
    """What differs between a live run and its replay, one text each; none if equal.

    Args:
      plain_tokens: those of the trace, up to its stop token.
    """
    found = [
        f"{name}: live {value}, replayed {getattr(replayed, name)}"
        for name, value in vars(live.counters).items()
        if value != getattr(replayed, name)
    ]
    if live.tokens != plain_tokens:
        pairs = zip(live.tokens, plain_tokens, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        found.append(
            f"{len(live.tokens)} tokens live, {len(plain_tokens)} in the trace"
            if at is None
            else f"token {at}: live {live.tokens[at]}, in the trace {plain_tokens[at]}"
        )
    return found
