"""Drafters on traces: built without the target, and replayed prompt by prompt."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import policies, recordings, runs, traces
from spec_jax import loading
from spec_jax.analysis import metrics, trace as trace_lib
from spec_jax.drafters import each, oracle, registry
from spec_jax.engine import checks, round as round_lib, scheduler as scheduler_lib
from spec_jax.model import tokenizer
from spec_jax.ops import dispatch


CONSTANT = policies.Chosen()
"""No policy: the same gamma in every round."""


def build(
    name: str,
    header: traces.Header,
    draft: pathlib.Path | None,
    *,
    gamma_max: int,
    min_confidence: float = 0.0,
) -> registry.Built:
    """Returns the drafter of that name for these traces, as a live run has it.

    The draft's weights are read if the drafter uses them; the target's never.

    Args:
      draft: Hugging Face folder of the draft model; the embedded one if None.
      min_confidence: of the draft model, see `draft_model.DraftModel`.

    Raises:
      ValueError: an unknown name, a folder that cannot be used, a draft of another
        vocabulary, or a confidence outside `[0, 1]`.
      NotImplementedError: an implementation that cannot run here.
    """

    def load_draft():
        folder = draft or loading.EMBEDDED_DRAFT
        words = tokenizer.load(folder)
        drafter, params = loading.load_draft(
            folder,
            words,
            gamma_max=gamma_max,
            dtype=header.dtype,
            impl=dispatch.resolve(header.impl),
        )
        ours = {"vocabulary": words.fingerprint, "vocab_size": drafter.vocab_size}
        changes = header.changes(ours)
        if changes:
            raise ValueError(
                f"{folder}: a draft of another vocabulary than that of the traces "
                f"({'; '.join(changes)}); give the --draft that goes with "
                f"{header.target}"
            )
        return dataclasses.replace(drafter, min_confidence=min_confidence), params

    parts = registry.Parts(
        gamma_max=gamma_max, vocab_size=header.vocab_size, load_draft=load_draft
    )
    return registry.build(name, parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replayer:
    """A drafter on traces, one sequence at a time.

    Attributes:
      built: the drafter, and its parameters.
      capacity: positions of all caches, whole pages.
      stop_ids: at which the rounds end.
    """

    header: traces.Header
    built: registry.Built
    capacity: int
    stop_ids: tuple[int, ...]

    def run(
        self,
        prompt: traces.PromptTrace,
        *,
        gamma: int,
        chosen: policies.Chosen = CONSTANT,
    ) -> tuple[metrics.Counters, np.ndarray]:
        """Replays one prompt, with a policy that chooses gammas up to `gamma`.

        Returns:
          The counters, and verifications by their active rows `[slab + 1]`: what the
          target would have computed.

        Raises:
          ValueError: a prompt, a trace or a gamma that cannot be used.
        """
        drafter, params = self.built
        size, max_tokens = self.capacity + 1, len(prompt.generated_ids)
        speculator = round_lib.Speculator(
            params=(None, params),
            target=trace_lib.TraceTarget(max_rows=self.header.slab, size=size),
            drafter=each.lift(drafter, 1),
            gamma_policy=chosen.gamma_policy,
        )
        scheduler = scheduler_lib.Scheduler(
            speculator=speculator,
            capacity=self.capacity,
            page_size=self.header.page_size,
            stop_ids=self.stop_ids,
            policy_state=chosen.state,
        )
        trace, known = trace_lib.make_trace(prompt.text, size=size), None
        trace_lib.check_request(trace, prompt.prompt_ids, max_tokens)
        if isinstance(drafter, oracle.Oracle):
            # What a live oracle is told: the text of decoding, to its stop token.
            text = [*prompt.prompt_ids, *prompt.until_stop(self.stop_ids)]
            known = oracle.make_trace(text)
        request = scheduler_lib.Request(
            prompt=prompt.prompt_ids,
            max_tokens=max_tokens,
            gamma=gamma,
            sampling=recordings.sampling_of(self.header),
            target_params=trace,
            draft_params=known,
        )
        state = round_lib.generate(
            speculator, scheduler.begin(request), max_rounds=jnp.int32(max_tokens)
        )
        checks.check_pages(state.slots.status, state.slots.length, state.cache)
        slot = scheduler_lib.slot_of(jax.device_get(state.slots), 0)
        num_tokens = int(slot.length) - len(prompt.prompt_ids)
        counters = metrics.of_slot(slot, num_tokens=num_tokens)
        return counters, np.asarray(state.cache.num_forwards)

    def run_live(
        self,
        target: loading.LanguageModel,
        prompt: traces.PromptTrace,
        *,
        gamma: int,
        chosen: policies.Chosen = CONSTANT,
    ) -> runs.Speculative:
        """Runs the rounds of a prompt with the target, and all else as `run` has it.

        Raises:
          ValueError: a prompt that cannot be used.
          MemoryError: out of pages.
        """
        settings = runs.Settings(
            gamma=gamma,
            gen_tokens=self.header.gen_tokens,
            capacity=self.capacity,
            page_size=self.header.page_size,
            stop_ids=self.stop_ids,
            prefill_by_rows=self.header.prefill == "rows",
            sampling=recordings.sampling_of(self.header),
            gamma_policy=chosen.gamma_policy,
            policy_state=chosen.state,
        )
        lm = target.with_drafter(*self.built)
        return runs.run_speculative(lm, settings, prompt.prompt_ids)


def differences(
    live: runs.Speculative, replayed: metrics.Counters, written: list[int]
) -> list[str]:
    """Returns what differs between a live run and its replay, one text each.

    Args:
      written: tokens of the trace, up to its stop token.
    """
    found = [
        f"{name}: live {value}, replayed {getattr(replayed, name)}"
        for name, value in vars(live.counters).items()
        if value != getattr(replayed, name)
    ]
    if live.tokens != written:
        pairs = enumerate(zip(live.tokens, written, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), None)
        found.append(
            f"{len(live.tokens)} tokens live, {len(written)} in the trace"
            if at is None
            else f"token {at}: live {live.tokens[at]}, in the trace {written[at]}"
        )
    return found
