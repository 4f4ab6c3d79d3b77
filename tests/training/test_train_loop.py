"""The training loop: its log, its batches, their gradients and the learning rate; and
parts of a drafter from its target: scales of features, vocabularies, tables. Gradients
over several devices are those of one device, up to the order of sums.

`experiments/test_train_drafter` resumes killed runs.
"""

import dataclasses
import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from script_runs import run_python

from spec_jax.model import sequence
from spec_jax.ops import rms_norm
from spec_jax.training import batches, eagle3, loop, targets


# Orbax leaves its event loops to the garbage collector.
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
def test_a_folder_without_a_checkpoint(optax_promotes, tmp_path):
    with pytest.raises(ValueError, match="no checkpoint"):
        loop.restore(loop.Recipe(steps=6), {"w": jnp.ones(3)}, tmp_path / "nothing")


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


def test_every_window_comes_once_an_epoch():
    step = functools.partial(batches.rows_of_step, np.ones(6, int), seed=0)
    epochs = np.reshape([step(size=2, step=number) for number in range(6)], (2, 6))
    assert (np.sort(epochs) == np.arange(6)).all()
    assert not np.array_equal(*epochs)
    with pytest.raises(ValueError, match="batch size 7 exceeds the 6 windows"):
        step(size=7, step=0)


@pytest.mark.parametrize(
    ("is_counted", "counts"), [(False, {128: 20, 256: 10, 384: 4, 640: 4}), (True, {})]
)
def test_batches_hold_about_as_much(rng, is_counted, counts):
    """Fails if a batch mixes lengths or holds more than a batch of the longest, if a
    text comes twice, or if batches are sorted by length."""
    texts = {128: 63, 256: 33, 640: 32, 384: 4}
    columns = rng.permutation(np.repeat(list(texts), list(texts.values())))
    how = {"size": 4, "seed": 0, "unit": 2, "is_counted": is_counted}
    step = functools.partial(batches.rows_of_step, columns, **how)
    num = sum(there // counts.get(width, 4) for width, there in texts.items())
    found = [step(step=number) for number in range(num)]
    rows = np.concatenate(found)
    assert len(set(rows.tolist())) == len(rows)
    widths = [columns[of].min() for of in found]
    assert widths == [columns[of].max() for of in found]
    assert [len(of) for of in found] == [counts.get(width, 4) for width in widths]
    assert not (np.diff(widths) >= 0).all()
    np.testing.assert_array_equal(step(step=5), found[5])
    again = np.concatenate([step(step=num + n) for n in range(num)])
    assert not np.array_equal(again, rows)


def distance(actual, expected) -> float:
    """Returns the largest relative error of a leaf, in the Frobenius norm."""

    def error(a, e) -> float:
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        return float(np.linalg.norm(a - e) / np.linalg.norm(e))

    return max(jax.tree.leaves(jax.tree.map(error, actual, expected)))


def test_a_batch_in_parts_has_the_gradients_of_the_whole(rng):
    """Fails if a part is lost, or has another weight than its share."""
    params = {name: rng.normal(size=5).astype(np.float32) for name in "ab"}
    batch = rng.normal(size=(8, 5)).astype(np.float32)

    def loss(params, batch, teacher):
        return jnp.mean(jnp.tanh(batch @ params["a"]) * (batch @ params["b"]))

    in_parts = functools.partial(loop.value_and_grad, loss, params, teacher=None)
    expected = jax.value_and_grad(loss)(params, batch, None)
    assert distance(in_parts(batch, part_size=2), expected) < 1e-5
    # Negative control: without one sequence the gradient differs.
    fewer = np.concatenate([batch[1:2], batch[1:]])
    assert distance(in_parts(fewer, part_size=2), expected) > 1e-3
    with pytest.raises(ValueError, match="8 sequences is not of whole parts of 3"):
        in_parts(batch, part_size=3)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 8e-3)]
)
def test_the_norm_has_the_gradient_of_rms_norm(rng, dtype, tolerance):
    """Compares gradients with `rms_norm`'s, which rounds 2 or 3 times in bfloat16."""
    x, weight, cotangent = (
        jnp.asarray(rng.normal(size=shape).astype(jnp.dtype(dtype)))
        for shape in [(3, 5, 16), (16,), (3, 5, 16)]
    )

    def gradients(norm):
        value, pull = jax.vjp(jax.jit(norm), x, weight)
        return value, pull(cotangent)

    plain, expected = gradients(lambda x, w: rms_norm.rms_norm(x, w, eps=1e-3))
    value, actual = gradients(lambda x, w: sequence.norm(x, w, 1e-3))
    np.testing.assert_array_equal(value, plain)
    assert distance(actual, expected) < tolerance
    # Negative control: another `eps` gives other gradients.
    _, other = gradients(lambda x, w: sequence.norm(x, w, 1.0))
    assert distance(other, expected) > 10 * tolerance


def test_the_learning_rate_rises_stays_and_falls(optax_promotes):
    recipe = loop.Recipe(steps=100, warmup_steps=10, decay_share=0.3)
    rate = loop.learning_rate(recipe, 0.02)
    rates = [float(rate(step)) for step in (0, 5, 10, 40, 70, 85, 100)]
    np.testing.assert_allclose(rates, [0, 0.01, 0.02, 0.02, 0.02, 0.01, 0], atol=1e-9)
    # Before it falls, the rate does not depend on the length of the run.
    longer = loop.learning_rate(dataclasses.replace(recipe, steps=1000), 0.02)
    assert [float(longer(step)) for step in (5, 40)] == rates[1:4:2]
    assert float(longer(85)) != rates[5]


class Features:
    """Features of four texts; rows outside the mask are large, and must not count."""

    def __init__(self, factors):
        drawn = np.random.default_rng(0).normal(size=(4, 9, len(factors)))
        self._mask = np.arange(9) > np.arange(4)[:, None]
        self._rows = np.where(self._mask[..., None], drawn, 1e6) * factors

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, rows):
        return {"features": self._rows[rows], "mask": self._mask[rows]}


def test_scales_even_features_out():
    """Fails if a large feature stays large, a factor is no power of two, or a row
    that is masked out counts."""
    factors = np.array([1e-3, 1.0, 37.0, 900.0, 0.0])
    scale = targets.scale_of(Features(factors))
    assert scale.dtype == np.float32 and scale.shape == (5,)
    assert np.all(np.frexp(scale)[0] == 0.5)  # powers of two
    assert np.all((0.5 < scale[:4] * factors[:4]) & (scale[:4] * factors[:4] < 2))
    assert np.isfinite(scale[4])
    np.testing.assert_array_equal(
        targets.scale_of(Features(8 * factors))[:4] * 8, scale[:4]
    )


@pytest.mark.parametrize(("width", "kept"), [(4, 0.999), (3, 0.8), (8, 0.999)])
def test_a_resized_table_holds_what_its_width_can(rng, width, kept):
    """Fails if directions other than the leading ones stay, or a wide table changes."""
    x = rng.normal(size=(50, 6)) @ np.diag([4.0, 3.0, 2.0, 1.0, 0.0, 0.0])
    made = np.asarray(eagle3._resized(jnp.asarray(x, jnp.float32), width), float)
    assert made.shape == (50, width)
    gram, whole = made @ made.T, x @ x.T
    assert np.trace(gram) >= kept * np.trace(whole)
    if kept > 0.9:
        np.testing.assert_allclose(gram, whole, atol=1e-3)


def test_the_draft_vocabulary_is_the_most_frequent_of_what_was_written():
    tokens = np.array([[9, 4, 4, 7], [9, 9, 2, 2]], np.int32)
    mask = np.array([[True] * 4, [False, True, True, False]])
    texts = targets.Texts(tokens=tokens, mask=mask, greedy=np.ones(2, bool))
    found = lambda size: targets.draft_vocabulary(texts, size=size, vocab_size=12)
    np.testing.assert_array_equal(found(2), [2, 4])  # prompts have 9; 7 is written once
    np.testing.assert_array_equal(found(3), [2, 4, 7])
    assert found(12) is None


PROGRAM = """
import functools
import jax, numpy as np, pytest, random_weights, tiny_pair
from spec_jax.model import block_params, params as params_lib
from spec_jax.training import block, loop, targets

random_weights.install()
config = tiny_pair.config(
    vocab_size=32, hidden_size=16, intermediate_size=24, head_dim=8,
    tie_word_embeddings=True,
)
params = params_lib.init(jax.random.key(0), config, stddev=0.3)
head = block_params.BlockConfig(
    layer=config, draft_vocab_size=32, taps=(0,), block_size=3, slots="anchor-first",
    mask_token_id=0, head="vanilla", markov_rank=4, has_confidence=True,
    confidence_with_markov=True,
)
# Texts of other lengths, so that devices have other weights.
rng = np.random.default_rng(0)
texts = {
    "tokens": rng.integers(0, 32, (16, 13)).astype(np.int32),
    "mask": np.arange(13) >= np.arange(16)[:, None] % 12,
} | {
    name: rng.normal(size=(16, 13, 16)).astype(np.float32)
    for name in ("features", "final")
}
draw = block.Anchors(num_drafts=head.num_drafts, seed=0, count=4)
batch = draw(texts, np.arange(16), 0)
given = block.init(jax.random.key(0), head, params, None)
teacher, made = targets.teacher_of(params, None), {}
loss = functools.partial(block.loss, head)
for count in (1, 8):
    run = functools.partial(loop.value_and_grad, loss, part_size=2)
    inputs = jax.jit(functools.partial(run, mesh=loop.data_mesh(count)))
    compiled = inputs.lower(given, batch, teacher).compile()
    made[count] = compiled(given, batch, teacher)
    assert ("all-reduce" in compiled.as_text()) == (count == 8), count
# Negative control: the features of other texts.
made["other"] = compiled(given, batch | {"features": batch["features"][::-1]}, teacher)
error = lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b))
errors = [
    max(jax.tree.leaves(jax.tree.map(error, made[which], made[1])))
    for which in (8, "other")
]
assert errors[0] < 1e-5 and errors[1] > 1e-3, errors
with pytest.raises(ValueError, match="9 devices: jax has 8 here"):
    loop.data_mesh(9)
print("devices agree", len(jax.devices()))
"""


@pytest.mark.slow
def test_eight_devices_have_the_gradients_of_one():
    """Fails if sequences are lost, counted twice or not spread over the devices."""
    flags = "--xla_force_host_platform_device_count=8"
    flags += " --xla_backend_optimization_level=0"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    done = run_python("-c", PROGRAM, XLA_FLAGS=flags)
    assert done.stdout.split() == ["devices", "agree", "8"], done.stderr
