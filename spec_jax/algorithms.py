"""Speculative and autoregressive decoding as algorithms: `init`, `step` and `run`.

    algo = speculative(target, drafter)
    state = algo.init(params, prompts, max_tokens=64)
    state, info = jax.jit(algo.step, donate_argnums=1)(params, state)
    state = algo.run(params, state)

Parameters are explicit pytrees, and slots are the batch axis: prompts, or seeds of one
prompt. An algorithm is static and hashable; all that changes is in its state.
`generation` is built on these; `Speculative.scheduler` refills slots from a queue.
"""

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spec_jax import pytree
from spec_jax.drafters import each
from spec_jax.engine import (
    baseline,
    checks,
    protocols,
    requests as requests_lib,
    round as round_lib,
    rows,
    scheduler as scheduler_lib,
    state as states,
    verification,
)
from spec_jax.gamma import policy as policy_lib
from spec_jax.rules import rule as rule_lib
from spec_jax.typing import check_whole


PAGE_SIZE = 16
"""Positions per page, unless another number is given."""

Params = tuple[protocols.Params, protocols.Params]
"""The target's parameters and the drafter's."""


class Info(pytree.Node):
    """Counts of a step, by slot; 0, and finite, where a slot does not generate."""

    drafted: jax.Array  # [B] int32, drafts that were verified
    accepted: jax.Array  # [B] int32, drafts that the target kept
    committed: jax.Array  # [B] int32, tokens added to the text
    finite: jax.Array  # [B] bool, whether they were chosen from finite logits


class Decoding(pytree.Node):
    """The state of autoregressive decoding: sequences, each with a cache of its own."""

    sequences: tuple[baseline.DecodeState, ...]
    prompt_len: jax.Array  # [B] int32

    def _stacked(self, name: str) -> jax.Array:
        return jnp.stack([getattr(one, name) for one in self.sequences])

    @property
    def tokens(self) -> Int[Array, "B max_len"]:
        """Committed tokens of each slot, its prompt first, then padding."""
        return self._stacked("tokens")

    @property
    def length(self) -> Int[Array, " B"]:
        """How many tokens each slot has committed, its prompt included."""
        return self._stacked("length")

    @property
    def done(self) -> Bool[Array, " B"]:
        """The slots that do not generate, bool."""
        return self._stacked("status") != int(states.Status.RUNNING)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculative:
    """Speculative decoding, made by `speculative`, which explains the fields.

    Raises:
      ValueError: no rule of that name.
    """

    target: Any
    drafter: Any
    rule: verification.Rule = "coupled"
    policy: policy_lib.GammaPolicy | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", rule_lib.of(self.rule))

    def init(
        self,
        params: Params,
        prompts: Sequence[checks.Tokens],
        *,
        max_tokens: int,
        sampling: requests_lib.Draws = None,
        processors: requests_lib.Processors = None,
        gamma: int | None = None,
        stop_ids: checks.Tokens = (),
        policy_state: policy_lib.State = None,
        capacity: int | None = None,
        page_size: int = PAGE_SIZE,
        prefill_by_rows: bool | None = None,
    ) -> states.State:
        """Allocates caches and prefills the prompts, a slot each. Runs on the host.

        Args:
          params: the target's and the drafter's.
          prompts: token ids of each slot.
          max_tokens: tokens to generate in each slot, at most.
          sampling: how tokens are drawn, one for all slots or one for each; None:
            greedily.
          processors: of the logits, one for all slots or one for each.
          gamma: tokens to draft a round, at most; None: as many as the drafter drafts.
          stop_ids: tokens that end a sequence.
          policy_state: the policy's first state; None: what its `init()` makes.
          capacity: positions of a slot; None: enough, by `requests_lib.capacity_for`.
          page_size: positions per page.
          prefill_by_rows: see `row_model.RowModel.prefill`.

        Returns:
          The state before the first round. `tokens`, `length` and `done` are by slot.

        Raises:
          ValueError: an argument that cannot be used; before anything runs.
        """
        asked = requests_lib.make(
            prompts,
            max_tokens=max_tokens,
            gamma=gamma,
            sampling=sampling,
            processors=processors,
        )
        if capacity is None:
            capacity = requests_lib.capacity_for(
                self.target, prompts, max_tokens, self.drafter
            )
        return self.scheduler(
            params,
            num_slots=len(asked),
            capacity=capacity,
            page_size=page_size,
            stop_ids=tuple(checks.token_list(stop_ids, what="stop_ids")),
            policy_state=policy_state,
            prefill_by_rows=prefill_by_rows,
        ).begin(*asked)

    def step(self, params: Params, state: states.State) -> tuple[states.State, Info]:
        """Runs one round of every slot that generates: pure, to be jitted and donated.

        A slot that finds no page commits nothing and ends.
        """
        speculator = self.speculator(params, state.num_slots)
        after, _ = round_lib.run_round(speculator, state)
        slots, before = after.slots, state.slots
        return after, Info(
            drafted=slots.num_proposed - before.num_proposed,
            accepted=slots.num_accepted - before.num_accepted,
            committed=slots.length - before.length,
            finite=slots.num_nonfinite == before.num_nonfinite,
        )

    def run(
        self,
        params: Params,
        state: states.State,
        *,
        max_rounds: int = round_lib.UNTIL_DONE,
    ) -> states.State:
        """Runs rounds on the device until no slot generates, `max_rounds` at most.

        Compiled once for a state's shapes, for any `max_rounds`; `state` is donated.
        """
        speculator = self.speculator(params, state.num_slots)
        return round_lib.run(speculator, state, max_rounds=max_rounds)

    def generated(self, state: states.State) -> list[list[int]]:
        """Returns what each slot generated, without its prompt, on the host.

        Raises:
          FloatingPointError: tokens were chosen from logits that are not finite.
          MemoryError: a slot found no page.
          RuntimeError: a fault of the program, such as an operation a cache refused.
        """
        checks.check_refused([state.cache, state.memory])
        slots, config = jax.device_get(state.slots), self.target.config
        checks.check_pages(slots.status, slots.length, state.cache)
        return [
            requests_lib.Finished(
                number=slot,
                slot=requests_lib.slot_of(slots, slot),
                vocab_size=None if config is None else config.vocab_size,
            ).tokens
            for slot in range(state.num_slots)
        ]

    def speculator(self, params: Params, num_slots: int) -> round_lib.Speculator:
        """Returns what rounds share; raises `ValueError` unless `params` is a pair."""
        if not isinstance(params, tuple) or len(params) != 2:
            raise ValueError(
                f"params of type {type(params).__name__}: give the target's and the "
                "drafter's, as in params=(lm.params, lm.drafter_params)"
            )
        drafter = self.drafter
        if not hasattr(drafter, "num_slots"):  # Not yet for slots.
            drafter = each.lift(
                drafter, num_slots, rule=self.rule, gamma_policy=self.policy
            )
        return round_lib.Speculator(
            params=params,
            target=rows.of(self.target, num_slots),
            drafter=drafter,
            rule=self.rule,
            gamma_policy=self.policy,
        )

    def scheduler(
        self,
        params: Params,
        *,
        num_slots: int,
        policy_state: policy_lib.State = None,
        **sizes: Any,
    ) -> scheduler_lib.Scheduler:
        """Returns a scheduler, which refills `num_slots` slots from a queue.

        Args:
          policy_state: the policy's first state; None: what its `init()` makes.
          **sizes: other fields of `scheduler.Scheduler`, such as `capacity`.

        Raises:
          ValueError: as `scheduler.Scheduler`, or a policy that makes no first state.
        """
        if self.policy is not None and policy_state is None:
            policy_state = _first_state(self.policy)
        return scheduler_lib.Scheduler(
            speculator=self.speculator(params, num_slots),
            policy_state=policy_state,
            **sizes,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Autoregressive:
    """Autoregressive decoding; made by `autoregressive`."""

    target: Any

    def init(
        self,
        params: protocols.Params,
        prompts: Sequence[checks.Tokens],
        *,
        max_tokens: int,
        sampling: requests_lib.Draws = None,
        processors: requests_lib.Processors = None,
        stop_ids: checks.Tokens = (),
        capacity: int | None = None,
        page_size: int = PAGE_SIZE,
        prefill_by_rows: bool | None = None,
    ) -> Decoding:
        """Prefills the prompts, each into a cache of its own.

        Args:
          params: the target's.

        The other arguments, and the errors, are those of `Speculative.init`.
        """
        asked = requests_lib.make(
            prompts, max_tokens=max_tokens, sampling=sampling, processors=processors
        )
        if capacity is None:
            capacity = requests_lib.capacity_for(self.target, prompts, max_tokens)
        check_whole(capacity=capacity)
        target = rows.of(self.target, 1)
        return Decoding(
            prompt_len=jnp.asarray([len(one.prompt) for one in asked], jnp.int32),
            sequences=tuple(
                baseline.begin(
                    target,
                    params,
                    target.new_cache(capacity=capacity, page_size=page_size),
                    one.prompt,
                    max_tokens=max_tokens,
                    prefill_by_rows=prefill_by_rows,
                    sampling=one.sampling,
                    processor=one.processor,
                    stop_ids=stop_ids,
                )
                for one in asked
            ),
        )

    def step(self, params: protocols.Params, state: Decoding) -> tuple[Decoding, Info]:
        """Decodes one token of every slot that generates; see `Speculative.step`."""
        run_step = functools.partial(baseline.run_step, self.target, params)
        after = state.replace(
            sequences=tuple(
                jax.lax.cond(
                    one.status == int(states.Status.RUNNING), run_step, lambda s: s, one
                )
                for one in state.sequences
            )
        )
        return after, Info(
            drafted=jnp.zeros_like(state.length),
            accepted=jnp.zeros_like(state.length),
            committed=after.length - state.length,
            finite=after._stacked("num_nonfinite") == state._stacked("num_nonfinite"),
        )

    def run(
        self,
        params: protocols.Params,
        state: Decoding,
        *,
        max_rounds: int = round_lib.UNTIL_DONE,
    ) -> Decoding:
        """Decodes slot after slot until each has ended, `max_rounds` tokens at most.

        `state` is donated.
        """
        steps = jnp.int32(max_rounds)
        return state.replace(
            sequences=tuple(
                baseline.generate(self.target, params, one, max_steps=steps)
                for one in state.sequences
            )
        )

    def generated(self, state: Decoding) -> list[list[int]]:
        """Returns what each slot generated; raises as `Speculative.generated`."""
        found = []
        for one, start in zip(state.sequences, state.prompt_len, strict=True):
            baseline.check(one, vocab_size=self.target.config.vocab_size)
            found.append(jax.device_get(one.tokens)[start : one.length].tolist())
        return found


def speculative(
    target: Any,
    drafter: Any,
    *,
    rule: verification.Rule = "coupled",
    policy: policy_lib.GammaPolicy | None = None,
) -> Speculative:
    """Returns speculative decoding of a target by a drafter.

    Examples:
      >>> import spec_jax as sj
      >>> lm = sj.load()
      >>> algo = sj.speculative(lm.target, lm.drafter)
      >>> params = lm.params, lm.drafter_params
      >>> prompts = [lm.tokenizer.encode(text) for text in ("import os", "def f(")]
      >>> state = algo.run(params, algo.init(params, prompts, max_tokens=8))
      >>> base = sj.autoregressive(lm.target)
      >>> plain = base.run(lm.params, base.init(lm.params, prompts, max_tokens=8))
      >>> algo.generated(state) == base.generated(plain)
      True

    Args:
      target: a model, such as `lm.target`; a `ForwardTarget`; or an object with the
        protocol `engine.target.Target`.
      drafter: an `engine.protocols.Drafter`, such as `lm.drafter`.
      rule: how drafts are accepted, one of `rules.coupled`, `rules.rejection`,
        `rules.block` and `rules.multipath`, or its name. The first writes the stream
        of autoregressive decoding, bit for bit; the others keep its distribution.
      policy: chooses gamma in each round, such as `gamma.Threshold()`; None: gamma is
        always that of `init`.

    Raises:
      ValueError: no rule of that name.
    """
    return Speculative(target=target, drafter=drafter, rule=rule, policy=policy)


def autoregressive(target: Any) -> Autoregressive:
    """Returns autoregressive decoding: the baseline, and the oracle of `speculative`.

    Its functions have the same names, take the target's parameters alone, and decode
    each sequence by itself, in a cache of its own.

    Args:
      target: as `speculative` takes it.
    """
    return Autoregressive(target=target)


def _first_state(policy: policy_lib.GammaPolicy) -> policy_lib.State:
    """Returns the state that the policy's `init` makes without arguments.

    Raises:
      ValueError: the policy has no `init`, or one that needs arguments.
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
