"""Runs of `experiments/exactness.py` on a tiny pair, and their output, for tests."""

import pathlib

from script_runs import models_of, rows_of

from experiments import exactness


NUM_PROMPTS, GEN_TOKENS = 3, 12


def one_cell(folders, *more: str) -> list[str]:
    """Returns flags of one cell, the cheapest value of every axis; later flags win."""
    flags = f"--gen-tokens {GEN_TOKENS} --prompts {NUM_PROMPTS} --impl native "
    flags += "--dtype float32 --slab 4 --gamma 2 --page-size 8 --cache paged "
    flags += "--prefill rows --drafter oracle --sampling greedy "
    flags += "--gamma-policy fixed --batch 1"
    return [*models_of(folders), *flags.split(), *more]


def several_cells(folders, *more: str) -> list[str]:
    """Returns flags of a base and cells one value off it; most share their programs."""
    several = "--gamma 3,2 --drafter oracle,always-wrong --sampling greedy,sampled "
    several += "--batch 1,2 --gamma-policy fixed,threshold"
    return one_cell(folders, *several.split(), *more)


def certifying(certificate: pathlib.Path) -> list[str]:
    """Returns flags that write a certificate, even in a checkout with changes."""
    return ["--certificate", str(certificate), "--allow-dirty"]


def verify(folders, certificate: pathlib.Path, *more: str) -> int:
    """Returns the exit status of `--verify`."""
    return exactness.main([*models_of(folders), "--verify", str(certificate), *more])


def run_one_cell(folders, tmp_path, *more) -> tuple[int, list[dict]]:
    """Runs one cell; returns the exit status and the rows of prompts."""
    out = tmp_path / "wrong.jsonl"
    status = exactness.main(one_cell(folders, *more, "--out", str(out)))
    return status, rows_of(out, "prompt")
