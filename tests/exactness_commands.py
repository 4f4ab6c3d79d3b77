"""Runs of `experiments/exactness.py` on a tiny pair, and their output, for tests."""

import dataclasses
import functools
import json
import pathlib

import script_runs
from script_runs import models_of, rows_of

from experiments import exactness
from experiments.lib import certificates


NUM_PROMPTS, GEN_TOKENS = 3, 12


def one_cell(folders, *more: str) -> list[str]:
    """Returns flags of one cell, the cheapest value of every axis; later flags win."""
    return [
        *models_of(folders),
        *("--gen-tokens", str(GEN_TOKENS), "--prompts", str(NUM_PROMPTS)),
        *("--impl", "native", "--dtype", "float32", "--slab", "4"),
        *("--gamma", "2", "--page-size", "8", "--cache", "paged"),
        *("--prefill", "rows", "--drafter", "oracle"),
        *("--sampling", "greedy", "--gamma-policy", "fixed", "--batch", "1"),
        *more,
    ]


def several_cells(folders, *more: str) -> list[str]:
    """Returns flags of a base and cells one value off it; most share their programs."""
    several = (
        *("--gamma", "3,2", "--drafter", "oracle,always-wrong"),
        *("--sampling", "greedy,sampled", "--batch", "1,2"),
        *("--gamma-policy", "fixed,threshold"),
    )
    return one_cell(folders, *several, *more)


def certifying(certificate: pathlib.Path) -> list[str]:
    """Returns flags that write a certificate, even in a checkout with changes."""
    return ["--certificate", str(certificate), "--allow-dirty"]


def verify(folders, certificate: pathlib.Path, *more: str) -> int:
    """Returns the exit status of `--verify`."""
    return exactness.main([*models_of(folders), "--verify", str(certificate), *more])


def edited(certificate: pathlib.Path, path: pathlib.Path, edit) -> pathlib.Path:
    """Writes a certificate after `edit`, rehashed as by a forger; returns its path."""
    content = json.loads(certificate.read_text())
    edit(content)
    del content["sha256"]
    content["sha256"] = certificates.sha256_of(content)
    path.write_text(json.dumps(content))
    return path


assert_fails_with = functools.partial(script_runs.assert_fails_with, exactness.main)
"""`script_runs.assert_fails_with` of `exactness`: takes `capsys, arguments, *words`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """The files of a run that was exact."""

    out: pathlib.Path
    certificate: pathlib.Path

    def summary(self, **axes) -> dict:
        """Returns the summary of the first cell that has these values."""
        rows = rows_of(self.out, "cell")
        return next(row for row in rows if axes.items() <= row["cell"].items())


def certify(folders, tmp_path, *more) -> tuple[int, dict]:
    """Runs one cell; returns the exit status and the certificate."""
    certificate = tmp_path / "run.json"
    more = (*more, *certifying(certificate))
    status = exactness.main(one_cell(folders, *more))
    return status, certificates.read(certificate)


def run_one_cell(folders, tmp_path, *more) -> tuple[int, list[dict]]:
    """Runs one cell; returns the exit status and the rows of prompts."""
    out = tmp_path / "wrong.jsonl"
    status = exactness.main(one_cell(folders, *more, "--out", str(out)))
    return status, rows_of(out, "prompt")


def line_of(printed: str, label: str) -> list[str]:
    """Returns the cells of a printed row, after its label."""
    (line,) = (row for row in printed.splitlines() if row.startswith(f"{label} "))
    return line.removeprefix(label).split()
