"""What Qwen3 at full depth costs before XLA: traced and lowered for a GPU, on a CPU."""

import collections

import hopper
import hopper_models as models
import jax
import pytest
from jax.experimental import pallas as pl


KERNELS_OF_A_MODEL = 1 + 6 + 3
"""The angles; those of a layer and its job list, which XLA keeps one of; and, after the
last: head, and two of the argmax."""


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


@pytest.mark.parametrize(
    ("build", "num_models"), [(models.plain_step, 1), (models.spec_round, 2)]
)
def test_each_layer_is_traced_and_lowered_once(traced, build, num_models):
    """Fails if a kernel is traced or lowered again for each of 36 and 28 layers."""
    program = build("qwen3-8b")
    with hopper.lowering_for(hopper.DEVICE):
        trace = jax.jit(program.fn, donate_argnums=program.donate).trace(*program.args)
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
    assert traced.total() == num_models * KERNELS_OF_A_MODEL
    assert text.count("stablehlo.custom_call") == num_models * KERNELS_OF_A_MODEL
    # 5 and 9 million characters where every layer has kernels of its own.
    assert len(text) < num_models * 400_000
