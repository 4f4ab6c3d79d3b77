"""Sweeps: what is run and what is not, resuming, totals, and bad input."""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import pathlib

import pytest
import tiny_pair

from experiments import sweep
from experiments.lib import cli, flags
from experiments.support import (
    paired_runs,
    prompt_runs,
    report,
    sweep_file,
    sweep_rows,
)
from spec_jax.analysis import conventions, metrics


GEN_TOKENS = 6
PROMPTS = [
    {"id": "1", "category": "code", "prompt": "def first(x):"},
    {"id": "2", "category": "prose", "prompt": "one, two, one, two"},
    {"id": "3", "category": "code", "prompt": "import second"},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and a draft, and a file of prompts of two categories beside them."""
    folder = tmp_path_factory.mktemp("pair")
    lines = "".join(json.dumps(row) + "\n" for row in PROMPTS)
    (folder / "prompts.jsonl").write_text(lines)
    return tiny_pair.write(folder)


def prompts_of(folders) -> pathlib.Path:
    return folders[0].parent / "prompts.jsonl"


def command(folders, out: pathlib.Path, *more: str) -> list[str]:
    target, draft = folders
    return [
        *("--target", str(target), "--draft", str(draft), "--drafter", "ngram"),
        *("--gamma", "1,2", "--gen-tokens", str(GEN_TOKENS), "--ignore-stop"),
        *("--prompts", str(prompts_of(folders)), "--repeats", "2", "--out", str(out)),
        *more,
    ]


def rows_of(path: pathlib.Path) -> list[dict]:
    """The cells of a file, the header apart."""
    header, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert header["kind"] == sweep_file.HEADER
    return rows


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


def must_not_run(*_, **__):
    raise AssertionError("a prompt was run")


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
        assert {field.name for field in report.FIELDS} <= set(row)
        assert row["temperature"] == 0 and row["gamma_policy"] == "fixed"
        assert row["prompt_source"] == str(prompts_of(folders))
        assert row["speedup_e2e_p10"] <= row["speedup_e2e"] <= row["speedup_e2e_p90"]


def test_conventions_of_other_tools(swept):
    """As `spec_jax.conventions` has them, from the counters of the row."""
    for row in rows_of(swept):
        counters = sweep_rows._counters(row)
        metrics.identities(counters)
        found = row["conventions"]
        vllm = conventions.to_vllm(counters)
        assert found["vllm"]["mean_acceptance_length"] == vllm.mean_acceptance_length
        assert found["eagle"]["tau"] == pytest.approx(row["mean_accepted_length"])
        assert found["spec_bench"]["mean_accepted_tokens"] == pytest.approx(
            row["mean_accepted_length"]
        )
        sglang = conventions.to_sglang(counters)
        assert found["sglang"]["spec_accept_length"] == sglang.spec_accept_length
        assert found["sglang"]["spec_accept_length"] == row["tokens_per_target_step"]
    silent = sweep_rows.by_convention(
        metrics.Counters(tokens=1, rounds=1, accepted_hist=(1,))
    )
    assert "eagle" not in silent and silent["vllm"]["draft_acceptance_rate"] is None


def test_a_total_is_that_of_one_run(swept):
    """Fails if categories are averaged, and not added up."""
    of_gamma = [row for row in rows_of(swept) if row["gamma"] == 2]
    total = sweep_rows.total(of_gamma)
    assert total["category"] == sweep_rows.ALL and total["prompts"] == 3
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
    (alone,) = sweep_rows.totals(of_gamma[:1])
    for name in ("speedup_decode", "acceptance_rate", "baseline_e2e_tpot_ms"):
        assert alone[name] == of_gamma[0][name]
    with pytest.raises(ValueError, match="2 cells have no total"):
        sweep_rows.total(rows_of(swept))


def test_finished_cells_are_not_run_again(folders, copied, monkeypatch, capsys):
    before = copied.read_bytes()
    monkeypatch.setattr(prompt_runs, "run_prompt", must_not_run)
    assert sweep.main(command(folders, copied)) == 0
    assert copied.read_bytes() == before
    printed = " ".join(capsys.readouterr().out.split())
    assert "4 cells, 4 of them in" in printed
    assert "by category" in printed and "prose" in printed
    # Negative control: a cell that is not there is run.
    monkeypatch.setattr(paired_runs, "warm_up", lambda *_: 0.0)
    with pytest.raises(AssertionError, match="a prompt was run"):
        sweep.main(command(folders, copied, "--temperature", "0,0.7"))


@pytest.mark.slow
def test_a_larger_grid_adds_to_the_file(folders, copied, monkeypatch):
    """Sampled cells and an adaptive policy: only they are run, and they match."""
    before, real, ran = copied.read_bytes(), prompt_runs.run_prompt, []

    def counted(*arguments, **keywords):
        ran.append(arguments[2].id)
        return real(*arguments, **keywords)

    monkeypatch.setattr(prompt_runs, "run_prompt", counted)
    more = ("--temperature", "0,0.7", "--gamma-policy", "fixed,threshold")
    more += ("--gamma", "2", "--gamma-max", "2")
    assert sweep.main(command(folders, copied, *more)) == 0
    assert copied.read_bytes().startswith(before)
    new = rows_of(copied)[4:]
    places = {(row["temperature"], row["gamma_policy"]) for row in new}
    assert places == {(0.7, "fixed"), (0.7, "threshold"), (0, "threshold")}
    assert all(row["matched"] for row in new)
    assert ran == ["1", "3", "2"] * 3


def test_an_interrupted_sweep_goes_on(folders, tmp_path, monkeypatch, capsys):
    """Ctrl-C keeps what is finished; the same command runs the rest."""
    real, numbers = prompt_runs.run_prompt, itertools.count(1)

    def interrupted(*arguments, **keywords):
        if next(numbers) == 4:  # within the third cell
            raise KeyboardInterrupt
        return real(*arguments, **keywords)

    out = tmp_path / "sweep.jsonl"
    monkeypatch.setattr(prompt_runs, "run_prompt", interrupted)
    assert sweep.main(command(folders, out)) == cli.INTERRUPTED == 130
    assert "goes on from there" in capsys.readouterr().err
    assert len(rows_of(out)) == 2
    assert sweep.main(command(folders, out)) == 0
    cells = [sweep_rows.cell_of(row) for row in rows_of(out)]
    assert len(cells) == len(set(cells)) == 4


def test_half_a_line_is_dropped(folders, copied, monkeypatch):
    """What a machine that stopped left behind: the cell is run again."""
    whole = copied.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    copied.write_bytes(whole[: last + 40])
    assert sweep.main(command(folders, copied)) == 0
    assert len(rows_of(copied)) == 4
    assert copied.read_bytes().startswith(whole[:last])


def test_half_a_header_is_begun_anew(swept, tmp_path):
    """Nothing was finished, and nothing is lost."""
    header = swept.read_text().splitlines(keepends=True)[0]
    path = tmp_path / "sweep.jsonl"
    settings = {
        name: value for name, value in json.loads(header).items() if name != "kind"
    }
    for kept in (0, 5, 60):
        path.write_text(header[:kept])
        with sweep_file.SweepFile(path, settings) as file:
            assert file.rows == []
        assert path.read_text() == header


def test_a_run_that_does_not_match(folders, tmp_path, monkeypatch, capsys):
    """Exit status 2, and the table says so."""
    real = paired_runs.run_speculative

    def corrupted(pair, settings, prompt):
        run = real(pair, settings, prompt)
        return dataclasses.replace(run, tokens=[(t + 1) % 250 for t in run.tokens])

    monkeypatch.setattr(paired_runs, "run_speculative", corrupted)
    out = tmp_path / "sweep.jsonl"
    arguments = command(folders, out, "--gamma", "2")
    assert sweep.main(arguments) == sweep.NOT_MATCHED == 2
    assert not any(row["matched"] for row in rows_of(out))
    assert "no, " in capsys.readouterr().out
    # Resumed, it is still not matched.
    assert sweep.main(arguments) == sweep.NOT_MATCHED


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is missing"
)
def test_figures_at_the_end(folders, copied, tmp_path):
    figures = tmp_path / "figures"
    assert sweep.main(command(folders, copied, "--figures", str(figures))) == 0
    names = {path.name for path in figures.iterdir()}
    assert names == {"sweep_speedup.svg", "sweep_categories.svg"}
    assert "prose" in (figures / "sweep_categories.svg").read_text()


def test_a_figure_that_cannot_be_drawn_says_why(folders, copied, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    figures = tmp_path / "figures"
    more = ("--gamma", "2", "--gamma-max", "2", "--figures", str(figures))
    assert sweep.main(command(folders, copied, *more)) == 0
    assert "sweep_speedup is not drawn: no cells of two" in capsys.readouterr().out


def test_time_left():
    clock = iter([0.0, 10.0, 30.0]).__next__
    pace = sweep._Pace(4, clock)
    assert pace.after(1) == "1 of 4 prompts, 0:00:30 left"
    assert pace.after(2) == "3 of 4 prompts, 0:00:10 left"


def assert_fails_with(capsys, arguments: list[str], *words: str) -> None:
    """Asserts exit status 1 and one clear line, with no traceback."""
    try:
        status = sweep.main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    error = capsys.readouterr().err
    assert status == cli.UNUSABLE == 1
    assert "Traceback" not in error
    (line,) = [line for line in error.splitlines() if "error:" in line]
    for word in words:
        assert word in line, line


def test_other_settings_are_refused(folders, copied, capsys):
    """With all that differs, and the file as it was."""
    before = copied.read_bytes()
    more = ("--gen-tokens", "7", "--seed", "3")
    assert_fails_with(
        capsys,
        command(folders, copied, *more),
        *("gen_tokens is 6 there and 7 here", "seed is 0 there and 3 here"),
    )
    assert_fails_with(
        capsys, command(folders, copied, "--gamma", "4"), "gamma_max is 2 there and 4"
    )
    assert copied.read_bytes() == before


def test_another_target_is_refused(folders, copied, tmp_path, capsys):
    other = tiny_pair.write_model(
        tmp_path / "target", tiny_pair.config(num_layers=2), seed=5
    )
    arguments = command((other, folders[1]), copied)
    arguments += ["--prompts", str(prompts_of(folders))]
    assert_fails_with(capsys, arguments, "target_sha256")


def test_prompts_that_have_changed_are_refused(folders, tmp_path, swept, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text(prompts_of(folders).read_text())
    out = tmp_path / "sweep.jsonl"
    text = swept.read_text().replace(str(prompts_of(folders)), str(path))
    out.write_text(text)
    arguments = command(folders, out, "--prompts", str(path))
    assert sweep.main(arguments) == 0
    path.write_text(path.read_text().replace("import second", "import third"))
    assert_fails_with(capsys, arguments, "category code", "others than those")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"kind": "summary"}\n', ["line 1", "not of a sweep"]),
        ("[1]\n", ["line 1", "not of a sweep"]),
        ("a line without an end", ["not of a sweep"]),
        ("def f():\n    pass\n", ["line 1", "no JSON"]),
        ("HEADER{\n{}\n", ["line 2", "no JSON", "only the last line"]),
        ("HEADER[1]\n", ["line 2", "not of a sweep"]),
        ('HEADER{"kind": "sweep"}\n', ["lacks drafter"]),
    ],
)
def test_foreign_and_broken_files_are_refused(
    folders, swept, tmp_path, capsys, content, words
):
    header = swept.read_text().splitlines(keepends=True)[0]
    path = tmp_path / "sweep.jsonl"
    path.write_text(content.replace("HEADER", header))
    before = path.read_bytes()
    assert_fails_with(capsys, command(folders, path), *words)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--drafter", "medusa"], ["'medusa'", "suffix"]),
        (["--gamma", "0"], ["--gamma"]),
        (["--gamma", "4", "--gamma-max", "2"], ["--gamma 4", "--gamma-max 2"]),
        (["--gamma-policy", "greedy"], ["'greedy'", "threshold"]),
        (["--temperature", "hot"], ["'hot'", "0,0.7"]),
        (["--temperature", "0,nan"], ["nan"]),
        (["--temperature=-1"], ["negative"]),
        (["--temperature", "0,1", "--top-p", "0"], ["--top-p 0.0 is outside"]),
        (["--top-k", "0"], ["--top-k", "at least 1"]),
        (["--prompts", "missing.jsonl"], ["missing.jsonl"]),
        (["--prompts", "0"], ["--prompts"]),
        (["--gen-tokens", "4000"], ["--gen-tokens 4000 is above 2047"]),
        (["--impl", "mosaic"], ["mosaic"]),
        (["--out", "/nowhere/sweep.jsonl"], ["/nowhere"]),
        (["--out", "/"], ["directory"]),
        (
            ["--figures", "/dev/null/x"],
            ["/dev/null/x", "no folder that can be written to"],
        ),
    ],
)
def test_bad_input(folders, tmp_path, capsys, more, words):
    assert_fails_with(capsys, command(folders, tmp_path / "out.jsonl", *more), *words)


def test_a_file_is_required(folders, capsys):
    arguments = command(folders, pathlib.Path("x"))
    arguments = arguments[: arguments.index("--out")]
    assert_fails_with(capsys, arguments, "--out")
    assert_fails_with(
        capsys, ["--target", str(folders[0]), "--out", "x.jsonl"], "--draft"
    )


def test_without_matplotlib_one_line_says_how_to_get_it(
    folders, tmp_path, monkeypatch, capsys
):
    """Before the work, and not after it."""
    monkeypatch.setattr(sweep.importlib.util, "find_spec", lambda name: None)
    more = ("--figures", str(tmp_path / "figures"))
    assert_fails_with(
        capsys, command(folders, tmp_path / "out.jsonl", *more), "'.[plot]'"
    )


def test_filters_are_for_cells_that_draw():
    """Fails if a greedy cell beside others is refused, or filters are ignored."""
    args = argparse.Namespace(
        temperature=(0.0, 0.7), top_k=20, top_p=1.0, min_p=0.0, seed=0
    )
    assert flags.sampling_settings(args, 0.0) is None
    assert int(flags.sampling_settings(args, 0.7).top_k) == 20
    args.top_p = 2.0
    with pytest.raises(ValueError, match="--top-p 2.0 is outside"):
        flags.sampling_settings(args, 0.0)
