"""Runs of the exactness suite: prompts decoded, and in the rounds of a cell.

Both with a recorder. Decoding gets its pages in another order than the rounds, so that
equal bits are also equal over pages; and slots are used again and again, so that a
prompt finds the pages of those before it.
"""

import collections
import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.lib import exact_cells as cells, runs
from spec_jax import loading
from spec_jax.debug import evidence, recorder
from spec_jax.drafters import draft_model, oracle, registry
from spec_jax.engine import (
    baseline,
    checks,
    requests as requests_lib,
    round as round_lib,
)
from spec_jax.paging import cache as paged, index


FORCED = {"always-right": 1.0, "always-wrong": 0.0}
"""Drafters that know the text: every draft is right, so that all rows of a window are
kept, or every one wrong."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What all cells share."""

    gen_tokens: int
    # Positions that the longest prompt and its text need; caches are of whole pages
    # above it
    longest: int
    stop_ids: tuple[int, ...] = ()

    def cache_sizes(self, page_size: int) -> dict[str, int]:
        """Returns the arguments of `RowModel.new_cache`."""
        pages = index.pages_for(self.longest, page_size)
        return {"capacity": pages * page_size, "page_size": page_size}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
    """A run of decoding: the evidence, and the text for drafters that know it."""

    evidence: evidence.Evidence
    text: np.ndarray  # [max_len] int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """A run in rounds: the evidence, and how well it was drafted."""

    evidence: evidence.Evidence
    rounds: int
    proposed: int
    accepted: int


Weights = tuple[Any, Any]
"""Of the target, and of the draft model."""


def drafter_names() -> tuple[str, ...]:
    """Returns the names of drafters, but for those written package.module:Name."""
    return (*registry.names(), *FORCED)


def load_models(
    cell: cells.Cell, *, target: Any, draft: Any, weights: Weights | None = None
) -> loading.LanguageModel:
    """Returns a cell's target, with the draft model as its drafter.

    Args:
      target, draft: folders; without a draft the drafter is a lookup.
      weights: of this cell's dtype, in the place of those of the folders.
    """
    lm = loading.load(
        target,
        draft=draft,
        drafter="ngram" if draft is None else "draft-model",
        # As many as fit, whatever the cell's gamma: cells share their executables.
        gamma_max=cell.slab - 1,
        dtype=cell.dtype,
        weights=cell.weights if cell.weights != "dense" else None,
        impl=cell.impl,
        cache=cell.cache,
        slab=cell.slab,
    )
    if weights is None:
        return lm
    params, draft_params = weights
    return dataclasses.replace(lm, params=params, drafter_params=draft_params)


def with_drafter(
    lm: loading.LanguageModel, cell: cells.Cell, *, head: pathlib.Path | None = None
) -> loading.LanguageModel:
    """Returns what `load_models` made, with the cell's drafter.

    Args:
      head: folder of the head that the cell's drafter is, if it is one.
    """
    name = "oracle" if cell.drafter in FORCED else cell.drafter
    # Raises `ValueError`: no draft is given.
    load_draft = functools.partial(
        loading.load_draft,
        None,
        lm.tokenizer,
        gamma_max=lm.gamma_max,
        dtype=cell.dtype,
        impl=cell.impl,
    )
    if isinstance(lm.drafter, draft_model.DraftModel):
        load_draft = lambda: (lm.drafter, lm.drafter_params)
    parts = registry.Parts(
        gamma_max=lm.gamma_max,
        vocab_size=lm.target.config.vocab_size,
        load_draft=load_draft,
        target=lm.target,
        target_params=lm.params,
        draft=head if name in registry.NEED_TARGET else None,
        dtype=cell.dtype,
    )
    drafter, params = registry.build(name, parts)
    lm = lm.with_drafter(drafter, params)
    return lm if cell.tree == cells.NO_TREE else lm.with_tree(cell.tree)


def run_plain(
    lm: loading.LanguageModel, cell: cells.Cell, settings: Settings, prompt: list[int]
) -> Plain:
    """Decodes a prompt with the cell's target."""
    watched = recorder.Recorder(target=lm.target)
    run = _run_settings(cell, settings)
    kv = _in_another_order(runs.new_cache(lm, run))
    state = runs.begin_plain(lm, run, prompt, kv)
    state = baseline.generate(
        watched,
        lm.params,
        watched.attach(state),
        max_steps=jnp.int32(settings.gen_tokens),
    )
    with contextlib.suppress(FloatingPointError):  # They are counted.
        baseline.check(watched.detach(state)[0], vocab_size=lm.target.config.vocab_size)
    return Plain(
        evidence=evidence.of_decode(state, num_prompt=len(prompt)),
        text=np.array(state.tokens),
    )


def _run_settings(cell: cells.Cell, settings: Settings, **more: Any) -> runs.Settings:
    """Returns the settings of a cell's runs, plain or in rounds."""
    return runs.Settings(
        gamma=cell.gamma,
        gen_tokens=settings.gen_tokens,
        **settings.cache_sizes(cell.page_size),
        stop_ids=settings.stop_ids,
        prefill_by_rows=cell.prefill == "rows",
        sampling=cell.settings,
        num_slots=cell.batch,
        **more,
    )


def _in_another_order(kv: paged.PagedKV) -> paged.PagedKV:
    """Returns the empty cache, with its free pages shuffled where there are any."""
    free = np.array(kv.free_pages)
    num_free = int(kv.num_free)
    free[:num_free] = np.random.default_rng(0).permutation(free[:num_free])
    return kv.replace(free_pages=jnp.array(free))


class Slots:
    """A cell's slots, which its prompts take as they come free.

    Raises:
      ValueError, NotImplementedError: a drafter that has no form for these slots.
    """

    def __init__(self, lm: loading.LanguageModel, cell: cells.Cell, settings: Settings):
        """Allocates the slots, all empty.

        Args:
          lm: with the cell's drafter.
        """
        self._lm, self._cell, self._settings = lm, cell, settings
        policy = cell.policy(lm.drafter)
        run = _run_settings(
            cell,
            settings,
            gamma_policy=policy.gamma_policy,
            policy_state=policy.state,
        )
        self._scheduler = runs.make_scheduler(lm, run)
        self._watched = recorder.Recorder(target=self._scheduler.speculator.target)
        self._state = self._scheduler.empty(draws=cell.settings is not None)

    def run(self, prompts: Sequence[list[int]], plain: Sequence[Plain]) -> list[Rounds]:
        """Runs all prompts; takes the evidence of each before its slot is refilled.

        Args:
          plain: of each prompt.

        Raises:
          ValueError: a prompt that cannot be used.
          MemoryError, RuntimeError: as `Scheduler.run`.
        """
        scheduler = self._scheduler
        watching = scheduler.speculator.replace(target=self._watched)
        waiting = collections.deque(
            (number, self._request(prompt, plain[number]))
            for number, prompt in enumerate(prompts)
        )
        state, running = self._watched.attach(self._state), {}  # numbers by slot
        found: dict[int, Rounds] = {}
        while waiting or running:
            for slot in set(range(self._cell.batch)) - set(running):
                if waiting:
                    running[slot], request = waiting.popleft()
                    state = self._admit(state, slot, request)
            state = round_lib.generate(
                watching,
                state,
                max_rounds=jnp.int32(self._settings.gen_tokens),
                until_one_ends=bool(waiting),
            )
            checks.check_refused([state.cache.cache, state.memory])
            slots = state.slots
            checks.check_pages(slots.status, slots.length, state.cache.cache)
            for slot in np.flatnonzero(~np.asarray(slots.running)).tolist():
                if slot in running:
                    number = running.pop(slot)
                    found[number] = _of_slot(state, slot, len(prompts[number]))
        self._state, _ = self._watched.detach(state)
        return [found[number] for number in range(len(prompts))]

    def _request(self, prompt: list[int], plain: Plain) -> requests_lib.Request:
        trace = None
        if isinstance(self._lm.drafter, oracle.Oracle):
            rate = FORCED.get(self._cell.drafter, 1.0)
            trace = oracle.make_trace(plain.text.tolist(), rate=rate)
        request = requests_lib.Request(
            prompt=prompt,
            max_tokens=self._settings.gen_tokens,
            gamma=self._cell.gamma,
            sampling=self._cell.settings,
            draft_params=trace,
        )
        self._scheduler.check(request)
        return request

    def _admit(self, state, slot, request):
        """Admits a request to a slot of a state that is recorded."""
        state, recording = self._watched.detach(state)
        state = self._scheduler.admit(state, slot, request)
        return state.replace(cache=recording.replace(cache=state.cache))


def _of_slot(state, slot: int, num_prompt: int) -> Rounds:
    slots = state.slots
    return Rounds(
        evidence=evidence.of_slot(state, num_prompt=num_prompt, slot=slot),
        rounds=int(slots.num_rounds[slot]),
        proposed=int(slots.num_proposed[slot]),
        accepted=int(slots.num_accepted[slot]),
    )
