"""The ladder of designs from its command line: rows, exit status, what it judges by."""

import dataclasses

import pytest
import tiny_pair
from script_runs import assert_fails_with, models_of, rows_of

from experiments import history, spec_round
from experiments.ablations import verify_paths
from experiments.lib import cli, results, runs, terminal
from spec_jax.analysis import metrics
from spec_jax.model import llama


def command(folders, *more: str) -> list[str]:
    sizes = ("--gen-tokens", "6", "--gamma", "2", "--prompts", "1")
    return [*models_of(folders), *sizes, *more]


@pytest.mark.slow
def test_every_rung_is_run_and_written(folders, tmp_path, capsys, monkeypatch):
    """Fails if a rung runs another design than its own, or is compared with another."""
    decoded, real = [], runs.run_plain

    def watched(lm, settings, prompt):
        decoded.append(type(lm.target))
        return real(lm, settings, prompt)

    monkeypatch.setattr(runs, "run_plain", watched)
    out = tmp_path / "out.jsonl"
    status = history.main(command(folders, "--out", str(out)))
    rows = rows_of(out)
    rungs = [rung.name for rung in history.LADDER]
    prompts, rows = rows[: len(rungs)], rows[len(rungs) :]
    assert [row["rung"] for row in prompts] == [row["rung"] for row in rows] == rungs
    assert {(row["kind"], row["id"]) for row in prompts} == {
        ("history_prompt", "py-01")
    }
    decided, flash, loop, library, contract = rows
    assert decided["commit_decode_steps"] == decided["mirror_decode_steps"] > 0
    assert decided["matched"] and loop["matched"] and contract["matched"]
    assert contract["verify_decode_mismatches"] == loop["verify_decode_mismatches"] == 0
    assert flash["commit_decode_steps"] == contract["commit_decode_steps"] == 0
    assert loop["verify_steps"] == loop["rounds"] + loop["proposed"]
    assert contract["target_steps"] == contract["rounds"]
    # Library products are compared with decoding through library products.
    assert decoded.count(verify_paths.LibraryRows) == 2  # one of them warms up
    printed = capsys.readouterr().out
    assert "0.68x, unmatched" in printed and "row contract" in printed
    assert status == (0 if history.story_holds(rows) else history.DOES_NOT_HOLD)


def test_a_family_without_the_paths_is_refused(tmp_path, capsys):
    """Fails if a model that norms no queries and keys ends in a traceback."""
    qwen3 = dataclasses.asdict(tiny_pair.config())
    config = llama.LlamaConfig(**{k: v for k, v in qwen3.items() if k != "yarn"})
    folder = str(tiny_pair.write_model(tmp_path, config, seed=0))
    words = ("runs models of qwen3, and this is one of llama: take 'paged-decode'",)
    pair = (folder, folder)
    assert_fails_with(history.main, capsys, command(pair), "'flash'", *words)
    arguments = command(pair, "--verify-path", "library-rows")
    assert_fails_with(spec_round.main, capsys, arguments, "'library-rows'", *words)


def test_an_interrupted_ladder_leaves_the_prompts_before(
    folders, tmp_path, monkeypatch, capsys
):
    """Fails if rows are written at the end only. Nothing is run or compiled."""
    timing = metrics.Timing(prefill_s=1.0, decode_s=1.0, tokens=1)
    plain = runs.Plain(tokens=[5], timing=timing)
    counters = metrics.Counters(tokens=1, rounds=1, accepted_hist=(1,))
    spec = runs.Speculative(tokens=[5], origins=[], counters=counters, timing=timing)

    def interrupted(designs, prompt, ids, **keywords):
        if prompt.id == "py-02":
            raise KeyboardInterrupt
        about = {"prompt": prompt, "prompt_ids": ids, "mismatches": 0}
        done = results.PromptResult(**about, plain=[plain], spec=[spec])
        return dict.fromkeys(designs, done)

    monkeypatch.setattr(results, "warm_up", lambda designs, prompts: 0.0)
    monkeypatch.setattr(results, "run_designs", interrupted)
    monkeypatch.setattr(terminal, "INTERVAL_S", 0.0)
    out = tmp_path / "out.jsonl"
    more = ("--prompts", "2", "--out", str(out))
    assert history.main(command(folders, *more)) == cli.INTERRUPTED
    assert [row["id"] for row in rows_of(out)] == ["py-01"] * len(history.LADDER)
    printed = capsys.readouterr().err
    assert f"finished rows are in {out}" in printed and "prompts: 1 of 2" in printed


def row(name: str, *, matched: bool, speedup: float) -> dict:
    return {"rung": name, "matched": matched, "speedup_e2e": speedup}


def test_the_story_holds_only_if_the_last_rung_matches_and_wins():
    safe = row("safe", matched=True, speedup=0.4)
    unsafe = row("unsafe", matched=False, speedup=2.0)
    last = row("last", matched=True, speedup=1.5)
    assert history.story_holds([safe, unsafe, last])
    assert not history.story_holds([safe, unsafe, last | {"matched": False}])
    assert not history.story_holds([safe | {"speedup_e2e": 1.6}, unsafe, last])


def test_bad_input(folders, capsys):
    for more in (("--target", "nowhere"), ("--prompts", "nowhere.txt")):
        assert_fails_with(history.main, capsys, command(folders, *more), more[1])
