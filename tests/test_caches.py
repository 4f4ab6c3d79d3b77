"""Kinds of cache change no bit: paged or static, a draft's kept or built each round."""

import dataclasses
import functools
import itertools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import CAPACITY, GAMMA_MAX, PAGE_SIZE, PROMPT

from spec_jax import autoregressive, session, testing
from spec_jax.drafters import draft_model
from spec_jax.model import params as params_lib, row_model
from spec_jax.ops import dispatch
from spec_jax.paging import allocator, cache, static


KINDS = [*itertools.product(row_model.CACHE_KINDS, draft_model.DRAFT_CACHES)]
# Compiling a loop with XLA's products takes long: all four kinds run on the kernels,
# and `test_rounds` has a paged cache and a persistent one with XLA.
RUNS = [("native", *kinds) for kinds in KINDS] + [("xla", "static", "round")]
LONG = 133  # past one key block of the attention, inside a page of any size


def available(impl: str) -> str:
    try:
        return dispatch.resolve(impl)
    except NotImplementedError as error:
        return pytest.skip(str(error))


def make_target(impl: str, kind: str, **changes) -> row_model.RowModel:
    return dataclasses.replace(
        decoding.TARGET,
        impl=available(impl),
        cache=kind,
        config=decoding.make_config(**changes),
    )


@jax.jit
def poisoned(kv):
    """Every byte NaN; of a paged cache the free pages in another order."""
    order = np.random.default_rng(0).permutation(kv.num_pages)
    stack = jnp.asarray(order, jnp.int32) if kv.pages_change_hands else kv.free_pages
    kv = allocator.release(kv, row_model.SLOT)
    kv = kv.replace(
        k=tuple(jnp.full_like(k, jnp.nan) for k in kv.k),
        v=tuple(jnp.full_like(v, jnp.nan) for v in kv.v),
        free_pages=stack,
    )
    return allocator.register(kv, row_model.SLOT)


def run_window(model, params, page_size, *, by_rows, spoil=lambda kv: kv):
    """A long prompt, a window of rows, half of it dropped, and another: all bits."""
    rng = np.random.default_rng(1)
    text = rng.integers(0, model.config.vocab_size, 256).astype(np.int32)
    kv = poisoned(model.new_cache(capacity=192, page_size=page_size))
    kv = model.prefill(params, kv, jnp.asarray(text), jnp.int32(LONG), by_rows=by_rows)
    forward = jax.jit(type(model).forward, static_argnums=0)
    outputs, kept = [], LONG
    for _ in range(2):
        window = jnp.asarray(text[kept : kept + model.slab])
        where = {"start": jnp.int32(kept), "num_live": jnp.int32(model.slab - 1)}
        kv, logits = forward(model, params, spoil(kv), tokens=window, **where)
        outputs.append(logits[: model.slab - 1])
        kept += 2
        kv = model.truncate(kv, kept)
    allocator.check(kv)
    return outputs, [cache.gather(kv, layer, 0, kept) for layer in range(len(kv.k))]


@pytest.mark.parametrize(
    ("impl", "dtype", "page_size", "by_rows"),
    [
        ("xla", "float32", 8, False),
        ("xla", "bfloat16", 128, True),
        ("native", "float32", 16, True),
        ("native", "float32", 128, True),
        ("native", "bfloat16", 8, False),
        ("native", "bfloat16", 64, True),
    ],
)
def test_static_rows_are_paged_rows(impl, dtype, page_size, by_rows):
    """Fails if a logit or a key written depends on the kind of cache."""
    results = []
    for kind in row_model.CACHE_KINDS:
        # XLA's take long to compile; one layer has a cache as well as two.
        depth = 1 if impl == "xla" else 2
        model = make_target(impl, kind, dtype=dtype, num_layers=depth)
        params = params_lib.init(jax.random.key(0), model.config, stddev=0.3)
        results.append(run_window(model, params, page_size, by_rows=by_rows))
    assert np.isfinite(np.asarray(results[0][0][0])).all()
    testing.assert_same_bits(results[1], results[0])


def test_another_stretch_is_caught():
    """Negative control: attention that reads the second page in place of the first."""

    def spoil(kv):
        return kv.replace(page_table=kv.page_table.at[0, 0].set(kv.page_table[0, 1]))

    model = make_target("native", "static")
    arguments = (model, decoding.TARGET_PARAMS, 8)
    right = run_window(*arguments, by_rows=True)
    wrong = run_window(*arguments, by_rows=True, spoil=spoil)
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(wrong, right)


@pytest.fixture(scope="module")
def plain():
    """Plain decoding on the default cache by implementation: what must be committed."""
    return functools.cache(
        lambda impl: decoding.plain(target=make_target(impl, "paged"))
    )


class Hoarder(draft_model.DraftModel):
    """A planted fault: a draft whose cache forgets nothing."""

    def commit(self, params, memory, length):
        return memory


def run_rounds(
    impl,
    kind,
    draft_cache,
    *,
    gamma=GAMMA_MAX,
    slab=2,
    capacity=CAPACITY,
    drafter=draft_model.DraftModel,
):
    """All rounds with a draft that is right now and then."""
    target = make_target(impl, kind)
    drafter = drafter(
        model=dataclasses.replace(target, slab=slab),
        gamma_max=GAMMA_MAX,
        draft_cache=draft_cache,
    )
    # The target's own weights, disturbed: neither always right nor always wrong.
    embed = decoding.TARGET_PARAMS.embed
    noise = jax.random.normal(jax.random.key(2), embed.shape)
    draft_params = decoding.TARGET_PARAMS.replace(embed=embed + 0.1 * noise)
    state = session.begin(
        target,
        drafter,
        (decoding.TARGET_PARAMS, draft_params),
        target.new_cache(capacity=CAPACITY, page_size=PAGE_SIZE),
        drafter.model.new_cache(capacity=capacity, page_size=PAGE_SIZE),
        PROMPT,
        max_tokens=40,
    )
    state = decoding.generate(
        drafter, state, gamma=gamma, draft_params=draft_params, target=target
    )
    session.check_state(state)
    return state


def assert_same_text(state, plain):
    """Tokens and committed K/V, whichever cache they are in."""
    assert decoding.text(state) == decoding.text(plain)
    length = int(state.length) - 1  # The last token is pending.
    testing.assert_same_bits(
        decoding.held(state.cache, length), decoding.held(plain.cache, length)
    )


@pytest.mark.parametrize(("impl", "kind", "draft_cache"), RUNS)
def test_tokens_are_those_of_plain_decoding(plain, impl, kind, draft_cache):
    """Fails if a kind of cache, or of draft cache, changes a token or a key."""
    for gamma in (GAMMA_MAX, 1, 0):
        state = run_rounds(impl, kind, draft_cache, gamma=gamma)
        assert_same_text(state, plain(impl))
        assert isinstance(state.cache, static.StaticKV) == (kind == "static")
        cache.check_integrity(state.cache)
        cache.check_integrity(state.memory)
        if draft_cache == "round":
            assert state.memory.length.tolist() == [0]
        else:
            assert int(state.memory.length[0]) >= len(PROMPT) - 1
        if gamma:  # Not vacuous: some drafts are kept, and some are not.
            assert 0 < int(state.num_accepted) < int(state.num_proposed)


def assert_same_drafts(state, expected):
    """The text, and how many drafts were proposed and kept in each round."""
    assert decoding.text(state) == decoding.text(expected)
    for name in ("num_rounds", "num_proposed", "num_accepted", "accepted_hist"):
        testing.assert_same_bits(
            getattr(state, name), getattr(expected, name), what=name
        )


def test_the_drafts_are_the_same_too():
    """Fails if a cache that is built again has other keys than one that was kept.

    Native kernels prefill by rows, so that all of the draft's K/V comes from rows;
    the height of the slab that rebuilds it does not matter.
    """
    expected = run_rounds("native", "paged", "persistent")
    for kind, draft_cache in KINDS:
        state = run_rounds("native", kind, draft_cache)
        assert_same_drafts(state, expected)
    assert_same_drafts(run_rounds("native", "static", "round", slab=40), expected)


def test_a_cache_that_is_not_dropped_is_caught():
    """Negative control: keys of rejected drafts stay, and new ones are drafted on."""
    expected = run_rounds("native", "paged", "round")
    with pytest.raises((AssertionError, RuntimeError)):
        assert_same_drafts(
            run_rounds("native", "paged", "round", drafter=Hoarder), expected
        )


@pytest.mark.parametrize("kind", row_model.CACHE_KINDS)
def test_a_small_draft_cache_ends_the_drafts_alone(plain, kind):
    """Fails if a round-local cache that is full stops the target, or spins."""
    state, kept = (
        run_rounds("native", kind, draft_cache, capacity=24)
        for draft_cache in ("round", "persistent")
    )
    assert_same_text(state, plain("native"))
    assert_same_drafts(state, kept)
    assert int(state.num_proposed) < int(state.num_rounds)


def test_a_full_static_cache_keeps_what_is_committed(plain):
    """Fails if the flag of a full slot is lost, or its message has no numbers."""
    target = make_target("native", "static")
    kv = target.new_cache(capacity=24, page_size=PAGE_SIZE)
    state = session.begin_plain(
        target, decoding.TARGET_PARAMS, kv, PROMPT, max_tokens=60
    )
    # A text that may grow past the cache, which `begin_plain` never makes.
    state = autoregressive.generate(
        target,
        decoding.TARGET_PARAMS,
        state.replace(limit=jnp.int32(40), tokens=jnp.pad(state.tokens, (0, 15))),
        stop_ids=decoding.NO_STOP,
        max_steps=decoding.FOREVER,
    )
    assert decoding.text(state) == decoding.text(plain("native"))[:25]
    with pytest.raises(MemoryError, match="25 tokens: .* holds at most 24 tokens"):
        session.check_state(state)


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="cache='dynamic' is not one of paged, static"):
        make_target("xla", "dynamic")
    with pytest.raises(ValueError, match="draft_cache='none' is not one of persistent"):
        dataclasses.replace(decoding.draft_drafter(), draft_cache="none")


@pytest.mark.parametrize("kind", row_model.CACHE_KINDS)
@pytest.mark.parametrize("sizes", [(0, 8), (-1, 8), (96, 0)])
def test_impossible_sizes_are_refused(kind, sizes):
    capacity, page_size = sizes
    with pytest.raises(ValueError, match=f"{capacity=} and {page_size=} must be at"):
        make_target("xla", kind).new_cache(capacity=capacity, page_size=page_size)
