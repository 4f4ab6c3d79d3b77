"""What Qwen3 at full depth costs before XLA: traced and lowered for a GPU, on a CPU."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import hopper
import hopper_models as models
import jax
import pytest
from jax.experimental import pallas as pl


MODEL = 1 + 8 + 4
"""Kernels: the angles; those of a layer and its job list, which XLA keeps one of; and,
after the last: norm, head, and two of the argmax."""

DRAWS = 2 + 1 + 2 + 2
"""A filter has two, the noise one, and the largest is looked for before and after."""


CACHE = "append_each", "truncate_each"
"""Kernels of a cache, which are no part of a layer. They are traced twice: once to see
whether they are the bookkeeping of a CPU."""

CALLS = {models.plain_generate: 1, models.verify_tree: 2, models.spec_generate: 4}
"""Of `CACHE`: a plain step truncates nothing, a round both caches."""

CALLS_WITH_A_HEAD = 6


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


def trace(program: hopper.Program) -> Any:
    """The program as jax traces it for the H100."""
    with hopper.lowering_for(hopper.DEVICE):
        return jax.jit(program.fn, donate_argnums=program.donate).trace(*program.args)


def equations(jaxpr: Any, seen: dict[int, Any] | None = None) -> int:
    """The equations of a program, those of a function that is called often once."""
    seen = {} if seen is None else seen
    if id(jaxpr) in seen:
        return 0
    seen[id(jaxpr)] = jaxpr  # Kept, so that no other one gets its number.
    inside = (each for eqn in jaxpr.eqns for each in functions(eqn))
    return len(jaxpr.eqns) + sum(equations(each, seen) for each in inside)


def functions(eqn: Any) -> Iterator[Any]:
    """What an equation calls: loops, branches, functions and kernels."""
    for value in eqn.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            each = getattr(each, "jaxpr", each)
            if hasattr(each, "eqns"):
                yield each


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("build", "options", "kernels", "size", "characters"),
    [
        (models.plain_generate, {}, MODEL, 2094, 450_000),
        (models.plain_generate, {"draws": True}, MODEL + DRAWS, 3204, 600_000),
        (models.spec_generate, {"draws": True}, 2 * (MODEL + DRAWS), 6724, 1_200_000),
        (models.spec_generate, {}, 2 * MODEL, 4502, 900_000),
        (
            models.spec_generate,
            {"num_slots": 4, "draws": True},
            2 * (MODEL + DRAWS),
            8488,
            1_450_000,
        ),
        (models.spec_generate, {"num_slots": 4}, 2 * MODEL, 6283, 1_150_000),
        (models.verify_tree, {}, MODEL, 6977, 1_100_000),
        # A head takes features in, and grows its tree in a loop.
        (models.head_round, {"layers": 36}, 38, 9948, 1_600_000),
        # Of five layers, each of which keeps its context and runs blocks.
        (models.block_round, {"layers": 36}, 78, 12_896, 2_000_000),
        (
            models.scheduled_round,
            {"layers": 36, "num_slots": 2},
            79,
            12_800,
            2_100_000,
        ),
    ],
)
def test_each_layer_is_traced_and_lowered_once(
    traced, build, options, kernels, size, characters
):
    """Fails if a kernel is traced or lowered again for each of 36 and 28 layers.

    Or if jax has a twentieth more to trace, of whatever kind.
    """
    program = trace(build("qwen3-8b", **options))
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    # One is lowered once for two equal calls.
    of_cache = sum(traced[name] for name in CACHE)
    assert kernels <= traced.total() - of_cache <= kernels + 1
    calls = CALLS.get(build, CALLS_WITH_A_HEAD)
    assert text.count("stablehlo.custom_call") == kernels + calls
    count = equations(program.jaxpr.jaxpr)
    print(f"{build.__name__}, {options}: {count} equations")
    assert count <= 1.05 * size
    # 5 and 9 million characters of `generate` where every layer has its own kernels.
    assert len(text) < characters


def test_layers_that_are_traced_apart_are_counted():
    """Negative control: of each layer that is no function its equations are there."""

    def apart(program):
        def step(*args):
            with mock.patch.object(jax, "jit", lambda function, **unused: function):
                return program.fn(*args)

        return dataclasses.replace(program, fn=step)

    def of_a_layer(changed):
        one, three = (
            equations(
                trace(changed(models.plain_step("qwen3-8b", layers=layers))).jaxpr.jaxpr
            )
            for layers in (1, 3)
        )
        return (three - one) / 2

    assert of_a_layer(lambda program: program) < 20
    assert of_a_layer(apart) > 200
