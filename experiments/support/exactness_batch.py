"""Batches of the exactness suite: prompts that share every forward of their rounds.

Slots are used again and again, as a queue uses them, so that a prompt finds the pages
of those before it. Rows of a batch are not recorded: tokens, and keys and values of
each slot, are the evidence.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from spec_jax.batch import drafters, queue, rounds as batch_rounds, rows

from experiments.support import (
    exactness_cells as cells,
    exactness_evidence as evidence,
    exactness_runs as runs,
    exactness_values as values,
    model_pair,
)
from spec_jax import session
from spec_jax.drafters import oracle


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    """A cell's batch, between two uses.

    Attributes:
      state: all slots are done; used up by `run`.
    """

    batch: queue.Batch
    state: batch_rounds.BatchState


def open_slots(
    pair: model_pair.ModelPair, cell: cells.Cell, settings: runs.Settings
) -> Slots:
    """The empty slots of a cell.

    Raises:
      NotImplementedError: a drafter that has no form for batches.
    """
    # Of an oracle only the kind: every request brings its own trace.
    nothing = np.zeros((1,), np.int32)
    drafter, draft_params = runs.DRAFTERS[cell.drafter](pair, nothing)
    adaptive = values.policy_of(cell.gamma_policy, drafter)
    batch = queue.Batch(
        target=rows.RowBatch(model=pair.target, num_slots=cell.batch),
        drafter=drafters.of(drafter, cell.batch),
        params=(pair.params[0], draft_params),
        **settings.cache_sizes(cell.page_size),
        stop_ids=settings.stop_ids,
        prefill_by_rows=cell.prefill == "rows",
        gamma_policy=adaptive.gamma_policy,
        policy_state=adaptive.state,
    )
    return Slots(batch=batch, state=batch.empty(draws=cell.sampling == "sampled"))


def run(
    slots: Slots,
    pair: model_pair.ModelPair,
    cell: cells.Cell,
    settings: runs.Settings,
    prompts: Sequence[list[int]],
    plain: Sequence[runs.Plain],
) -> tuple[Slots, list[runs.Rounds]]:
    """The cell's rounds of as many prompts as there are slots, or fewer.

    Args:
      slots: used up.
      plain: of each prompt.

    Returns:
      The slots, for the next prompts, and what each prompt's slot left behind.

    Raises:
      ValueError: a prompt that cannot be used.
    """
    batch, state = slots.batch, slots.state
    requests = [
        _request(pair, cell, settings, *each)
        for each in zip(prompts, plain, strict=True)
    ]
    for slot, request in enumerate(requests):
        batch.check(request)
        state = batch.admit(state, slot, request)
    state = batch_rounds.generate(
        batch.target,
        batch.drafter,
        batch.params,
        state,
        stop_ids=session.stop_array(batch.stop_ids),
        max_rounds=jnp.int32(settings.gen_tokens),
        until_one_ends=jnp.bool_(False),
        gamma_policy=batch.gamma_policy,
    )
    session.check_refused([state.cache, state.memory])
    found = [
        _of_slot(state, slot, num_prompt=len(prompt))
        for slot, prompt in enumerate(prompts)
    ]
    return dataclasses.replace(slots, state=state), found


def _request(pair, cell, settings, prompt, plain) -> queue.Request:
    drafter, draft_params = runs.DRAFTERS[cell.drafter](pair, plain.text)
    has_trace = isinstance(drafter, oracle.Oracle)
    return queue.Request(
        prompt=prompt,
        max_tokens=settings.gen_tokens,
        gamma=cell.gamma,
        settings=values.settings_of(cell.sampling),
        draft_params=draft_params if has_trace else None,
    )


def _of_slot(
    state: batch_rounds.BatchState, slot: int, *, num_prompt: int
) -> runs.Rounds:
    one = jax.tree.map(lambda leaf: np.asarray(leaf[slot]), state.slots)
    return runs.Rounds(
        evidence=evidence.of_state(
            one, state.cache, None, num_prompt=num_prompt, slot=slot
        ),
        rounds=int(one.num_rounds),
        proposed=int(one.num_proposed),
        accepted=int(one.num_accepted),
    )
