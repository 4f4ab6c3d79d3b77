"""A model of one slot and its cache: rows must follow the positions that it holds."""

import dataclasses
import functools

import decoding
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.engine import baseline
from spec_jax.model import row_model
from spec_jax.ops import dispatch


def forward(model, kv, start):
    params, tokens = decoding.TARGET_PARAMS, decoding.PROMPT[:2]
    return decoding.forward(model, params, kv, tokens, start)[0]


def test_rows_that_do_not_follow_are_refused():
    """Fails if a gap, or a position that is held already, goes unnoticed."""
    model = decoding.quickest()
    empty = model.new_cache(capacity=decoding.CAPACITY, page_size=decoding.PAGE_SIZE)
    held = forward(model, empty, jnp.int32(0))
    testing.assert_same_bits(held.length, np.array([2], np.int32))
    for start in (0, 1, 3):
        kv = forward(model, held, jnp.int32(start))
        assert bool(kv.refused[0]), start
    # Negative control: the next position is no fault.
    kv = forward(model, held, jnp.int32(2))
    assert not bool(kv.refused[0])
    assert int(kv.length[0]) == 4


def test_a_refusal_reaches_the_edge():
    """Fails if the check accepts a generation whose rows left a gap in the cache."""
    model = decoding.quickest()
    state = decoding.plain(max_tokens=1, target=model)
    kv = state.cache.replace(length=state.cache.length - 1)
    check = functools.partial(baseline.check, vocab_size=model.config.vocab_size)
    check(state)
    with pytest.raises(RuntimeError, match="refused"):
        check(state.replace(cache=forward(model, kv, state.cache.length[0])))


def test_auto_is_resolved_where_a_model_is_built():
    """Fails if "auto" is not resolved: no operation knows it, and XLA would run."""
    model = dataclasses.replace(decoding.TARGET, impl="auto")
    assert model.impl == dispatch.resolve("auto") != "auto"
    assert model == dataclasses.replace(decoding.TARGET, impl=model.impl)
    assert row_model.slab_for("auto", 5) == row_model.slab_for(model.impl, 5)
    with pytest.raises(ValueError, match="impl='numpy' is not one of auto, xla"):
        dataclasses.replace(decoding.TARGET, impl="numpy")
