"""The default policy on drawn texts: the script, its rows, its exit status."""

import pytest
from script_runs import rows_of

from experiments import regret_drawn as script


BRIEF = ["--texts", "2", "--gen-tokens", "64", "--gamma", "2"]


def test_a_row_for_each_acceptance_and_cost(tmp_path, capsys):
    """Exit status 2 is the negative control: a bound that trying passes."""
    out = tmp_path / "rows.jsonl"
    some = ["--acceptance", "0,0.9-0", "--draft-cost", "0.05,0.6", "--out", str(out)]
    assert script.main([*BRIEF, *some]) == 0
    rows = rows_of(out, "drawn_regret")
    assert [(row["acceptance"], row["draft_cost"]) for row in rows] == [
        *(("0", 0.05), ("0", 0.6), ("0.9-0", 0.05), ("0.9-0", 0.6))
    ]
    assert all(0 < row["loss"] <= row["worst_loss"] <= 0.02 for row in rows[:2])
    assert rows[0]["best_gamma"] == 0 and rows[0]["regret"] == rows[0]["loss"]
    assert rows[2]["loss"] < 0
    assert "draft 0.05" in capsys.readouterr().out
    assert script.main([*BRIEF, *some[:4], "--bound", "0.001"]) == 2


@pytest.mark.parametrize("bad", ["1.5", "a", "0.1-0.2-0.3", "-1"])
def test_chances_that_are_none_are_refused(bad, capsys):
    with pytest.raises(SystemExit) as error:
        script.main([f"--acceptance={bad}"])
    assert error.value.code == 1 and bad in capsys.readouterr().err
