"""Plans from the command line: rows, exit status, bad input."""

import dataclasses
import json
import pathlib

import pytest
import tiny_pair

from experiments import plan
from experiments.lib import cli
from experiments.support import paired_runs, plan_runs


GAMMA, GEN_TOKENS, PAGE_SIZE = 2, 8, 16
PROMPTS = ("def first(x):", "import second")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and a draft, and a file of two short prompts beside them."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "prompts.txt").write_text("".join(line + "\n" for line in PROMPTS))
    return tiny_pair.write(folder)


def command(folders, *more: str) -> list[str]:
    target, draft = folders
    return [
        *("--target", str(target), "--draft", str(draft), "--gamma", f"1,{GAMMA}"),
        *("--prompts", str(target.parent / "prompts.txt")),
        *("--gen-tokens", str(GEN_TOKENS), "--page-size", str(PAGE_SIZE)),
        *("--repeats", "2", "--cost-repeats", "2", "--drafter", "draft-model,ngram"),
        *more,
    ]


def rows_of(path: pathlib.Path, kind: str) -> list[dict]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


@pytest.fixture(scope="module")
def planned(folders, tmp_path_factory):
    """The rows of one run."""
    out = tmp_path_factory.mktemp("out") / "out.jsonl"
    assert plan.main(command(folders, "--out", str(out))) == plan.MATCHED == 0
    return out


def test_the_rows_of_a_plan(planned):
    """Fails if a run is missing, or an error is not that of its two numbers."""
    runs = rows_of(planned, "plan")
    assert [(row["drafter"], row["gamma"]) for row in runs] == [
        (drafter, gamma) for drafter in ("draft-model", "ngram") for gamma in (1, 2)
    ]
    for row in runs:
        assert row["matched"] and row["verify_decode_mismatches"] == 0
        assert row["prompts"] == 2 and row["tokens"] == 2 * GEN_TOKENS
        assert row["measured_speedup"] == row["speedup_decode"] > 0
        if row["predicted_speedup"] is not None:
            expected = row["predicted_speedup"] / row["measured_speedup"] - 1
            assert row["relative_error"] == pytest.approx(expected)
    for drafter in ("draft-model", "ngram"):
        of_drafter = [row for row in runs if row["drafter"] == drafter]
        best = max(of_drafter, key=lambda row: row["measured_speedup"])
        assert [row["is_best_measured"] for row in of_drafter] == [
            row is best for row in of_drafter
        ]
    costs = {row["cost"]: row for row in rows_of(planned, "plan_cost")}
    assert list(costs)[:4] == [
        *("plain step", "1 live row", "2 live rows", "3 live rows")
    ]
    for drafter in ("draft-model", "ngram"):
        assert costs[f"{drafter}: round, gamma 0"]["n"] == 2
        assert costs[f"{drafter}: proposal, gamma 2"]["ms"] > 0
    shares = rows_of(planned, "plan_acceptance")
    assert len(shares) == 2
    # Both drafters commit the texts of plain decoding.
    assert {row["repetition"] for row in (*shares, *runs)} == {runs[0]["repetition"]}
    assert 0 <= runs[0]["repetition"] < 1


def test_predictions_are_those_of_costs_and_acceptance(planned):
    """The rows say enough to compute them again."""
    ms = {row["cost"]: row["ms"] for row in rows_of(planned, "plan_cost")}
    ratios = {row["cost"]: row["ratio"] for row in rows_of(planned, "plan_cost")}
    (kept, *_) = (row["kept"] for row in rows_of(planned, "plan_acceptance"))
    first, *_ = rows_of(planned, "plan")
    assert first["predicted_tokens_per_round"] == pytest.approx(1 + kept[0])
    # A draft model always fills its windows.
    plain = ms["plain step"]
    parts = [ratios[name] * plain for name in ("1 live row", "2 live rows")]
    overhead = max(0, ratios["draft-model: round, gamma 0"] * plain - parts[0])
    none, one, two = (
        ratios[f"draft-model: proposal, gamma {gamma}"] * plain for gamma in (0, 1, 2)
    )
    draft = max(0, two - one)
    overhead += max(0, one - none - draft)
    round_ms = overhead + draft + max(parts)
    assert first["predicted_speedup"] == pytest.approx((1 + kept[0]) * plain / round_ms)


def test_a_run_that_does_not_match(folders, monkeypatch):
    """Exit status 2: predictions of another text mean nothing."""
    real = paired_runs.run_speculative

    def corrupted(pair, settings, prompt):
        run = real(pair, settings, prompt)
        return dataclasses.replace(run, tokens=[(t + 1) % 250 for t in run.tokens])

    monkeypatch.setattr(paired_runs, "run_speculative", corrupted)
    more = ("--drafter", "ngram", "--gamma", "2")
    assert plan.main(command(folders, *more)) == plan.NOT_MATCHED == 2


def test_an_interrupted_plan_leaves_whole_rows(folders, tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_runs, "run", interrupted)
    out = tmp_path / "out.jsonl"
    more = ("--drafter", "ngram", "--gamma", "2", "--out", str(out))
    assert plan.main(command(folders, *more)) == cli.INTERRUPTED == 130
    assert len(rows_of(out, "plan_verdict")) == 1
    assert str(out) in capsys.readouterr().err


def assert_fails_with(capsys, arguments: list[str], *words: str) -> None:
    """Asserts exit status 1 and one clear line, with no traceback."""
    try:
        status = plan.main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    error = capsys.readouterr().err
    assert status == cli.UNUSABLE == 1
    assert "Traceback" not in error
    (line,) = [line for line in error.splitlines() if "error:" in line]
    for word in words:
        assert word in line, line


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--drafter", "ngram,medusa"], ["'medusa'", "suffix"]),
        (["--gamma", "0,2"], ["--gamma"]),
        (["--gamma", "two"], ["'two'", "1,2,4"]),
        (["--gen-tokens", "2"], ["--gen-tokens 2", "up to 3 tokens"]),
        (["--gen-tokens", "4000"], ["--gen-tokens 4000 is above 2047"]),
        (["--prompts", "missing.jsonl"], ["missing.jsonl"]),
        (["--repeats", "0"], ["--repeats", "at least 1"]),
        (["--cost-repeats", "0"], ["--cost-repeats", "at least 1"]),
        (["--impl", "mosaic"], ["mosaic"]),
        (["--out", "/nowhere/out.jsonl"], ["/nowhere"]),
    ],
)
def test_bad_input(folders, capsys, more, words):
    assert_fails_with(capsys, command(folders, *more), *words)


def test_models_that_are_not_there(folders, capsys):
    assert_fails_with(capsys, ["--target", str(folders[0])], "--draft")
