"""The main job from its command line: exit status, lines written, bad input."""

import dataclasses

import pytest
from script_runs import (
    models_of,
    rows_of,
    with_another_token,
    write_rows,
)

from experiments import spec_round
from experiments.lib import (
    policies,
    results,
    runs,
    tables,
)
from spec_jax import loading
from spec_jax.analysis import metrics
from spec_jax.gamma import budget, goodput, threshold
from spec_jax.ops import dispatch


def command(folders, *more: str) -> list[str]:
    """A short run, without a text beside it, which takes programs of its own."""
    sizes = [
        "--gen-tokens",
        "6",
        "--gamma",
        "2",
        "--prompts",
        "2",
        "--temperature",
        "0",
    ]
    return [*models_of(folders), *sizes, *more]


def test_a_matched_run(folders, tmp_path):
    """Fails if a line is missing, or the summary is not that of the lines."""
    out = tmp_path / "out.jsonl"
    status = spec_round.main(command(folders, "--out", str(out), "--repeats", "2"))
    assert status == spec_round.MATCHED == 0
    *prompts, summary = rows_of(out)
    assert [row["id"] for row in prompts] == ["py-01", "py-02"]
    assert {row["kind"] for row in prompts} == {"prompt"}
    for row in prompts:
        assert row["matched"] and row["plain_ids"] == row["spec_ids"]
        assert len(row["baseline_e2e_s"]) == len(row["spec_e2e_s"]) == 2
        assert row["repetition"] == metrics.repetition(row["spec_ids"])
        assert row["acceptance_rate"] == row["accepted"] / row["proposed"]
    assert summary["kind"] == "summary" and summary["matched"] is True
    assert summary["verify_decode_mismatches"] == summary["nonfinite_logits"] == 0
    for name in ("tokens", "rounds", "proposed", "accepted"):
        assert summary[name] == sum(row[name] for row in prompts)
    assert summary["tercile_prompts"] == [1, 1]
    assert summary["impl"] == dispatch.resolve("auto") and summary["gamma"] == 2
    assert {field.name for field in tables.FIELDS} <= set(summary)


def test_a_run_that_does_not_match(folders, tmp_path, monkeypatch):
    """Exit status 2, and the replay counts the planted token."""
    real = runs.run_speculative

    def corrupted(lm, settings, prompt):
        run = real(lm, settings, prompt)
        return run if settings.gen_tokens == 1 else with_another_token(run)

    monkeypatch.setattr(runs, "run_speculative", corrupted)
    out = tmp_path / "out.jsonl"
    more = ("--ignore-stop", "--out", str(out))
    assert spec_round.main(command(folders, *more)) == spec_round.NOT_MATCHED == 2
    *prompts, summary = rows_of(out)
    assert summary["matched"] is False
    assert summary["verify_decode_mismatches"] == len(prompts) == 2


def test_a_rule_that_keeps_the_distribution_alone_is_not_compared(folders, tmp_path):
    """Above temperature 0; greedily it commits the target's tokens, and is."""
    out = tmp_path / "out.jsonl"
    more = ("--rule", "rejection", "--batch", "2", "--out", str(out))
    assert spec_round.main(command(folders, *more, "--temperature", "1")) == 0
    summary = rows_of(out)[-1]
    assert summary["rule"] == "rejection" and summary["matched"] is None
    assert summary["verify_decode_mismatches"] is None
    assert spec_round.main(command(folders, *more, "--temperature", "0")) == 0
    assert rows_of(out)[-1]["matched"] is True


def test_a_drafter_from_outside(folders, tmp_path, monkeypatch):
    """By its module, in a batch."""
    (tmp_path / "outside.py").write_text(
        "from spec_jax.drafters import ngram\n"
        "class Mine(ngram.PromptLookup):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    more = ("--drafter", "outside:Mine", "--batch", "2")
    assert spec_round.main(command(folders, *more)) == 0


def test_designs_and_settings_that_change_no_token(folders, tmp_path):
    """Other caches, prefills and pages."""
    out = tmp_path / "out.jsonl"
    rows = {}
    for name, more in {
        "ours": (),
        "static": ("--cache", "static", "--prefill", "rows"),
    }.items():
        more = (*more, "--prompts", "1", "--out", str(out))
        assert spec_round.main(command(folders, *more)) == 0, name
        rows[name] = rows_of(out)[-1]
    for name in ("rounds", "proposed", "accepted", "tokens"):
        assert len({row[name] for row in rows.values()}) == 1, name
    more = ("--prefill", "batched", "--page-size", "8", "--dtype", "bfloat16")
    assert spec_round.main(command(folders, *more, "--prompts", "1")) == 0


@pytest.mark.slow
def test_trees_change_no_token(folders, tmp_path):
    """Of a draft model and of lookup, one prompt after the other and in slots."""
    out = tmp_path / "out.jsonl"
    for more in (
        ("--tree", "2x3:5", "--drafter", "ngram", "--batch", "2"),
        ("--tree", "[[0],[1],[0,0],[0,1],[0,0,0]]"),
        ("--tree", "2x3:5", "--gamma-policy", "goodput"),
    ):
        assert spec_round.main(command(folders, *more, "--out", str(out))) == 0
        row = rows_of(out)[-1]
        assert row["matched"] and row["tree"].startswith(("2x3:5@", "[[0],[1]"))
        assert len(row["accepted_hist"]) == 4 and len(row["kept_by_rank"]) == 5
        # By what rounds are measured to cost, none may be worth a draft.
        assert "goodput" in more or row["rows_per_round"] > 1
        assert 1 <= row["rows_per_round"] <= 6
        drawn = rows_of(out)[-2]
        assert drawn["kind"] == "tree" and drawn["parents"][0] == 0
        path, column = [], drawn["kept"][-1] if drawn["kept"] else 0
        while column:
            path.insert(0, column)
            column = drawn["parents"][column]
        assert path == drawn["kept"]


def test_logits_that_are_not_finite_match_nothing(overflowing, tmp_path):
    """Finite weights that overflow at run time: equal tokens, and exit status 2."""
    out = tmp_path / "out.jsonl"
    more = ("--batch", "2", "--ignore-stop", "--out", str(out))
    assert spec_round.main(command(overflowing, *more)) == spec_round.NOT_MATCHED == 2
    *prompts, summary = rows_of(out)
    for row in prompts:
        assert row["plain_ids"] == row["spec_ids"] and not row["matched"]
        assert 0 < row["nonfinite_logits"] <= row["tokens"]
    assert summary["matched"] is False
    assert summary["nonfinite_logits"] == sum(p["nonfinite_logits"] for p in prompts)


def test_conversations_and_categories(folders, tmp_path):
    """Every turn is run; counts stand by category, in the table and in the summary."""
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"question_id": 1, "category": "chat", "turns": ["hello", "and then?"]},
        {"question_id": 2, "category": "math", "turns": ["1 + 1"]},
    ]
    write_rows(path, lines)
    more = ("--prompts", str(path), "--out", str(out), "--temperature", "0")
    assert spec_round.main(command(folders, *more)) == 0
    *prompts, summary = rows_of(out)
    assert [row["id"] for row in prompts] == ["1 turn 1", "1 turn 2", "2"]
    assert prompts[1]["prompt_tokens"] > prompts[0]["prompt_tokens"]
    parts = summary["by_category"]
    assert {name: part["prompts"] for name, part in parts.items()} == {
        "chat": 2,
        "math": 1,
    }
    for name in ("tokens", "proposed", "accepted"):
        assert sum(part[name] for part in parts.values()) == summary[name]


def test_tokens_are_compared_and_not_assumed():
    """Negative control of `matched`: one differing token is enough."""
    plain = runs.Plain(tokens=[1, 2, 3], timing=None)
    spec = runs.Speculative(
        tokens=[1, 2, 4], origins=[], timing=None, counters=metrics.Counters()
    )
    result = results.PromptResult(
        prompt=None, prompt_ids=[1], plain=[plain], spec=[spec], mismatches=0
    )
    assert not result.matched
    same = dataclasses.replace(spec, tokens=[1, 2, 3])
    assert dataclasses.replace(result, spec=[same]).matched
    of_nan = dataclasses.replace(same, counters=metrics.Counters(nonfinite=1))
    assert not dataclasses.replace(result, spec=[of_nan]).matched
    of_nan = dataclasses.replace(plain, nonfinite=1)
    assert not dataclasses.replace(result, plain=[of_nan], spec=[same]).matched
    assert results.all_matched([True, None]) is None
    assert results.all_matched([None, False]) is False


@pytest.mark.slow
@pytest.mark.few(1)
def test_policies_by_name(folders):
    """The costs that goodput goes by are measured, one for each gamma."""
    lm = loading.load(folders[0], drafter="ngram", gamma_max=2)
    settings = runs.Settings(gamma=2, gen_tokens=6, capacity=64, page_size=16)
    made = lambda name: policies.with_policy(name, lm, settings, [5, 9, 31, 7, 5, 9])
    assert made("fixed") == settings
    by_share = made("threshold").gamma_policy
    # What ngram does not find costs nothing, and is no evidence.
    assert by_share.probing.empty_is_free
    assert isinstance(by_share, threshold.Threshold) and by_share.ladder == (0, 1, 2)
    by_speed = made("goodput")
    assert isinstance(by_speed.gamma_policy, goodput.Goodput)
    assert by_speed.policy_state.round_s.shape == (3,)
    within = made("budget").gamma_policy
    assert isinstance(within, budget.Budget) and within.empty_is_free
    with pytest.raises(ValueError, match="'none' is not one of fixed, threshold"):
        made("none")
    settings = dataclasses.replace(settings, rule="block")
    with pytest.raises(ValueError, match="'budget' chooses gamma by measured times"):
        made("budget")


def test_a_target_without_gamma_adapts(folders):
    """And the embedded pair does not, so that its counts are the same in every run."""
    chosen = lambda *more: vars(spec_round.parse_args(more))
    target = models_of(folders)
    for more, name, gamma in (
        ((), "fixed", 4),
        (("--gamma-policy", "budget"), "budget", 7),
        (("--gamma-policy", "goodput"), "goodput", 4),
        (target, "budget", 7),
        ((*target, "--gamma", "2"), "fixed", 2),
        ((*target, "--rule", "block"), "fixed", 4),
        ((*target, "--tree", "2x3:5"), "fixed", 4),
        ((*target, "--gamma-policy", "budget", "--gamma", "3"), "budget", 3),
    ):
        found = chosen(*more)
        assert (found["gamma_policy"], found["gamma"]) == (name, gamma), more
