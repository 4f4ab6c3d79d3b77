"""What Qwen3 at full depth costs before XLA: traced and lowered for a GPU, on a CPU."""

import collections

import hopper
import pytest
from jax.experimental import pallas as pl

from experiments.support import gpu_compile, gpu_task
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
