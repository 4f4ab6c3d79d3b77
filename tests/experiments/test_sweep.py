"""Sweeps: cells that are run and cells that are not, resuming, and bad input."""

import pathlib

import pytest
import tiny_pair
from script_runs import assert_fails_with, interrupted, models_of, rows_of, write_rows

from experiments import spec_round, sweep
from experiments.lib import tables


GEN_TOKENS = 6
PROMPTS = [
    {"id": "1", "category": "code", "prompt": "def first(x):"},
    {"id": "2", "category": "prose", "prompt": "one, two, one, two"},
    {"id": "3", "category": "code", "prompt": "import second"},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns a target and a draft, with a file of prompts of two categories beside."""
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
    """Returns the file of a whole sweep."""
    out = tmp_path_factory.mktemp("out") / "sweep.jsonl"
    assert sweep.main(command(folders, out)) == sweep.MATCHED == 0
    return out


@pytest.fixture
def copied(swept, tmp_path):
    """Returns a copy of it that a test may change."""
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
    """Fails if a category is left out, or a row has another cell's numbers."""
    rows = rows_of(swept)
    places = [(row["drafter"], row["gamma"], row["category"]) for row in rows]
    assert places == [("ngram", gamma, sweep.ALL) for gamma in (1, 2)]
    for row in rows:
        assert row["matched"] is True and row["verify_decode_mismatches"] == 0
        assert row["prompts"] == 3 and row["tokens"] == 3 * GEN_TOKENS
        assert set(tables.FIELDS) <= set(row)
        assert row["temperature"] == 0 and row["gamma_policy"] == "fixed"
        assert row["prompt_source"] == str(prompts_of(folders))
        assert row["speedup_e2e_p10"] <= row["speedup_e2e"] <= row["speedup_e2e_p90"]
        parts = row["by_category"]
        assert {name: one["prompts"] for name, one in parts.items()} == {
            "code": 2,
            "prose": 1,
        }
        for name in ("tokens", "rounds", "proposed", "accepted"):
            assert row[name] == sum(one[name] for one in parts.values())


def test_a_cell_is_a_run_of_spec_round(swept, folders, tmp_path):
    """Fails if it drafts or counts differently from the script of one run."""
    out = tmp_path / "out.jsonl"
    same = [one for one in command(folders, out) if one != "1,2"]
    same.remove("--gamma")
    assert spec_round.main([*same, "--gamma", "2"]) == 0
    (summary,) = rows_of(out, "summary")
    row = rows_of(swept)[-1]
    for name in ("tokens", "rounds", "proposed", "accepted", "accepted_hist"):
        assert row[name] == summary[name]
    assert row["tercile_prompts"] == summary["tercile_prompts"] == [1, 1, 1]


def test_finished_cells_are_not_run_again(folders, copied, monkeypatch, capsys):
    before = copied.read_bytes()
    monkeypatch.setattr(sweep.Bench, "__call__", interrupted)
    assert sweep.main(command(folders, copied)) == 0
    assert copied.read_bytes() == before
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 cells, 2 of them in" in printed
    assert "by category" in printed and "prose" in printed
    # Negative control: a cell that the file lacks is run.
    assert sweep.main(command(folders, copied, "--temperature", "0,0.7")) == 130


def test_other_settings_prompts_and_models_are_refused(
    folders, copied, tmp_path, capsys
):
    """Fails unless the message names all that differs, and the file stays as it was."""
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
    edited = [row | {"prompts_sha256": "0"} for row in rows_of(copied)]
    write_rows(copied, edited)
    arguments = command(folders, copied)
    assert_fails_with(sweep.main, capsys, arguments, "prompts_sha256 is another")
