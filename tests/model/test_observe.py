"""The hook of `forward_rows`: it sees the values of operations and may replace them."""

import functools

import numpy as np
import pytest
import test_rows as rows_lib

from spec_jax import testing
from spec_jax.model import observe
from spec_jax.paging import cache


START, LIVE = rows_lib.PREFIX, 3


@functools.cache
def model():
    return rows_lib.make_model("bfloat16", "native")


def forward(hook):
    """Returns the cache and logits of three active rows of five after the prompt."""
    kv = model().fill(rows_lib.make_cache(model().config))
    how = {"slab": 5, "forward": rows_lib.compile_forward(observe=hook)}
    kv, outputs = model().run(kv, rows_lib.window(count=LIVE), **how)
    held = [cache.gather(kv, layer, 0, START + LIVE) for layer in range(2)]
    return held, outputs.logits


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
    config = model().config
    layers = [f"{n}:{name}" for n in range(config.num_layers) for name in of_layer]
    assert list(seen) == ["embed", *layers, "logits"]
    D, F = config.hidden_size, config.intermediate_size
    N, K = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    widths = {"embed": D, "1:q": N, "1:k": K, "1:v": K, "1:k_cache": K}
    widths |= {"0:v_cache": K, "0:attention": N, "0:attention_residual": D}
    widths |= {"0:swiglu": F, "1:mlp_residual": D, "logits": config.vocab_size}
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
