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


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("build", "options", "kernels", "characters"),
    [
        (models.plain_generate, {}, KERNELS_OF_A_MODEL, 450_000),
        (models.spec_generate, {}, 2 * KERNELS_OF_A_MODEL, 900_000),
        (models.verify_tree, {}, KERNELS_OF_A_MODEL, 1_100_000),
        # A head takes features in, and grows its tree in a loop.
        (models.head_round, {"layers": 36}, 31, 1_600_000),
        # Of five layers, each of which keeps its context and runs blocks.
        (models.scheduled_round, {"layers": 36, "num_slots": 2}, 56, 2_100_000),
    ],
)
def test_each_layer_is_traced_and_lowered_once(
    traced, build, options, kernels, characters
):
    """Fails if a kernel is traced or lowered again for each of 36 and 28 layers."""
    program = build("qwen3-8b", **options)
    with hopper.lowering_for(hopper.DEVICE):
        trace = jax.jit(program.fn, donate_argnums=program.donate).trace(*program.args)
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
    # One is lowered once for two equal calls.
    assert kernels <= traced.total() <= kernels + 1
    assert text.count("stablehlo.custom_call") == kernels
    # 5 and 9 million characters of `generate` where every layer has its own kernels.
    assert len(text) < characters
