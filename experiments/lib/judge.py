"""Judging: every drafter and gamma on the traces of one file, a row for each."""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from experiments.lib import policies, recordings, replays, step_costs, traces
from spec_jax import loading
from spec_jax.analysis import metrics
from spec_jax.drafters import registry
from spec_jax.gamma import theory
from spec_jax.paging import index


_NOT_REPLAYED = ("baseline_", "spec_", "speedup_", "matched", "verify_decode_")
_NOT_REPLAYED += ("nonfinite_logits",)
"""Numbers of `metrics.summarise`, by their beginnings, that a trace does not tell."""


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
            replayer = replays.Replayer(
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
        chosen = policies.make(
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
                differs = replays.differences(live, counters, written)
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
    make = functools.partial(
        replays.build, header=header, draft=draft, gamma_max=gamma_max
    )
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
    lm = recordings.load_target(
        folder, dtype=header.dtype, impl=header.impl, gamma_max=header.slab - 1
    )
    changes = header.changes(recordings.facts(lm))
    if changes:
        name = folder or recordings.EMBEDDED
        raise ValueError(
            f"{name}: not the target of the traces, or not as it ran for them "
            f"({'; '.join(changes)}); give the --target that they were recorded "
            f"with, {header.target}, or record again"
        )
    return lm
