"""A checked call of `generation`: prompts as ids, requests, a scheduler, results.

Arguments that cannot be used raise errors here, before anything is allocated.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from spec_jax import (
    algorithms,
    compilation,
    default_gamma,
    inputs,
    results,
    scoring,
)
from spec_jax.analysis import metrics as metrics_lib
from spec_jax.drafters import tree_shapes
from spec_jax.engine import (
    baseline,
    checks,
    ends as ends_lib,
    protocols,
    requests as requests_lib,
    round as round_lib,
    scheduler as scheduler_lib,
    state as states,
    verification,
)
from spec_jax.gamma import costs as costs_lib, policy as policy_lib
from spec_jax.language_model import LanguageModel
from spec_jax.model import stop_texts
from spec_jax.ops import dispatch
from spec_jax.typing import check_whole


PAGE_SIZE = algorithms.PAGE_SIZE
Sampling = requests_lib.Sampling

DEFAULT_GAMMA = 4
"""Gamma of chains if none is given and no policy chooses it; at most `gamma_max`."""

Gamma = int | policy_lib.GammaPolicy | tree_shapes.AnyTree | costs_lib.RoundCosts | None
"""How many tokens to draft a round, or the object that decides it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A call whose arguments are checked, and which can run."""

    lm: LanguageModel
    requests: list[requests_lib.Request]
    scheduler: scheduler_lib.Scheduler
    skip_special_tokens: bool
    log_probs: bool
    top_logprobs: int
    n: int | None
    alone: bool  # the prompt is one, not a list
    adapts: bool  # to what rounds cost: no gamma was given
    stops: tuple[bytes, ...] = ()  # texts
    costs: costs_lib.RoundCosts | None = None  # by which the default policy chooses

    @classmethod
    def make(
        cls,
        lm: LanguageModel,
        prompt: inputs.Prompt | Sequence[inputs.Prompt],
        *,
        chat: Mapping[str, Any] | None = None,
        prefix: inputs.Prompt | None = None,
        max_tokens: int = 64,
        gamma: Gamma = None,
        policy_state: policy_lib.State = None,
        sampling: Sampling | Sequence[Sampling] | None = None,
        processors: requests_lib.Processors = None,
        stop: inputs.Stop | None = None,
        ignore_eos: bool = False,
        skip_special_tokens: bool = True,
        log_probs: bool = False,
        top_logprobs: int = 0,
        n: int | None = None,
        num_slots: int | None = None,
        rule: verification.Rule = "coupled",
        page_size: int = PAGE_SIZE,
    ) -> "Run":
        """Makes the run of a call; takes and raises as `generation.generate`."""
        prompts, alone = inputs.encode(lm, prompt, chat, prefix)
        samples = 1 if n is None else n
        check_whole(n=samples)
        most = lm.target.config.vocab_size
        check_whole(top_logprobs=top_logprobs, least=0, most=most)
        if isinstance(gamma, tree_shapes.AnyTree):
            lm, gamma = lm.with_tree(gamma), gamma.nodes
        costs = gamma if isinstance(gamma, costs_lib.RoundCosts) else None
        if costs is not None:
            gamma, policy_state = default_gamma.policy_for(lm, costs)
        adapts = gamma is None
        is_policy = hasattr(gamma, "choose") and hasattr(gamma, "update")
        policy, number = cast(Any, (gamma, None) if is_policy else (None, gamma))
        if adapts:
            number = lm.gamma_max
            if not protocols.is_tree(lm.drafter):
                number = min(DEFAULT_GAMMA, number)
        requests = requests_lib.make(
            prompts,
            max_tokens=max_tokens,
            gamma=number,
            sampling=sampling,
            samples=samples,
            processors=processors,
        )
        if num_slots is None:
            num_slots = min(len(requests), 8)
        check_whole(num_slots=num_slots)
        num_slots = min(num_slots, len(requests))
        is_paged = lm.target.cache == "paged"
        # Prompts that begin alike are prefilled by rows, which can go on from K/V that
        # another slot has.
        has_prefix = prefix is not None
        shares = is_paged and len(requests) > 1 and (has_prefix or samples > 1)
        algo = algorithms.speculative(lm.target, lm.drafter, rule=rule, policy=policy)
        own = () if ignore_eos else lm.stop_ids
        ids, stops = inputs.stops(lm, stop)
        scheduler = algo.scheduler(
            (lm.params, lm.drafter_params),
            num_slots=num_slots,
            capacity=requests_lib.capacity_for(
                lm.target, prompts, max_tokens, lm.drafter
            ),
            page_size=page_size,
            stop_ids=tuple(dict.fromkeys((*own, *ids))),
            policy_state=policy_state,
            prefill_by_rows=True if has_prefix else None,
            shares=shares,
        )
        scheduler.check_all(requests)
        return cls(
            lm=lm,
            requests=requests,
            scheduler=scheduler,
            skip_special_tokens=skip_special_tokens,
            log_probs=log_probs,
            top_logprobs=top_logprobs,
            n=n,
            alone=alone,
            adapts=adapts,
            stops=stops,
            costs=costs,
        )

    def adapted(self) -> "Run":
        """Returns the run with the default policy, unless it was given a gamma.

        Costs are measured here, once. `default_gamma.adapted` says where gamma stays.
        """
        if not self.adapts:
            return self
        scheduler, requests, costs = default_gamma.adapted(
            self.lm, self.scheduler, self.requests
        )
        return dataclasses.replace(
            self, scheduler=scheduler, requests=requests, costs=costs
        )

    @property
    def base(self) -> algorithms.Autoregressive:
        """The baseline."""
        return algorithms.autoregressive(self.lm.target)

    def warn(self) -> None:
        """Warns of drafts past the positions that the drafter was trained for."""
        longest = max(len(one.prompt) + one.max_tokens for one in self.requests)
        checks.warn_positions(self.lm.drafter, longest)

    def ends(self) -> ends_lib.Ends | None:
        """Returns the search for the stop texts in a run; None if there are none."""
        if not self.stops:
            return None
        words: Any = self.lm.tokenizer
        return stop_texts.Ends(words.bytes_of, self.stops)

    def decode(self, number: int) -> baseline.DecodeState:
        """Decodes one request in one call; with stop texts, in one call per token.

        Raises as `algorithms.Autoregressive.generated`.
        """
        state, ends = self.begin_decoding(number), self.ends()
        steps = round_lib.UNTIL_DONE if ends is None else 1
        while not bool(state.done[0]):
            state = self.base.run(self.lm.params, state, max_rounds=steps)
            tokens = self.base.generated(state)[0]  # Raises flagged errors.
            if ends is not None and ends(number, tokens) is not None:
                stop = np.int32(states.Status.STOP)
                return state.sequences[0].replace(status=stop)
        return state.sequences[0]

    def begin_decoding(self, number: int) -> algorithms.Decoding:
        """Prefills the prompt of one request into a cache of its own."""
        request = self.requests[number]
        return self.base.init(
            self.lm.params,
            [request.prompt],
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            processors=request.processor,
            stop_ids=self.scheduler.stop_ids,
            capacity=self.scheduler.capacity,
            page_size=self.scheduler.page_size,
            prefill_by_rows=self.scheduler.prefill_by_rows,
        )

    def shaped(self, outs: list[Any]) -> Any:
        """Returns the results by prompt: for each a list if `n` was given, else one;
        without the outer list if the prompt was one."""
        if self.n is not None:
            firsts = range(0, len(outs), self.n)
            outs = [outs[first : first + self.n] for first in firsts]
        return outs[0] if self.alone else outs

    def generation(
        self, one: requests_lib.Finished, seconds: float
    ) -> results.Generation:
        """Returns the result of a request; raises as `requests.Finished.tokens`."""
        tokens, origins = one.tokens, np.asarray(one.slot.origins)
        origins = origins[origins != int(results.Origin.PROMPT)].tolist()
        counters = metrics_lib.of_slot(one.slot, num_tokens=len(tokens))
        more: dict[str, float] = {"e2e_s": seconds}
        if self.scheduler.shares:
            more["shared_prompt_tokens"] = one.shared
        return self._result(one.number, tokens, origins, one.status, counters, more)

    def decoded(
        self, state: baseline.DecodeState, number: int, seconds: float
    ) -> results.Generation:
        """Returns the result of autoregressive decoding."""
        num_prompt, length = len(self.requests[number].prompt), int(state.length)
        tokens = np.asarray(state.tokens)[num_prompt:length].tolist()
        counters = metrics_lib.Counters(
            tokens=len(tokens),
            rounds=len(tokens),
            accepted_hist=(len(tokens),),
            nonfinite=int(state.num_nonfinite),
        )
        origins, more = [results.Origin.BONUS] * len(tokens), {"e2e_s": seconds}
        return self._result(
            number, tokens, origins, state.status, counters, more, height=1
        )

    def _result(self, number, tokens, origins, status, counters, more, *, height=None):
        lm = self.lm
        summary = metrics_lib.summarise(counters)
        summary["repetition"] = metrics_lib.repetition(tokens)
        scores: dict[str, Any] = {}
        request = self.requests[number]
        known = provenance(lm) | {"rule": self.scheduler.rule.name}
        if self.costs is not None:
            known["round_costs"] = dataclasses.asdict(self.costs)
        if request.sampling is not None and float(request.sampling.temperature):
            known["seed"] = int(request.sampling.seed)  # It draws this sample alone.
        prompt = checks.token_list(request.prompt)
        if self.log_probs or self.top_logprobs:
            made = scoring.of_tokens(
                lm,
                prompt,
                tokens,
                request.sampling,
                processor=request.processor,
                top=self.top_logprobs,
                height=height,
                by_rows=self.scheduler.prefill_by_rows,
            )
            scores = {name: getattr(made, name) for name in scoring.NAMES}
        return results.Generation(
            tokens=tokens,
            pieces=self._pieces(tokens),
            origins=[results.Origin(origin) for origin in origins],
            prompt_tokens=prompt,
            status=results.Status(int(status)),
            metrics=summary | more,
            provenance=known,
            **scores,
        )

    def _pieces(self, tokens: list[int]) -> list[str]:
        """Returns the text of each token; [] without a tokenizer."""
        if self.lm.tokenizer is None:
            return []
        return self.lm.tokenizer.decode_pieces(
            tokens, skip_special_tokens=self.skip_special_tokens, stops=self.stops
        )


def provenance(lm: LanguageModel) -> dict[str, Any]:
    """Returns the settings that decide bits: if all are equal, so are results."""
    device, layout = jax.devices()[0], lm.target.layout
    found = {
        "jax_version": jax.__version__,
        "device_kind": device.device_kind,
        "platform": device.platform,
        "impl": lm.target.impl,
        "instruction_set": dispatch.instruction_set(lm.target.impl),
        "dtype": lm.target.config.dtype,
        "slab": lm.target.slab,
        **compilation.describe(),
    }
    if lm.target.config.is_bytes:
        found["weights"] = lm.target.config.weights
    return found if layout is None else found | layout.describe()
