"""Verify paths: which keep the bits of decoding, which only its values."""

import dataclasses
import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.ablations import verify_paths
from spec_jax import session, testing
from spec_jax.model import params as params_lib
from spec_jax.paging import allocator, cache


START = len(decoding.PROMPT) - 1
WINDOW = [decoding.PROMPT[-1], 4, 9, 33, 60]


def prompted(target=decoding.TARGET, params=decoding.TARGET_PARAMS, *, poison=False):
    """A cache that holds the prompt but its last token; NaN where nothing is held."""
    kv = target.new_cache(capacity=decoding.CAPACITY, page_size=decoding.PAGE_SIZE)
    if poison:
        kv = kv.replace(
            k=tuple(jnp.full_like(pool, jnp.nan) for pool in kv.k),
            v=tuple(jnp.full_like(pool, jnp.nan) for pool in kv.v),
        )
    return session.prefill(target, params, kv, decoding.PROMPT)


@functools.partial(jax.jit, static_argnames=("path",))
def forward(path, params, kv, *, tokens, start, num_live):
    """Compiled once for each path: how many rows are live is data."""
    return path.forward(params, kv, tokens=tokens, start=start, num_live=num_live)


def verify(path, params=decoding.TARGET_PARAMS, *, num_live=5, poison=False, window=()):
    """Logits of the live rows, and K/V of the text with the window, all layers."""
    model = path.model if isinstance(path, verify_paths._OnModel) else path
    kv = prompted(model, params, poison=poison)

    kv, logits = forward(
        path,
        params,
        kv,
        tokens=jnp.asarray(window or WINDOW),
        start=jnp.int32(START),
        num_live=jnp.int32(num_live),
    )
    allocator.check(kv)
    assert int(kv.length[0]) == START + num_live
    layers = range(path.config.num_layers)
    held = [cache.gather(kv, layer, 0, START + num_live) for layer in layers]
    return np.asarray(logits)[:num_live], held


@pytest.mark.parametrize("num_live", [1, 3, 5])
def test_the_row_loop_has_the_bits_of_rows(num_live):
    path = verify_paths.make("row-loop", decoding.TARGET)
    expected = verify(decoding.TARGET, num_live=num_live)
    testing.assert_same_bits(verify(path, num_live=num_live), expected)


@pytest.mark.parametrize("name", ["flash", "library-rows"])
@pytest.mark.parametrize("num_live", [1, 5])
def test_library_windows_have_the_values_of_rows(name, num_live):
    """Fails if a window forgets its prefix, a mask, a norm or a rotation."""
    path = verify_paths.make(name, decoding.TARGET)
    logits, held = verify(path, num_live=num_live, poison=True)
    expected_logits, expected_held = verify(decoding.TARGET, num_live=num_live)
    # Two layers, and each sums at most 96 terms: an error of a sum is passed on.
    close = {"dtype": "float32", "reduction": 96 * 8}
    testing.assert_rows_close(logits, expected_logits, **close)
    for actual, expected in zip(held, expected_held, strict=True):
        for one, other in zip(actual, expected, strict=True):
            testing.assert_rows_close(one, other, **close)


@pytest.mark.parametrize("name", ["flash", "library-rows"])
def test_a_later_row_does_not_change_an_earlier_one(name):
    path = verify_paths.make(name, decoding.TARGET)
    logits, _ = verify(path)
    others, _ = verify(path, window=[*WINDOW[:3], 1, 2])
    testing.assert_same_bits(others[:3], logits[:3])
    assert (testing.bits(others[3:]) != testing.bits(logits[3:])).any(axis=1).all()


def test_flash_has_other_bits_than_decoding():
    """What the row contract forbids, in the dtype where it shows."""
    config = dataclasses.replace(decoding.TARGET.config, dtype="bfloat16")
    model = dataclasses.replace(decoding.TARGET, config=config)
    params = params_lib.init(jax.random.key(0), config, stddev=0.3)
    rows, _ = verify(model, params)
    flash, _ = verify(verify_paths.make("flash", model), params)
    assert (testing.bits(rows) != testing.bits(flash)).any()


@pytest.mark.parametrize("name", ["row-loop", "flash", "library-rows"])
def test_no_room_is_flagged_and_forgotten(name):
    """A window that does not fit commits nothing; one that fits then runs."""
    path = verify_paths.make(name, decoding.TARGET)
    kv = decoding.TARGET.new_cache(capacity=16, page_size=decoding.PAGE_SIZE)
    kv = session.prefill(
        decoding.TARGET, decoding.TARGET_PARAMS, kv, decoding.PROMPT + [1, 2]
    )
    start = len(decoding.PROMPT) + 1

    def run(kv, num_live):
        kv, _ = forward(
            path,
            decoding.TARGET_PARAMS,
            kv,
            tokens=jnp.asarray(WINDOW),
            start=jnp.int32(start),
            num_live=jnp.int32(num_live),
        )
        starved = bool(path.is_starved(kv))
        return path.truncate(kv, jnp.int32(start)), starved

    kv, starved = run(kv, 5)
    assert starved
    kv, starved = run(kv, 4)
    assert not starved
    cache.check_integrity(kv)


def test_names():
    assert verify_paths.make("paged-decode", decoding.TARGET) is decoding.TARGET
    with pytest.raises(ValueError, match="'fast' is not one of paged-decode, row-loop"):
        verify_paths.make("fast", decoding.TARGET)
