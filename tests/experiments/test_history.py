"""The ladder of designs from its command line: rows, exit status, what it judges by."""

import dataclasses
import json

import pytest
import tiny_pair

from experiments import history
from experiments.ablations import verify_paths
from experiments.lib import cli
from experiments.support import paired_runs


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_pair.write(tmp_path_factory.mktemp("pair"))


def command(folders, *more: str) -> list[str]:
    target, draft = folders
    return [
        *("--target", str(target), "--draft", str(draft)),
        *("--gen-tokens", "6", "--gamma", "2", "--prompts", "1"),
        *more,
    ]


def test_every_rung_is_run_and_written(folders, tmp_path, capsys, monkeypatch):
    """Fails if a rung runs another design than its own, or is judged by another."""
    judged = []
    real = paired_runs.run_plain

    def watched(pair, settings, prompt):
        judged.append(type(pair.target))
        return real(pair, settings, prompt)

    monkeypatch.setattr(paired_runs, "run_plain", watched)
    out = tmp_path / "out.jsonl"
    history.main(command(folders, "--out", str(out)))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
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
    # Library products are judged by a decoding through library products.
    assert judged.count(verify_paths.LibraryRows) == 2  # one of them warms up
    printed = capsys.readouterr().out
    assert "0.68x, unmatched" in printed and "row contract" in printed


def test_an_interrupted_ladder_leaves_the_prompts_before(
    folders, tmp_path, monkeypatch, capsys
):
    """Fails if rows are written at the end only."""
    real, seen = history.Ladder.run_prompt, []

    def interrupted(self, prompt, prompt_ids, **keywords):
        seen.append(prompt.id)
        if prompt.id == "py-02":
            raise KeyboardInterrupt
        return real(self, prompt, prompt_ids, **keywords)

    monkeypatch.setattr(history.Ladder, "run_prompt", interrupted)
    out = tmp_path / "out.jsonl"
    more = ("--prompts", "2", "--out", str(out))
    assert history.main(command(folders, *more)) == cli.INTERRUPTED
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["py-01"] * len(history.LADDER)
    assert f"finished rows are in {out}" in capsys.readouterr().err


def row(name: str, *, matched: bool, speedup: float) -> dict:
    return {"rung": name, "matched": matched, "speedup_e2e": speedup}


def test_the_story_holds_only_if_the_last_rung_matches_and_wins():
    safe = row("safe", matched=True, speedup=0.4)
    unsafe = row("unsafe", matched=False, speedup=2.0)
    last = row("last", matched=True, speedup=1.5)
    assert history.story_holds([safe, unsafe, last])
    assert not history.story_holds([safe, unsafe, last | {"matched": False}])
    assert not history.story_holds([safe | {"speedup_e2e": 1.6}, unsafe, last])


def test_the_exit_status_is_that_of_the_story(folders, monkeypatch):
    monkeypatch.setattr(history, "story_holds", lambda rows: False)
    assert history.main(command(folders)) == history.DOES_NOT_HOLD == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--target", "nowhere"), "nowhere"),
        (("--prompts", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_bad_input(folders, capsys, more, said):
    assert history.main(command(folders, *more)) == cli.UNUSABLE == 1
    assert said in capsys.readouterr().err


def test_rungs_are_designs_that_exist():
    for rung in history.LADDER:
        assert rung.verify_path in verify_paths.PATHS
        assert rung.acceptance in paired_runs.ACCEPTANCES
    assert dataclasses.replace(history.LADDER[-1], name="") == history.Rung(
        name="", verify_path="paged-decode", acceptance="verify", published="-"
    )
