"""Drafters on traces: built without the target, replayed prompt by prompt, judged.

Also recording, which decodes every prompt once, and the check, which runs the target
live and compares every counter.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import (
    gamma_policies,
    prompt_files,
    prompts as prompts_lib,
    records,
    runs,
    step_costs,
    terminal,
    traces,
)
from spec_jax import loading
from spec_jax.analysis import metrics, trace as trace_lib
from spec_jax.drafters import each, oracle, registry
from spec_jax.engine import checks, round as round_lib, scheduler as scheduler_lib
from spec_jax.gamma import theory
from spec_jax.model import fingerprint, load, row_model, tokenizer
from spec_jax.ops import dispatch
from spec_jax.paging import index
from spec_jax.rules import sampling


CONSTANT = gamma_policies.Chosen()
"""No policy: the same gamma in every round."""

EMBEDDED = "embedded"
"""The name of the target that comes with the package."""

_NOT_REPLAYED = ("baseline_", "spec_", "speedup_", "matched", "verify_decode_")
_NOT_REPLAYED += ("nonfinite_logits",)
"""Numbers of `metrics.summarise`, by their beginnings, that a trace does not tell."""


def load_target(
    folder: pathlib.Path | None, *, dtype: str | None, impl: str, gamma_max: int
) -> loading.LanguageModel:
    """Returns the target alone, a model without a drafter, for windows of `gamma_max`.

    Raises:
      ValueError: a folder that cannot be used, or a slab that is too high.
      NotImplementedError: an implementation that cannot run here.
    """
    folder, impl = folder or loading.EMBEDDED_TARGET, dispatch.resolve(impl)
    slab = row_model.slab_for(impl, gamma_max + 1)
    words = tokenizer.load(folder)
    config, params = load.load(folder, dtype=dtype)
    return loading.LanguageModel(
        target=row_model.RowModel(config=config, impl=impl, slab=slab),
        params=params,
        drafter=None,
        drafter_params=None,
        tokenizer=words,
    )


def _facts(lm: loading.LanguageModel) -> dict[str, Any]:
    """Returns the fields of a header that the target decides."""
    return {
        "fingerprint": fingerprint.of_params(lm.params),
        "vocabulary": lm.tokenizer.fingerprint,
        "vocab_size": lm.target.config.vocab_size,
        "native_isa": dispatch.instruction_set(lm.target.impl),
    }


def sampling_of(header: traces.Header) -> sampling.SamplingSettings | None:
    """Returns how the target drew; None is greedy.

    Raises:
      ValueError: a value outside its range.
    """
    settings = sampling.make_settings(
        **{name: getattr(header, name) for name in traces.SAMPLING}
    )
    return None if header.temperature == 0 else settings


#
# Recording
#


def record(
    path: pathlib.Path,
    *,
    target: pathlib.Path | None,
    dtype: str | None,
    impl: str,
    gamma_max: int,
    prompts: str,
    raw: bool,
    gen_tokens: int,
    page_size: int,
    settings: Mapping[str, float | int | None],
) -> tuple[traces.Header, int]:
    """Decodes the prompts that the file does not hold yet, and writes their traces.

    Args:
      gamma_max: the largest gamma that live rounds will have: it sets the slab.
      settings: how the target draws, by the names of `traces.Header`.

    Returns:
      The header, and how many prompts the file held before.

    Raises:
      ValueError: input that cannot be used, or a file that holds something else.
      NotImplementedError: an implementation that cannot run here.
      MemoryError: out of memory, or of pages.
    """
    drawn = sampling.make_settings(**settings) if settings["temperature"] else None
    named = prompt_files.parse(prompts, default_file=prompt_files.BUNDLED)
    lm = load_target(target, dtype=dtype, impl=impl, gamma_max=gamma_max)
    sizes = {"gen_tokens": gen_tokens, "page_size": page_size}
    prepared = prompts_lib.prepare(lm, named, raw=raw, sampling=drawn, **sizes)
    header = traces.Header(
        target=str(target or EMBEDDED),
        dtype=lm.target.config.dtype,
        impl=lm.target.impl,
        slab=lm.target.slab,
        prefill="rows" if lm.target.prefills_by_rows else "batched",
        stop_ids=tuple(lm.stop_ids),
        prompt_source=prompts,
        raw=raw,
        num_prompts=len(prepared.prompts),
        **_facts(lm),
        **sizes,
        **settings,
    )
    run = runs.Settings(
        gamma=gamma_max,
        capacity=prepared.capacity,
        # Live rounds judge drafts after a stop token, too, before it cuts.
        stop_ids=(),
        prefill_by_rows=lm.target.prefills_by_rows,
        sampling=drawn,
        **sizes,
    )
    known = _taken_up(path, header, prepared)
    with records.JsonLines(path) as out, terminal.progress() as progress:
        out.write(header.to_row() | records.provenance())
        total = header.num_prompts
        task = progress.add_task("prompts", total=total, completed=len(known))
        for one in known:
            out.write(one.to_row())
        for number in range(len(known), total):
            prompt, ids = prepared.prompts[number], prepared.ids[number]
            one = traces.PromptTrace(
                id=prompt.id,
                category=prompt.category,
                prompt_ids=ids,
                generated_ids=runs.run_plain(lm, run, ids).tokens,
            )
            out.write(one.to_row())
            progress.advance(task)
    return header, len(known)


def _taken_up(path, header, prepared) -> list[traces.PromptTrace]:
    """Returns the traces that an interrupted recording of the same left behind.

    Raises:
      ValueError: a file of something else.
    """
    if not path.is_file() or not path.stat().st_size:
        return []
    theirs, known = traces.read(path, is_complete=False)
    changes = theirs.changes(dataclasses.asdict(header))
    pairs = zip(prepared.prompts, prepared.ids, strict=True)
    named = [(prompt.id, ids) for prompt, ids in pairs]
    if not changes and [(k.id, k.prompt_ids) for k in known] != named[: len(known)]:
        changes = ["prompts of another file"]
    if changes:
        raise ValueError(
            f"{path}: holds traces of another recording ({'; '.join(changes)}); name "
            "another file, or remove this one"
        )
    return known


#
# Replaying
#


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
        chosen: gamma_policies.Chosen = CONSTANT,
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
            sampling=sampling_of(self.header),
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
        chosen: gamma_policies.Chosen = CONSTANT,
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
            sampling=sampling_of(self.header),
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


#
# Judging
#


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judge:
    """Drafters on the traces of one file.

    Attributes:
      built: drafters and their parameters, by name.
      curves: of step costs, by the name of the drafter; empty without costs.
      target: to be run live, for a check; None: no check.
    """

    header: traces.Header
    prompts: list[traces.PromptTrace]
    built: Mapping[str, registry.Built]
    gammas: tuple[int, ...]
    policies: tuple[str, ...]
    ignore_stop: bool
    curves: Mapping[str, theory.CostCurve]
    target: loading.LanguageModel | None

    @property
    def num_replays(self) -> int:
        """Prompts replayed, over all rows."""
        num_rows = len(self.built) * len(self.gammas) * len(self.policies)
        return num_rows * len(self.prompts)

    def rows(self, after_prompt: Callable[[], None]) -> Iterator[dict[str, Any]]:
        """Yields a row for each drafter, gamma and policy, as soon as it is known."""
        header = self.header
        longest = max(len(prompt.prompt_ids) for prompt in self.prompts)
        pages = index.pages_for(longest + header.gen_tokens, header.page_size)
        for name, built in self.built.items():
            replayer = Replayer(
                header=header,
                built=built,
                capacity=pages * header.page_size,
                stop_ids=() if self.ignore_stop else header.stop_ids,
            )
            for gamma, policy in itertools.product(self.gammas, self.policies):
                yield {
                    "kind": "replay",
                    "drafter": name,
                    "gamma": gamma,
                    "gamma_policy": policy,
                    **self._row(name, replayer, gamma, policy, after_prompt),
                }

    def _row(self, name, replayer, gamma, policy, after_prompt) -> dict[str, Any]:
        """Returns what one drafter does with one gamma and policy, over all prompts."""
        curve = self.curves.get(name)
        chosen = gamma_policies.make(
            policy,
            replayer.built[0],
            gamma=gamma,
            round_s=lambda: curve.round_s(gamma),
        )
        run = {"gamma": gamma, "chosen": chosen}
        found, forwards, differing = [], [], []
        for prompt in self.prompts:
            counters, num_forwards = replayer.run(prompt, **run)
            found.append(counters)
            forwards.append(num_forwards)
            if self.target is not None:
                live = replayer.run_live(self.target, prompt, **run)
                written = prompt.until_stop(replayer.stop_ids)
                differs = differences(live, counters, written)
                differing += [{"id": prompt.id, "differs": differs}] if differs else []
            after_prompt()
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
            "checked": None if self.target is None else len(self.prompts),
            "differing": differing,
        }


def make_judge(
    path: pathlib.Path,
    *,
    asked: Mapping[str, Any],
    drafters: tuple[str, ...],
    gammas: tuple[int, ...],
    policies: tuple[str, ...],
    min_confidence: float,
    target: pathlib.Path | None,
    draft: pathlib.Path | None,
    costs: pathlib.Path | None,
    ignore_stop: bool,
    check: bool,
) -> Judge:
    """Reads and checks everything that is named, before anything runs.

    Args:
      path: of the traces.
      asked: fields of the traces' header, by name, that they must have.
      target, draft: Hugging Face folders; the embedded ones if None.
      costs: a file for `step_costs.read`.

    Raises:
      ValueError: input that cannot be used, or does not fit the traces.
      NotImplementedError: an implementation that cannot run here.
    """
    if "goodput" in policies and costs is None:
        raise ValueError(
            "gamma policy goodput expects speeds from step costs: give --costs"
        )
    header, prompts = traces.read(path)
    gamma_max, changes = max(gammas), header.changes(asked)
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
    curves = {} if costs is None else step_costs.read(costs, drafters)
    for curve in curves.values():
        curve.round_s(gamma_max)  # Raises where its table is too short.
    make = functools.partial(build, header=header, draft=draft, gamma_max=gamma_max)
    return Judge(
        header=header,
        prompts=prompts,
        built={name: make(name, min_confidence=min_confidence) for name in drafters},
        gammas=gammas,
        policies=policies,
        ignore_stop=ignore_stop,
        curves=curves,
        target=_live_target(target, header) if check else None,
    )


def _live_target(
    folder: pathlib.Path | None, header: traces.Header
) -> loading.LanguageModel:
    """Loads the target of the traces; raises `ValueError` where it is another one."""
    lm = load_target(
        folder, dtype=header.dtype, impl=header.impl, gamma_max=header.slab - 1
    )
    changes = header.changes(_facts(lm))
    if changes:
        raise ValueError(
            f"{folder or EMBEDDED}: not the target of the traces, or not as it ran for "
            f"them ({'; '.join(changes)}); give the --target that they were recorded "
            f"with, {header.target}, or record again"
        )
    return lm
