"""Costs of rounds: their parts, and proposals along a text that are timed for them."""

import dataclasses
import json
import typing

import jax.numpy as jnp
import pytest
import tiny_pair
from script_runs import write_rows

from experiments.lib import bench, costs, noise, step_costs, works
from spec_jax import loading
from spec_jax.drafters import each
from spec_jax.gamma import theory


GAMMA = 2
COSTS = costs.RoundCosts(
    plain_s=10.0,
    drafts=(0, 1, 3),
    verify_s=(10.0, 12.0, 14.0),
    beyond_s=(1.0, 2.5, 4.5),
)


def test_the_costs_of_a_round():
    """Fails if a part is left out, or counted twice; differences below 0 are noise."""
    assert COSTS.round_s().tolist() == [11.0, 14.5, 3.5 + 13.0, 18.5]
    assert COSTS.draft_s == 1.0  # The first costs more.
    one = dataclasses.replace(
        COSTS, drafts=(0, 1), verify_s=(10.0, 12.0), beyond_s=(1.0, 2.5)
    )
    assert one.draft_s == 1.5
    assert dataclasses.replace(COSTS, beyond_s=(1.0, 3.0, 2.0)).draft_s == 0
    rounds = {
        free: COSTS.without(free).round_s()[-1] for free in typing.get_args(theory.Free)
    }
    assert rounds == {"drafting": 15.0, "verification": 14.5, "both": 11.0}


def test_costs_are_compared_within_a_turn():
    """A turn that was slow as a whole leaves ratios as they are."""
    per_step = {
        **{"plain step": 1.0, "1 active row": 1.0, "2 active rows": 0.9},
        **{"d: round, gamma 0": 1.1, "d: round, gamma 1": 1.3},
        "d: proposal, nothing to catch up": 0.4,
        "d: proposal, 7 tokens to catch up": 1.1,
    }
    slow = (1.0, 1.0, 7.0)
    seconds = {name: [factor * s for factor in slow] for name, s in per_step.items()}
    timings = bench.Timings(warm_up={}, seconds=seconds)
    found = costs.costs_of("d", timings, {0: 0.0, 1: 0.5})
    assert found.verify_s == (1.0, 1.0)  # two rows cannot take less than one
    assert found.beyond_s == pytest.approx((0.1, 0.3))
    assert found.catch_up_s == pytest.approx(0.7 / 7)
    # A lookup that found no more than half: the rest of its rows was not verified.
    seconds["2 active rows"] = [1.2 * s for s in slow]
    found = costs.costs_of("d", timings, {0: 0.0, 1: 0.5})
    assert found.beyond_s == pytest.approx((0.1, 0.2))


@pytest.mark.parametrize("stride", [1, 3])
def test_a_head_proposes_along_the_text(tmp_path, stride):
    """Fails if features do not come with what is committed: it would draft nothing."""
    target, _ = tiny_pair.write(tmp_path)
    head = tiny_pair.write_head(tmp_path / "head", target)
    lm = loading.load(target, drafter=str(head), gamma_max=GAMMA)
    memory = noise.noisy_memory(lm.drafter, capacity=16, page_size=16)
    memory, seen = works.propose_along(
        each.lift(lm.drafter, 1),
        lm.drafter_params,
        noise.memory_at(memory, 4),
        tokens=jnp.ones((1, 17), jnp.int32),
        features=jnp.ones((16, 2, 32)),
        sampling=None,
        start=jnp.int32(4),
        gamma=jnp.int32(GAMMA),
        steps=jnp.int32(3),
        stride=jnp.int32(stride),
    )
    last = 4 + 2 * stride
    assert int(memory.ring.first[0]) == last - 1  # The last proposal took all in.
    assert int(memory.ring.end[0]) == last + stride - 1
    assert int(seen) >= 3 * GAMMA


TABLE = {"plain_s": 1.0, "verify_s": {"1": 1.0, "5": 2.0}, "draft_s": {"oracle": 0.5}}


def test_costs_as_latency_writes_them(tmp_path):
    path = tmp_path / "latency.jsonl"
    steps = {
        "plain step": (None, 2.0),
        "1 active row": (1, 2.0),
        "2 active rows": (2, 3.0),
        "draft step": (1, 0.5),
    }
    rows = [
        {"kind": "step", "step": name, "num_active": num_active, "ms": ms}
        for name, (num_active, ms) in steps.items()
    ]
    write_rows(path, [*rows, {"kind": "x"}])
    curves = step_costs.read(path, ("draft-model", "ngram", "hybrid"))
    curve = theory.CostCurve(
        plain_s=0.002, rows=(1, 2), verify_s=(0.002, 0.003), draft_s=0.0005
    )
    assert curves["draft-model"] == curves["hybrid"] == curve
    assert curves["ngram"].draft_s == 0.0
    path.write_text(path.read_text() * 2)
    with pytest.raises(ValueError, match="rows of several runs"):
        step_costs.read(path, ("ngram",))
    # One number for all drafters.
    path.write_text(
        json.dumps(TABLE | {"draft_s": 0.25, "overhead_s": 0.125}, indent=1)
    )
    curve = step_costs.read(path, ("suffix",))["suffix"]
    assert curve.draft_s == 0.25 and curve.overhead_s == 0.125
    assert step_costs.expected_seconds(curve, [0, 0, 0]) == 0.0
