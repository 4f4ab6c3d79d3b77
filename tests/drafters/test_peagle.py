"""P-EAGLE of random weights: proposals and loss are those of a float64 head."""

import dataclasses
import functools
import json

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import test_eagle3 as eagle
from decoding import SMALL
from model import eagle3_oracle as oracle
from slow_cases import slow

from spec_jax.drafters import (
    eagle3 as drafting,
    features as features_lib,
    peagle,
    tree_shapes,
)
from spec_jax.model import (
    checkpoint_files as files,
    eagle3_files,
    eagle3_params,
    head_dialects,
    sequence,
)
from spec_jax.training import peagle as training, targets


HEAD = dataclasses.replace(
    eagle.HEAD, layer=decoding.make_config(num_layers=2), mask_token_id=95
).validate()
PARAMS = eagle3_params.init(
    jax.random.key(3),
    HEAD,
    embed=decoding.TARGET_PARAMS.embed,
    hot=eagle.HOT,
    stddev=0.3,
)
GAMMA = 4
LENGTHS = (3, 4, 7, 12, 13)


def make(impl=SMALL.target.impl, *, head=HEAD) -> drafting.Eagle3:
    return eagle.make(impl, head=head)


CHAIN = make()


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Writes the head to a file; returns a float64 head of that file."""
    folder = tmp_path_factory.mktemp("peagle")
    origin = head_dialects.Origin(target=SMALL.target.config)
    eagle3_files.save(folder, HEAD, PARAMS, dialect="speculators", origin=origin)
    return oracle.Head(
        config=json.loads((folder / "config.json").read_text()),
        tensors=safetensors.numpy.load_file(folder / files.SINGLE_FILE),
        embed=np.asarray(decoding.TARGET_PARAMS.embed),
    )


def drafted(head, length, *, late=0):
    """Returns the oracle's drafts after a prefix; `late` shifts features: a fault."""
    read = eagle.features_of()
    flat = np.roll(read.reshape(len(read), -1), late, axis=0)[: length - 1]
    return oracle.draft(head, flat, eagle.TEXT[1:length], count=GAMMA)


class Counted(drafting.Eagle3):
    """A class of this file alone: nothing is compiled for it yet."""


@pytest.mark.parametrize("impl", ["xla", slow("native")])
def test_drafts_are_the_oracles(head, impl, monkeypatch):
    """Fails if a pair or a mask is elsewhere, or a feature one position early or late,
    a shift that would cost most of the acceptance.

    Pairs and masks of a round must run in one forward, and a round without drafts must
    run none.
    """
    decoding.needs(impl)
    passes = eagle.count_passes(monkeypatch, peagle.SlotParallel, "_forward")
    counts, right, wrong = [], [], {-1: [], 1: []}
    lengths, gammas = (*LENGTHS, LENGTHS[-1] + 1), (*[GAMMA] * len(LENGTHS), 0)
    rounds = eagle.rounds_of(
        *(Counted(**vars(make(impl))), eagle.features_of(), lengths),
        params=PARAMS,
        gammas=gammas,
    )
    for (length, proposal), gamma in zip(rounds, gammas, strict=True):
        jax.effects_barrier()
        counts.append(len(passes))
        assert proposal.num_drafted == gamma
        if gamma:
            right.append(proposal.tokens.tolist())
            assert right[-1] == drafted(head, length)[0]
            for late, found in wrong.items():
                found.append(drafted(head, length, late=late)[0])
    assert right not in wrong.values()
    assert counts[-1] == counts[-2]
    # The prompt has one run. With XLA many pairs of a round need several slabs.
    assert counts[:3] == [2, 3, 4] or impl == "xla"


@pytest.mark.slow
def test_a_slot_that_sits_out_takes_in_before_its_ring_is_full(head, monkeypatch):
    """Fails if features are lost while a slot sits out and its ring fills up."""
    monkeypatch.setattr(features_lib, "RING_ROWS", 4)  # and 5 more for a round
    lengths, gammas = (1, 2, 3, 7, 9, 10, 14, 17), (4, 0, 4, 0, 0, 0, 0, 4)
    asked = {"params": PARAMS, "gammas": gammas}
    made = list(eagle.rounds_of(CHAIN, eagle.features_of(), lengths, **asked))
    assert [int(p.num_drafted) for _, p in made] == [0, 0, 4, 0, 0, 0, 0, 4]
    for number in (2, 7):
        length, proposal = made[number]
        assert proposal.tokens.tolist() == drafted(head, length)[0]


@pytest.mark.slow
def test_children_are_the_best_of_each_slot(head):
    """Fails if a level of a tree has the logits of the slot before or after."""
    wide = CHAIN.for_tree(tree_shapes.parse("2-2-2"))
    hot = np.asarray(eagle.HOT)
    rounds = eagle.rounds_of(wide, eagle.features_of(), (3, 6, 11), params=PARAMS)
    for length, proposal in rounds:
        logits = drafted(head, length)[1]
        best = hot[np.argsort(-logits, axis=-1)[:, :2]]
        tokens = proposal.tokens.tolist()
        assert tokens[:2] == best[0].tolist()
        assert tokens[2:6] == [*best[1]] * 2
        assert tokens[6:14] == [*best[2]] * 4


def logits_of(batch, config=HEAD):
    """Returns training's logits of the drafts after a batch's anchors."""
    return np.asarray(of_training(training.drafts, config)(batch)[0])


@functools.cache
def of_training(function, config=HEAD):
    """Returns a function that computes a loss, or logits, of a batch."""
    teacher = targets.teacher_of(decoding.TARGET_PARAMS, PARAMS.hot)
    trained = training.trained(config, PARAMS)
    run = jax.jit(functools.partial(function, config, steps=GAMMA))
    return lambda batch: run(trained, jax.tree.map(jnp.asarray, batch), teacher)


def batch_of():
    """Returns the text, its features and anchors; all features are right."""
    tokens, features = np.array([eagle.TEXT], np.int32), eagle.features_of()
    known = np.zeros((1, len(eagle.TEXT), HEAD.features_size), np.float32)
    flat = features.reshape(len(features), -1)[: len(eagle.TEXT) - 1]
    known[0, : len(flat)] = flat
    anchors = np.array([LENGTHS], np.int32) - 1
    return {"tokens": tokens, "features": known, "anchors": anchors}


PLANTED = {
    "position": lambda batch: batch | {"features": np.roll(batch["features"], -1, 1)},
    "tokens": lambda batch: batch | {"tokens": np.roll(batch["tokens"], -1, 1)},
    "anchors": lambda batch: batch | {"anchors": batch["anchors"] + 1},
}


def test_training_computes_what_is_drafted(head):
    """Fails if a mask is trained with another context, position or label."""
    batch = batch_of()
    expected = np.stack([drafted(head, length)[1] for length in LENGTHS])
    np.testing.assert_allclose(logits_of(batch), expected, rtol=2e-3, atol=2e-3)
    windowed = dataclasses.replace(HEAD, window=3)
    layer = head.layer | {"layer_types": ["sliding_attention"], "sliding_window": 3}
    narrow = dataclasses.replace(
        head, config=head.config | {"transformer_layer_config": layer}
    )
    found = np.stack([drafted(narrow, length)[1] for length in LENGTHS])
    np.testing.assert_allclose(logits_of(batch, windowed), found, rtol=2e-3, atol=2e-3)
    for plant in (*PLANTED.values(), lambda batch: batch):
        other = logits_of(plant(batch))
        is_right = np.allclose(other, expected, rtol=2e-3, atol=2e-3)
        assert is_right == (plant not in PLANTED.values())


@pytest.mark.slow
def test_the_loss_is_that_of_drafting(head):
    """Compares the loss with the float64 head's, draft by draft. First drafts count
    after every pair, not after anchors alone."""
    batch, params = batch_of(), decoding.TARGET_PARAMS
    text = sequence.forward(params, SMALL.target.config, jnp.asarray(batch["tokens"]))
    final = np.asarray(text.hidden)
    T = len(eagle.TEXT)
    batch |= {"final": final, "mask": np.arange(T)[None] >= 5}
    draw = training.Anchors(num_drafts=GAMMA, seed=1, count=3)
    batch = draw(batch, np.arange(1), 4)
    hot, wide = np.asarray(PARAMS.hot), final[0].astype(float)
    rows = wide @ np.asarray(params.head, float).T[:, hot]
    probs = np.exp(rows - rows.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)

    def nats(anchor):
        logits = drafted(head, anchor + 1)[1]
        top = logits.max(axis=1, keepdims=True)
        norm = np.log(np.exp(logits - top).sum(axis=1, keepdims=True)) + top
        at = np.minimum(anchor + np.arange(GAMMA), T - 1)
        return -(probs[at] * (logits - norm)).sum(axis=1)

    weights, total = batch["weights"][0], 0.0
    for anchor, share in zip(batch["anchors"][0], weights, strict=True):
        total += (share[1:] * nats(int(anchor))[1:]).sum()
    first = [anchor for anchor in range(5, T - 1)]
    total += weights[:, 0].sum() * np.mean([nats(anchor)[0] for anchor in first])
    assert np.count_nonzero(batch["pair_weights"]) == len(first) > 3
    np.testing.assert_allclose(weights.sum(), 1, rtol=1e-5)
    loss = of_training(training.loss)
    np.testing.assert_allclose(float(loss(batch)), total, rtol=1e-3)
    for plant in PLANTED.values():
        assert abs(float(loss(plant(batch))) / total - 1) > 5e-3
