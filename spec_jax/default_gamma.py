"""The default gamma: it adapts to what rounds cost here, within a budget."""

import dataclasses
import time
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafters import choice
from spec_jax.engine import (
    protocols,
    requests as requests_lib,
    round as round_lib,
    scheduler as scheduler_lib,
    state as states,
)
from spec_jax.gamma import budget, costs as costs_lib, goodput, policy as policy_lib
from spec_jax.language_model import LanguageModel


TURNS, SECONDS = (5, 20), 0.2
"""The fewest and the most measurements of each time; no further one begins after these
seconds. The fastest counts, since a disturbance only adds to it."""

SAT_OUT = 8
"""Tokens that a drafter sits out before its catching up is timed."""

_known: weakref.WeakKeyDictionary[
    LanguageModel, dict[Any, list[costs_lib.RoundCosts]]
] = weakref.WeakKeyDictionary()


def policy_for(
    lm: LanguageModel, costs: costs_lib.RoundCosts
) -> tuple[budget.Budget, budget.BudgetState]:
    """Returns the default policy of a model, and its first state.

    It chooses at most as many drafts of a chain as the drafter makes and `costs` has
    times for, or at most all nodes of a tree.

    Raises:
      ValueError: `costs` has times for fewer nodes than the tree has.
    """
    is_tree = protocols.is_tree(lm.drafter)
    return make(
        costs.upto(lm.gamma_max if is_tree else min(lm.gamma_max, costs.gamma_max)),
        is_tree=is_tree,
        looks_up=choice.looks_up(lm.drafter),
        chooses=isinstance(lm.drafter, choice.Choice),
    )


def make(
    costs: costs_lib.RoundCosts,
    *,
    is_tree: bool = False,
    looks_up: bool = False,
    chooses: bool = False,
) -> tuple[budget.Budget, budget.BudgetState]:
    """Returns the default policy for costs, and its first state.

    It begins with a high chance of acceptance, since the budget bounds what a useless
    drafter costs. Its gamma is at most `costs.gamma_max`.

    Args:
      looks_up: whether the drafter loses nothing where it drafts nothing.
      chooses: whether the drafter chooses by itself how much it drafts.
    """
    if chooses:
        every = policy_lib.Fixed(gamma_max=costs.gamma_max)
        bound = budget.Budget(asks=every, empty_is_free=True)
        return bound, bound.init(costs, asks=every.init(costs.gamma_max))
    kind = goodput.RankGoodput if is_tree else goodput.Goodput
    asks = kind(
        gamma_max=costs.gamma_max,
        prior=0.7,
        prior_weight=4.0,
        probing=policy_lib.Probing(
            every=1, longest=64, empty_is_free=looks_up, bound=1.0
        ),
    )
    made = budget.Budget(asks=asks, empty_is_free=looks_up)
    return made, made.init(costs, asks=asks.init(costs.rising_s()))


def adapted(
    lm: LanguageModel,
    scheduler: scheduler_lib.Scheduler,
    requests: Sequence[requests_lib.Request],
) -> tuple[
    scheduler_lib.Scheduler, list[requests_lib.Request], costs_lib.RoundCosts | None
]:
    """Gives a scheduler and requests of a fixed gamma the default policy.

    The first call for a model, a number of slots, greedy or not, and a kind of
    processor measures the costs. A fixed gamma stays, and the costs are None, where
    times would decide more than speed: under rules other than "coupled", whose tokens
    depend on gamma, and with several processes, whose programs must be equal. A choice
    among drafters gets the costs of each; the highest are returned.
    """
    is_exact = scheduler.rule.is_exact and jax.process_count() == 1
    if not is_exact or not lm.gamma_max:
        return scheduler, list(requests), None
    draws = any(one.sampling is not None for one in requests)
    kind = jax.tree.structure(requests[0].processor)
    key = scheduler.target.num_slots, draws, kind
    known = _known.setdefault(lm, {})
    if key not in known:
        # The program of the run is the same for any costs.
        some = costs_lib.RoundCosts(round_s=(1.0,) * (lm.gamma_max + 1))
        policy, first = policy_for(lm, some)
        made = _with(scheduler, first, gamma_policy=policy)
        known[key] = [measure(one, requests) for one in _of_members(made)]
    costs = costs_lib.highest(known[key])
    policy, first = policy_for(lm, costs)
    target, drafts = scheduler.speculator.params
    if isinstance(lm.drafter, choice.Choice):
        drafts = choice.with_costs(drafts, known[key])
    scheduler = _with(scheduler, first, gamma_policy=policy, params=(target, drafts))
    asked = [dataclasses.replace(one, gamma=lm.gamma_max) for one in requests]
    return scheduler, asked, costs


def _of_members(scheduler: scheduler_lib.Scheduler) -> list[scheduler_lib.Scheduler]:
    """Returns the schedulers to be timed: for a choice among drafters one for each
    member, which is always chosen; else the scheduler itself."""
    target, drafts = scheduler.speculator.params
    if not isinstance(drafts, choice.ChoiceParams):
        return [scheduler]
    pinned = [choice.pinned(drafts, n) for n in range(len(drafts.members))]
    first = scheduler.policy_state
    return [_with(scheduler, first, params=(target, one)) for one in pinned]


def _with(
    scheduler: scheduler_lib.Scheduler, first: policy_lib.State, **parts: Any
) -> scheduler_lib.Scheduler:
    """Returns the scheduler with other parts of its speculator."""
    speculator = scheduler.speculator.replace(**parts)
    return dataclasses.replace(scheduler, speculator=speculator, policy_state=first)


def measure(
    scheduler: scheduler_lib.Scheduler, requests: Sequence[requests_lib.Request]
) -> costs_lib.RoundCosts:
    """Times rounds of all slots, one by one, in the program that is to run.

    Rounds of 0, 1, 3, 7 .. and of all drafts are timed, others interpolated. Caches
    begin with the first tokens of a request; the text in the slots repeats itself, so
    that lookups find something. A draft beyond those made takes the others' mean time;
    if none was made, that of a round without drafts, since no row takes longer.

    Args:
      scheduler: with the policy that `policy_for` makes, for any costs.
    """
    rounds = _Rounds(scheduler, requests)
    sizes = sorted({2**n - 1 for n in range(rounds.gamma_max.bit_length())})
    sizes = sorted({*sizes, rounds.gamma_max})
    catches_up = not choice.looks_up(scheduler.drafter)
    rounds.run(0, 0)  # Compiles.
    found: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    calls, late = [], []
    began = time.perf_counter()
    for turn in range(max(TURNS)):
        if turn >= min(TURNS) and time.perf_counter() - began > SECONDS:
            break
        calls.append(rounds.run(0, 0)[1])
        for size in sizes:
            if rounds.make_room(size + 1):
                found[size].append(rounds.run(size, 1))
        if catches_up and rounds.make_room(SAT_OUT + 2):
            rounds.run(0, SAT_OUT)
            late.append(rounds.run(1, 1)[1])
    timed = [size for size in sizes if found[size]]
    drafted = np.array([np.mean([drafts for drafts, _ in found[n]]) for n in timed])
    seconds = np.array([min(seconds for _, seconds in found[n]) for n in timed])
    # Less the time of an empty call; at least a tenth, in case that one was disturbed.
    seconds = np.maximum.accumulate(np.maximum(seconds - min(calls), seconds / 10))
    round_s = _by_drafts(drafted, seconds, rounds.gamma_max)
    late_s = 0.0
    if late:  # A round that is not late takes in one token, too.
        late_s = max(0.0, min(late) - min(calls) - float(round_s[1])) / (SAT_OUT - 1)
    return costs_lib.RoundCosts(round_s=tuple(round_s.tolist()), catch_up_s=late_s)


def _by_drafts(drafted: np.ndarray, seconds: np.ndarray, gamma_max: int) -> np.ndarray:
    """Returns the seconds of a round by its drafts, `[gamma_max + 1]`.

    Args:
      drafted: the average number of drafts in each kind of timed round; the first is 0.
      seconds: of these rounds; they never fall.
    """
    drafts, most = np.arange(gamma_max + 1), drafted.max()
    a_draft_s = (seconds[-1] - seconds[0]) / most if most > 0 else seconds[0]
    order = np.argsort(drafted, kind="stable")
    within = np.interp(drafts, drafted[order], seconds[order])
    return within + np.maximum(drafts - most, 0) * a_draft_s


class _Rounds:
    """Runs rounds of all slots, which draft a given number of tokens."""

    def __init__(self, scheduler, requests):
        self._scheduler, self.gamma_max = scheduler, scheduler.drafter.gamma_max
        self._size = scheduler.slot_capacity
        request = max(requests, key=lambda one: one.sampling is not None)
        prompt = list(request.prompt)[: max(1, min(128, self._size // 4))]
        self._request = dataclasses.replace(
            request, prompt=prompt, max_tokens=self._size
        )
        self._state = scheduler.empty(
            draws=request.sampling is not None, processor=request.processor
        )
        self._begin()

    def _begin(self) -> None:
        """Begins the request in every slot."""
        for slot in range(self._scheduler.target.num_slots):
            self._state = self._scheduler.admit(self._state, slot, self._request)
        self._length = len(self._request.prompt)

    def make_room(self, num_tokens: int) -> bool:
        """Begins anew if slots have no room for so many tokens, or for the longest path
        if that is shorter; returns whether they have it now."""
        longest = protocols.depth_max(self._scheduler.drafter) + 1
        most = min(num_tokens, max(longest, SAT_OUT + 2))
        if self._length + most > self._size:
            self._begin()
        return self._length + most <= self._size

    def run(self, gamma: int, num_rounds: int) -> tuple[float, float]:
        """Returns the mean drafts of a slot, and the seconds of the call."""
        slots = self._state.slots
        before = np.asarray(slots.num_proposed)
        state = jax.block_until_ready(
            self._state.replace(slots=self._prepared(slots, gamma))
        )
        started = time.perf_counter()
        state = jax.block_until_ready(
            round_lib.run(self._scheduler.speculator, state, max_rounds=num_rounds)
        )
        seconds = time.perf_counter() - started
        self._state, self._length = state, int(np.max(state.slots.length))
        drafted = np.asarray(state.slots.num_proposed) - before
        return float(drafted.mean()), seconds

    def _prepared(self, slots: states.Slots, gamma: int) -> states.Slots:
        """Returns the slots with a text that repeats itself in place of their own, and
        with a policy that chooses all drafts, so that `gamma` alone decides."""
        num_slots, max_len = slots.tokens.shape
        text = np.arange(max_len) % 4
        if protocols.is_tree(self._scheduler.drafter):  # For many continuations.
            text = np.random.default_rng(0).integers(4, size=max_len)
        text += (self._scheduler.vocab_size or 4) // 2 - 2
        first: Any = self._scheduler.policy_state
        pinned, asks = first.replace(balance=jnp.float32(np.inf)), first.asks
        if isinstance(asks, goodput.GoodputState):
            asks = asks.replace(gamma=jnp.int32(asks.reached.shape[0]))
            pinned = pinned.replace(asks=asks)
        of_all = lambda leaf: jnp.stack([leaf] * num_slots)
        return slots.replace(
            tokens=jnp.asarray(np.tile(text.astype(np.int32), (num_slots, 1))),
            status=jnp.full_like(slots.status, int(states.Status.RUNNING)),
            gamma=jnp.full_like(slots.gamma, gamma),
            limit=jnp.full_like(slots.limit, self._size + 1),
            policy=jax.tree.map(of_all, pinned),
        )
