"""Sweeps: what is run and what is not, resuming, totals, and bad input."""

import pathlib

import pytest
import tiny_pair
from script_runs import assert_fails_with, interrupted, models_of, rows_of, write_rows

from experiments import reproduce, sweep
from experiments.lib import sweep_cells as cells_lib, tables


GEN_TOKENS = 6
PROMPTS = [
    {"id": "1", "category": "code", "prompt": "def first(x):"},
    {"id": "2", "category": "prose", "prompt": "one, two, one, two"},
    {"id": "3", "category": "code", "prompt": "import second"},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and a draft, and a file of prompts of two categories."""
    folder = tmp_path_factory.mktemp("pair")
    write_rows(folder / "prompts.jsonl", PROMPTS)
    return tiny_pair.write(folder)


def prompts_of(folders) -> pathlib.Path:
    return folders[0].parent / "prompts.jsonl"


def command(folders, out: pathlib.Path, *more: str) -> list[str]:
    return [
        *(*models_of(folders), "--drafter", "ngram"),
        *("--gamma", "1,2", "--gen-tokens", str(GEN_TOKENS), "--ignore-stop"),
        *("--prompts", str(prompts_of(folders)), "--repeats", "2", "--out", str(out)),
        *more,
    ]


@pytest.fixture(scope="module")
def swept(folders, tmp_path_factory):
    """The file of a whole sweep."""
    out = tmp_path_factory.mktemp("out") / "sweep.jsonl"
    assert sweep.main(command(folders, out)) == sweep.MATCHED == 0
    return out


@pytest.fixture
def copied(swept, tmp_path):
    """A copy of it that a test may change."""
    path = tmp_path / "sweep.jsonl"
    path.write_bytes(swept.read_bytes())
    return path


def test_contexts_are_cells(folders, tmp_path):
    """Fails if a prompt has another length than its cell says."""
    out = tmp_path / "sweep.jsonl"
    more = ("--context", "12,40", "--gamma", "2", "--repeats", "1")
    assert sweep.main(command(folders, out, *more)) == 0
    found = [(row["category"], row["prompts"], row["matched"]) for row in rows_of(out)]
    assert found == [("12", 3, True), ("40", 3, True)]


def test_every_cell_has_a_row(swept, folders):
    rows = rows_of(swept)
    places = [(row["drafter"], row["gamma"], row["category"]) for row in rows]
    assert places == [
        ("ngram", gamma, category) for gamma in (1, 2) for category in ("code", "prose")
    ]
    for row in rows:
        assert row["matched"] is True and row["verify_decode_mismatches"] == 0
        assert row["prompts"] == (2 if row["category"] == "code" else 1)
        assert row["tokens"] == row["prompts"] * GEN_TOKENS
        assert {field.name for field in tables.FIELDS} <= set(row)
        assert row["temperature"] == 0 and row["gamma_policy"] == "fixed"
        assert row["prompt_source"] == str(prompts_of(folders))
        assert row["speedup_e2e_p10"] <= row["speedup_e2e"] <= row["speedup_e2e_p90"]


def test_a_total_is_that_of_one_run(swept):
    """Fails if categories are averaged, and not added up."""
    of_gamma = [row for row in rows_of(swept) if row["gamma"] == 2]
    total = cells_lib.total(of_gamma)
    assert total["category"] == cells_lib.ALL and total["prompts"] == 3
    for name in ("tokens", "rounds", "proposed", "accepted"):
        assert total[name] == sum(row[name] for row in of_gamma)
    ratios = []
    for repeat in range(2):
        seconds = [
            sum(
                prefill_s + decode_s
                for row in of_gamma
                for prefill_s, decode_s, _ in row[name][repeat]
            )
            for name in ("plain_timings", "spec_timings")
        ]
        ratios.append(seconds[0] / seconds[1])
    assert total["speedup_e2e"] == pytest.approx(sum(ratios) / 2)
    weighted = sum(row["tokens"] * row["repetition"] for row in of_gamma)
    assert total["repetition"] == pytest.approx(weighted / total["tokens"])
    assert total["tercile_prompts"] == [1, 1, 1]
    # A total of one category is that category's own row.
    (alone,) = cells_lib.totals(of_gamma[:1])
    for name in ("speedup_decode", "acceptance_rate", "baseline_e2e_tpot_ms"):
        assert alone[name] == of_gamma[0][name]
    with pytest.raises(ValueError, match="2 cells have no total"):
        cells_lib.total(rows_of(swept))


def test_totals_are_published_with_their_commit(copied):
    before = rows_of(copied)
    rows = reproduce.shortened(rows_of(copied), totals=True)
    assert [row["category"] for row in rows] == [cells_lib.ALL] * 2
    for row, gamma in zip(rows, (1, 2), strict=True):
        of_gamma = [row for row in before if row["gamma"] == gamma]
        assert row["accepted"] == sum(row["accepted"] for row in of_gamma)
        assert row["gamma"] == gamma and "texts" not in row
        for name in ("git_commit", "target_sha256", "native_isa", "gen_tokens"):
            assert row[name] == before[0][name]


def test_published_totals_stand_for_themselves(copied):
    """Fails if a figure cannot be drawn from published rows."""
    before = rows_of(copied)
    published = reproduce.shortened(rows_of(copied), totals=True)
    assert cells_lib.totals(published) == published
    # Negative controls: a total among what it was made of, and a category without it.
    mixed = [published[0], *(row for row in before if row["gamma"] == 1)]
    del before[0]["counters"]
    for rows in (mixed, before[:1]):
        with pytest.raises(ValueError, match="rows without counters, .* have no total"):
            cells_lib.totals(rows)


def test_finished_cells_are_not_run_again(folders, copied, monkeypatch, capsys):
    before = copied.read_bytes()
    monkeypatch.setattr(sweep, "run_cell", interrupted)
    assert sweep.main(command(folders, copied)) == 0
    assert copied.read_bytes() == before
    printed = " ".join(capsys.readouterr().out.split())
    assert "4 cells, 4 of them in" in printed
    assert "by category" in printed and "prose" in printed
    # Negative control: a cell that is not there is run.
    assert sweep.main(command(folders, copied, "--temperature", "0,0.7")) == 130


def test_other_settings_and_models_are_refused(folders, copied, tmp_path, capsys):
    """With all that differs, and the file as it was."""
    before = copied.read_bytes()
    assert_fails_with(
        sweep.main,
        capsys,
        command(folders, copied, "--gen-tokens", "7", "--seed", "3"),
        *("gen_tokens is 6 there and 7 here", "seed is 0 there and 3 here"),
    )
    other = tiny_pair.write_model(
        tmp_path / "target", tiny_pair.config(num_layers=2), seed=5
    )
    arguments = command((other, folders[1]), copied)
    arguments += ["--prompts", str(prompts_of(folders))]
    assert_fails_with(sweep.main, capsys, arguments, "target_sha256")
    assert copied.read_bytes() == before
