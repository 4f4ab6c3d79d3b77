"""Training of heads: its losses and counts are those of a float64 head that drafts."""

import dataclasses
import functools

import head_cases as heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import HEADS, PARAMS
from model import block_oracle, head_layouts
from slow_cases import slow_but

from spec_jax.model import sequence
from spec_jax.training import block, heads as training_heads, peagle, targets


def inputs_of(name):
    """Returns the weights that are trained, and the target's part of the loss."""
    params = PARAMS[name]
    teacher = targets.teacher_of(heads.TARGET, params.hot)
    return training_heads.trained(HEADS[name], params), teacher


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def planted(batch):
    """Yields a batch with the features, and one with the tokens, of the next position:
    faults."""
    for name in ("features", "tokens"):
        yield batch | {name: jnp.roll(batch[name], -1, axis=1)}


NAMES = ("dspark", "peagle", "dflash2", "dflash", "gated", "mixed", "anchored")


@pytest.mark.parametrize("name", slow_but(NAMES, "dspark", "peagle"))
def test_training_computes_what_is_drafted(tmp_path, name):
    """Fails if a draft is trained with other context, positions or labels."""
    oracle, config = heads.Oracle(tmp_path, name), HEADS[name]
    lengths = (3, 4, 7, 12, 13) if name == "peagle" else (1, 4, 7, 12)
    features = heads.features_of()[: len(heads.TEXT)]
    known = features.reshape(1, len(features), -1)
    anchors = np.array([lengths], np.int32) - 1
    tokens = np.array([heads.TEXT], np.int32)
    batch = {"tokens": tokens, "features": known, "anchors": anchors}
    batch = jax.tree.map(jnp.asarray, batch)

    trained, teacher = inputs_of(name)
    drafts = block.drafts
    if name == "peagle":
        drafts = functools.partial(peagle.drafts, steps=heads.GAMMA)
    drafts = jax.jit(drafts, static_argnums=0)

    def difference(batch, config=config):
        """Returns the largest difference of a probability from the oracle's."""
        made = drafts(config, trained, batch, teacher)
        made, confidence = made if isinstance(made, tuple) else (made, None)
        errors = []
        for n, length in enumerate(lengths):
            drawn = heads.TEXT[length : length + heads.GAMMA]
            _, logits, survival = oracle.after(length, drawn=drawn)
            errors.append(np.abs(softmax(made[0, n]) - softmax(logits)).max())
            if confidence is not None:
                kept = np.cumprod(1 / (1 + np.exp(-confidence[0, n])))
                errors.append(np.abs(kept - survival).max())
        return max(errors)

    assert difference(batch) < 1e-4
    for wrong in planted(batch):
        assert difference(wrong) > 1e-3
    if name == "peagle":
        layer = oracle.head.layer
        layer.update(layer_types=["sliding_attention"], sliding_window=3)
        assert difference(batch, config=dataclasses.replace(config, window=3)) < 1e-4


TEXTS = np.random.default_rng(1).integers(0, 64, (2, 13)).astype(np.int32)
TEXTS[0, 9] = 90  # which the small draft vocabulary lacks
MASK = np.arange(13) >= np.array([[2], [9]])


@functools.cache
def batch_with_anchors(name, *, count=4, step=3):
    config, teacher = HEADS[name], inputs_of(name)[1]
    forward = jax.jit(sequence.forward, static_argnames=("config", "taps"))
    of_target = {"config": heads.SMALL.target.config, "taps": config.taps}
    made = forward(heads.TARGET, tokens=jnp.asarray(TEXTS), **of_target)
    batch = {
        "tokens": TEXTS,
        "mask": MASK,
        "greedy": np.ones(2, bool),
        "features": np.asarray(made.features).reshape(2, 13, -1),
        "final": np.asarray(made.hidden),
        "best": np.asarray(made.hidden @ teacher.head.T).argmax(-1),
    }
    if name == "peagle":
        draw = peagle.Anchors(num_drafts=heads.GAMMA, seed=7, count=count)
    else:
        tokens = block.draftable(teacher.hot, config.layer.vocab_size)
        how = {"num_drafts": config.num_drafts, "draftable": tokens}
        draw = block.Anchors(**how, seed=7, count=count)
    return jax.tree.map(jnp.asarray, draw(batch, np.arange(2), step))


def target_logits(name):
    """Returns the target's logits `[2, 13, Vd]` of draft tokens, in float64."""
    final = np.asarray(batch_with_anchors(name)["final"], float)
    return final @ np.asarray(inputs_of(name)[1].draft_head, float).T


def blocks_of(name):
    """Yields text, anchor and weights of each block of a batch that counts."""
    batch = jax.device_get(batch_with_anchors(name))
    for b, n in np.argwhere(batch["weights"][..., 0]):
        yield int(b), int(batch["anchors"][b, n]), batch["weights"][b, n]


def test_the_loss_is_that_of_drafting(tmp_path):
    """Compares the loss with that of a float64 drafter, draft by draft."""
    oracle, rows = heads.Oracle(tmp_path, "dspark"), softmax(target_logits("dspark"))
    batch, (trained, teacher) = batch_with_anchors("dspark"), inputs_of("dspark")
    terms = np.zeros(3)
    for b, anchor, weights in blocks_of("dspark"):
        labels = np.pad(TEXTS[b, anchor + 1 :], (0, heads.GAMMA))
        _, logits, survival = oracle.draft(
            batch["features"][b], TEXTS[b, : anchor + 1], drawn=labels
        )
        kept = survival / np.concatenate([[1.0], survival[:-1]])
        for i in np.flatnonzero(weights):
            draft = softmax(logits[i])
            l1 = np.abs(draft - rows[b, anchor + i]).sum()
            chance = 1 - l1 / 2
            cross = -np.log(draft[labels[i]])
            sure = -chance * np.log(kept[i]) - (1 - chance) * np.log(1 - kept[i])
            terms += weights[i] * np.array([cross, l1, sure]) / 2
    both = (block.DSPARK, block.DFLASH)

    @jax.jit
    def found_of(*inputs):
        return [block.loss(HEADS["dspark"], *inputs, terms=weights) for weights in both]

    found = found_of(trained, batch, teacher)
    np.testing.assert_allclose(found, [terms @ weights for weights in both], rtol=1e-4)


def check_loss(loss, batch, expected):
    """Checks a loss, and as negative controls that each planted fault changes it."""
    loss = jax.jit(loss)
    np.testing.assert_allclose(float(loss(batch)), expected, rtol=1e-4)
    for wrong in planted(batch):
        assert abs(float(loss(wrong)) / expected - 1) > 1e-3


@pytest.mark.slow
def test_the_loss_of_a_selector(tmp_path):
    """Compares the loss with a float64 drafter's: of the slots' own logits, and of the
    selector among the best tokens and the text's."""
    config = dataclasses.replace(HEADS["dflash2"], top_k=24)
    head = heads.Oracle(tmp_path, "dflash2").head
    batch, (trained, teacher) = batch_with_anchors("dflash2"), inputs_of("dflash2")
    total, missing = 0.0, 0
    for b, anchor, weights in blocks_of("dflash2"):
        text = TEXTS[b, anchor:]
        h, U = block_oracle.backbone(head, batch["features"][b, :anchor], text[0])
        for i in np.flatnonzero(weights):
            own, label = U[i + 1], text[i + 1]
            scores = own + block_oracle.selector(head, text[i], h[i + 1])
            best = np.argsort(-own)[: config.top_k]
            missing += label not in best
            among = np.union1d(best, [label])
            chosen = np.log(softmax(scores[among])[among == label][0])
            total -= weights[i] * (np.log(softmax(own)[label]) + chosen) / 2
    assert 0 < missing < np.count_nonzero(batch["weights"])
    loss = lambda batch: block.loss(config, trained, batch, teacher, terms=block.DFLASH)
    check_loss(loss, batch, total)


@pytest.mark.slow
def test_the_loss_of_masks(tmp_path):
    """Compares the loss with the float64 head's, draft by draft. First drafts count
    after every pair, not after anchors alone."""
    oracle, rows = heads.Oracle(tmp_path, "peagle"), softmax(target_logits("peagle"))
    batch, (trained, teacher) = batch_with_anchors("peagle"), inputs_of("peagle")

    def nats(b, anchor):
        logits = oracle.draft(batch["features"][b], TEXTS[b, : anchor + 1])[1]
        at = np.minimum(anchor + np.arange(heads.GAMMA), 12)
        return -(rows[b, at] * np.log(softmax(logits))).sum(axis=1)

    total = sum(w[1:] @ nats(b, anchor)[1:] for b, anchor, w in blocks_of("peagle"))
    pairs = [(b, anchor) for b in range(2) for anchor in np.flatnonzero(MASK[b, :12])]
    assert np.count_nonzero(batch["pair_weights"]) == len(pairs)
    firsts = batch["weights"][..., 0].sum()
    total += firsts * np.mean([nats(*pair)[0] for pair in pairs])
    loss = functools.partial(peagle.loss, HEADS["peagle"], steps=heads.GAMMA)
    check_loss(lambda batch: loss(trained, batch, teacher), batch, total / 2)


def test_held_out_rounds_follow_each_other(tmp_path):
    """Compares rounds with a float64 drafter's: fails if a round does not begin after
    the tokens that the last one kept, or a token of the prompt is counted."""
    oracle, rows = heads.Oracle(tmp_path, "dspark"), target_logits("dspark")
    trained, teacher = inputs_of("dspark")
    batch = batch_with_anchors("dspark", count=13, step=None)
    tokens = rounds = 0
    for b in range(2):
        at = int(MASK[b].argmax())
        tokens += 12 - at
        while at < 12:
            rounds += 1
            labels = np.pad(TEXTS[b, at + 1 :], (0, heads.GAMMA))
            _, logits, _ = oracle.draft(
                batch["features"][b], TEXTS[b, : at + 1], drawn=labels
            )
            count = min(heads.GAMMA, 12 - at)
            agrees = logits[:count].argmax(-1) == rows[b, at : at + count].argmax(-1)
            at += 1 + int(np.logical_and.accumulate(agrees).sum())
    measure = jax.jit(functools.partial(block.measure, HEADS["dspark"]))
    found = np.asarray(measure(trained, batch, teacher)["accepted_length"])
    np.testing.assert_array_equal(found, [tokens, rounds])
    drawn = batch | {"greedy": jnp.array([False, True])}
    found = np.asarray(measure(trained, drawn, teacher)["accepted_length"])
    assert found[0] == 12 - MASK[1].argmax()


@pytest.mark.slow
def test_what_a_term_trains():
    """Fails if confidence trains the drafts it judges, or a table has no gradient."""
    trained, teacher = inputs_of("dspark")
    narrow = lambda x: x.astype("bfloat16")
    teacher = teacher.replace(embed=narrow(teacher.embed), head=narrow(teacher.head))
    config = head_layouts.with_dtype(HEADS["dspark"], "bfloat16")
    batch = batch_with_anchors("dspark")
    batch = batch | {name: narrow(batch[name]) for name in ("features", "final")}

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
    rows = np.arange(5)
    whole = draw(batch, rows, 3)
    order = np.array([2, 0, 4])
    part = draw({"tokens": tokens[order], "mask": mask[order]}, order, 3)
    np.testing.assert_array_equal(part["anchors"], whole["anchors"][order])
    reseeded = dataclasses.replace(draw, seed=8)
    for other in (
        draw(batch, rows, 4),
        draw(batch, 1 + rows, 3),
        reseeded(batch, rows, 3),
    ):
        assert (other["anchors"] != whole["anchors"]).any()
    anchors, weights = whole["anchors"], whole["weights"]
    np.testing.assert_allclose(weights.sum(), 5, rtol=1e-6)
    assert [int((w[:, 0] > 0).sum()) for w in weights] == [4, 1, 4, 4, 0]
    assert (anchors[0] >= 3).all() and len(set(anchors[0])) == 4
    # Position 38 is the last one with a label: its block counts one draft.
    assert (weights[1, 0] > 0).tolist() == [True, False, False]
    first = weights[0, 0]
    np.testing.assert_allclose(first / first[0], np.exp(-np.arange(3) / 4), rtol=1e-6)
    # A token that cannot be drafted ends a block.
    tokens[2, 20] = 9
    short = dataclasses.replace(draw, count=39, draftable=np.arange(96) != 9)
    made = short(batch, rows, 0)
    anchors, counts = made["anchors"][2], made["weights"][2] > 0
    assert 19 not in anchors[:38]
    assert counts[anchors == 18].tolist() == [[True, False, False]]
