"""What Qwen3 at full depth costs before XLA: traced and lowered for a GPU, on a CPU."""

import collections

import jax
import pytest
from jax.experimental import pallas as pl

from experiments.lib import kernel_costs, kernels, lowering, steps, subjects


KERNELS_OF_A_MODEL = 9 + 4
"""Of a layer, and of what comes after the last: norm, head and two of the argmax."""


@pytest.fixture
def traced(monkeypatch):
    """Counts the kernels that are traced, by name."""
    jax.clear_caches()
    counts = collections.Counter()
    pallas_call = pl.pallas_call

    def counted(*args, name, **kwargs):
        counts[name] += 1
        return pallas_call(*args, name=name, **kwargs)

    monkeypatch.setattr(pl, "pallas_call", counted)
    return counts


@pytest.mark.parametrize(
    ("program", "num_models"), [("target: plain steps", 1), ("rounds", 2)]
)
def test_a_generation_is_lowered_layer_by_layer_once(traced, program, num_models):
    """Fails if a kernel is traced or lowered again for each of 36 and 28 layers."""
    sizes = {"gamma_max": 4, "slab": 5, "dtype": None, "impl": "triton"}
    pair = subjects.preset_pair("qwen3-8b", "qwen3-0.6b", as_shapes=True, **sizes)
    plan = steps.Plan(contexts=[128], page_size=16, steps=16, as_shapes=True)
    works = [c.work for group in steps.all_costs(pair, plan) for c in group if c.work]
    (work, *_) = [work for work in works if work.program == program]
    row = lowering.lower(work.trace)
    assert traced.total() == row["kernels"] == num_models * KERNELS_OF_A_MODEL
    # 5 and 9 million characters where every layer has kernels of its own.
    assert row["characters"] < num_models * 400_000


@pytest.mark.parametrize(
    ("name", "impl", "num_kernels"),
    [
        ("attention out", "triton", 1),
        ("attention out", "mosaic", 1),
        ("attention out", "xla", 0),
        ("context 1024", "triton", 3),
    ],
)
def test_a_loop_of_calls_is_lowered_once(traced, name, impl, num_kernels):
    """Fails if a kernel is traced for each of its calls: up to 128."""
    config = subjects.PRESETS["qwen3-0.6b"]
    made = kernels.all_subjects(config, contexts=(1024,), platform="gpu")
    (subject,) = (each for each in made if each.name == name)
    bench = kernel_costs.Bench(subject, as_shapes=True)
    row = bench.lowered(kernel_costs.Variant(impl, 5))
    assert subject.copies > 30 and row["kernels"] == num_kernels
    assert traced.total() == (num_kernels if impl == "triton" else 0)
