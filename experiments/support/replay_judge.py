"""Judging: every drafter and gamma on the traces of one file, a row for each."""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from experiments.lib import records
from experiments.support import (
    model_pair,
    replay_check,
    replay_costs,
    replay_policies,
    replay_runs,
    report,
    traces,
)
from spec_jax.analysis import metrics
from spec_jax.gamma import theory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to judge.

    Attributes:
      drafters: names of `drafters.DRAFTERS`.
      gammas: the most tokens drafted a round, a row for each.
      policies: names of `policies.POLICIES`, a row for each gamma and each of them.
      min_confidence: of a draft model.
      target: Hugging Face folder of the target, for a check alone; the embedded one
        if None.
      draft: that of the draft model; the embedded one if None.
      costs: a file for `replay_costs.read`.
      ignore_stop: judge what is behind stop tokens, too.
      check: run the target live, and compare.
    """

    path: pathlib.Path
    drafters: tuple[str, ...]
    gammas: tuple[int, ...]
    policies: tuple[str, ...]
    min_confidence: float
    target: pathlib.Path | None
    draft: pathlib.Path | None
    costs: pathlib.Path | None
    ignore_stop: bool
    check: bool


class Judge:
    """Drafters on the traces of one file."""

    def __init__(self, request: Request, asked: Mapping[str, Any]):
        """Reads and checks everything that is named, before anything runs.

        Args:
          asked: fields of the traces' header, by name, that they must have.

        Raises:
          ValueError: input that cannot be used, or does not fit the traces.
          NotImplementedError: an implementation that cannot run here.
        """
        self._request = request
        has_costs = request.costs is not None
        replay_policies.check_costs(request.policies, has_costs=has_costs)
        self._header, self._prompts = traces.read(request.path)
        self._check_agreement(asked)
        self._curves: dict[str, theory.CostCurve] = {}
        if has_costs:
            self._curves = replay_costs.read(request.costs, request.drafters)
            for curve in self._curves.values():
                curve.round_s(self._gamma_max)  # Raises where its table is too short.
        self._drafters = replay_runs.build(
            request.drafters,
            self._header,
            request.draft or model_pair.EMBEDDED_DRAFT,
            gamma_max=self._gamma_max,
            min_confidence=request.min_confidence,
        )
        self._pair: model_pair.ModelPair | None = None
        self._pair_of = ""
        if request.check:
            # The first pair is loaded now, to see whether the target is the right one.
            self._load_pair(request.drafters[0])

    @property
    def header(self) -> traces.Header:
        """Of the traces."""
        return self._header

    @property
    def num_replays(self) -> int:
        """Prompts replayed, over all rows."""
        request = self._request
        num_rows = len(request.drafters) * len(request.gammas) * len(request.policies)
        return num_rows * len(self._prompts)

    def rows(self, after_prompt: Callable[[], None]) -> Iterator[dict[str, Any]]:
        """A row for each drafter, gamma and policy, as soon as it is known."""
        request, header = self._request, self._header
        for name, (drafter, params) in self._drafters.items():
            if request.check:
                self._load_pair(name)
            replayer = replay_runs.Replayer(
                drafter=drafter,
                params=params,
                slab=header.slab,
                capacity=replay_runs.capacity_of(header, self._prompts),
                page_size=header.page_size,
                stop_ids=() if request.ignore_stop else header.stop_ids,
            )
            for gamma, policy in itertools.product(request.gammas, request.policies):
                yield {
                    "kind": "replay",
                    "drafter": name,
                    "gamma": gamma,
                    "gamma_policy": policy,
                    **self._judge(name, replayer, gamma, policy, after_prompt),
                }

    def _judge(
        self,
        name: str,
        replayer: replay_runs.Replayer,
        gamma: int,
        policy: str,
        after_prompt: Callable[[], None],
    ) -> dict[str, Any]:
        """What one drafter does with one gamma and policy, over all prompts."""
        chosen = replay_policies.make(
            policy, replayer.drafter, gamma=gamma, curve=self._curves.get(name)
        )
        run = {"gamma": gamma, "chosen": chosen}
        found, differing = [], []
        for prompt in self._prompts:
            replayed = replayer.run(prompt, **run)
            found.append(replayed)
            if self._request.check:
                differs = self._differences(replayer, prompt, replayed, **run)
                differing += [{"id": prompt.id, "differs": differs}] if differs else []
            after_prompt()
        counters = metrics.total(prompt.counters for prompt in found)
        summary = metrics.summarise(
            counters,
            prompts=len(self._prompts),
            texts=[
                metrics.text_counts(
                    prompt.until_stop(replayer.stop_ids), replayed.counters
                )
                for prompt, replayed in zip(self._prompts, found, strict=True)
            ],
            matched=None,
            verify_decode_mismatches=None,
        )
        counted = [f.name for f in report.FIELDS if f.group in ("counts", "acceptance")]
        num_forwards = np.sum([prompt.num_forwards for prompt in found], axis=0)
        return {
            **{key: summary[key] for key in counted},
            "cut": counters.cut,
            "proposed_at": counters.proposed_at,
            "accepted_at": counters.accepted_at,
            "rounds_by_rows": num_forwards,
            **self._expected(name, counters, num_forwards),
            "checked": len(self._prompts) if self._request.check else None,
            "differing": differing,
        }

    def _differences(self, replayer, prompt, replayed, **run) -> list[str]:
        live = replay_check.run_live(self._pair, self._header, replayer, prompt, **run)
        return replay_check.differences(
            live, replayed.counters, prompt.until_stop(replayer.stop_ids)
        )

    def _expected(
        self, name: str, counters: metrics.Counters, num_forwards: np.ndarray
    ) -> dict[str, float | None]:
        """Speeds of decoding without prefill; None without costs."""
        if name not in self._curves:
            return {"expected_tok_s": None, "expected_speedup": None}
        curve = self._curves[name]
        seconds = replay_costs.expected_seconds(curve, num_forwards)
        return {
            "expected_tok_s": counters.tokens / seconds,
            "expected_speedup": counters.tokens * curve.plain_s / seconds,
        }

    def description(self) -> dict[str, Any]:
        """What was judged, for every row."""
        request, header = self._request, dataclasses.asdict(self._header)
        return {
            **{key: header[key] for key in header if key != "num_prompts"},
            "draft": str(request.draft or "embedded"),
            "confidence": request.min_confidence,
            "ignore_stop": request.ignore_stop,
            "costs": None if request.costs is None else str(request.costs),
            **records.provenance(),
        }

    def _load_pair(self, name: str) -> None:
        """Loads what runs that drafter live, unless it is there."""
        if self._pair_of == name:
            return
        self._pair = None  # Its memory is free before the next one is read.
        self._pair = replay_check.load_pair(
            self._header,
            self._request.target or model_pair.EMBEDDED_TARGET,
            self._request.draft or model_pair.EMBEDDED_DRAFT,
            drafter=name,
            gamma_max=self._gamma_max,
            min_confidence=self._request.min_confidence,
        )
        self._pair_of = name

    @property
    def _gamma_max(self) -> int:
        return max(self._request.gammas)

    def _check_agreement(self, asked: Mapping[str, Any]) -> None:
        """Raises `ValueError` where the traces are not what was asked for."""
        path, rows = self._request.path, self._header.slab
        changes = self._header.changes(asked)
        if changes:
            raise ValueError(
                f"{path}: what was recorded is not what is asked for "
                f"({'; '.join(changes)}); leave these flags out, or record again"
            )
        if self._gamma_max + 1 > rows:
            raise ValueError(
                f"{path}: recorded for windows of at most {rows} rows, which is gamma "
                f"{rows - 1}, and --gamma has {self._gamma_max}; record again with it"
            )
