"""`experiments/train_drafter.py` on a tiny target: its flags, shared by tests."""

import shutil

from experiments import train_drafter
from experiments.heads import jobs


FLAGS = [
    *("--family", "eagle3", "--taps", "0,1,2", "--ttt-steps", "2"),
    *("--prompts", "10", "--prefix", "9", "--length", "16", "--draft-vocab", "40"),
    *("--batch", "4", "--steps", "4", "--save-every", "2", "--eval-every", "2"),
    *("--impl", "native", "--mlp", "24"),
]

BLOCKS = [
    *("--family", "dspark", "--head", "rnn", "--rank", "4"),
    *("--block", "3", "--layers", "1", "--anchors", "3", "--dialect", "speculators"),
]
"""Flags of a block drafter; given after `FLAGS`, they override its values."""


def command(target, work, stage, *more) -> list[str]:
    places = ["--target", str(target), "--work", str(work), "--stage", stage]
    return [*FLAGS, *places, *more]


def run(target, work, stage, *more) -> None:
    assert train_drafter.main(command(target, work, stage, *more)) == 0


def args_of(target, work, *more, stage="train"):
    return train_drafter.parse_args(command(target, work, stage, *more))


def job_of(target, work, *more):
    return jobs.prepare(args_of(target, work, *more))


def with_texts(work, folder):
    """Copies a work folder with its rollouts and cache; returns the copy."""
    return shutil.copytree(work, folder, dirs_exist_ok=True)
