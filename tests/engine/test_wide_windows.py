"""Trees of up to 256 rows: the tokens and the K/V of decoding at each budget."""

import dataclasses

import decoding
import jax
import numpy as np
import pytest
from decoding import Ask

from spec_jax.drafters import tree_shapes
from spec_jax.engine import protocols, windows


WIDEST = protocols.MAX_TREE_ROWS  # of a window, the root's among them
PROMPT = (7, 3, 90, 7, 3, 41, 7, 3)
ASKS = (
    Ask(prompt=PROMPT, max_tokens=24, gamma=None, sampling=decoding.COLD),
    Ask(prompt=PROMPT, max_tokens=20, gamma=None, sampling=decoding.WARM),
    Ask(prompt=(9,), max_tokens=12, gamma=40, sampling=decoding.COLD),
)
WEIGHTS = decoding.perturbed(decoding.TARGET_PARAMS, 0.05)


def run(rows, impl, asks=ASKS):
    """Sequences side by side, whose drafts are wrong often enough to need a tree."""
    tree = tree_shapes.parse(f"8x8:{rows - 1}@1")
    drafter = decoding.draft_drafter(impl=impl).for_tree(tree)
    setting = dataclasses.replace(decoding.setting_of(impl), capacity=400)
    scheduler = setting.scheduler(drafter, num_slots=len(asks), draft_params=WEIGHTS)
    return setting, jax.device_get(decoding.rounds(scheduler, asks))


@pytest.mark.parametrize(
    ("rows", "impl"),
    [
        pytest.param(64, "native", marks=pytest.mark.slow),
        (WIDEST, "native"),
        pytest.param(WIDEST, "xla", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_decoding_at_each_budget(rows, impl):
    """Fails if a row of a later tile misses one before it, or a branch is cut."""
    setting, state = run(rows, impl)
    decoding.assert_as_decoded(setting, state, ASKS)
    # Nodes past the first 64 were proposed, and some of them were kept.
    slots = state.slots
    assert slots.num_proposed[0] == (rows - 1) * slots.num_rounds[0]
    assert slots.num_proposed[2] == 40 * slots.num_rounds[2]
    if rows > 64:
        assert np.asarray(slots.kept_by_rank)[:, 63:].sum() > 0


@pytest.mark.slow
def test_one_sequence():
    """Fails if XLA ends the process over columns that nothing reads: one slot's are not
    packed (`compilation.one_kernel`)."""
    setting, state = run(WIDEST, "native", ASKS[:1])
    decoding.assert_as_decoded(setting, state, ASKS[:1])


def test_a_parent_in_another_tile_that_is_not_seen_is_caught(monkeypatch):
    """Negative control: rows of a tile see the nodes of their own tile alone."""
    layout = windows._layout

    def planted(window, *, num_rows):
        positions, branch = layout(window, num_rows=num_rows)
        columns = jax.numpy.arange(num_rows)[None, :, None]
        places = branch - window.start[:, None, None]
        is_far = (places > 0) & (places // 80 < columns // 80)
        return positions, branch - is_far.astype(branch.dtype)

    monkeypatch.setattr(windows, "_layout", planted)
    setting, state = run(255, "native")  # a program of its own
    with pytest.raises(AssertionError):
        decoding.assert_as_decoded(setting, state, ASKS)
