"""Files of step costs: those that `latency.py` writes, tables, and neither."""

import json

import pytest
from script_runs import write_rows

from experiments.lib import step_costs
from spec_jax.gamma import theory


COSTS = {"plain_s": 1.0, "verify_s": {"1": 1.0, "5": 2.0}, "draft_s": {"oracle": 0.5}}


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
        json.dumps(COSTS | {"draft_s": 0.25, "overhead_s": 0.125}, indent=1)
    )
    curve = step_costs.read(path, ("suffix",))["suffix"]
    assert curve.draft_s == 0.25 and curve.overhead_s == 0.125
    assert step_costs.expected_seconds(curve, [0, 0, 0]) == 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no .plain step."),
        ("[1, 2]", "indices"),
        ('{"plain_s": 1}', "no 'draft_s'"),
        ('{"kind": "step"}\n{"kind": "summary"}', "no 'step'"),
        (json.dumps(COSTS | {"plain_s": 0}), "plain_s=0"),
    ],
)
def test_costs_that_are_none(tmp_path, text, message):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=rf"costs.json: no table of costs \(.*{message}"
    ):
        step_costs.read(path, ("ngram",))
    with pytest.raises(ValueError, match="nowhere.json: cannot be read"):
        step_costs.read(tmp_path / "nowhere.json", ("ngram",))
