"""Trees of up to 256 rows: the tokens and the K/V of decoding at each budget."""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import planting
import pytest
from decoding import Ask
from slow_cases import slow

from spec_jax.drafters import tree_shapes
from spec_jax.engine import protocols, windows


WIDEST = protocols.MAX_TREE_ROWS  # of a window, with the root's row
PROMPT = (7, 3, 90, 7, 3, 41, 7, 3)
ASKS = (
    Ask(prompt=PROMPT, max_tokens=24, gamma=None, sampling=decoding.COLD),
    Ask(prompt=PROMPT, max_tokens=20, gamma=None, sampling=decoding.WARM),
    Ask(prompt=(9,), max_tokens=12, gamma=40, sampling=decoding.COLD),
)
WEIGHTS = decoding.perturbed(decoding.TARGET_PARAMS, 0.05)


def of_own_tiles(real):
    """Plants a fault: rows see only those nodes that are in their own tile."""

    def layout(window, *, num_rows):
        positions, branch = real(window, num_rows=num_rows)
        columns = jnp.arange(num_rows)[None, :, None]
        places = branch - window.start[:, None, None]
        is_far = (places > 0) & (places // 80 < columns // 80)
        return positions, branch - is_far.astype(branch.dtype)

    return layout


def scheduler_of(setting, rows, num_slots):
    """Returns a scheduler whose drafts are often wrong, so that trees matter."""
    tree = tree_shapes.parse(f"8x8:{rows - 1}@1")
    drafter = decoding.draft_drafter(impl=setting.target.impl).for_tree(tree)
    return setting.scheduler(drafter, num_slots=num_slots, draft_params=WEIGHTS)


def setting_of(impl):
    return dataclasses.replace(decoding.setting_of(impl), capacity=400)


@pytest.mark.parametrize(
    ("rows", "impl"),
    [
        slow(64, "native"),
        (WIDEST, "native"),
        slow(WIDEST, "xla"),
    ],
)
def test_tokens_are_those_of_decoding_at_each_budget(rows, impl):
    """Fails if a row does not see a node of an earlier tile, or a branch is cut."""
    setting, requests = setting_of(impl), [ask.request() for ask in ASKS]
    scheduler = scheduler_of(setting, rows, len(ASKS))

    seen = []

    def check(state):
        seen.append(jax.device_get(state.slots))
        decoding.assert_as_decoded(setting, state, ASKS)

    # Up to 80 rows are one tile, in which the fault changes nothing.
    faults = [(windows, "_layout", of_own_tiles)] * (rows > 80)
    begin = lambda: decoding.admit(scheduler, requests)
    planting.check_faults(scheduler.speculator, begin, faults, check)
    # Nodes past the first 64 were proposed, and some of them were kept.
    slots = seen[0]
    assert slots.num_proposed[0] == (rows - 1) * slots.num_rounds[0]
    assert slots.num_proposed[2] == 40 * slots.num_rounds[2]
    if rows > 64:
        assert np.asarray(slots.kept_by_rank)[:, 63:].sum() > 0


@pytest.mark.slow
def test_one_sequence():
    """Fails if XLA aborts the process over columns that nothing reads: those of a lone
    slot are not packed (`compilation.one_kernel`)."""
    setting = setting_of("native")
    state = decoding.rounds(scheduler_of(setting, WIDEST, 1), ASKS[:1])
    decoding.assert_as_decoded(setting, state, ASKS[:1])
