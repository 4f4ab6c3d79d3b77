"""Published results: tables and figures match their rows, and all can be made anew."""

import argparse
import importlib
import json
import pathlib
import re
import shlex

import numpy as np
import pytest

from experiments import reproduce
from experiments.lib import (
    figures,
    files,
    published,
    records,
    reproduction,
)
from spec_jax import testing
from spec_jax.model import hub
from spec_jax.native import build


RESULTS = published.RESULTS
TEXTS = {page.name: page.read_text() for page in published.PAGES}


@pytest.mark.parametrize("page", [n for n in TEXTS if "<!-- rows: " in TEXTS[n]])
def test_tables_are_of_the_rows(page):
    """Fails if a number was typed by hand, or is older than its row."""
    text = TEXTS[page]
    assert published.update(text) == text
    # Negative control.
    digit = re.search(r"(?s)<!-- rows: .*?\| [^|]*([0-9]) ", text).start(1)
    other = str((int(text[digit]) + 1) % 10)
    assert published.update(text[:digit] + other + text[digit + 1 :]) == text


def test_every_table_is_on_a_page_and_has_rows(monkeypatch):
    pages = "".join(TEXTS.values())
    found = re.findall(r"<!-- rows: (\w+) -->", pages)
    assert found and set(found) == set(published.TEMPLATES)
    assert len(found) == pages.count("<!-- end of rows -->")
    template = ("no_such_file.jsonl: summary", "| gamma |", "| {gamma} |")
    monkeypatch.setitem(published.TEMPLATES, "none", template)
    with pytest.raises(ValueError, match="no rows for the table none: no_such_file"):
        published.table("none")


def test_the_table_of_rounds_is_in_the_figure():
    """Fails if the figure lacks a run that the table shows."""
    rows = published.rows_of("spec_round*.jsonl", "summary")
    drawn = figures.read_source(RESULTS / "figures/speedup.svg")
    assert set(figures.digests(rows)) <= set(drawn)


def test_rows_are_of_commits():
    """Fails if a row names no commit, or was measured with changed code."""
    for path in RESULTS.glob("*.jsonl"):
        rows = files.read_rows(path)
        for row in rows:
            if row["kind"] == "prompt" and rows[-1]["kind"] == "summary":
                row = rows[-1]  # It names the commit for its prompts.
            assert row.get("git_commit") and row.get("git_dirty") is False, path


def test_rows_name_no_folder_of_a_machine():
    for path in (*RESULTS.glob("*.jsonl"), *RESULTS.glob("certificates/*.json")):
        assert '"/' not in path.read_text(), path


def test_every_step_can_be_parsed(tmp_path, monkeypatch):
    """Fails if a script loses a flag, or two steps write to one file."""
    monkeypatch.setattr(hub, "cache", lambda: tmp_path)
    (tmp_path / hub.FETCHED["smollm2"]).touch()
    # Other tests may have loaded kernels: no others can be chosen after that.
    monkeypatch.setattr(build, "choose", lambda isa: None)
    steps = list(reproduction.steps())
    assert len({step.file for step in steps}) == len(steps)
    words = {name: name for name in ("results", *reproduce.FOLDERS)}
    for step in steps:
        assert len(step.runs) == 1 or step.keep
        for command in step.runs:
            script, *arguments = shlex.split(command.format(**words))
            if step.flag:
                arguments = [step.flag, str(tmp_path / "out"), *arguments]
            importlib.import_module(f"experiments.{script}").parse_args(arguments)
    # All rows and certificates that are published today are among their files.
    today = {*RESULTS.glob("certificates/*.json"), *RESULTS.glob("*.jsonl")}
    assert today <= {step.path for step in steps}


def test_a_step_has_the_rows_of_all_its_runs(tmp_path, monkeypatch):
    """Fails if a run that fails leaves rows, or those of one run are lost."""
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    args = argparse.Namespace(allow_dirty=True, data=None, llama_bin=None, texts=None)
    step = reproduction.Step(file="x.jsonl", runs=("one", "two"))
    asked = []

    def call(script, arguments):
        asked.append(script)
        is_cut_off = asked.count("two") == 1 and script == "two"
        row = {"kind": "row", "script": script}
        pathlib.Path(arguments[1]).write_text("" if is_cut_off else json.dumps(row))
        return 1 if is_cut_off else 0

    monkeypatch.setattr(reproduce, "call", call)
    assert reproduce.run_step(args, step) == 1 and not step.path.exists()
    assert reproduce.run_step(args, step) == 0
    assert asked == ["one", "two", "one", "two"]
    found = [row["script"] for row in files.read_rows(step.path)]
    assert found == ["one", "two"]


def test_published_rows_are_short():
    """Fails if they lose bits of float32, or keep more digits or local folders."""
    third = 0.1 + 1 / 3
    exact = float(np.nextafter(np.float32(third), np.float32(1)))
    row = {
        "kind": "a", "s": [third, {"x": 1e-300 / 3}], "n": 12345678901234567890,
        "exact": exact, "prompt_source": "/home/me/set/test.jsonl:5",
        "drafter": "/home/me/dflash", "plain_ids": [1, 2], "spec_ids": [1, 2],
        "by_category": {"b": {"s": 1}}, "argv": ["--out", f"{RESULTS}/a.jsonl"],
    }  # fmt: skip
    rows = [row, {"kind": "b", "plain_ids": [1, 2], "spec_ids": [1, 3]}]
    found, other = reproduce.shortened(rows)
    assert other == rows[1]
    assert found["plain_ids"] == [1, 2] and not {"spec_ids", "by_category"} & set(found)
    assert (found["prompt_source"], found["drafter"]) == ("set/test.jsonl:5", "dflash")
    assert found["argv"] == ["--out", "experiments/results/a.jsonl"]
    assert found["s"] == [0.433333333, {"x": 3.33333333e-301}]
    assert found["n"] == row["n"] and found["exact"] != exact
    testing.assert_same_bits(np.float32(found["exact"]), np.float32(exact))
