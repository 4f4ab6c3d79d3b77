"""Drafters on traces: built without the target, and replayed prompt by prompt."""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from experiments.lib import models, policies, runs, step_costs, traces
from spec_jax import algorithms, loading
from spec_jax.analysis import metrics, trace as trace_lib
from spec_jax.drafters import oracle, registry
from spec_jax.engine import (
    checks,
    protocols,
    rows as rows_lib,
    scheduler as scheduler_lib,
)
from spec_jax.gamma import theory
from spec_jax.model import fingerprint, tokenizer
from spec_jax.ops import dispatch
from spec_jax.paging import index


CONSTANT = policies.Chosen()
"""No policy: the same gamma in every round."""


def build(
    name: str,
    header: traces.Header,
    draft: pathlib.Path | None,
    *,
    gamma_max: int,
    min_confidence: float = 0.0,
    target: loading.LanguageModel | None = None,
) -> registry.Built:
    """Returns the drafter of that name for these traces, as a live run has it.

    The draft's weights are read if the drafter uses them; the target's never.

    Args:
      draft: Hugging Face folder of the draft model; the embedded one if None.
      min_confidence: of a drafter that runs a model, see `draft_model.DraftModel`.
      target: of a drafter that reads its features.

    Raises:
      ValueError: an unknown name, a folder that cannot be used, a draft of another
        vocabulary, or a confidence outside `[0, 1]`.
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
        return drafter, params

    is_embedded = header.target == traces.EMBEDDED
    parts = registry.Parts(
        gamma_max=gamma_max,
        vocab_size=header.vocab_size,
        load_draft=load_draft,
        target=None if target is None else target.target,
        target_params=None if target is None else target.params,
        draft=draft,
        heads=loading.heads_for(None if is_embedded else header.target),
        dtype=header.dtype,
    )
    drafter, params = registry.build(name, parts)
    if min_confidence:  # At 0 a drafter keeps what it was made with.
        drafter = models.ending_early(drafter, min_confidence)
    return drafter, params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replayer:
    """A drafter on traces, one sequence at a time."""

    header: traces.Header
    built: registry.Built
    capacity: int  # positions of all caches, whole pages
    stop_ids: tuple[int, ...]  # at which the rounds end

    def run(
        self,
        prompt: traces.PromptTrace,
        *,
        gamma: int,
        chosen: policies.Chosen = CONSTANT,
        features: np.ndarray | None = None,
    ) -> tuple[metrics.Counters, np.ndarray]:
        """Replays one prompt, with a policy that chooses gammas up to `gamma`.

        Args:
          features: that `record_features` returned, for a drafter that reads them.

        Returns:
          The counters, and verifications by their active rows `[slab + 1]`: what the
          target would have computed.
        """
        drafter, params = self.built
        size, max_tokens = self.capacity + 1, len(prompt.generated_ids)
        target = trace_lib.TraceTarget(
            max_rows=self.header.slab, size=size, **_features_of(drafter, features)
        )
        algo = algorithms.speculative(target, drafter, policy=chosen.gamma_policy)
        scheduler = algo.scheduler(
            (None, params),
            num_slots=1,
            capacity=self.capacity,
            page_size=self.header.page_size,
            stop_ids=self.stop_ids,
            policy_state=chosen.state,
        )
        known = None
        trace = trace_lib.make_trace(prompt.text, size=size, features=features)
        trace_lib.check_request(trace, prompt.prompt_ids, max_tokens)
        if isinstance(drafter, oracle.Oracle):
            # What a live oracle is told: the text of decoding, to its stop token.
            text = [*prompt.prompt_ids, *prompt.until_stop(self.stop_ids)]
            known = oracle.make_trace(text)
        request = scheduler_lib.Request(
            prompt=prompt.prompt_ids,
            max_tokens=max_tokens,
            gamma=gamma,
            sampling=self.header.settings,
            target_params=trace,
            draft_params=known,
        )
        state = algo.run((None, params), scheduler.begin(request))
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
        """Runs the rounds of a prompt with the target, and all else as `run` has it."""
        settings = runs.Settings(
            gamma=gamma,
            gen_tokens=self.header.gen_tokens,
            capacity=self.capacity,
            page_size=self.header.page_size,
            stop_ids=self.stop_ids,
            prefill_by_rows=self.header.prefill == "rows",
            sampling=self.header.settings,
            gamma_policy=chosen.gamma_policy,
            policy_state=chosen.state,
        )
        lm = target.with_drafter(*self.built)
        return runs.run_speculative(lm, settings, prompt.prompt_ids)


def _features_of(drafter: Any, features: np.ndarray | None) -> dict[str, Any]:
    """Returns what a target of traces says of them."""
    if features is None:
        return {}
    return {
        "taps": protocols.taps_of(drafter),
        "feature_size": features.shape[2],
        "feature_dtype": features.dtype.name,
    }


def record_features(
    lm: loading.LanguageModel,
    prompt: traces.PromptTrace,
    taps: tuple[int, ...],
    *,
    capacity: int | None = None,
) -> np.ndarray:
    """Runs the target over a text for its features, as live rounds do.

    Args:
      capacity: texts with the same share executables; None: as the text needs.
    """
    return trace_lib.record_features(
        rows_lib.SlotRows(model=lm.target, num_slots=1),
        lm.params,
        prompt.text,
        num_prompt=len(prompt.prompt_ids),
        taps=taps,
        capacity=capacity,
    )


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
    at = runs.first_difference(live.tokens, written)
    if at is not None:
        found.append(
            f"token {at}: live {live.tokens[at]}, in the trace {written[at]}"
            if at < min(len(live.tokens), len(written))
            else f"{len(live.tokens)} tokens live, {len(written)} in the trace"
        )
    return found


_NOT_REPLAYED = ("baseline_", "spec_", "speedup_", "matched", "verify_decode_")
_NOT_REPLAYED += ("nonfinite_logits",)
"""Numbers of `metrics.summarise`, by their beginnings, that a trace does not tell."""


Task = tuple[str, int, str]  # The drafter, gamma and gamma policy of a row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Drafters on the traces of one file: a row for each, gamma and policy."""

    args: argparse.Namespace
    header: traces.Header
    prompts: list[traces.PromptTrace]
    built: Mapping[str, registry.Built]  # drafters and their parameters, by name
    curves: Mapping[str, theory.CostCurve]  # of step costs, by drafter, or none
    # To be run live, for a check, or over the texts, for features; None: neither
    target: loading.LanguageModel | None
    after_prompt: Callable[[], None] = lambda: None
    # Features of all prompts by taps, as they are needed
    recorded: dict[tuple[int, ...], list] = dataclasses.field(default_factory=dict)

    def tasks(self) -> list[Task]:
        """Returns what rows there are to be: drafter, gamma and policy of each."""
        args = self.args
        return list(itertools.product(self.built, args.gamma, args.gamma_policy))

    def __call__(self, task: Task) -> Iterator[dict[str, Any]]:
        """Yields the row of a task."""
        name, gamma, policy = task
        header, built = self.header, self.built[name]
        longest = max(len(prompt.prompt_ids) for prompt in self.prompts)
        pages = index.pages_for(longest + header.gen_tokens, header.page_size)
        replayer = Replayer(
            header=header,
            built=built,
            capacity=pages * header.page_size,
            stop_ids=() if self.args.ignore_stop else header.stop_ids,
        )
        features = self._features(protocols.taps_of(built[0]))
        yield {
            "kind": "replay",
            "drafter": name,
            "gamma": gamma,
            "gamma_policy": policy,
            "drafter_sha256": fingerprint.of_params(built[1]),
            **self._row(name, replayer, gamma, policy, features),
        }

    def _features(self, taps: tuple[int, ...]) -> list:
        """Returns those of all prompts, recorded once; of no taps there are none."""
        if not taps:
            return [None] * len(self.prompts)
        if taps not in self.recorded:
            assert self.target is not None  # The drafter was built with it.
            capacity = max(len(prompt.text) for prompt in self.prompts)
            self.recorded[taps] = [
                record_features(self.target, prompt, taps, capacity=capacity)
                for prompt in self.prompts
            ]
        return self.recorded[taps]

    def _chosen(self, name, drafter, gamma, policy) -> policies.Chosen:
        """Returns a policy, with `--schedule` by the profile of one slot."""
        if not self.args.schedule:
            curve = self.curves.get(name)
            return policies.make(
                policy, drafter, gamma=gamma, round_s=lambda: curve.round_s(gamma)
            )
        header = self.header
        about = {"drafter": name, "target": header.target, "dtype": header.dtype}
        about |= {"impl": header.impl, "native_isa": header.native_isa}
        about["draft"] = models.draft_of(self.args, name)
        lengths = statistics.median(len(prompt.prompt_ids) for prompt in self.prompts)
        return policies.scheduled(
            self.args.schedule,
            about,
            drafter,
            name=policy,
            gamma=gamma,
            num_slots=1,
            context=int(lengths) + header.gen_tokens // 2,
            temperature=header.temperature,
        )

    def _row(self, name, replayer, gamma, policy, features) -> dict[str, Any]:
        """Returns what one drafter does with one gamma and policy, over all prompts."""
        curve = self.curves.get(name)
        chosen = self._chosen(name, replayer.built[0], gamma, policy)
        run = {"gamma": gamma, "chosen": chosen}
        found, forwards, differing = [], [], []
        for prompt, of_prompt in zip(self.prompts, features, strict=True):
            counters, num_forwards = replayer.run(prompt, features=of_prompt, **run)
            found.append(counters)
            forwards.append(num_forwards)
            if self.args.check:
                assert self.target is not None
                live = replayer.run_live(self.target, prompt, **run)
                written = prompt.until_stop(replayer.stop_ids)
                differs = differences(live, counters, written)
                differing += [{"id": prompt.id, "differs": differs}] if differs else []
            self.after_prompt()
        counters, num_forwards = metrics.total(found), np.sum(forwards, axis=0)
        texts = [prompt.until_stop(replayer.stop_ids) for prompt in self.prompts]
        summary = metrics.summarise(
            counters,
            prompts=len(self.prompts),
            texts=list(map(metrics.text_counts, texts, found)),
            matched=None,
            verify_decode_mismatches=None,
        )
        seconds = None
        if curve is not None:
            seconds = step_costs.expected_seconds(curve, num_forwards)
        return {
            **{k: v for k, v in summary.items() if not k.startswith(_NOT_REPLAYED)},
            "cut": counters.cut,
            "proposed_at": counters.proposed_at,
            "accepted_at": counters.accepted_at,
            "rounds_by_rows": num_forwards,
            "expected_tok_s": seconds and counters.tokens / seconds,
            "expected_speedup": seconds and counters.tokens * curve.plain_s / seconds,
            "checked": len(self.prompts) if self.args.check else None,
            "differing": differing,
        }


def prepare(args: argparse.Namespace, asked: Mapping[str, Any]) -> Evaluation:
    """Reads and checks everything that the flags name, before anything runs.

    Args:
      asked: fields of the traces' header, by name, that they must have.
    """
    path, gamma_max = args.traces, max(args.gamma)
    has_costs = args.costs is not None or args.schedule is not None
    if "goodput" in args.gamma_policy and not has_costs:
        raise ValueError(
            "gamma policy goodput expects speeds from step costs: give --costs"
        )
    header, prompts = traces.read(path)
    changes = header.changes(asked)
    if changes:
        raise ValueError(
            f"{path}: what was recorded is not what is asked for "
            f"({'; '.join(changes)}); leave these flags out, or record again"
        )
    if gamma_max + 1 > header.slab:
        raise ValueError(
            f"{path}: recorded for windows of at most {header.slab} rows, which is "
            f"gamma {header.slab - 1}, and --gamma has {gamma_max}; record again with "
            "it"
        )
    curves = {} if args.costs is None else step_costs.read(args.costs, args.drafter)
    for curve in curves.values():
        curve.round_s(gamma_max)  # Raises where its table is too short.
    reads_target = any(registry.reads_target(n, args.draft) for n in args.drafter)
    target = None
    if args.check or reads_target:
        target = _live_target(args.target, header)
    make = functools.partial(
        build,
        target=target,
        header=header,
        draft=args.draft,
        gamma_max=gamma_max,
        min_confidence=args.confidence,
    )
    built = {name: make(name) for name in args.drafter}
    for name, (drafter, _) in built.items():
        models.check_gamma(name, drafter, gamma_max)
    return Evaluation(
        args=args,
        header=header,
        prompts=prompts,
        built=built,
        curves=curves,
        target=target,
    )


def _live_target(
    folder: pathlib.Path | None, header: traces.Header
) -> loading.LanguageModel:
    """Loads the target of the traces; raises `ValueError` where it is another one."""
    lm = traces.load_target(
        folder, dtype=header.dtype, impl=header.impl, gamma_max=header.slab - 1
    )
    changes = header.changes(traces.facts(lm))
    if changes:
        raise ValueError(
            f"{folder or traces.EMBEDDED}: not the target of the traces, or not as it "
            f"ran for them ({'; '.join(changes)}); give the --target that they were "
            f"recorded with, {header.target}, or record again"
        )
    return lm
