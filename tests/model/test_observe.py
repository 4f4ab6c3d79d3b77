"""The hook of `forward_rows`: it sees the values of operations and may replace them."""

import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.model import observe, params as params_lib, qwen3, row_model
from spec_jax.paging import allocator, cache


START, LIVE = len(decoding.PROMPT) - 1, 3
CONFIG = decoding.make_config(dtype="bfloat16")
MODEL = row_model.RowModel(config=CONFIG, impl="native", slab=5)
PARAMS = params_lib.cast(decoding.TARGET_PARAMS, "bfloat16")


def forward(hook):
    """Returns the cache and logits of three active rows of five after the prompt."""
    kv = MODEL.new_cache(capacity=32, page_size=decoding.PAGE_SIZE)
    kv, _ = MODEL.prefill(PARAMS, kv, list(decoding.PROMPT[:-1]), by_rows=True)
    kv = allocator.reserve(kv, 0, START + 5)
    rows = qwen3.Rows(
        tokens=jnp.asarray([decoding.PROMPT[-1], 4, 9, 1, 2], jnp.int32),
        slots=jnp.zeros((5,), jnp.int32),
        positions=START + jnp.arange(5, dtype=jnp.int32),
        num_active=jnp.int32(LIVE),
    )

    @jax.jit
    def run(params, rows, kv):
        kv, outputs = qwen3.forward_rows(
            params, CONFIG, rows, kv, impl=MODEL.impl, observe=hook
        )
        return kv, outputs.logits

    kv, logits = run(PARAMS, rows, kv)
    held = [cache.gather(kv, layer, 0, START + 5) for layer in range(2)]
    return held, np.asarray(logits)[:LIVE]


@functools.cache
def unseen():
    return forward(None)


def key_of(layer, operation):
    return operation if layer is None else f"{layer}:{operation}"


def test_the_hook_sees_all_that_leaves_a_kernel_and_moves_no_bit():
    """Fails if the hook misses or repeats an operation, or looking changes a bit."""
    seen = {}

    def record(layer, operation, value):
        seen[key_of(layer, operation)] = value.reshape(5, -1).shape[1]
        return value

    testing.assert_same_bits(forward(record), unseen())
    of_layer = observe.LEAVES_ROWS[1:-1]
    layers = [f"{n}:{name}" for n in range(CONFIG.num_layers) for name in of_layer]
    assert list(seen) == ["embed", *layers, "logits"]
    D, F = CONFIG.hidden_size, CONFIG.intermediate_size
    N, K = (n * CONFIG.head_dim for n in (CONFIG.num_heads, CONFIG.num_kv_heads))
    widths = {"embed": D, "1:q": N, "1:k": K, "1:v": K, "1:k_cache": K}
    widths |= {"0:v_cache": K, "0:attention": N, "0:attention_residual": D}
    widths |= {"0:swiglu": F, "1:mlp_residual": D, "logits": CONFIG.vocab_size}
    assert {key: seen[key] for key in widths} == widths


@pytest.mark.parametrize(
    ("key", "written_differs"), [("1:k_cache", True), ("1:swiglu", False)]
)
def test_what_the_hook_returns_goes_on(key, written_differs):
    """Negative control: the hook changes one element of one row, which must be seen."""

    def change(layer, operation, value):
        if key_of(layer, operation) != key:
            return value
        flat = value.reshape(5, -1)
        return flat.at[LIVE - 1, 0].add(1).reshape(value.shape)

    held, logits = forward(change)
    expected_held, expected_logits = unseen()
    if written_differs:  # The layer reads the key before it is changed and stored.
        testing.assert_same_bits(logits, expected_logits)
    else:
        testing.assert_same_bits(logits[: LIVE - 1], expected_logits[: LIVE - 1])
        assert (logits[LIVE - 1] != expected_logits[LIVE - 1]).any()
    differs = [
        np.flatnonzero((testing.bits(ours) != testing.bits(theirs)).any(axis=(1, 2)))
        for pair, other in zip(held, expected_held, strict=True)
        for ours, theirs in zip(pair, other, strict=True)
    ]
    changed = {START + LIVE - 1} if written_differs else set()
    assert set(np.concatenate(differs).tolist()) == changed
