"""Heads that are trained on the same texts, and compared."""

import json

import numpy as np
import pytest
from head_runs import job_of, run
from script_runs import assert_fails_with, rows_of

from experiments import compare_heads
from experiments.heads import families
from spec_jax.training import targets


@pytest.fixture
def texts(target, tmp_path):
    """Writes twenty texts of noise, and a cache without them; returns their folder."""
    tokens = np.random.default_rng(0).integers(1, 250, (20, 16))
    mask, greedy = np.arange(16) < np.full((20, 1), 15), np.arange(20) % 2 == 0
    np.savez(tmp_path / "texts.npz", tokens=tokens, mask=mask, greedy=greedy, samples=2)
    online = job_of(target, tmp_path).online
    targets.store_of(tmp_path / "cache", online.params, online.config, online.taps)
    return tmp_path


def command(target, folder, *more) -> list[str]:
    return [
        *("--target", str(target), "--texts", str(folder)),
        *("--work", str(folder / "heads"), "--out", str(folder / "rows.jsonl")),
        *("--draft-vocab", "40", "--taps", "0,1,2", "--tokens", "100"),
        *("--prompts", "2", "--gen-tokens", "6", "--context", "12", "--tree", "none"),
        *(*more, "--", "--mlp", "24", "--batch", "4"),
    ]


@pytest.mark.parametrize("head", compare_heads.HEADS)
def test_every_head_has_a_layout(target, tmp_path, head):
    """Fails if a head is trained that no published layout can store."""
    args = compare_heads.parse_args(command(target, tmp_path))
    told = compare_heads.training_of(args, head, "train")
    config = families.plan(told, families.target_config(told))
    sees = config.attention_of(0) if head == "jetspec" else None
    assert sees is None or (sees.is_causal and sees.window > 4096)


@pytest.mark.slow
@pytest.mark.filterwarnings(  # Orbax leaves its event loops to the garbage collector.
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
@pytest.mark.usefixtures("optax_promotes")
def test_heads_are_compared_on_the_same_texts(target, texts):
    """Fails if a head sees fewer tokens than asked, or is trained again after
    its end, or a row is lost."""
    run(target, texts, "cache")
    args = command(target, texts, "--heads", "peagle,dspark-rnn")
    for _ in range(2):  # The second begins at the end of the first.
        assert compare_heads.main(args) == 0
        rows = rows_of(texts / "rows.jsonl")
        assert [(row["kind"], row["head"]) for row in rows] == [
            *(("head", "peagle"), ("head", "dspark-rnn")),
            *(("sweep", "peagle"),) * 2,
            *(("sweep", "dspark-rnn"),) * 2,
        ]
        for row in rows[:2]:
            lines = (texts / "heads" / row["head"] / "log.jsonl").read_text()
            assert lines.count("\n") == row["steps"]
            last = json.loads(lines.splitlines()[-1])["tokens"]
            assert 100 <= row["tokens_seen"] < 100 + last
        assert all(row["matched"] for row in rows[2:])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--texts", "nowhere"), "nowhere/texts.npz: no such file; run the stage"),
        (("--taps", "0,1"), "of another taps; delete the folder"),
    ],
)
def test_heads_that_cannot_be_compared(target, texts, capsys, more, words):
    given = command(target, texts, *more)
    assert_fails_with(compare_heads.main, capsys, given, words)
