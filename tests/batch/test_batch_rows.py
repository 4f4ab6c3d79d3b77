"""The rows of many slots in one forward: each slot's bits are those of it alone."""

import dataclasses
import functools

import batch_cases
import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spec_jax.batch import rows

from spec_jax import rules, testing
from spec_jax.model import params as params_lib, row_model
from spec_jax.paging import allocator, cache as paged
from spec_jax.rules import sampling


SLOTS, WINDOW = batch_cases.SLOTS, 5
SIZES = {"capacity": 24, "page_size": 4}
NAN_TOKEN = 0  # that of dead rows: its embedding is NaN

KINDS = {
    "native-float32": ("native", "float32", "paged"),
    "native-bfloat16": ("native", "bfloat16", "paged"),
    "native-static": ("native", "float32", "static"),
    "xla-float32": ("xla", "float32", "paged"),
    "xla-bfloat16": ("xla", "bfloat16", "paged"),
}
DRAWN = ("native-float32",)  # the others are greedy
SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 3},
    {"temperature": 0.0, "seed": 1},
    {"temperature": 2.0, "seed": 4},
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """A model of one layer, and the compiled forwards of slots and of one slot."""

    model: row_model.RowModel
    params: params_lib.Params

    @property
    def batch(self) -> rows.RowBatch:
        return rows.RowBatch(model=self.model, num_slots=SLOTS)

    @functools.cached_property
    def together(self):
        """`RowBatch.next_tokens` and a truncation, compiled anew."""

        def step(params, kv, tokens, starts, num_live, settings, kept):
            kv, own, _ = self.batch.next_tokens(
                params,
                kv,
                tokens=tokens,
                starts=starts,
                num_live=num_live,
                settings=settings,
            )
            return self.batch.truncate(kv, kept, asked=num_live > 0), own

        return functools.partial(jax.jit(step), self.params)

    @functools.cached_property
    def alone(self):
        """`RowModel.forward`, the choice of tokens, and a truncation."""

        def step(params, kv, tokens, start, num_live, settings, kept):
            kv, logits = self.model.forward(
                params, kv, tokens=tokens, start=start, num_live=num_live
            )
            own, _ = rules.own_tokens(
                self.model,
                logits,
                settings,
                first_position=start + 1,
                num_live=num_live,
            )
            return self.model.truncate(kv, kept), own

        return functools.partial(jax.jit(step), self.params)


@functools.cache
def make_scene(kind: str) -> Scene:
    impl, dtype, cache = KINDS[kind]
    config = decoding.make_config(
        dtype=dtype, tie_word_embeddings=False, num_layers=1, hidden_size=32
    )
    model = row_model.RowModel(config=config, impl=impl, slab=WINDOW, cache=cache)
    params = params_lib.init(jax.random.key(0), config, stddev=0.3)
    embed = params.embed.at[NAN_TOKEN].set(jnp.nan)
    return Scene(model=model, params=params.replace(embed=embed))


def anew(scene: Scene) -> Scene:
    """The same, nothing of it compiled: for what is patched."""
    return Scene(model=scene.model, params=scene.params)


def poisoned(kv: paged.PagedKV) -> paged.PagedKV:
    """NaN into every byte that is no token's: pages of nobody among them."""
    is_held = np.zeros((kv.num_pages, kv.page_size), bool)
    for slot in range(kv.num_slots):
        positions = np.arange(int(kv.length[slot]))
        pages = np.asarray(kv.page_table)[slot, positions // kv.page_size]
        is_held[pages, positions % kv.page_size] = True
    kept = jnp.asarray(is_held)[:, :, None, None]

    def poison(pool):
        return jnp.where(kept, pool, jnp.full_like(pool, jnp.nan))

    return kv.replace(k=tuple(map(poison, kv.k)), v=tuple(map(poison, kv.v)))


def stacked_settings() -> sampling.SamplingSettings:
    each = [sampling.make_settings(**settings) for settings in SETTINGS]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)


def walk(scene, together, rng, *, settings=None, num_steps=8) -> int:
    """Raises unless all slots are, after every step, what each of them is alone.

    Steps of 0 to `WINDOW` rows a slot, and truncations by some of them.

    Returns:
      The most live rows of a step.
    """
    kv = scene.batch.new_cache(**SIZES)
    # Pages come from a stack in no order.
    if kv.pages_change_hands:
        order = rng.permutation(int(kv.num_free)).astype(np.int32)
        stack = kv.free_pages.at[: int(kv.num_free)].set(
            kv.free_pages[: int(kv.num_free)][order]
        )
        kv = kv.replace(free_pages=stack)
    own_kvs = [scene.model.new_cache(**SIZES) for _ in range(SLOTS)]
    most = 0
    for number in range(num_steps):
        starts = np.asarray(kv.length)
        num_live = rng.integers(0, WINDOW + 1, SLOTS).astype(np.int32)
        if number == 1:
            num_live[:] = WINDOW  # as many tiles as there can be
        num_live = np.minimum(num_live, kv.slot_capacity - starts)
        tokens = rng.integers(1, 96, (SLOTS, WINDOW)).astype(np.int32)
        tokens[np.arange(WINDOW) >= num_live[:, None]] = NAN_TOKEN
        kept = starts + rng.integers(0, num_live + 1).astype(np.int32)
        kv, own = together(poisoned(kv), tokens, starts, num_live, settings, kept)
        batch_cases.check_pages(kv)
        assert not bool(kv.refused.any() | kv.out_of_pages.any())
        most = max(most, int(num_live.sum()))
        for slot in range(SLOTS):
            if num_live[slot]:
                own_kvs[slot], expected = scene.alone(
                    poisoned(own_kvs[slot]),
                    tokens[slot],
                    starts[slot],
                    num_live[slot],
                    jax.tree.map(lambda leaf, slot=slot: leaf[slot], settings),
                    kept[slot],
                )
                np.testing.assert_array_equal(
                    own[slot, : num_live[slot]], expected[: num_live[slot]]
                )
            testing.assert_same_bits(
                batch_cases.held(kv, slot), batch_cases.held(own_kvs[slot], 0)
            )
        assert not np.asarray(own)[np.arange(WINDOW) >= num_live[:, None]].any()
    return most


@pytest.mark.parametrize(
    "kind",
    [
        *(kind for kind in KINDS if kind != "xla-bfloat16"),
        pytest.param("xla-bfloat16", marks=pytest.mark.slow),
    ],
)
def test_slots_are_what_they_are_alone(kind, rng):
    """Fails if a bit depends on neighbours, on a tile, or on what is not a token's."""
    batch_cases.skip_without(KINDS[kind][0])
    scene = make_scene(kind)
    settings = stacked_settings() if kind in DRAWN else None
    most = walk(scene, scene.together, rng, settings=settings)
    # With XLA, all of the tiles that there can be.
    assert most == SLOTS * WINDOW
    assert most > 3 * scene.model.slab


def test_native_rows_of_several_tiles(rng):
    """Fails if a native tile that is not the first finds other rows or other K/V."""
    batch_cases.skip_without("native")
    scene = make_scene("native-float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "NATIVE_TILE", 3)
        walk(scene, anew(scene).together, rng)


def _neighbours_position(real):
    return lambda tokens, starts, num_live, *, height: real(
        tokens, jnp.roll(starts, 1), num_live, height=height
    )


def _neighbours_slot(real):
    def pack(*arguments, height):
        packed, at = real(*arguments, height=height)
        return dataclasses.replace(packed, slots=(packed.slots + 1) % SLOTS), at

    return pack


def _neighbours_token(real):
    def pack(*arguments, height):
        packed, at = real(*arguments, height=height)
        return packed, jnp.roll(at, 1, axis=0)

    return pack


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("_pack", _neighbours_position),
        ("_pack", _neighbours_slot),
        ("_pack", _neighbours_token),
        ("_tile_of", lambda real: lambda rows, start, height: real(rows, 0, height)),
    ],
)
def test_planted_faults_are_caught(name, fault, rng, monkeypatch):
    """Negative control: rows at another's position, in another's slot, and so on."""
    batch_cases.skip_without("native")
    scene = make_scene("native-float32")
    monkeypatch.setattr(rows, name, fault(getattr(rows, name)))
    monkeypatch.setattr(rows, "NATIVE_TILE", 3)
    with pytest.raises(AssertionError):
        walk(scene, anew(scene).together, rng, num_steps=4)


def test_a_slot_without_a_page_is_not_run_and_the_others_are():
    """Fails if a starved slot is written or lengthened, or stops its neighbours."""
    batch_cases.skip_without("native")
    scene = make_scene("native-float32")
    kv, full = scene.batch.new_cache(**SIZES), jnp.full((SLOTS,), WINDOW, jnp.int32)
    tokens = jnp.ones((SLOTS, WINDOW), jnp.int32)
    # Every slot wants a second page, and there are two.
    few = kv.replace(num_free=jnp.int32(2))
    arguments = tokens, kv.length, full, None, full
    expected, _ = scene.together(kv, *arguments)
    after, own = scene.together(few, *arguments)
    assert scene.batch.is_starved(after).tolist() == [False, False, True, True]
    assert after.length.tolist() == [WINDOW, WINDOW, 0, 0]
    # Slots that cannot be truncated to what they never held say so.
    assert after.refused.tolist() == [False, False, True, True]
    for slot in (0, 1):
        testing.assert_same_bits(
            batch_cases.held(after, slot), batch_cases.held(expected, slot)
        )
    assert not np.asarray(own)[2:].any()
    assert not bool(after.k[0][int(after.page_table[2, 0])].any())


def test_rows_that_do_not_follow_are_refused():
    """Of the slot that is wrong, and of no other; not where nothing is asked."""
    batch_cases.skip_without("native")
    scene = make_scene("native-float32")
    kv = scene.batch.new_cache(**SIZES)
    starts = kv.length + jnp.array([0, 1, 3, 0])
    num_live = jnp.array([2, 2, 0, 1])
    tokens = jnp.ones((SLOTS, WINDOW), jnp.int32)
    after, _ = scene.together(kv, tokens, starts, num_live, None, starts + num_live)
    assert after.refused.tolist() == [False, True, False, False]


def test_slots_that_make_no_sense():
    model = decoding.TARGET
    with pytest.raises(ValueError, match="num_slots=0 must be at least 1"):
        rows.RowBatch(model=model, num_slots=0)
    batch = rows.RowBatch(model=model, num_slots=3)
    with pytest.raises(ValueError, match="capacity=0 and page_size=8 must be at least"):
        batch.new_cache(capacity=0, page_size=8)
    with pytest.raises(ValueError, match="num_pages=2 is fewer than num_slots=3"):
        batch.new_cache(capacity=16, page_size=8, num_pages=2)
    still = dataclasses.replace(batch, model=dataclasses.replace(model, cache="static"))
    with pytest.raises(ValueError, match="leave num_pages out, or use cache='paged'"):
        still.new_cache(capacity=16, page_size=8, num_pages=6)


def test_an_empty_cache_has_all_slots_open():
    """And as many pages as was said, or enough for all of them in full."""
    batch = rows.RowBatch(model=decoding.TARGET, num_slots=3)
    kv = batch.new_cache(capacity=17, page_size=8)
    assert (kv.num_pages, kv.slot_capacity) == (9, 24)
    assert kv.registered.tolist() == [True] * 3 and kv.num_owned.tolist() == [1] * 3
    few = batch.new_cache(capacity=64, page_size=8, num_pages=4)
    assert (few.num_pages, few.slot_capacity) == (4, 32)
    assert [batch.pages_needed(n, 8) for n in (0, 1, 8, 9)] == [1, 1, 1, 2]
    allocator.check(few)
