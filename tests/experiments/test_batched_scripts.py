"""Batches from the command line: equal texts, rows, exit statuses."""

import pytest
from script_runs import models_of, rows_of, with_another_token

from experiments import spec_round, throughput
from experiments.lib import bench, runs, terminal


def command(folders, *more: str) -> list[str]:
    sizes = ("--gen-tokens", "6", "--gamma", "2", "--prompts", "3")
    return [*models_of(folders), *sizes, *more]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "more",
    [
        ("--gamma-policy", "threshold", "--confidence", "0.1"),
        ("--drafter", "hybrid"),
    ],
)
def test_a_batch_of_any_drafter(folders, tmp_path, more):
    """Of three prompts in two slots, sampled: each as it is alone."""
    out = tmp_path / "out.jsonl"
    more = (*more, "--batch", "2", "--temperature", "0.7", "--out", str(out))
    assert spec_round.main(command(folders, *more)) == 0
    *prompts, summary = rows_of(out)
    assert [row["matched"] for row in prompts] == [True] * 3
    assert summary["matched"] and summary["batch"] == 2
    # Prefill and decoding overlap: no number claims to tell them apart.
    for numbers in (summary, *summary["by_category"].values()):
        assert "speedup_decode" not in numbers and numbers["speedup_e2e"] > 0


def test_throughput(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(terminal, "INTERVAL_S", 0.0)
    out = tmp_path / "out.jsonl"
    more = ("--batch", "2", "--gamma", "1,2", "--repeats", "2", "--out", str(out))
    assert throughput.main(command(folders, *more)) == throughput.MATCHED
    rows = rows_of(out)
    ways = [(None, 0), *((2, gamma) for gamma in (0, 1, 2))]
    assert [(row["batch"], row["gamma"]) for row in rows] == 3 * ways
    of_runs, rows = rows[: 2 * len(ways)], rows[2 * len(ways) :]
    assert [row["repeat"] for row in of_runs] == [0] * len(ways) + [1] * len(ways)
    assert {(run["kind"], run["prompts_equal"]) for run in of_runs} == {
        ("throughput_run", 3)
    }
    for row in rows:
        seconds = [run["seconds"] for run in of_runs if run["way"] == row["way"]]
        speed = bench.spread([row["tokens"] / each for each in seconds])
        assert (row["tok_s"], row["tok_s_p10"], row["tok_s_p90"]) == speed
        assert row["prompts_equal"] == row["prompts"] == 3
        assert row["n"] == 2 and row["tok_s"] > 0
    assert rows[0]["ratio"] == 1
    printed = capsys.readouterr()
    assert "gamma 2, batch 2" in printed.out and "runs: 1 of 12" in printed.err


def test_throughput_of_a_tree(folders, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    more = ("--batch", "2", "--repeats", "1", "--tree", "2x3:5", "--out", str(out))
    assert throughput.main(command(folders, *more)) == throughput.MATCHED
    plain, slots, tree = rows_of(out, "throughput")
    assert (tree["tree"], tree["gamma"], tree["batch"]) == ("2x3:5@0.4", 5, 2)
    assert tree["prompts_equal"] == 3 and "tree" not in {*plain, *slots}
    assert "tree 2x3:5@0.4, batch 2" in capsys.readouterr().out


@pytest.mark.slow
def test_no_more_slots_than_prompts(folders, tmp_path, capsys, monkeypatch):
    """Fails if a thousand slots are compiled for one prompt."""
    slots, real = [], runs.make_scheduler

    def watched(lm, settings):
        slots.append(settings.num_slots)
        return real(lm, settings)

    monkeypatch.setattr(runs, "make_scheduler", watched)
    out = tmp_path / "out.jsonl"
    more = ("--prompts", "1", "--out", str(out), "--drafter", "ngram")
    assert spec_round.main(command(folders, *more, "--batch", "1000")) == 0
    assert rows_of(out)[-1]["batch"] == 1
    assert "--batch: 1 slots, as many as there are prompts" in capsys.readouterr().out
    more += ("--repeats", "1", "--batch", "1,500,1000")
    assert throughput.main(command(folders, *more)) == 0
    assert [row["batch"] for row in rows_of(out)] == 2 * [None, 1, 1]
    assert "--batch: at most 1 slots" in capsys.readouterr().out
    assert set(slots) == {1}


def test_throughput_of_a_batch_that_differs(folders, monkeypatch):
    """Exit status 2: a planted token in the last prompt's text."""
    real = runs.run_batch

    def corrupted(*args, **kwargs):
        *done, last = real(*args, **kwargs)
        return [*done, with_another_token(last)]

    monkeypatch.setattr(runs, "run_batch", corrupted)
    more = ("--batch", "2", "--repeats", "1")
    assert throughput.main(command(folders, *more)) == throughput.NOT_MATCHED == 2


def test_throughput_that_differed_once(folders, tmp_path, monkeypatch):
    """Fails if the last repeat alone decides what rows and the exit status say."""
    real, calls = throughput._once, []

    def corrupted(lm, settings, ids, way):
        calls.append(way)
        done, seconds = real(lm, settings, ids, way)
        if way.gamma and calls.count(way) == 2:  # The first repeat, after a brief run.
            done = [with_another_token(done[0]), *done[1:]]
        return done, seconds

    monkeypatch.setattr(throughput, "_once", corrupted)
    out = tmp_path / "out.jsonl"
    more = ("--batch", "2", "--repeats", "2", "--out", str(out))
    assert throughput.main(command(folders, *more)) == throughput.NOT_MATCHED == 2
    *_, row = rows_of(out, "throughput")
    assert row["gamma"] and (row["prompts_equal"], row["prompts"]) == (2, 3)
    repeats = [x for x in rows_of(out, "throughput_run") if x["way"] == row["way"]]
    assert [one["prompts_equal"] for one in repeats] == [2, 3]
    assert (row["confidence"], row["schedule"]) == (0.0, None)
