"""Heads with a window keep K/V in rings of pages, however long a text is."""

import dataclasses

import decoding
import pytest
import test_block as blocks
import test_eagle3 as eagle
from slow_cases import slow

from experiments.heads import windowed
from spec_jax.drafters import each, features as features_lib, registry, tree_shapes
from spec_jax.engine import checks
from spec_jax.paging import static


WINDOW = 7
LENGTHS = (3, 7, 8, 11, 12, 16, 19)
EAGLE = eagle.make(head=dataclasses.replace(eagle.HEAD, window=WINDOW))
DRAFTERS = {
    "eagle3": (EAGLE, eagle.PARAMS),
    "eagle3, tree": (EAGLE.for_tree(tree_shapes.parse("2-2-1")), eagle.PARAMS),
    "dflash": (
        blocks.make(
            dataclasses.replace(blocks.DFLASH, attention=(blocks._Sees(window=8),) * 2)
        ),
        blocks.PARAMS["dflash"],
    ),
}


def drafts(name, monkeypatch, *, kept):
    """Returns the drafts after prefixes of a text if so many positions are kept."""
    if kept is not None:
        monkeypatch.setattr(features_lib.SlotReader, "_kept", kept)
    drafter, params = DRAFTERS[name]
    features = eagle.features_of(drafter.taps)
    rounds = eagle.rounds_of(drafter, features, LENGTHS, params=params)
    made = [proposal.tokens[: proposal.num_drafted].tolist() for _, proposal in rounds]
    monkeypatch.undo()
    return made


@pytest.mark.parametrize(
    "name",
    [
        slow("eagle3"),
        "eagle3, tree",
        slow("dflash"),
    ],
)
def test_a_ring_drafts_what_all_pages_do(name, monkeypatch):
    """Fails if a key that rows see is overwritten, or read from another place."""
    whole = drafts(name, monkeypatch, kept=None)  # All 32 positions are kept.
    assert all(whole) and drafts(name, monkeypatch, kept=16) == whole
    # Negative control: too small a ring.
    assert drafts(name, monkeypatch, kept=8) != whole


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
    mixed = each.lift(blocks.make(blocks.MIXED), 3)
    assert not isinstance(mixed.init(capacity=4000, page_size=16).kv, static.StaticKV)


def with_positions(head, count):
    layer = dataclasses.replace(head.layer, max_position_embeddings=count)
    return dataclasses.replace(head, layer=layer)


@pytest.mark.filterwarnings("error")
def test_positions_past_those_of_a_head():
    """Fails if a head's few positions limit its pages, or do not lead to a warning.

    A head with a window sees no distance that it was not trained for: no warning.
    """
    short = with_positions(eagle.HEAD, 16)
    one = eagle.make(
        head=short, model=dataclasses.replace(EAGLE.model, config=short.layer)
    )
    with pytest.warns(UserWarning, match="16 positions.*few may be accepted"):
        checks.warn_positions(one, 20)
    each.lift(one, 1).init(capacity=96, page_size=2048)
    windowed = dataclasses.replace(short, window=WINDOW)
    two = dataclasses.replace(one, head=windowed)
    checks.warn_positions(two, 20)
    three = dataclasses.replace(one, head=dataclasses.replace(short, window=17))
    with pytest.warns(UserWarning, match="16 positions"):
        checks.warn_positions(three, 20)


def test_a_window_for_the_shipped_head(monkeypatch):
    """Fails if the head of `experiments.heads.windowed:eagle3` keeps all keys."""
    whole = eagle.make(head=eagle.HEAD)
    monkeypatch.setitem(registry.BUILDERS, "eagle3", lambda _: (whole, eagle.PARAMS))
    made, params = windowed.eagle3(None)
    assert params is eagle.PARAMS and not whole.head.window
    sizes = {"capacity": 9000, "page_size": 16, "num_pages": 999}
    rings = [each.lift(one, 1).init(**sizes).kv for one in (whole, made)]
    assert [isinstance(kv, static.RingKV) for kv in rings] == [False, True]
    assert windowed.WINDOW <= rings[1].num_pages * 16 < 2 * windowed.WINDOW
