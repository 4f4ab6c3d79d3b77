"""The layer as a function of its own: traced once, and no part of what is compiled."""

import functools
import re

import decoding
import jax
import jax.numpy as jnp
import pytest

from spec_jax.model import params as params_lib, qwen3, row_model
from spec_jax.ops import row_attention


def lower(impl: str, *, num_layers: int) -> jax.stages.Lowered:
    """A forward pass of a tiny model, for shapes, its cache donated."""
    config = decoding.make_config(dtype="bfloat16", num_layers=num_layers)
    model = row_model.RowModel(config=config, impl=impl, slab=5)
    kv = jax.eval_shape(lambda: model.new_cache(capacity=32, page_size=8))
    row = jax.ShapeDtypeStruct((5,), jnp.int32)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    rows = qwen3.Rows(tokens=row, slots=row, positions=row, num_active=number)

    def forward(params, rows, kv):
        return qwen3.forward_rows(params, config, rows, kv, impl=impl)

    jitted = jax.jit(forward, donate_argnums=2)
    return jitted.lower(params_lib.shapes(config), rows, kv)


def test_a_layer_is_traced_and_lowered_once(monkeypatch):
    """Fails if what tracing and lowering cost grows with the number of layers."""
    traced = []
    attention = row_attention.row_attention

    def counted(*args, **kwargs):
        traced.append(0)
        return attention(*args, **kwargs)

    monkeypatch.setattr(row_attention, "row_attention", counted)
    few, many = (lower("native", num_layers=n).as_text() for n in (2, 9))
    assert len(traced) == 2
    # Embedding, four products and the attention of a layer, and the head.
    assert few.count("@spec_jax") == many.count("@spec_jax") == 7
    assert many.count("call @_run_layer") == 9


def instructions(hlo: str) -> list[str]:
    """Shape and operation of each instruction of a program, sorted.

    Those that do not depend on each other are in any order.
    """
    found = re.findall(
        r"^ +(?:ROOT )?%?[\w.-]+ = ((?:\([^=]*?\)|\S+) [\w-]+)\(.*?"
        r'(?:custom_call_target="([^"]*)"|$)',
        hlo,
        flags=re.MULTILINE,
    )
    return sorted(" ".join(words) for words in found)


@pytest.mark.parametrize("impl", ["native", "xla"])
def test_the_compiled_program_is_that_of_unrolled_layers(monkeypatch, impl):
    """Fails if the function around a layer changes an operation, or copies a pool."""
    programs = [lower(impl, num_layers=2)]
    with monkeypatch.context() as patch:
        patch.setattr(jax, "jit", functools.partial(jax.jit, inline=True))
        programs.append(lower(impl, num_layers=2))
    calls = ["call @_run_layer" in program.as_text() for program in programs]
    assert calls == [True, False]
    called, unrolled = (program.compile() for program in programs)
    expected = instructions(unrolled.as_text())
    assert len(expected) > 50
    assert instructions(called.as_text()) == expected
    sizes = called.memory_analysis(), unrolled.memory_analysis()
    assert sizes[0].temp_size_in_bytes == sizes[1].temp_size_in_bytes
    assert sizes[0].alias_size_in_bytes == sizes[1].alias_size_in_bytes > 0
