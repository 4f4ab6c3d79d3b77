"""A call of the front door, settled: prompts as ids, requests, a scheduler, a result.

Everything that a user can get wrong is found here, before anything is allocated.
"""

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import compilation, results
from spec_jax.analysis import metrics as metrics_lib
from spec_jax.drafters import each, tree_shapes
from spec_jax.engine import (
    baseline,
    checks,
    protocols,
    round as round_lib,
    rows,
    scheduler as scheduler_lib,
    state as states,
    verification,
)
from spec_jax.gamma import policy as policy_lib
from spec_jax.loading import LanguageModel
from spec_jax.ops import dispatch
from spec_jax.rules import sampling as sampling_lib


PAGE_SIZE = 16
"""Positions a page, unless another number is given."""

DEFAULT_GAMMA = 4
"""Tokens drafted a round where no number is given, or `lm.gamma_max` if fewer."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or the messages of a chat."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn; see `sampling.make_settings` for the order of filters.

    Attributes:
      temperature: divides the logits; 0 is greedy, and takes no filter.
      top_k: how many tokens stay; None keeps all.
      top_p: the mass that stays, in `(0, 1]`.
      min_p: the least probability that stays, as a share of the highest, in `[0, 1]`.
      seed: of all noise, in `[0, 2**32)`: with it a stream is drawn again, bit for bit.

    Raises:
      ValueError: a value outside its range, or a filter at temperature 0.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.settings()

    def settings(self) -> sampling_lib.SamplingSettings:
        """Returns the settings as arrays."""
        return sampling_lib.make_settings(**dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a call settles before it runs."""

    lm: LanguageModel
    prompts: list[list[int]]
    requests: list[scheduler_lib.Request]
    scheduler: scheduler_lib.Scheduler

    @classmethod
    def make(
        cls,
        lm: LanguageModel,
        prompts: list[list[int]],
        *,
        max_tokens: int = 64,
        gamma: int | policy_lib.GammaPolicy | tree_shapes.AnyTree | None = None,
        policy_state: policy_lib.State = None,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: Sequence[int | str] | None = None,
        num_slots: int | None = None,
        rule: verification.Rule = "coupled",
        page_size: int = PAGE_SIZE,
    ) -> "Run":
        """Checks everything, and raises before anything is allocated."""
        verification.check_rule(rule)
        checks.check_max_tokens(max_tokens)
        if isinstance(gamma, tree_shapes.AnyTree):
            lm, gamma = lm.with_tree(gamma), gamma.nodes
        policy: Any = gamma if _is_policy(gamma) else None
        number = None if _is_policy(gamma) else cast(int | None, gamma)
        if policy is not None and policy_state is None:
            policy_state = _first_state(policy)
        if policy is None and number is None:
            number = lm.gamma_max
            if not protocols.is_tree(lm.drafter):
                number = min(DEFAULT_GAMMA, number)
        if num_slots is None:
            num_slots = min(len(prompts), 8)
        checks.check_count(num_slots=num_slots)
        num_slots = min(num_slots, len(prompts))
        speculator = round_lib.Speculator(
            params=(lm.params, lm.drafter_params),
            target=rows.SlotRows(model=lm.target, num_slots=num_slots),
            drafter=each.lift(lm.drafter, num_slots, rule=rule, gamma_policy=policy),
            rule=rule,
            gamma_policy=policy,
        )
        stop_ids = lm.stop_ids if stop is None else _stop_ids(lm, stop)
        scheduler = scheduler_lib.Scheduler(
            speculator=speculator,
            capacity=_capacity(lm, prompts, max_tokens),
            page_size=page_size,
            stop_ids=stop_ids,
            policy_state=policy_state,
        )
        requests = [
            scheduler_lib.Request(
                prompt=prompt, max_tokens=max_tokens, gamma=number, sampling=settings
            )
            for prompt, settings in zip(
                prompts, _settings(sampling, len(prompts)), strict=True
            )
        ]
        for request in requests:
            scheduler.check(request)
        return cls(lm=lm, prompts=prompts, requests=requests, scheduler=scheduler)

    def decode(self, number: int) -> baseline.DecodeState:
        """Decodes one prompt without drafts; the state as the loop leaves it."""
        return baseline.generate(
            self.lm.target,
            self.lm.params,
            self.begin_decoding(number),
            max_steps=jnp.int32(self.requests[number].max_tokens),
        )

    def begin_decoding(self, number: int) -> baseline.DecodeState:
        """Prefills one prompt into a cache of its own."""
        request, target = self.requests[number], self.lm.target
        kv = target.new_cache(
            capacity=self.scheduler.capacity, page_size=self.scheduler.page_size
        )
        return baseline.begin(
            target,
            self.lm.params,
            kv,
            request.prompt,
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            stop_ids=self.scheduler.stop_ids,
        )

    def generation(
        self, slot: states.Slots, number: int, seconds: float
    ) -> results.Generation:
        """Returns the result of a finished slot; raises as `checks.check_slot`."""
        checks.check_slot(slot, vocab_size=self.lm.target.config.vocab_size)
        tokens = scheduler_lib.generated(slot)
        origins = np.asarray(slot.origins)
        origins = origins[origins != int(results.Origin.PROMPT)].tolist()
        counters = metrics_lib.of_slot(slot, num_tokens=len(tokens))
        return self._result(tokens, origins, counters, slot.status, number, seconds)

    def decoded(
        self, state: baseline.DecodeState, number: int, seconds: float
    ) -> results.Generation:
        """Returns the result of autoregressive decoding."""
        num_prompt, length = len(self.prompts[number]), int(state.length)
        tokens = np.asarray(state.tokens)[num_prompt:length].tolist()
        counters = metrics_lib.Counters(
            tokens=len(tokens),
            rounds=len(tokens),
            accepted_hist=(len(tokens),),
            nonfinite=int(state.num_nonfinite),
        )
        origins = [results.Origin.BONUS] * len(tokens)
        return self._result(tokens, origins, counters, state.status, number, seconds)

    def _result(self, tokens, origins, counters, status, number, seconds):
        lm = self.lm
        summary = metrics_lib.summarise(
            counters,
            prompts=1,
            texts=[metrics_lib.text_counts(tokens, counters)],
            matched=None,
            verify_decode_mismatches=None,
        )
        return results.Generation(
            tokens=tokens,
            pieces=[] if lm.tokenizer is None else lm.tokenizer.decode_pieces(tokens),
            origins=[results.Origin(origin) for origin in origins],
            prompt_tokens=self.prompts[number],
            status=results.Status(int(status)),
            metrics=summary | {"e2e_s": seconds},
            provenance=provenance(lm) | {"rule": self.scheduler.speculator.rule},
        )


def provenance(lm: LanguageModel) -> dict[str, Any]:
    """Returns what decides bits: where it is equal, the results are."""
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
    return found if layout is None else found | layout.describe()


def _is_policy(gamma: Any) -> bool:
    return hasattr(gamma, "choose") and hasattr(gamma, "update")


def _first_state(policy: policy_lib.GammaPolicy) -> policy_lib.State:
    """Returns what the policy's `init` makes of nothing.

    Raises:
      ValueError: it wants to be told something.
    """
    init: Any = getattr(policy, "init", None)
    if init is None:
        raise ValueError(
            f"{type(policy).__name__} has no `init` that makes its first state: give "
            "it as policy_state"
        )
    wanted = inspect.signature(init).parameters.values()
    names = [one.name for one in wanted if one.default is one.empty]
    if names:
        raise ValueError(
            f"{type(policy).__name__} makes no first state of nothing: give "
            f"policy_state=policy.init({', '.join(names)})"
        )
    return init()


def encode(lm: LanguageModel, prompt: Any) -> tuple[list[list[int]], bool]:
    """Returns the token ids of each prompt, and whether there was one and no list."""
    if _is_one(prompt):
        return [_encode(lm, prompt)], True
    prompts = list(prompt)
    if not prompts:
        raise ValueError("the list of prompts is empty: give at least one")
    return [_encode(lm, one) for one in prompts], False


def _is_one(prompt: Any) -> bool:
    """Whether this is one prompt: text, a row of ids, or a chat's messages."""
    if isinstance(prompt, str | np.ndarray | jax.Array):
        return True
    if not isinstance(prompt, Sequence):
        raise ValueError(
            f"a prompt of type {type(prompt).__name__}: give text, token ids, messages "
            "or a list of these"
        )
    return bool(prompt) and isinstance(prompt[0], int | np.integer | Mapping)


def _encode(lm: LanguageModel, prompt: Any, *, begins: bool = True) -> list[int]:
    """Returns the token ids of one prompt."""
    is_chat = not isinstance(prompt, str) and len(prompt) > 0
    is_chat = is_chat and isinstance(prompt[0], Mapping)
    if not isinstance(prompt, str) and not is_chat:
        return checks.token_list(prompt)
    if lm.tokenizer is None:
        raise ValueError("the model has no tokenizer: give token ids")
    text = lm.tokenizer.apply_chat(prompt) if is_chat else prompt
    return lm.tokenizer.encode(text, begins=begins and not is_chat)


def _settings(
    sampling: Sampling | Sequence[Sampling] | None, count: int
) -> list[sampling_lib.SamplingSettings | None]:
    """Returns the settings of each prompt."""
    if sampling is None:
        return [None] * count
    if isinstance(sampling, Sampling):
        return [sampling.settings()] * count
    if len(sampling) != count:
        raise ValueError(
            f"{len(sampling)} settings of sampling for {count} prompts: give one for "
            "all, or one for each"
        )
    return [one.settings() for one in sampling]


def _stop_ids(lm: LanguageModel, stop: Sequence[int | str]) -> tuple[int, ...]:
    """Returns the ids of stop tokens."""
    ids: list[int] = []
    for one in [stop] if isinstance(stop, str | int) else stop:
        encoded = _encode(lm, one, begins=False) if isinstance(one, str) else [one]
        if len(encoded) != 1:
            raise ValueError(
                f"stop text {one!r} is {len(encoded)} tokens: give text of one token, "
                "or an id"
            )
        ids += encoded
    return tuple(checks.token_list(ids, what="stop"))


def _capacity(lm: LanguageModel, prompts: list[list[int]], max_tokens: int) -> int:
    """Returns positions of a slot: enough for the longest prompt and its answer.

    Rounded up, to within a quarter, so that prompts of about one length share their
    programs.
    """
    longest = max(map(len, prompts))
    needed, most = longest + max_tokens, lm.target.config.max_position_embeddings
    if needed > most:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_tokens=} make {needed} positions, "
            f"and the model has {most} (max_position_embeddings): shorten one of them"
        )
    step = max(64, 1 << max(int(math.log2(needed)) - 2, 0))
    return min(-(-needed // step) * step, most)
