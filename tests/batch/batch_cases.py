"""Requests of a tiny model, each alone and several in slots: what batch tests share.

Alone is `spec_jax.rounds`, with the same target, drafter, settings and gamma policy.
Everything that a sequence is must be the same in a batch, bit for bit: its tokens,
counters and what its policy learnt, its K/V and the draft model's.
"""

import dataclasses
import functools
from collections.abc import Mapping

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spec_jax.batch import drafters, queue, rounds as batch_rounds, rows

from spec_jax import autoregressive, rounds, session, testing
from spec_jax.drafters import draft_model, hybrid, ngram, oracle, suffix
from spec_jax.engine import protocols
from spec_jax.gamma import goodput, policy, threshold
from spec_jax.model import row_model
from spec_jax.ops import dispatch
from spec_jax.paging import cache as paged, static
from spec_jax.rules import sampling


SLOTS, GAMMA_MAX = 4, decoding.GAMMA_MAX
CAPACITY, PAGE_SIZE = 48, 8
SIZES = {"capacity": CAPACITY, "page_size": PAGE_SIZE}
# One layer: most of the time is compilation.
CONFIG, PARAMS = decoding.DRAFT_CONFIG, decoding.DRAFT_PARAMS


def skip_without(impl: str) -> None:
    """Skips the test where the implementation cannot be had."""
    try:
        dispatch.resolve(impl)
    except NotImplementedError as error:
        pytest.skip(str(error))


def _draws(**settings) -> sampling.SamplingSettings:
    return sampling.make_settings(**settings)


GREEDY = _draws(temperature=0.0)
WARM = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}

REQUESTS = (
    queue.Request(prompt=decoding.PROMPT, max_tokens=24, gamma=4, settings=GREEDY),
    queue.Request(prompt=[5], max_tokens=9, gamma=1, settings=_draws(**WARM, seed=3)),
    # One that ends with its cache, and drafts as much as can be drafted.
    queue.Request(
        prompt=[1, 2, 3, 4] * 5, max_tokens=60, settings=_draws(temperature=2.0, seed=4)
    ),
    queue.Request(
        prompt=[60, 2, 60],
        max_tokens=1,
        gamma=3,
        settings=_draws(temperature=1.0, min_p=0.05, seed=5),
    ),
    # Plain decoding, beside the others' drafts.
    queue.Request(prompt=[9, 9], max_tokens=30, gamma=0, settings=GREEDY),
    queue.Request(
        prompt=list(range(30, 60)), max_tokens=18, gamma=2, settings=_draws(**WARM)
    ),
    queue.Request(
        prompt=[7, 3, 90, 7, 3, 41, 7, 3], max_tokens=17, gamma=4, settings=GREEDY
    ),
    queue.Request(
        prompt=[8] * 16,
        max_tokens=12,
        gamma=3,
        settings=_draws(temperature=0.5, top_p=0.9, seed=2**32 - 1),
    ),
)
"""Unlike in everything that a request can differ in; greedy ones among the others."""


def _perturbed(params, scale: float):
    """Weights that mostly agree with `params`, and sometimes do not."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    moved = [
        leaf + scale * jax.random.normal(key, leaf.shape, leaf.dtype)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, moved)


DRAFT_PARAMS = _perturbed(PARAMS, 0.02)
CORPUS = suffix.remember(suffix.empty_corpus(64), [1, 2, 3, 4, 8, 8, 9, 9, 60, 7, 3])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A target on one implementation, and a drafter by its name.

    Attributes:
      adaptive: the name of a gamma policy, or "".
      greedy: in a program that cannot draw, whatever a request says.
    """

    name: str = "draft-model"
    impl: str = "native"
    cache: str = "paged"
    adaptive: str = ""
    greedy: bool = False

    @property
    def target(self) -> row_model.RowModel:
        """Of one layer."""
        return row_model.RowModel(
            config=CONFIG, impl=self.impl, slab=GAMMA_MAX + 1, cache=self.cache
        )

    @property
    def drafter(self) -> protocols.Drafter:
        """That of one sequence."""
        draft = draft_model.DraftModel(
            model=dataclasses.replace(self.target, slab=2),
            gamma_max=GAMMA_MAX,
            draws="sample-path" if self.draws_drafts else "highest",
        )
        lookup = suffix.SuffixDecoding(gamma_max=GAMMA_MAX)
        return {
            "draft-model": draft,
            "sampled": draft,
            "ngram": ngram.PromptLookup(gamma_max=GAMMA_MAX),
            "suffix": lookup,
            "hybrid": hybrid.Hybrid(suffix=lookup, draft=draft),
            "oracle": oracle.Oracle(gamma_max=GAMMA_MAX, vocab_size=CONFIG.vocab_size),
        }[self.name]

    @property
    def draws_drafts(self) -> bool:
        """Whether drafts are drawn, with the noise of the target's draws."""
        return self.name in ("sampled", "hybrid")

    def draft_params(self, request: queue.Request):
        """The drafter's parameters for one request."""
        weights = DRAFT_PARAMS
        if self.draws_drafts:
            weights = draft_model.SampledParams(
                weights=weights, settings=request.settings
            )
        return {
            "suffix": CORPUS,
            "hybrid": hybrid.HybridParams(draft=weights, corpus=CORPUS),
            "ngram": None,
            "oracle": None,
        }.get(self.name, weights)

    def policy(self):
        """A policy that moves within a few rounds, and its first state."""
        probing = policy.Probing(every=2, longest=8)
        if self.adaptive == "threshold":
            made = threshold.Threshold(
                ladder=(0, 1, 2, 4), lower=0.35, upper=0.5, weight=0.5, probing=probing
            )
            return made, made.init(2)
        if self.adaptive == "goodput":
            made = goodput.Goodput(gamma_max=GAMMA_MAX, decay=0.7, probing=probing)
            return made, made.init(np.array([1.0, 1.3, 1.45, 1.6, 1.75]))
        return None, None

    def batch(self, *, num_slots: int = SLOTS, **changes) -> queue.Batch:
        """The pair in slots."""
        gamma_policy, policy_state = self.policy()
        return queue.Batch(
            target=rows.RowBatch(model=self.target, num_slots=num_slots),
            drafter=drafters.of(self.drafter, num_slots),
            # The settings in a batch are those of its slots.
            params=(PARAMS, self.draft_params(REQUESTS[0])),
            gamma_policy=gamma_policy,
            policy_state=policy_state,
            **(SIZES | changes),
        )

    def request(self, number: int) -> queue.Request:
        """One of the requests, with what this drafter takes of it."""
        request = REQUESTS[number]
        if self.name == "oracle":
            request = dataclasses.replace(
                request, draft_params=trace(number, self.impl)
            )
        if self.greedy:
            request = dataclasses.replace(request, settings=None)
        return request


@functools.cache
def trace(number: int, impl: str) -> oracle.Trace:
    """A request's own text, with drafts that are right at some of its positions."""
    target, request = Case(impl=impl).target, REQUESTS[number]
    state = session.begin_plain(
        target,
        PARAMS,
        target.new_cache(**SIZES),
        request.prompt,
        max_tokens=request.max_tokens,
        settings=request.settings,
    )
    state = autoregressive.generate(
        target,
        PARAMS,
        state,
        stop_ids=decoding.NO_STOP,
        max_steps=decoding.FOREVER,
    )
    text = np.asarray(state.tokens).tolist()
    return oracle.make_trace(text, rate=0.75, seed=number)


@functools.cache
def alone(case: Case, number: int, stop_ids: tuple[int, ...] = ()) -> rounds.RoundState:
    """The last state of a request that ran by itself, on the host."""
    request = case.request(number)
    draft_params = request.draft_params
    if draft_params is None:
        draft_params = case.draft_params(request)
    gamma_policy, policy_state = case.policy()
    state = session.begin(
        case.target,
        case.drafter,
        (PARAMS, draft_params),
        case.target.new_cache(**SIZES),
        case.drafter.init(**SIZES),
        request.prompt,
        max_tokens=request.max_tokens,
        settings=request.settings,
        policy=policy_state,
    )
    state = rounds.generate(
        case.target,
        case.drafter,
        (PARAMS, draft_params),
        state,
        gamma=jnp.int32(GAMMA_MAX if request.gamma is None else request.gamma),
        stop_ids=session.stop_array(stop_ids),
        max_rounds=decoding.FOREVER,
        gamma_policy=gamma_policy,
    )
    session.check_state(state)
    return jax.tree.map(np.asarray, state)


def admit(
    batch: queue.Batch, case: Case, placed: Mapping[int, int]
) -> batch_rounds.BatchState:
    """Requests in slots, by their numbers; the other slots stay empty."""
    state = batch.empty(draws=not case.greedy)
    for slot, number in placed.items():
        state = batch.admit(state, slot, case.request(number))
    return state


def generate(
    batch: queue.Batch,
    state: batch_rounds.BatchState,
    *,
    max_rounds: int = 10_000,
    until_one_ends: bool = False,
) -> batch_rounds.BatchState:
    """Rounds of all slots, in one call."""
    return batch_rounds.generate(
        batch.target,
        batch.drafter,
        batch.params,
        state,
        stop_ids=session.stop_array(batch.stop_ids),
        max_rounds=jnp.int32(max_rounds),
        until_one_ends=jnp.bool_(until_one_ends),
        gamma_policy=batch.gamma_policy,
    )


def check_pages(kv: paged.PagedKV) -> None:
    """The invariant of the pages, of either kind of cache."""
    check = paged.check_integrity
    if isinstance(kv, static.StaticKV):
        check = static.check_integrity
    check(kv)


def held(kv: paged.PagedKV, slot: int) -> list[np.ndarray]:
    """A slot's length, and its K/V of each layer, by the page table."""
    length = int(kv.length[slot])
    positions = np.arange(length)
    pages = np.asarray(kv.page_table)[slot, positions // kv.page_size]
    at = pages, positions % kv.page_size
    return [kv.length[slot], *(np.asarray(pool)[at] for pool in (*kv.k, *kv.v))]


def assert_same_states(found: rounds.RoundState, expected: rounds.RoundState) -> None:
    """All of a sequence but its K/V: tokens, counters, settings, policy."""
    without = {"cache": None, "memory": None}
    testing.assert_same_bits(found.replace(**without), expected.replace(**without))


def assert_each_alone(
    case: Case,
    state: batch_rounds.BatchState,
    placed: Mapping[int, int],
    stop_ids: tuple[int, ...] = (),
) -> None:
    """Raises unless each slot is what its request is alone; caches are in order."""
    caches = [kv for kv in (state.cache, state.memory) if isinstance(kv, paged.PagedKV)]
    for kv in caches:
        check_pages(kv)
        assert not bool(kv.refused.any())
    for slot, number in placed.items():
        expected = alone(case, number, stop_ids)
        found = jax.tree.map(
            lambda leaf, slot=slot: np.asarray(leaf[slot]), state.slots
        )
        assert_same_states(found, expected)
        testing.assert_same_bits(
            held(state.cache, slot), held(expected.cache, 0), what=f"slot {slot}"
        )
        if isinstance(state.memory, paged.PagedKV):
            testing.assert_same_bits(
                held(state.memory, slot), held(expected.memory, 0), what=f"draft {slot}"
            )
