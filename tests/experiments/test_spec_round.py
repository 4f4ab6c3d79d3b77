"""The main job from its command line: exit status, lines written, defaults."""

import dataclasses

from script_runs import models_of, rows_from, with_another_token

from experiments import spec_round, throughput
from experiments.lib import bench, results, runs
from spec_jax.analysis import metrics
from spec_jax.ops import dispatch


def command(folders, *more: str) -> list[str]:
    """Returns flags of a short run; all runs have one cache size, to share programs."""
    sizes = "--gen-tokens 6 --gamma 2 --prompts 2 --page-size 128 --temperature 0"
    return [*models_of(folders), *sizes.split(), *more]


def test_a_matched_run(folders, tmp_path):
    """Fails if a line is missing, or the summary is not the sum of the lines."""
    given = command(folders, "--repeats", "2")
    *prompts, summary = rows_from(spec_round.main, tmp_path, given)
    assert [row["id"] for row in prompts] == ["py-01", "py-02"]
    for row in prompts:
        assert row["matched"] and row["plain_ids"] == row["spec_ids"]
        assert len(row["baseline_e2e_s"]) == len(row["spec_e2e_s"]) == 2
        assert row["repetition"] == metrics.repetition(row["spec_ids"])
        assert row["acceptance_rate"] == row["accepted"] / row["proposed"]
    assert summary["kind"] == "summary" and summary["matched"] is True
    assert summary["verify_decode_mismatches"] == summary["nonfinite_logits"] == 0
    for name in ("tokens", "rounds", "proposed", "accepted"):
        assert summary[name] == sum(row[name] for row in prompts)
    assert summary["impl"] == dispatch.resolve("auto") and summary["gamma"] == 2


def test_a_run_that_does_not_match(folders, tmp_path, monkeypatch):
    """Fails if a planted token does not give exit status 2, or the replay misses it."""
    real = runs.run_speculative

    def corrupted(settings, prompt):
        run = real(settings, prompt)
        return run if settings.gen_tokens == 1 else with_another_token(run)

    monkeypatch.setattr(runs, "run_speculative", corrupted)
    given = command(folders, "--ignore-stop")
    *prompts, summary = rows_from(spec_round.main, tmp_path, given, status=2)
    assert summary["matched"] is False
    assert summary["verify_decode_mismatches"] == len(prompts) == 2


def test_a_rule_that_keeps_the_distribution_alone_is_not_compared(folders, tmp_path):
    """Fails if it is compared above temperature 0, or is not called exact at 0."""
    given = command(folders, "--rule", "rejection", "--temperature", "1")
    *_, summary = rows_from(spec_round.main, tmp_path, given)
    assert summary["rule"] == "rejection" and summary["matched"] is None
    assert summary["verify_decode_mismatches"] is None
    sizes = {"gamma": 2, "gen_tokens": 6, "capacity": 16, "page_size": 16}
    assert runs.Settings(lm=None, rule="rejection", **sizes).is_exact


def test_tokens_are_compared_and_not_assumed():
    """Negative control of `matched`: one differing token is enough."""
    plain = runs.Run(tokens=[1, 2, 3], prefill_s=0.0, decode_s=1.0)
    spec = dataclasses.replace(plain, tokens=[1, 2, 4])
    result = results.PromptResult(prompt=None, plain=[plain], spec=[spec], mismatches=0)
    of_nan = dataclasses.replace(plain, counters=metrics.Counters(nonfinite=1))
    for first, other, matched in (
        (plain, spec, False),
        (plain, plain, True),
        (of_nan, plain, False),
        (plain, of_nan, False),
    ):
        one = dataclasses.replace(result, plain=[first], spec=[other])
        assert one.matched is matched
    assert results.all_matched([True, None]) is None
    assert results.all_matched([None, False]) is False


def test_a_target_without_gamma_adapts(folders):
    """Fails unless it adapts, and the embedded pair, for equal counts, does not."""
    target, budget = models_of(folders), ("--gamma-policy", "budget")
    for more, name, gamma in (
        ((), "fixed", 4),
        (budget, "budget", 7),
        (("--gamma-policy", "goodput"), "goodput", 4),
        (target, "budget", 7),
        ((*target, "--gamma", "2"), "fixed", 2),
        ((*target, "--rule", "block"), "fixed", 4),
        ((*target, "--tree", "2x3:5"), "fixed", 4),
        ((*target, *budget, "--gamma", "3"), "budget", 3),
    ):
        found = spec_round.parse_args(more)
        assert (found.gamma_policy, found.gamma) == (name, gamma), more


def test_throughput(folders, tmp_path, capsys):
    more = "--batch 2,500 --gamma 1,2 --repeats 2".split()
    rows = rows_from(throughput.main, tmp_path, command(folders, *more))
    ways = [(None, 0), *((2, gamma) for gamma in (0, 1, 2))]
    assert [(row["batch"], row["gamma"]) for row in rows] == 3 * ways
    of_runs, rows = rows[: 2 * len(ways)], rows[2 * len(ways) :]
    for place, run in enumerate(of_runs):
        assert (run["kind"], run["prompts_equal"]) == ("throughput_run", 2)
        assert run["repeat"] == place // len(ways)
    for row in rows:
        seconds = [run["seconds"] for run in of_runs if run["way"] == row["way"]]
        speeds = [row["tokens"] / each for each in seconds]
        assert bench.spread_fields("tok_s", speeds).items() <= row.items()
        assert row["prompts_equal"] == row["prompts"] == 2
        assert row["n"] == 2 and row["tok_s"] > 0
    assert rows[0]["ratio"] == 1
    assert "gamma 2, batch 2" in capsys.readouterr().out


def test_throughput_that_differed_once(folders, tmp_path, monkeypatch):
    """Fails if the last repeat alone decides the row and the exit status."""
    real, calls = throughput._once, []

    def corrupted(way, settings, ids):
        calls.append(way)
        done = real(way, settings, ids)
        if way.gamma and calls.count(way) == 2:  # the first repeat, after a brief run
            done = [with_another_token(done[0]), *done[1:]]
        return done

    monkeypatch.setattr(throughput, "_once", corrupted)
    given = command(folders, *"--batch 2 --repeats 2".split())
    *runs_, row = rows_from(throughput.main, tmp_path, given, status=2)
    assert row["kind"] == "throughput" and row["gamma"]
    assert (row["prompts_equal"], row["prompts"]) == (1, 2)
    repeats = [one["prompts_equal"] for one in runs_ if one["way"] == row["way"]]
    assert repeats[:2] == [1, 2]
