"""Heads with a window keep K/V in rings of pages, however long a text is."""

import dataclasses

import decoding
import head_cases as heads
import jax
import pytest
from slow_cases import slow

from spec_jax.drafters import (
    each,
    eagle3,
    features as features_lib,
    tree_shapes,
)
from spec_jax.engine import checks
from spec_jax.paging import static


WINDOW = 7
LENGTHS = (3, 7, 8, 11, 12, 16, 19)
EAGLE = heads.make(dataclasses.replace(heads.EAGLE, window=WINDOW))
PARAMS = heads.PARAMS["eagle3"]
DRAFTERS = {
    "eagle3": (EAGLE, PARAMS),
    "eagle3, tree": (EAGLE.for_tree(tree_shapes.parse("2-2-1")), PARAMS),
    "dflash": (heads.make(heads.seeing({"window": 8})), heads.PARAMS["dflash"]),
}


def drafts(drafter, params=PARAMS):
    """Returns the drafts after prefixes of a text."""
    rounds = heads.rounds_of(drafter, params, LENGTHS)
    return [made.tokens[: made.num_drafted].tolist() for _, made in rounds]


@pytest.mark.parametrize("name", [slow("eagle3"), "eagle3, tree", slow("dflash")])
def test_a_ring_drafts_what_all_pages_do(name, monkeypatch):
    """Fails if a key that rows see is overwritten, or read from another place."""
    whole = drafts(*DRAFTERS[name])  # All 32 positions are kept.
    monkeypatch.setattr(features_lib.SlotReader, "_kept", 16)
    assert all(whole) and drafts(*DRAFTERS[name]) == whole
    # Negative control: too small a ring.
    monkeypatch.setattr(features_lib.SlotReader, "_kept", 8)
    assert drafts(*DRAFTERS[name]) != whole


def test_a_chain_with_a_window_is_one_native_call(monkeypatch):
    """Compares it, and one in a ring, with a tree of one branch: level by level."""
    decoding.needs("native")
    levels = heads.make(EAGLE.head, "native").for_tree(tree_shapes.parse("1-1-1-1"))
    expected = drafts(levels)
    # Negative control: without a window.
    assert drafts(heads.make("eagle3", "native")) != expected
    made = heads.make(EAGLE.head, "native")
    chain, calls = heads.counted(monkeypatch, made, eagle3.SlotEagle3, "_run_chains")
    for kept in (32, 16):
        monkeypatch.setattr(features_lib.SlotReader, "_kept", kept)
        assert drafts(chain) == expected
    jax.effects_barrier()
    assert len(calls) == 2 * len(LENGTHS)


def test_a_ring_has_pages_for_its_window_alone():
    """Fails if a ring grows with the text, or the check misses a page that is wrong."""
    slots = each.lift(EAGLE, 3)
    kv = slots.init(capacity=4000, page_size=16, num_pages=9).kv
    assert isinstance(kv, static.RingKV) and kv.slot_capacity == 4000
    reach = kv.num_pages // 3 * 16
    assert WINDOW < reach < 600
    decoding.check_cache(kv)
    with pytest.raises(ValueError, match="slots \\[1\\] do not own"):
        decoding.check_cache(kv.replace(page_table=kv.page_table.at[1, 5].set(0)))
    mixed = each.lift(heads.make("mixed"), 3)
    assert not isinstance(mixed.init(capacity=4000, page_size=16).kv, static.StaticKV)


@pytest.mark.filterwarnings("error")
def test_positions_past_those_of_a_head():
    """Fails if a head's few positions limit its pages, or do not lead to a warning.

    A head with a window sees no distance that it was not trained for: no warning.
    """
    layer = dataclasses.replace(heads.EAGLE.layer, max_position_embeddings=16)

    def drafter(window):
        return heads.make(dataclasses.replace(heads.EAGLE, layer=layer, window=window))

    for window in (0, 17):
        with pytest.warns(UserWarning, match="16 positions.*few may be accepted"):
            checks.warn_positions(drafter(window), 20)
    checks.warn_positions(drafter(WINDOW), 20)
    each.lift(drafter(0), 1).init(capacity=96, page_size=2048)
