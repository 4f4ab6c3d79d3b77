"""Runs of scripts in tests: their rows, and their messages on unusable input."""

import dataclasses
import importlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from experiments.lib import cli


ROOT = pathlib.Path(__file__).parents[1]


def rows_of(path: pathlib.Path, kind: str | None = None) -> list[dict]:
    """Returns the rows of a file, or only its rows of one kind."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if kind is None or row["kind"] == kind]


def rows_from(
    main: Callable, folder: pathlib.Path, arguments: Sequence[str], status: int = 0
) -> list[dict]:
    """Runs a script, which must end with `status`; returns its rows."""
    out = folder / "out.jsonl"
    assert main([*arguments, "--out", str(out)]) == status
    return rows_of(out)


SUPERSEDED = ("commit_decode_steps", "correction_steps", "mirror_decode_steps")
"""Counts of forwards in designs that were removed; older rows have them, as 0."""


def assert_has_fields_of(row: Mapping, file: str, *less: str) -> None:
    """Asserts that a fresh row has the fields of the published rows, from which tables
    are made; `less` are fields that no table reads any more."""
    path = ROOT / "experiments" / "results" / file
    stored = next(one for one in rows_of(path) if one["kind"] == row["kind"])
    assert set(stored) - set(row) <= {*less, *SUPERSEDED}


def write_rows(path: pathlib.Path, rows: Iterable[Mapping]) -> pathlib.Path:
    """Writes JSON lines; returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_python(*arguments: object, **variables: str) -> subprocess.CompletedProcess:
    """Runs Python on the checkout, with these variables in its environment."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths} | variables,
    )


def interrupted(*_, **__) -> None:
    """Raises KeyboardInterrupt, as Ctrl-C does; takes the place of any function."""
    raise KeyboardInterrupt


def with_another_token(run):
    """Returns the run with another last token."""
    return dataclasses.replace(
        run, tokens=[*run.tokens[:-1], (run.tokens[-1] + 1) % 250]
    )


def models_of(folders) -> list[str]:
    """Returns the flags of a target and a draft."""
    target, draft = folders
    return ["--target", str(target), "--draft", str(draft)]


def assert_fails_with(
    main: Callable, capsys, arguments: Sequence[str], *words: str
) -> None:
    """Asserts exit status 1, one line of error with these words, and no traceback."""
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
