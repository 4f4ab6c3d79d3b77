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


def command(folders, out: pathlib.Path, *more: str) -> list[str]:
    """Returns flags; the prompts are written beside the rows."""
    prompts = write_rows(out.parent / "prompts.jsonl", PROMPTS)
    flags = f"--drafter ngram --gamma 1,2 --gen-tokens {GEN_TOKENS} --ignore-stop "
    flags += f"--prompts {prompts} --repeats 2 --out {out}"
    return [*models_of(folders), *flags.split(), *more]


@pytest.fixture(scope="module")
def swept(folders, tmp_path_factory):
    """Returns the file of a whole sweep."""
    out = tmp_path_factory.mktemp("out") / "sweep.jsonl"
    assert sweep.main(command(folders, out)) == 0
    return out


def test_contexts_are_cells(folders, tmp_path):
    """Fails if a prompt has another length than its cell says."""
    out = tmp_path / "sweep.jsonl"
    more = ("--context", "12,40", "--gamma", "2", "--repeats", "1")
    assert sweep.main(command(folders, out, *more)) == 0
    found = [(row["category"], row["prompts"], row["matched"]) for row in rows_of(out)]
    assert found == [("12", 3, True), ("40", 3, True)]


def test_every_cell_has_a_row(swept):
    """Fails if a category is left out, or a row has another cell's numbers."""
    rows = rows_of(swept)
    places = [(row["drafter"], row["gamma"], row["category"]) for row in rows]
    assert places == [("ngram", gamma, sweep.ALL) for gamma in (1, 2)]
    for row in rows:
        assert row["matched"] is True and row["verify_decode_mismatches"] == 0
        assert row["prompts"] == 3 and row["tokens"] == 3 * GEN_TOKENS
        assert set(tables.FIELDS) <= set(row)
        assert row["temperature"] == 0 and row["gamma_policy"] == "fixed"
        assert row["speedup_e2e_p10"] <= row["speedup_e2e"] <= row["speedup_e2e_p90"]
        parts = row["by_category"]
        assert parts["code"]["prompts"] == 2 and parts["prose"]["prompts"] == 1
        for name in ("tokens", "rounds", "proposed", "accepted"):
            assert row[name] == sum(one[name] for one in parts.values())


def test_a_cell_is_a_run_of_spec_round(swept, folders, tmp_path):
    """Fails if it drafts or counts differently from the script of one run."""
    given = ["--gamma", "2", "--repeats", "1"]
    flags = command(folders, tmp_path / "out.jsonl")
    at = flags.index("1,2")
    assert spec_round.main([*flags[: at - 1], *flags[at + 1 :], *given]) == 0
    (summary,) = rows_of(tmp_path / "out.jsonl", "summary")
    row = rows_of(swept)[-1]
    for name in ("tokens", "rounds", "proposed", "accepted", "accepted_hist"):
        assert row[name] == summary[name]
    assert row["tercile_prompts"] == summary["tercile_prompts"] == [1, 1, 1]


def test_finished_cells_are_not_run_again(folders, swept, monkeypatch, capsys):
    before = swept.read_bytes()
    monkeypatch.setattr(sweep.Bench, "__call__", interrupted)
    assert sweep.main(command(folders, swept)) == 0
    assert swept.read_bytes() == before
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 cells, 2 of them in" in printed
    assert "by category" in printed and "prose" in printed
    # Negative control: a cell that the file lacks is run.
    assert sweep.main(command(folders, swept, "--temperature", "0,0.7")) == 130


def test_other_settings_prompts_and_models_are_refused(
    folders, swept, tmp_path, capsys
):
    """Fails unless the message names all that differs, and the file stays as it was."""
    path, config = tmp_path / "sweep.jsonl", tiny_pair.config(num_layers=2)
    other = tiny_pair.write_model(tmp_path / "target", config, seed=5)
    longer = ("--gen-tokens", "7", "--seed", "3")
    for pair, edit, more, words in (
        (folders, {}, longer, ("gen_tokens is 6 there and 7", "seed is 0 there and 3")),
        ((other, folders[1]), {}, (), ("target_sha256",)),
        (folders, {"prompts_sha256": "0"}, (), ("prompts_sha256 is another",)),
    ):
        write_rows(path, [row | edit for row in rows_of(swept)])
        before = path.read_bytes()
        arguments = command(pair, path, *more)
        arguments += ["--prompts", str(swept.parent / "prompts.jsonl")]
        assert_fails_with(sweep.main, capsys, arguments, *words)
        assert path.read_bytes() == before
