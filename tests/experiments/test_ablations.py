"""Designs of verification that came before: which keep the bits of decoding."""

import dataclasses
import functools
import types

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wrong_targets
from decoding import ALWAYS, GAMMA_MAX, PROMPT, SMALL, Ask

from experiments.ablations import decode_rounds, designs, round_local, verify_paths
from spec_jax import testing
from spec_jax.engine import round as round_lib
from spec_jax.engine.state import Origin
from spec_jax.model import (
    config as config_lib,
    llama,
    params as params_lib,
    prompt as prompt_lib,
)
from spec_jax.paging import allocator, cache


TARGET, PARAMS = decoding.TARGET, decoding.TARGET_PARAMS
START = len(PROMPT) - 1
WINDOW = [PROMPT[-1], 4, 9, 33, 60]


@functools.partial(jax.jit, static_argnames=("path",))
def forward(path, params, kv, *, tokens, start, num_active):
    """Compiled once for each path: how many rows are live is data."""
    return path.forward(params, kv, tokens=tokens, start=start, num_active=num_active)


def verify(path, params=PARAMS, *, num_active=5, poison=False, window=()):
    """Logits of the active rows, and K/V of the text with the window, all layers."""
    model = getattr(path, "model", path)
    kv = model.new_cache(capacity=decoding.CAPACITY, page_size=decoding.PAGE_SIZE)
    if poison:  # NaN where nothing is held.
        spoil = lambda pools: tuple(jnp.full_like(pool, jnp.nan) for pool in pools)
        kv = kv.replace(k=spoil(kv.k), v=spoil(kv.v))
    kv = prompt_lib.prefill(model, params, kv, PROMPT[:-1])
    kv, logits = forward(
        path,
        params,
        kv,
        tokens=jnp.asarray(window or WINDOW),
        start=jnp.int32(START),
        num_active=jnp.int32(num_active),
    )
    allocator.check(kv)
    assert int(kv.length[0]) == START + num_active
    layers = range(path.config.num_layers)
    held = [cache.gather(kv, layer, 0, START + num_active) for layer in layers]
    return np.asarray(logits)[:num_active], held


@pytest.mark.few(1)
@pytest.mark.parametrize("num_active", [1, 3, 5])
def test_the_row_loop_has_the_bits_of_rows(num_active):
    """Fails if decoding row by row is other arithmetic than a window of rows."""
    path = verify_paths.make("row-loop", TARGET)
    expected = verify(TARGET, num_active=num_active)
    testing.assert_same_bits(verify(path, num_active=num_active), expected)


@pytest.mark.parametrize("name", ["flash", "library-rows"])
def test_library_windows_refuse_other_families(name):
    """Fails if a model without norms of queries and keys ends in a traceback."""
    sizes = {
        field.name: getattr(TARGET.config, field.name)
        for field in dataclasses.fields(config_lib.ModelConfig)
    }
    model = dataclasses.replace(TARGET, config=llama.LlamaConfig(**sizes))
    with pytest.raises(ValueError, match="this is one of llama: take"):
        verify_paths.make(name, model)


@pytest.mark.parametrize("name", ["flash", "library-rows"])
def test_library_windows_have_the_values_of_rows(name):
    """Fails if a window forgets its prefix, a mask, a norm or a rotation."""
    path = verify_paths.make(name, TARGET)
    # Two layers, and each sums at most 96 terms: an error of a sum is passed on.
    close = {"dtype": "float32", "reduction": 96 * 8}
    for num_active in (1, 5):
        logits, held = verify(path, num_active=num_active, poison=True)
        expected_logits, expected_held = verify(TARGET, num_active=num_active)
        testing.assert_rows_close(logits, expected_logits, **close)
        for actual, expected in zip(held, expected_held, strict=True):
            for one, other in zip(actual, expected, strict=True):
                testing.assert_rows_close(one, other, **close)
    # And a later row changes no earlier one.
    others, _ = verify(path, window=[*WINDOW[:3], 1, 2])
    testing.assert_same_bits(others[:3], logits[:3])
    assert (testing.bits(others[3:]) != testing.bits(logits[3:])).any(axis=1).all()


def test_flash_has_other_bits_than_decoding():
    """What the row contract forbids, in the dtype where it shows."""
    config = dataclasses.replace(TARGET.config, dtype="bfloat16")
    model = dataclasses.replace(TARGET, config=config)
    params = params_lib.init(jax.random.key(0), config, stddev=0.3)
    rows, _ = verify(model, params)
    flash, _ = verify(verify_paths.make("flash", model), params)
    assert (testing.bits(rows) != testing.bits(flash)).any()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["row-loop", "flash", "library-rows"])
def test_no_room_is_flagged_and_forgotten(name):
    """A window that does not fit commits nothing; one that fits then runs."""
    path = verify_paths.make(name, TARGET)
    kv = TARGET.new_cache(capacity=16, page_size=decoding.PAGE_SIZE)
    kv = prompt_lib.prefill(TARGET, PARAMS, kv, [*PROMPT, 1])
    start = jnp.int32(len(PROMPT) + 1)
    for num_active, is_out_of_pages in ((5, True), (4, False)):
        kv, _ = forward(
            path,
            PARAMS,
            kv,
            tokens=jnp.asarray(WINDOW),
            start=start,
            num_active=jnp.int32(num_active),
        )
        assert bool(path.is_out_of_pages(kv)) is is_out_of_pages
        kv = path.truncate(kv, start)
    cache.check_integrity(kv)


ONE_SLOT = dataclasses.replace(SMALL.target, slab=GAMMA_MAX + 1)


@pytest.mark.parametrize("name", ["row-loop", "flash"])
def test_a_path_verifies_for_the_engine(name):
    """Fails if rounds see other rows, or another cache, than those of the path."""
    path = verify_paths.make(name, ONE_SLOT)
    target = verify_paths.OneSlot(model=ONE_SLOT, path=path)
    state = decoding.run(SMALL, [Ask(run=2)], scheduler=SMALL.scheduler(target=target))
    one = decoding.slot_of(state)
    assert one.num_proposed > one.num_accepted > 0
    if name == "row-loop":
        decoding.assert_as_decoded(SMALL, state, [Ask(run=2)])
    else:
        assert one.length == len(PROMPT) + 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrong(wrong_targets.Around):
    """A verify path that always chooses the token after the right one."""

    def choose(self, logits, num_active):
        return (self.target.choose(logits, num_active) + 1) % 96


FLASH = verify_paths.make("flash", SMALL.target)


def decide(path, ask: Ask):
    """Rounds that decoding decides, compared with decoding on both caches.

    Returns the slot and the caches.
    """
    target = decode_rounds.DecodeRounds(
        model=SMALL.target, path=path, width=GAMMA_MAX + 1
    )
    scheduler = SMALL.scheduler(target=target)
    state = decoding.run(SMALL, [ask], scheduler=scheduler)
    for kv in (state.cache.mirror, state.cache.commit):
        decoding.assert_as_decoded(SMALL, state.replace(cache=kv), [ask])
    return decoding.slot_of(state), state.cache


@pytest.mark.few(1)
@pytest.mark.parametrize("path", [FLASH, Wrong(target=FLASH)], ids=["flash", "wrong"])
def test_tokens_and_both_caches_are_those_of_decoding(path):
    """Fails if a bit of verification gets into what is committed; and the counters,
    by hand: an always right drafter never corrects, an always wrong one always."""
    for run in (0, 1, 3, ALWAYS):
        one, kv = decide(path, Ask(run=run))
        forwards = one.num_accepted + one.num_rounds
        assert int(kv.commit_steps) == int(kv.mirror_steps) == forwards
        origins = one.origins[len(PROMPT) : one.length - 1]
        corrections = int((origins == int(Origin.CORRECTION)).sum())
        # With one token to go nothing is drafted: that token corrects nothing.
        expected = {0: 39, ALWAYS: 0}.get(run, corrections)
        assert int(kv.correction_steps) == corrections == expected


def test_ends_inside_a_window():
    """A stop token, another gamma, and caches that fill up."""
    text = decoding.text(decoding.decoded(SMALL, Ask()))
    stop_ids = (text[len(PROMPT) + 6],)
    for ask in (Ask(gamma=0), Ask(stop_ids=stop_ids), Ask(max_tokens=200)):
        one, _ = decide(FLASH, ask)
        assert one.length > len(PROMPT)


def test_mismatches_are_committed_rows_that_verification_saw_otherwise():
    """Negative control of the counter: a verify path that is always wrong."""
    one, kv = decide(SMALL.target, Ask(run=3))
    assert int(kv.mismatches) == 0
    wrong = Wrong(target=SMALL.target)
    one, kv = decide(wrong, Ask(run=3))
    assert int(kv.mismatches) == 40
    text = decoding.text(decoding.decoded(SMALL, Ask()))
    one, kv = decide(wrong, Ask(stop_ids=(text[len(PROMPT) + 2],)))
    assert int(kv.mismatches) == one.length - len(PROMPT)


@pytest.mark.slow
def test_a_draft_cache_that_is_built_anew_drafts_the_same():
    """Fails if it keeps K/V over rounds, or drafts otherwise than with all of it."""
    drafter = decoding.draft_drafter(impl=SMALL.target.impl)
    params = decoding.perturbed(SMALL.weights, 0.02)
    slots = []
    for one in (drafter, round_local.of(drafter)):
        scheduler = SMALL.scheduler(one, draft_params=params)
        state = decoding.admit(scheduler, [Ask().request()])
        state, _ = jax.jit(lambda *a: round_lib.run_round(*a))(
            scheduler.speculator, state
        )
        assert (int(state.memory.length[0]) == 0) is (one is not drafter)
        state = decoding.generate(scheduler, state)
        decoding.assert_as_decoded(SMALL, state, [Ask()])
        slots.append(decoding.slot_of(state))
    testing.assert_same_bits(*slots)
    assert slots[0].num_proposed > slots[0].num_accepted > 0
    with pytest.raises(ValueError, match="Scripted has no draft model"):
        round_local.of(decoding.Scripted())


def test_names():
    """Fails if a name makes another design."""
    assert verify_paths.make("paged-decode", TARGET) is TARGET
    with pytest.raises(ValueError, match="'fast' is not one of paged-decode, row-loop"):
        verify_paths.make("fast", TARGET)
    lm = types.SimpleNamespace(target=TARGET, gamma_max=GAMMA_MAX)
    assert designs.verifier(lm) is None
    assert isinstance(designs.verifier(lm, path="flash"), verify_paths.OneSlot)
    decides = designs.verifier(lm, acceptance="decode")
    assert isinstance(decides, decode_rounds.DecodeRounds) and decides.width == 5
    with pytest.raises(ValueError, match="acceptance='both' is not one of verify, dec"):
        designs.verifier(lm, acceptance="both")
