"""Runs of scripts in tests: their rows, and how unusable input is said."""

import importlib
import json
import pathlib
from collections.abc import Callable, Sequence

from experiments.lib import cli


ROOT = pathlib.Path(__file__).parents[1]
REQUIRED = {
    "ablate_heads": ("--out", "rows.jsonl"),
    "compare_llama_cpp": ("--llama-bin", "bin"),
    "plot": ("--out", "figures", "--theory"),
    "reproduce": ("--list",),
    "replay": ("--record", "traces.jsonl"),
    "sweep": ("--out", "sweep.jsonl"),
    "train_drafter": ("--family", "eagle3", "--stage", "export"),
    "train_pair": ("--stage", "export"),
}
"""The least that a command line must have."""


def rows_of(path: pathlib.Path, kind: str | None = None) -> list[dict]:
    """The rows of a file, or those of a kind."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if kind is None or row["kind"] == kind]


def models_of(folders) -> list[str]:
    """The flags of a target and a draft."""
    target, draft = folders
    return ["--target", str(target), "--draft", str(draft)]


def assert_fails_with(
    main: Callable, capsys, arguments: Sequence[str], *words: str
) -> None:
    """Asserts exit status 1 and one clear line, with no traceback."""
    try:
        status = main([*arguments])
    except SystemExit as exit_:
        status = exit_.code
    error = capsys.readouterr().err
    assert status == cli.UNUSABLE == 1
    assert "Traceback" not in error
    (line,) = [line for line in error.splitlines() if "error:" in line]
    for word in words:
        assert word in line, line


def last_line(capsys) -> str:
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1]


def main_of(name: str):
    return importlib.import_module(f"experiments.{name}").main
