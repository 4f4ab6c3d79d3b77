"""The training loop: its log, its batches, and resuming a killed run."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import text_loss
import tiny_pair

from spec_jax import testing
from spec_jax.model import params as params_lib
from spec_jax.training import batches, loop


CONFIG = tiny_pair.config(
    vocab_size=32, hidden_size=16, intermediate_size=24, head_dim=8,
    max_position_embeddings=64,
)  # fmt: skip
RECIPE = loop.Recipe(steps=6, batch_size=2, warmup_steps=2, eval_every=3, save_every=2)
LOSS = functools.partial(text_loss.text_loss, CONFIG)

pytestmark = pytest.mark.usefixtures("optax_promotes")


def data() -> np.ndarray:
    """Returns eight windows of a sequence that can be learnt."""
    stream = np.arange(8 * 12 + 1) * 5 % 32
    return stream[np.arange(8)[:, None] * 12 + np.arange(13)].astype(np.int32)


def init():
    return params_lib.init(jax.random.key(0), CONFIG)


def logged(folder) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").open()]
    return [(row["step"], row["loss"]) for row in rows]


def test_a_log_is_read_to_the_checkpoint(tmp_path):
    """Fails if rows after the checkpoint count, or half a last line is an error."""
    rows = [{"step": step, "tokens": 10} for step in range(4)]
    rows[1]["held_out_loss"], rows[3]["held_out_loss"] = 2.0, 1.0
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "log.jsonl").write_text(text + '{"step": 4, "to')
    assert loop.tokens_seen(tmp_path) == 40 and loop.tokens_seen(tmp_path, 3) == 30
    assert loop.last_held_out(tmp_path) == rows[3]
    assert loop.last_held_out(tmp_path, 3) == rows[1]
    with pytest.raises(ValueError, match="no held-out text was measured yet"):
        loop.last_held_out(tmp_path, 1)
    assert loop.log_of(tmp_path / "nowhere") == []


# Orbax leaves its event loops to the garbage collector.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_killed_run_resumes_with_the_same_losses(tmp_path):
    """Fails if the batch order, the schedule or the moments start anew."""
    whole = loop.run("a", RECIPE, init(), LOSS, data(), data(), tmp_path / "whole")
    killed = tmp_path / "killed"
    loop.run("b", RECIPE, init(), LOSS, data(), data(), killed, stop_after=5)
    # The kill came after a step that no checkpoint holds, and cut a line in half.
    with (killed / "log.jsonl").open("a") as log:
        log.write('{"step": 5, "lo')
    resumed = loop.run("b", RECIPE, init(), LOSS, data(), data(), killed)
    assert logged(killed) == logged(tmp_path / "whole")
    assert [step for step, _ in logged(killed)] == list(range(6))
    testing.assert_same_bits(resumed, whole)
    assert logged(killed)[-1][1] < logged(killed)[0][1]
    assert loop.last_held_out(killed)["held_out_loss"] > 0
    assert loop.tokens_seen(killed) == 6 * 2 * 12
    # Negative control: another seed gives another loss curve.
    other = tmp_path / "other"
    recipe = dataclasses.replace(RECIPE, seed=1)
    loop.run("c", recipe, init(), LOSS, data(), data(), other)
    assert logged(other) != logged(killed)
    with pytest.raises(ValueError, match="no checkpoint"):
        loop.restore(RECIPE, init(), tmp_path / "nothing")


def test_every_window_comes_once_an_epoch():
    windows = np.arange(6)[:, None]
    epochs = [
        [batches.of_step(windows, size=2, step=3 * epoch + i, seed=0) for i in range(3)]
        for epoch in range(2)
    ]
    for epoch in epochs:
        assert sorted(np.concatenate(epoch).ravel().tolist()) == list(range(6))
    assert not np.array_equal(epochs[0], epochs[1])
    with pytest.raises(ValueError, match="batch size 7 exceeds the 6 windows"):
        batches.of_step(windows, size=7, step=0, seed=0)


COLUMNS = np.random.default_rng(0).permutation(
    np.repeat([128, 256, 640, 384], [63, 33, 32, 4])
)


@pytest.mark.parametrize(
    ("is_counted", "counts"),
    [(False, {128: 20, 256: 10, 384: 4, 640: 4}), (True, {})],
)
def test_batches_hold_about_as_much(is_counted, counts):
    """Fails if a batch mixes lengths or holds more than a batch of the longest, if a
    text comes twice, or if batches are sorted by length."""
    step = functools.partial(
        batches.rows_of_step, COLUMNS, size=4, seed=0, unit=2, is_counted=is_counted
    )
    per_epoch = sum(
        np.count_nonzero(COLUMNS == width) // counts.get(width, 4)
        for width in (128, 256, 384, 640)
    )
    found = [step(step=number) for number in range(per_epoch)]
    rows = np.concatenate(found)
    assert len(set(rows.tolist())) == len(rows)
    widths = [set(COLUMNS[of].tolist()) for of in found]
    assert all(len(width) == 1 for width in widths)
    widths = [width.pop() for width in widths]
    assert [len(of) for of in found] == [counts.get(width, 4) for width in widths]
    assert not (np.diff(widths) >= 0).all()
    np.testing.assert_array_equal(step(step=5), found[5])
    again = np.concatenate([step(step=per_epoch + n) for n in range(per_epoch)])
    assert not np.array_equal(again, rows)
