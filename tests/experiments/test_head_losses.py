"""Losses of heads, compared with drafting, and the first weights of a head."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from head_runs import BLOCKS, args_of, job_of
from model import eagle3_oracle as oracle

from experiments.heads import families, jobs
from spec_jax.model import (
    checkpoint_files as files,
    eagle3_files,
    head_dialects,
    sequence,
)
from spec_jax.training import eagle3, heads, targets


STEPS = 3  # of drafting, in the loss


pytestmark = pytest.mark.usefixtures("optax_promotes")


def test_the_loss_is_that_of_drafting(target, work, tmp_path):
    """Compares with drafting pair by pair; fails if anything is shifted."""
    job = job_of(target, work)
    batch = job.online[np.arange(2)] | {"greedy": np.ones(2, bool)}
    teacher = targets.teacher_of(job.params, job.hot)
    params = eagle3.init(jax.random.key(3), job.config, job.params, job.hot)
    head, hot = reference(tmp_path, job, params), np.asarray(job.hot)
    tokens = jnp.asarray(batch["tokens"])
    logits_of = jax.jit(sequence.logits, static_argnums=1)
    of_target = np.asarray(logits_of(job.params, job.target, tokens), float)
    expected, agrees = 0.0, np.zeros((2, 15, STEPS), bool)
    for b, first in itertools.product(range(2), range(15)):
        for j, draft in enumerate(drafted(head, batch, b, first)):
            row, is_counted = (
                of_target[b, first + j + 1],
                batch["mask"][b, first + j + 1],
            )
            best = int(row.argmax())
            p = np.exp(row[hot] - row[hot].max())
            q = draft - np.log(np.sum(np.exp(draft)))
            if is_counted and best in hot:
                expected -= 0.8**j * np.sum(p / p.sum() * q)
            agrees[b, first, j] = hot[draft.argmax()] == best and is_counted

    @jax.jit
    def measured(batch):
        told = job.config, params, batch, teacher
        return eagle3.loss(*told, steps=STEPS), eagle3.measure(*told, steps=STEPS)

    loss, found = measured(batch)
    np.testing.assert_allclose(float(loss), expected / 30, rtol=1e-4)
    tokens = rounds = 0
    for b in range(2):
        counted = np.flatnonzero(batch["mask"][b, 1:])
        tokens, at = tokens + len(counted), counted[0]
        while at <= counted[-1]:  # Each round follows from what the one before kept.
            rounds += 1
            at += 1 + int(np.cumprod(agrees[b, at]).sum())
    np.testing.assert_array_equal(found["accepted_length"], [tokens, rounds])
    # Negative control: features of the next position give another loss.
    moved = batch | {"features": np.roll(batch["features"], -1, axis=1)}
    other, _ = measured(moved)
    assert abs(float(other) - float(loss)) > 1e-3


def drafted(head, batch, b, first):
    """Returns logits of the drafts after pair `first`, in float64, pair by pair."""
    tokens = np.asarray(batch["tokens"][b])
    own = min(STEPS - 1, 14 - first)
    features = np.asarray(batch["features"][b, : first + 1], float)
    made = oracle.run(head, features, tokens[1 : first + 2 + own], num_own=own)
    return made[1][first:]


def reference(folder, job, params):
    """Returns the float64 head of these weights, read from the file that holds them."""
    whole = params.replace(embed=job.params.embed, hot=job.hot)
    origin = head_dialects.Origin(target=job.target)
    eagle3_files.save(folder, job.config, whole, dialect="midlayer", origin=origin)
    return oracle.Head(
        config=json.loads((folder / "config.json").read_text()),
        tensors=safetensors.numpy.load_file(folder / files.SINGLE_FILE),
        embed=np.asarray(job.params.embed),
    )


def test_a_head_begins_without_an_opinion(target, work):
    """Fails if the first logits are as large as the target's head gives for noise."""
    job = job_of(target, work)
    made = eagle3.init(jax.random.key(0), job.config, job.params, job.hot)
    hidden = np.random.default_rng(0).normal(size=(500, job.config.hidden_size))
    logits = (hidden * np.asarray(made.final_norm)) @ np.asarray(made.lm_head).T
    assert 0.8 < logits.std() < 1.25


@pytest.mark.slow
def test_a_normalizer_stands_for_the_logits_of_the_whole_vocabulary(target, work):
    """Fails if a loss with the normalizer differs from the loss without it."""
    args = args_of(target, work, *BLOCKS)
    job = jobs.prepare(args)
    rows = np.arange(4)
    drawn = families.draw_of(args, job.config, job.hot)(job.online[rows], rows, 0)
    batch = jax.tree.map(jnp.asarray, drawn)
    params = heads.complete(jobs.init(args, job), job.teacher)
    told = families.of_loss(args)
    loss = lambda batch: job.family.training.loss(
        job.config, params, batch, job.teacher, **told
    )
    assert job.online.normalizers and job.hot is not None
    without = {name: x for name, x in batch.items() if name != "normalizer"}
    np.testing.assert_allclose(loss(batch), loss(without), rtol=1e-5)
    neighbours = batch | {"normalizer": jnp.roll(batch["normalizer"], 1, 1)}
    assert abs(loss(neighbours) - loss(without)) > 1e-4 * loss(without)
