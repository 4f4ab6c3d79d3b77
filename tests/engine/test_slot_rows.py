"""The rows of many slots in one forward: each slot's bits are those of a run alone.

The run alone is `RowModel.forward_rows` of one slot. Free pages are in random order,
and places without a token hold NaN, so that a result that depends on them differs.
"""

import dataclasses
import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import page_tables
import planting
import pytest
from slow_cases import slow

from spec_jax import testing
from spec_jax.engine import protocols, rows, windows
from spec_jax.model import decoder, params as params_lib, row_model
from spec_jax.paging import allocator, cache as paged


WINDOW = 5
SIZES = {"capacity": 24, "page_size": 4}
NAN_TOKEN = 0  # the token of padding rows: its embedding is NaN
KINDS = {
    "native-float32": ("native", "float32", "paged"),
    "native-bfloat16": ("native", "bfloat16", "static"),
    "xla-float32": ("xla", "float32", "paged"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """A model of one layer, and the compiled forwards of slots and of one slot."""

    model: row_model.RowModel
    params: params_lib.Params
    num_slots: int

    @property
    def slots(self) -> rows.SlotRows:
        return rows.SlotRows(model=self.model, num_slots=self.num_slots)

    def step(self, params, kv, window, kept):
        """Runs `SlotRows.verify`, a truncation, and the choice of tokens."""
        kv, verified = self.slots.verify(params, kv, window)
        kv = self.slots.truncate(kv, kept, asked=window.num_active > 0)
        return kv, verified, self.slots.choose(verified.logits, verified.num_active)

    @functools.cached_property
    def alone(self):
        """The step of one slot, with `RowModel.forward_rows` in place of `verify`."""

        def step(params, kv, tokens, start, num_active, kept):
            columns = jnp.arange(WINDOW, dtype=jnp.int32)
            given = decoder.Rows(
                tokens=tokens,
                slots=jnp.zeros_like(columns),
                positions=start + columns,
                num_active=num_active,
            )
            kv = allocator.reserve(kv, 0, start + num_active)
            kv, outputs = self.model.forward_rows(params, given, kv)
            kv = allocator.extend(kv, 0, start + num_active)
            kv, logits = page_tables.truncate(kv, 0, kept), outputs.logits
            return kv, logits, self.model.choose(logits, num_active)

        return functools.partial(jax.jit(step), self.params)


def make_scene(kind: str, num_slots: int = 4) -> Scene:
    impl, dtype, cache = KINDS[kind]
    decoding.needs(impl)
    config = decoding.make_config(
        dtype=dtype, tie_word_embeddings=False, num_layers=1, hidden_size=32
    )
    model = row_model.RowModel(config=config, impl=impl, slab=WINDOW, cache=cache)
    params = params_lib.init(jax.random.key(0), config, stddev=0.3)
    params = params.replace(embed=params.embed.at[NAN_TOKEN].set(jnp.nan))
    return Scene(model=model, params=params, num_slots=num_slots)


def poisoned(kv: paged.PagedKV) -> paged.PagedKV:
    """Returns the cache with NaN in all places without a token, free pages included."""
    is_held = np.zeros((kv.num_pages, kv.page_size), bool)
    for slot in range(kv.num_slots):
        positions = np.arange(int(kv.length[slot]))
        pages = np.asarray(kv.page_table)[slot, positions // kv.page_size]
        is_held[pages, positions % kv.page_size] = True
    kept = jnp.asarray(is_held)[:, :, None, None]

    def poison(pool):
        return jnp.where(kept, pool, jnp.full_like(pool, jnp.nan))

    return kv.replace(k=tuple(map(poison, kv.k)), v=tuple(map(poison, kv.v)))


def walk(scene, together, rng, *, num_steps=8) -> int:
    """Raises unless each slot equals, after every step, the same slot run alone.

    A step runs 0 to `WINDOW` rows of each slot, and may truncate some of them.

    Returns:
      The most active rows of a step.
    """
    num_slots = scene.num_slots
    kv = page_tables.shuffled(scene.slots.new_cache(**SIZES), rng)
    own = [scene.model.new_cache(**SIZES) for _ in range(num_slots)]
    most = 0
    for number in range(num_steps):
        start = np.asarray(kv.length)
        num_active = rng.integers(0, WINDOW + 1, num_slots).astype(np.int32)
        if number == 1:
            num_active[:] = WINDOW  # as many tiles as possible
        num_active = np.minimum(num_active, kv.slot_capacity - start)
        tokens = rng.integers(1, 96, (num_slots, WINDOW)).astype(np.int32)
        tokens[np.arange(WINDOW) >= num_active[:, None]] = NAN_TOKEN
        kept = start + rng.integers(0, num_active + 1).astype(np.int32)
        window = protocols.Window(
            tokens=jnp.asarray(tokens),
            start=jnp.asarray(start),
            num_active=jnp.asarray(num_active),
        )
        kv, verified, chosen = together(scene.params, poisoned(kv), window, kept)
        decoding.check_cache(kv)
        assert not bool(kv.out_of_pages.any())
        assert int(verified.num_active) == num_active.sum()
        most = max(most, int(num_active.sum()))
        by_column = np.asarray(verified.by_column(chosen, fill=-7))
        rows_of = jax.device_get(verified)
        assert (by_column[np.arange(WINDOW) >= num_active[:, None]] == -7).all()
        for slot in range(num_slots):
            count = num_active[slot]
            if count:
                own[slot], logits, expected = scene.alone(
                    poisoned(own[slot]), tokens[slot], start[slot], count, kept[slot]
                )
                at = rows_of.at[slot, :count]
                testing.assert_same_bits(rows_of.logits[at], logits[:count])
                np.testing.assert_array_equal(by_column[slot, :count], expected[:count])
                assert (rows_of.slots[at] == slot).all()
                positions = start[slot] + np.arange(count)
                np.testing.assert_array_equal(rows_of.positions[at], positions)
            testing.assert_same_bits(
                decoding.held(kv, int(kept[slot]), slot=slot),
                decoding.held(own[slot], int(kept[slot])),
            )
    return most


@pytest.mark.parametrize(
    ("kind", "num_slots"),
    [slow("native-float32", 1), ("native-bfloat16", 4), slow("xla-float32", 4)],
)
def test_slots_are_what_they_are_alone(kind, num_slots, rng):
    """Fails if a bit depends on neighbours, on a tile, or on places without a token."""
    scene = make_scene(kind, num_slots)
    # Some step has all rows active: with XLA, as many tiles as possible.
    assert walk(scene, jax.jit(scene.step), rng) == num_slots * WINDOW


def _append(**changes):
    """Plants an `_append` whose packed rows are changed."""

    def wrap(real):
        def append(*args):
            kv, window, packed, at = real(*args)
            parts = {"slots": packed.slots, "positions": packed.positions, "at": at}
            for name, change in changes.items():
                parts[name] = change(parts[name])
            at = parts.pop("at")
            return kv, window, dataclasses.replace(packed, **parts), at

        return append

    return wrap


def _first_again(real):
    """Plants an `over_tiles` that runs the first tile in the place of each."""

    def over_tiles(forward, kv, rows, *more, tile):
        again = lambda x: jnp.tile(x[:tile], len(x) // tile)
        names = "tokens", "slots", "positions"
        rows = rows.replace(**{name: again(getattr(rows, name)) for name in names})
        return real(forward, kv, rows, *more, tile=tile)

    return over_tiles


FAULTS = (
    (windows, "_append", _append(positions=lambda x: x + 1)),
    (windows, "_append", _append(slots=lambda x: (x + 1) % 4)),
    (windows, "_append", _append(at=lambda x: jnp.roll(x, 1, axis=0))),
    (windows, "over_tiles", _first_again),
)
"""Rows with the next position, a neighbour's slot or rows, or the first tile again."""


def test_planted_faults_are_caught(rng, monkeypatch):
    """Negative control: with each of `FAULTS` some slot differs from a run alone."""
    monkeypatch.setattr(rows, "NATIVE_TILE", 3)
    scene = make_scene("native-float32")

    @jax.jit
    def step(number, *inputs):
        with planting.planted(FAULTS, number):
            return scene.step(*inputs)

    # Without a fault, later native tiles find their rows and K/V, too.
    together = functools.partial(step, jnp.int32(0))
    assert walk(scene, together, rng) == scene.num_slots * WINDOW
    for number in range(1, len(FAULTS) + 1):
        together = functools.partial(step, jnp.int32(number))
        with pytest.raises((AssertionError, ValueError)):
            walk(scene, together, rng, num_steps=4)
