"""Runs of the exactness suite: a prompt, plain and in rounds, with a recorder.

Plain decoding gets its pages in another order than the rounds, so that equal bits are
also equal over pages.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.support import (
    drafters,
    exactness_cells as cells,
    exactness_evidence as evidence,
    exactness_values as values,
    forced_drafter,
    model_pair,
    paired_runs,
)
from spec_jax import autoregressive, rounds, session
from spec_jax.debug import recorder
from spec_jax.drafters import draft_model, oracle
from spec_jax.engine import protocols
from spec_jax.paging import cache as paged, index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What all cells share.

    Attributes:
      longest: positions that the longest prompt and its text need; caches are of
        whole pages above it.
    """

    gen_tokens: int
    longest: int
    stop_ids: tuple[int, ...] = ()

    def cache_sizes(self, page_size: int) -> dict[str, int]:
        """Arguments of `RowModel.new_cache`."""
        pages = index.pages_for(self.longest, page_size)
        return {"capacity": pages * page_size, "page_size": page_size}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
    """A plain run: the evidence, and the whole text for drafters that know it."""

    evidence: evidence.Evidence
    text: np.ndarray  # [max_len] int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """A run in rounds: the evidence, and how well it was drafted."""

    evidence: evidence.Evidence
    rounds: int
    proposed: int
    accepted: int


Drafting = tuple[protocols.Drafter, Any]
"""A drafter, and its parameters."""


def _forced(pair: model_pair.ModelPair, text: np.ndarray, *, right: bool) -> Drafting:
    """Every draft right, so that all rows of a window are kept; or every one wrong."""
    drafter = forced_drafter.ForcedDrafter(
        inner=pair.drafter, vocab_size=pair.target.config.vocab_size
    )
    return drafter, forced_drafter.ForcedParams(
        draft=pair.params[1],
        trace=jnp.array(text),
        kept=jnp.full(text.shape, right),
    )


def _named(pair: model_pair.ModelPair, text: np.ndarray, *, name: str) -> Drafting:
    """A drafter of the command line."""
    parts = drafters.Parts(
        gamma_max=pair.drafter.gamma_max,
        vocab_size=pair.target.config.vocab_size,
        load_draft=lambda: (pair.drafter, pair.params[1]),
    )
    drafter, params = drafters.build(name, parts)
    if isinstance(drafter, oracle.Oracle):
        params = oracle.make_trace(text.tolist())
    return drafter, params


DRAFTERS: Mapping[str, Callable[[model_pair.ModelPair, np.ndarray], Drafting]] = {
    **{name: functools.partial(_named, name=name) for name in drafters.DRAFTERS},
    "always-right": functools.partial(_forced, right=True),
    "always-wrong": functools.partial(_forced, right=False),
}
"""What drafts, from a pair and the text that plain decoding wrote."""


def weights_of(pair: model_pair.ModelPair) -> tuple:
    """The weights of target and draft, whichever way the draft's tokens are drawn."""
    target, draft = pair.params
    if isinstance(draft, draft_model.SampledParams):
        draft = draft.weights
    return target, draft


def load(
    cell: cells.Cell, *, target: Any, draft: Any, weights: tuple | None
) -> model_pair.ModelPair:
    """The models of a cell.

    Args:
      target, draft: folders.
      weights: `weights_of` a pair of this cell's dtype, in the place of those of the
        folders.

    Raises:
      ValueError: a folder that cannot be used, or models that do not fit together.
      NotImplementedError: an implementation that cannot run here.
    """
    pair = model_pair.load_pair(
        target,
        draft,
        # As many as fit, whatever the cell's gamma: cells share their executables.
        gamma_max=cell.slab - 1,
        slab=cell.slab,
        dtype=cell.dtype,
        impl=cell.impl,
        verify_path=cell.verify_path,
        cache=cell.cache,
        draft_cache=cell.draft_cache,
        sampling_settings=values.settings_of(cell.sampling),
    )
    if weights is None:
        return pair
    target_params, draft_params = weights
    if isinstance(pair.params[1], draft_model.SampledParams):
        draft_params = pair.params[1].replace(weights=draft_params)
    return dataclasses.replace(pair, params=(target_params, draft_params))


def run_plain(
    pair: model_pair.ModelPair,
    cell: cells.Cell,
    settings: Settings,
    prompt: list[int],
) -> Plain:
    """Plain decoding of the cell's target.

    Raises:
      ValueError: a prompt that cannot be used.
    """
    watched = recorder.Recorder(target=pair.target, window=cell.slab)
    kv = pair.target.new_cache(**settings.cache_sizes(cell.page_size))
    state = session.begin_plain(
        pair.target,
        pair.params[0],
        _in_another_order(kv),
        prompt,
        max_tokens=settings.gen_tokens,
        prefill_by_rows=cell.prefill == "rows",
        settings=values.settings_of(cell.sampling),
    )
    state, recording = watched.detach(
        autoregressive.generate(
            watched,
            pair.params[0],
            watched.attach(state),
            stop_ids=session.stop_array(settings.stop_ids),
            max_steps=jnp.int32(settings.gen_tokens),
        )
    )
    paired_runs.check_state(state)
    return Plain(
        evidence=evidence.of_state(
            state, state.cache, recording, num_prompt=len(prompt)
        ),
        text=np.array(state.tokens),
    )


def run_rounds(
    pair: model_pair.ModelPair,
    cell: cells.Cell,
    settings: Settings,
    prompt: list[int],
    plain: Plain,
) -> Rounds:
    """The cell's rounds, of a prompt alone; raises as `run_plain`."""
    watched = recorder.Recorder(target=pair.verifier, window=cell.slab)
    sizes = settings.cache_sizes(cell.page_size)
    drafter, draft_params = DRAFTERS[cell.drafter](pair, plain.text)
    adaptive = values.policy_of(cell.gamma_policy, drafter)
    state = session.begin(
        pair.target,
        drafter,
        (pair.params[0], draft_params),
        pair.target.new_cache(**sizes),
        drafter.init(**sizes),
        prompt,
        max_tokens=settings.gen_tokens,
        prefill_by_rows=cell.prefill == "rows",
        settings=values.settings_of(cell.sampling),
        policy=adaptive.state,
    )
    state, recording = watched.detach(
        rounds.generate(
            watched,
            drafter,
            (pair.params[0], draft_params),
            watched.attach(state),
            gamma=jnp.int32(cell.gamma),
            stop_ids=session.stop_array(settings.stop_ids),
            max_rounds=jnp.int32(settings.gen_tokens),
            gamma_policy=adaptive.gamma_policy,
        )
    )
    paired_runs.check_state(state)
    return Rounds(
        evidence=evidence.of_state(
            state, state.cache, recording, num_prompt=len(prompt)
        ),
        rounds=int(state.num_rounds),
        proposed=int(state.num_proposed),
        accepted=int(state.num_accepted),
    )


def _in_another_order(kv: paged.PagedKV) -> paged.PagedKV:
    """The empty cache, with its free pages shuffled where there are any."""
    free = np.array(kv.free_pages)
    num_free = int(kv.num_free)
    free[:num_free] = np.random.default_rng(0).permutation(free[:num_free])
    return kv.replace(free_pages=jnp.array(free))
