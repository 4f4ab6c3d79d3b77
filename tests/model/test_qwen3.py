"""Traces and compiled programs: a layer is traced once, or all are one native call."""

import functools
import re

import decoding
import jax
import jax.numpy as jnp
import pytest

from spec_jax.model import params as params_lib, qwen3, row_model
from spec_jax.ops import row_attention


def lower(impl: str, *, num_layers: int) -> jax.stages.Lowered:
    """Lowers a forward pass of a tiny model from shapes, with its cache donated."""
    config = decoding.make_config(dtype="bfloat16", num_layers=num_layers)
    model = row_model.RowModel(config=config, impl=impl, slab=5)
    kv = jax.eval_shape(lambda: model.new_cache(capacity=32, page_size=8))
    row = jax.ShapeDtypeStruct((5,), jnp.int32)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    rows = qwen3.Rows(tokens=row, slots=row, positions=row, num_active=number)

    def forward(params, rows, kv):
        return qwen3.forward_rows(params, config, rows, kv, impl=impl)

    jitted = jax.jit(forward, donate_argnums=2)
    params = jax.eval_shape(
        functools.partial(params_lib.prepare, impl=impl), params_lib.shapes(config)
    )
    return jitted.lower(params, rows, kv)


def test_a_layer_is_traced_and_lowered_once(monkeypatch):
    """Fails if the cost of tracing and lowering grows with the number of layers."""
    traced = []
    attention = row_attention.row_attention

    def counted(*args, **kwargs):
        traced.append(0)
        return attention(*args, **kwargs)

    monkeypatch.setattr(row_attention, "row_attention", counted)
    few, many = (lower("xla", num_layers=n).as_text() for n in (2, 9))
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
