"""Training of block drafters: its losses and counts are those of drafting."""

import dataclasses
import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_block as blocks
import test_eagle3 as eagle
from slow_cases import slow

from spec_jax.drafters import each
from spec_jax.model import sequence
from spec_jax.training import block, targets


HEADS, PARAMS = blocks.HEADS, blocks.PARAMS
LENGTHS = (1, 4, 7)  # One token has no context.


def inputs_of(name, dtype="float32"):
    """Returns the weights that are trained, and the target's part of the loss."""
    params = PARAMS[name]
    teacher = targets.Teacher(
        embed=blocks.TARGET.embed.astype(dtype),
        head=blocks.TARGET.head.astype(dtype),
        hot=params.hot,
    )
    return params.replace(embed=None, lm_head=None, hot=None), teacher


@functools.cache
def drafted(name):
    """Returns proposals at temperature 1, drawn from their own float32 `probs`."""
    drafter = each.lift(blocks.make(HEADS[name]), 2, rule="rejection").drafter
    rounds = eagle.rounds_of(
        drafter,
        eagle.features_of(),
        LENGTHS,
        params=PARAMS[name],
        sampling=decoding.sampling_of(2, temperature=1.0, seed=5),
    )
    return [proposal for _, proposal in rounds]


def batch_of(name):
    """Returns the texts with their drafts; features from an anchor on are wrong."""
    T = LENGTHS[-1] + HEADS[name].num_drafts
    features = eagle.features_of()
    features = features.reshape(len(features), -1)
    tokens = np.zeros((len(LENGTHS), T), np.int32)
    known = np.full((len(LENGTHS), T, features.shape[1]), 1e3, np.float32)
    for row, (n, proposal) in enumerate(zip(LENGTHS, drafted(name), strict=True)):
        text = [*eagle.TEXT[:n], *proposal.tokens]
        tokens[row, : len(text)] = text
        known[row, : n - 1] = features[: n - 1]
    anchors = np.array(LENGTHS, np.int32)[:, None] - 1
    return {"tokens": tokens, "features": known, "anchors": anchors}


def differences(name, *, config=None, batch=None) -> float:
    """Returns the largest difference of a probability from the drafter's."""
    trained, teacher = inputs_of(name)
    batch = jax.tree.map(jnp.asarray, batch or batch_of(name))
    run = jax.jit(functools.partial(block.drafts, config or HEADS[name]))
    logits, confidence = run(trained, batch, teacher)
    made, hot = jax.nn.softmax(logits, axis=-1)[:, 0], teacher.hot
    errors = []
    for row, proposal in enumerate(drafted(name)):
        probs = proposal.probs if hot is None else proposal.probs[:, hot]
        count = min(made.shape[1], len(probs))
        errors.append(np.abs(np.asarray(made[row, :count]) - probs[:count]).max())
        if confidence is not None:
            kept = np.cumprod(1 / (1 + np.exp(-np.asarray(confidence)[row, 0])))
            errors.append(np.abs(kept[:count] - proposal.survival[:count]).max())
    return max(errors)


REST = [slow(name) for name in ("dflash2", "dflash", "gated", "mixed", "anchored")]


@pytest.mark.parametrize("name", ["dspark", *REST])
def test_training_computes_what_is_drafted(name):
    """Fails if a block is trained with other context, positions or labels."""
    assert differences(name) < 1e-5


def _with_anchor_seen(
    q, context, own, is_context, is_own, *, attend=sequence.attend_blocks
):
    late = jnp.roll(is_context, 1, axis=-1).at[..., 0].set(True)
    return attend(q, context, own, late, is_own)


@pytest.mark.slow
@pytest.mark.parametrize("shift", ["slots", "position", "mask id", "seen", "tokens"])
def test_a_planted_shift_is_not_what_is_drafted(shift, monkeypatch):
    """Negative control: each shift makes training differ from drafting."""
    batch, config = batch_of("dspark"), blocks.DSPARK
    if shift == "slots":
        config = dataclasses.replace(config, slots="fill-in")
    elif shift == "position":
        batch["features"] = np.roll(batch["features"], -1, axis=1)
    elif shift == "mask id":
        config = dataclasses.replace(config, mask_token_id=94)
    elif shift == "seen":
        monkeypatch.setattr(sequence, "attend_blocks", _with_anchor_seen)
    else:  # Each draft follows the token that it should predict.
        texts = batch["tokens"]
        for row, n in enumerate(LENGTHS):
            texts[row, n:] = np.roll(texts[row, n:], -1)
    assert differences("dspark", config=config, batch=batch) > 1e-3


TEXTS = np.random.default_rng(1).integers(0, 64, (2, 13)).astype(np.int32)
TEXTS[0, 9] = 90  # which the small draft vocabulary lacks
MASK = np.arange(13) >= np.array([[2], [9]])


@functools.cache
def batch_with_anchors(name, *, count=4, step=3):
    config, teacher = HEADS[name], inputs_of(name)[1]
    forward = jax.jit(sequence.forward, static_argnames=("config", "taps"))
    of_target = {"config": eagle.SMALL.target.config, "taps": config.taps}
    made = forward(blocks.TARGET, tokens=jnp.asarray(TEXTS), **of_target)
    batch = {
        "tokens": TEXTS,
        "mask": MASK,
        "greedy": np.ones(2, bool),
        "features": np.asarray(made.features).reshape(2, 13, -1),
        "final": np.asarray(made.hidden),
        "best": np.asarray(made.hidden @ teacher.head.T).argmax(-1),
    }
    draw = block.anchors_of(config, seed=7, count=count, hot=teacher.hot)
    return jax.tree.map(jnp.asarray, draw(batch, np.arange(2), step))


def test_the_loss_is_that_of_drafting(tmp_path):
    """Compares the loss with that of a float64 drafter, draft by draft."""
    config, (trained, teacher) = blocks.DSPARK, inputs_of("dspark")
    head, batch = blocks.oracle_of(tmp_path, "dspark"), batch_with_anchors("dspark")
    known = jax.device_get(batch)
    rows = known["final"].astype(float) @ np.asarray(teacher.head, float).T
    terms, total = [], 0.0
    for b in range(2):
        for anchor, weights in zip(
            known["anchors"][b], known["weights"][b], strict=True
        ):
            if not weights[0]:
                continue
            labels = np.pad(TEXTS[b, anchor + 1 :], (0, config.num_drafts))
            _, logits, survival = blocks.oracle.draft(
                head, known["features"][b, :anchor], TEXTS[b, anchor], drawn=labels
            )
            kept = survival / np.concatenate([[1.0], survival[:-1]])
            for i in range(config.num_drafts):
                at = anchor + i
                if not (at + 1 < 13 and MASK[b, at]):
                    break
                draft, target = softmax(logits[i]), softmax(rows[b, at])
                l1 = np.abs(draft - target).sum()
                chance = 1 - l1 / 2
                cross = -np.log(draft[labels[i]])
                sure = -chance * np.log(kept[i]) - (1 - chance) * np.log(1 - kept[i])
                weight = np.exp(-i / 4.0)
                terms.append(weight * np.array([cross, l1, sure]))
                total += weight
    both = (block.DSPARK, block.DFLASH)

    @jax.jit
    def found_of(*inputs):
        return [block.loss(config, *inputs, terms=weights) for weights in both]

    losses = found_of(trained, batch, teacher)
    for weights, made in zip(both, losses, strict=True):
        expected = np.sum(terms, axis=0) @ weights / total
        np.testing.assert_allclose(float(made), expected, rtol=1e-4)


@pytest.mark.slow
def test_the_loss_of_a_selector(tmp_path):
    """Compares the loss with a float64 drafter's: of the slots' own logits, and of the
    selector among the best tokens and the text's."""
    config, (trained, teacher) = HEADS["dflash2"], inputs_of("dflash2")
    head, batch = blocks.oracle_of(tmp_path, "dflash2"), batch_with_anchors("dflash2")
    total, missing = 0.0, 0
    for b, row in enumerate(np.asarray(batch["anchors"])):
        for anchor, weights in zip(row, np.asarray(batch["weights"])[b], strict=True):
            text = TEXTS[b, anchor:]
            h, U = blocks.oracle.backbone(head, batch["features"][b, :anchor], text[0])
            for i in np.flatnonzero(weights):
                own, label = U[i + 1], text[i + 1]
                scores = own + blocks.oracle.selector(head, text[i], h[i + 1])
                best = np.argsort(-own)[: config.top_k]
                missing += label not in best
                among = np.union1d(best, [label])
                chosen = np.log(softmax(scores[among])[among == label][0])
                total -= weights[i] * (np.log(softmax(own)[label]) + chosen) / 2
    found = block.loss(config, trained, batch, teacher, terms=block.DFLASH)
    np.testing.assert_allclose(float(found), total, rtol=1e-4)
    assert 0 < missing < np.count_nonzero(batch["weights"])
    # Negative controls: the features, and the tokens, of the next position.
    for name in ("features", "tokens"):
        moved = batch | {name: jnp.roll(batch[name], -1, axis=1)}
        other = block.loss(config, trained, moved, teacher, terms=block.DFLASH)
        assert abs(float(other) / total - 1) > 1e-2


def test_held_out_rounds_follow_each_other(tmp_path):
    """Compares rounds with a float64 drafter's: fails if a round does not begin after
    the tokens that the last one kept, or a token of the prompt is counted."""
    config, (trained, teacher) = blocks.DSPARK, inputs_of("dspark")
    head = blocks.oracle_of(tmp_path, "dspark")
    batch = batch_with_anchors("dspark", count=13, step=None)
    known = jax.device_get(batch)  # On the host slices compile nothing.
    rows = known["final"].astype(float) @ np.asarray(teacher.head, float).T
    tokens = rounds = 0
    for b in range(2):
        at = int(MASK[b].argmax())
        tokens += 12 - at
        while at < 12:
            rounds += 1
            labels = np.pad(TEXTS[b, at + 1 :], (0, config.num_drafts))
            _, logits, _ = blocks.oracle.draft(
                head, known["features"][b, :at], TEXTS[b, at], drawn=labels
            )
            kept = 0
            for i in range(min(config.num_drafts, 12 - at)):
                if logits[i].argmax() != rows[b, at + i].argmax():
                    break
                kept += 1
            at += kept + 1
    measure = jax.jit(functools.partial(block.measure, config))
    found = np.asarray(measure(trained, batch, teacher)["accepted_length"])
    np.testing.assert_array_equal(found, [tokens, rounds])
    drawn = batch | {"greedy": jnp.array([False, True])}
    found = np.asarray(measure(trained, drawn, teacher)["accepted_length"])
    assert found[0] == 12 - MASK[1].argmax()


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


@pytest.mark.slow
def test_what_a_term_trains():
    """Fails if confidence trains the drafts it judges, or a table has no gradient."""
    trained, teacher = inputs_of("dspark", "bfloat16")
    layer = dataclasses.replace(blocks.LAYER, dtype="bfloat16")
    config = dataclasses.replace(blocks.DSPARK, layer=layer)
    batch = batch_with_anchors("dspark")
    wide = ("features", "final")
    batch = batch | {name: batch[name].astype("bfloat16") for name in wide}

    @jax.jit
    def gradients(batch):
        return [
            jax.grad(functools.partial(block.loss, config, terms=terms))(
                trained, batch, teacher
            )
            for terms in ((1.0, 1.0, 0.0), (0.0, 0.0, 1.0))
        ]

    drafts, confidence = gradients(batch)
    moves = lambda leaf: bool(jnp.any(leaf != 0))
    assert moves(drafts.fc) and not moves(drafts.confidence)
    assert moves(drafts.markov.out) and moves(drafts.markov.embed)
    assert moves(confidence.confidence) and moves(confidence.markov.embed)
    assert not moves(confidence.markov.out)
    nothing = gradients(batch | {"weights": 0 * batch["weights"]})
    assert not any(map(moves, jax.tree.leaves(nothing)))


def test_anchors_are_of_the_seed_the_step_and_the_sequence():
    """Fails if anchors depend on other sequences of a batch, or not on the step."""
    draw = block.Anchors(num_drafts=3, seed=7, count=4)
    tokens = np.zeros((5, 40), np.int32)
    mask = np.arange(40) >= np.array([[3], [38], [0], [35], [39]])
    batch = {"tokens": tokens, "mask": mask}
    whole = draw(batch, np.arange(5), 3)
    order = np.array([2, 0, 4])
    part = draw({"tokens": tokens[order], "mask": mask[order]}, order, 3)
    np.testing.assert_array_equal(part["anchors"], whole["anchors"][order])
    reseeded = dataclasses.replace(draw, seed=8)
    for other in (
        draw(batch, np.arange(5), 4),
        draw(batch, np.arange(1, 6), 3),
        reseeded(batch, np.arange(5), 3),
    ):
        assert (other["anchors"] != whole["anchors"]).any()
    anchors, weights = whole["anchors"], whole["weights"]
    np.testing.assert_allclose(weights.sum(), 5, rtol=1e-6)
    assert [int((w[:, 0] > 0).sum()) for w in weights] == [4, 1, 4, 4, 0]
    assert (anchors[0] >= 3).all() and len(set(anchors[0])) == 4
    # Position 38 is the last one with a label: its block counts one draft.
    np.testing.assert_array_equal(weights[1, 0] > 0, [True, False, False])
    first = weights[0, 0]
    np.testing.assert_allclose(first / first[0], np.exp(-np.arange(3) / 4), rtol=1e-6)
    # A token that cannot be drafted ends a block.
    tokens[2, 20] = 9
    short = dataclasses.replace(draw, count=39, draftable=np.arange(96) != 9)
    counts = short(batch, np.arange(5), 0)["weights"][2] > 0
    anchors = short(batch, np.arange(5), 0)["anchors"][2]
    assert 19 not in anchors[:38]
    np.testing.assert_array_equal(counts[anchors == 18][0], [True, False, False])
