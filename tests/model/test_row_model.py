"""A model of one slot and its cache: which rows it takes, what it compiles to, and the
peak memory of a prompt."""

import dataclasses
import functools
import json
import re

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from script_runs import run_python

from spec_jax import testing
from spec_jax.model import decoder, params as params_lib, row_model
from spec_jax.ops import dispatch, row_attention


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


def test_auto_is_resolved_where_a_model_is_built():
    """Fails if "auto" is not resolved: no operation knows it, and XLA would run."""
    model = dataclasses.replace(decoding.TARGET, impl="auto")
    assert model.impl == dispatch.resolve("auto") != "auto"
    assert model == dataclasses.replace(decoding.TARGET, impl=model.impl)
    assert row_model.slab_for("auto", 5) == row_model.slab_for(model.impl, 5)
    with pytest.raises(ValueError, match="impl='numpy' is not one of auto, xla"):
        dataclasses.replace(decoding.TARGET, impl="numpy")


def lower(impl: str, *, num_layers: int) -> jax.stages.Lowered:
    """Lowers a forward pass of a tiny model from shapes, with its cache donated."""
    config = decoding.make_config(dtype="bfloat16", num_layers=num_layers)
    slab = row_model.slab_for(impl, 5)
    model = row_model.RowModel(config=config, impl=impl, slab=slab)
    kv = jax.eval_shape(lambda: model.new_cache(capacity=32, page_size=8))
    row = jax.ShapeDtypeStruct((slab,), jnp.int32)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    rows = decoder.Rows(tokens=row, slots=row, positions=row, num_active=number)

    def forward(params, rows, kv):
        return decoder.forward_rows(params, config, rows, kv, impl=impl)

    jitted = jax.jit(forward, donate_argnums=2)
    params = jax.eval_shape(
        functools.partial(params_lib.prepare, impl=impl), params_lib.shapes(config)
    )
    return jitted.lower(params, rows, kv)


@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_a_layer_is_traced_and_lowered_once(impl, monkeypatch):
    """Fails if the cost of tracing and lowering grows with the number of layers."""
    traced = []
    attention = row_attention.row_attention

    def counted(*args, **kwargs):
        traced.append(0)
        return attention(*args, **kwargs)

    monkeypatch.setattr(row_attention, "row_attention", counted)
    few, many = (lower(impl, num_layers=n).as_text() for n in (2, 9))
    assert len(traced) == 2
    assert few.count("call @run_layer") == 2
    assert many.count("call @run_layer") == 9


@pytest.mark.parametrize("num_layers", [2, 9])
def test_a_native_step_is_one_call(num_layers):
    """Fails if each layer makes its own call, or a pool of pages is copied."""
    lowered = lower("native", num_layers=num_layers)
    assert lowered.as_text().count("@spec_jax") == 1
    compiled = lowered.compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="spec_jax_step') == 1
    assert not re.search(r"\[4,8,2,16\]\S* copy\(", text)
    pools = 2 * num_layers * (4 * 8 * 2 * 16) * 2  # bytes of bfloat16
    assert compiled.memory_analysis().alias_size_in_bytes >= pools


PREFILL = """
import json, resource, jax, numpy as np, tiny_pair
from spec_jax.model import params as params_lib, row_model

config = tiny_pair.config(
    vocab_size=96, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=1,
    num_kv_heads=1, head_dim=16, max_position_embeddings=65_536)
model = row_model.RowModel(config=config, impl="native", slab=8)
params = params_lib.prepare(params_lib.init(jax.random.key(0), config), "native")
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def prefill(count):
    kv = model.new_cache(capacity=count + 16, page_size=16)
    tokens = np.random.default_rng(0).integers(0, 96, count).tolist()
    kv, _ = model.prefill(params, kv, tokens)
    assert int(kv.length[0]) == count
    return jax.block_until_ready(kv)

prefill(64)
before = peak()
kv = prefill(32_768)
stored = sum(x.nbytes for x in jax.tree.leaves(kv))
print(json.dumps([before, peak(), stored]))
"""


def test_a_prompt_of_32k_tokens_needs_no_square_of_memory():
    """Fails if all attention scores are in memory at once: they take four gigabytes."""
    done = run_python("-c", PREFILL)
    assert done.returncode == 0, done.stderr
    before, after, stored = json.loads(done.stdout)
    assert after - before < 3 * stored + 2**26 < 0.05 * 4 * 32_768**2
