"""What Qwen3 at full depth costs before XLA: traced and lowered for a GPU, on a CPU."""

import collections

import hopper
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from experiments.support import (
    gpu_attention,
    gpu_compile,
    gpu_kernels,
    gpu_plans,
    gpu_task,
)
from spec_jax.ops import dispatch


KERNELS_OF_A_MODEL = 9 + 4
"""Of a layer, and of what comes after the last: norm, head and two of the argmax."""


@pytest.fixture
def traced(monkeypatch):
    """Counts the kernels that are traced, by name."""
    counts = collections.Counter()
    pallas_call = pl.pallas_call

    def counted(*args, name, **kwargs):
        counts[name] += 1
        return pallas_call(*args, name=name, **kwargs)

    monkeypatch.setattr(pl, "pallas_call", counted)
    return counts


@pytest.fixture
def task(monkeypatch):
    """The GPU report's sizes; no GPU is looked for."""
    monkeypatch.setattr(dispatch, "resolve", lambda impl: impl)
    return gpu_task.Task(
        section="f", sizes=gpu_task.REAL, impl="triton", out=None, budget_s=1, where={}
    )


@pytest.mark.parametrize(
    ("program", "num_models"),
    [("target: plain generation", 1), ("speculative generation", 2)],
)
def test_a_generation_is_lowered_layer_by_layer_once(traced, task, program, num_models):
    """Fails if a kernel is traced or lowered again for each of 36 and 28 layers."""
    trace = gpu_compile.programs(task)[program]
    with hopper.lowering_for(hopper.DEVICE):
        text = trace().lower(lowering_platforms=("cuda",)).as_text()
    assert traced.total() == num_models * KERNELS_OF_A_MODEL
    assert text.count("stablehlo.custom_call") == num_models * KERNELS_OF_A_MODEL
    # 5 and 9 million characters where every layer has kernels of its own.
    assert len(text) < num_models * 400_000


def shape(*sizes, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def lower(fn, *args) -> str:
    with hopper.lowering_for(hopper.DEVICE):
        traced = jax.jit(fn).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_chain_of_products_is_lowered_once(traced, task):
    """Fails if a product is traced for each of its calls: 96 in section (b)."""
    sizes = task.sizes
    (matrix,) = (m for m in gpu_kernels.matrices("draft", sizes) if "out" in m.name)
    N, K = matrix.columns, matrix.terms
    variants = gpu_kernels.variants(matrix, task)
    for number, variant in enumerate((variants[0], variants[-2], variants[-1])):
        call = gpu_kernels.multiply(matrix, variant, interpret=False)
        text = lower(
            gpu_kernels.chain(call, shares_rows=variant.impl != "xla"),
            [shape(16, K)] * 96,
            [shape(N, K)] * 96,
            shape(16, N),
            shape(K),
        )
        assert text.count(" call @") >= 96
        assert text.count("stablehlo.custom_call") == (number < 2)
    assert variants[-2].impl == "mosaic" and traced.total() == 1


@pytest.mark.xfail(
    strict=False, reason="the layer's kernels are traced a second time; to be found"
)
def test_a_chain_of_attentions_is_lowered_once(traced, task):
    """Fails if the kernels of a layer are traced for each of its calls."""
    model, calls = task.sizes.target, 16
    pool = gpu_attention.Pool(model, gpu_task.TINY)
    (config,) = gpu_plans.attention_configs(
        model.head_dim, model.dtype, interpret=False, most=1
    )
    inputs = pool.call_inputs(32, 1, config)[0] * calls
    text = lower(
        gpu_attention.chain(model, config, interpret=False),
        *pool.pages,
        pool.heads,
        inputs,
    )
    assert traced.total() == text.count("stablehlo.custom_call") == 3
