"""The pair that ships with the package: whole, small, trained, and lossless."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spec_jax as sj
from experiments import spec_round
from experiments.lib import prompt_files
from spec_jax import loading
from spec_jax.drafters import registry
from spec_jax.model import config as config_lib, tokenizer
from spec_jax.training import block, eagle3, targets


def test_the_default_run_matches_and_the_draft_is_of_use(tmp_path):
    """Fails if an asset is missing or was not trained: a random draft accepts 0."""
    out = tmp_path / "out.jsonl"
    flags = ["--prompts", "2", "--gen-tokens", "24", "--out", str(out)]
    assert spec_round.main(flags) == spec_round.MATCHED
    summary = json.loads(out.read_text().splitlines()[-1])
    assert summary["verify_decode_mismatches"] == 0
    assert summary["acceptance_rate"] > 0.2


def test_the_folders_are_complete_and_small():
    target, draft = loading.EMBEDDED_TARGET, loading.EMBEDDED_DRAFT
    for folder in (target, draft):
        assert config_lib.read(folder / "config.json").dtype == "bfloat16"
        assert tokenizer.load(folder).stop_ids == (0,)
    tokenizer.check_same_vocabulary(tokenizer.load(target), tokenizer.load(draft))
    files = [path for path in loading.ASSETS.rglob("*") if path.is_file()]
    in_heads = [path for path in files if path.parent.name in registry.NEED_TARGET]
    assert sum(path.stat().st_size for path in files) < 42e6
    assert sum(path.stat().st_size for path in in_heads) < 12e6
    assert [path.parent for path in files if path.name == "tokenizer.json"] == [target]
    card = (loading.ASSETS / "README.md").read_text(encoding="utf-8")
    for fact in ("held-out loss", "tokens seen", "sha256", "LICENSE-PSF.txt"):
        assert fact in card
    for part in ("weights, heads and tokenizer", "spec_jax/assets/LICENSE-PSF.txt"):
        assert part in (loading.ASSETS.parents[1] / "NOTICE").read_text()
    notice = (loading.ASSETS / "LICENSE-PSF.txt").read_text(encoding="utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in notice


@pytest.mark.few(1)
@pytest.mark.parametrize("name", loading.shipped_heads())
def test_a_shipped_head_has_a_card_and_is_of_use(name, tmp_path):
    """Fails if a head is of another target, was not trained, or says too little."""
    card = (loading.ASSETS / name / "README.md").read_text(encoding="utf-8")
    for fact in ("held-out", "SHA-256", "licence"):
        assert fact in card
    out = tmp_path / "out.jsonl"
    flags = ["--prompts", "2", "--gen-tokens", "24", "--out", str(out)]
    assert spec_round.main([*flags, "--drafter", name]) == spec_round.MATCHED
    summary = json.loads(out.read_text().splitlines()[-1])
    assert summary["verify_decode_mismatches"] == 0
    assert summary["acceptance_rate"] > 0.2


def accepted(lm, texts, **shifted):
    """Drafts that are kept in a round; as `measured`."""
    tokens, rounds = measured(lm, texts, steps=4, **shifted)["accepted_length"]
    return float(tokens / rounds) - 1


def measured(lm, texts, *, steps, layers=0, positions=0, order=0):
    """What a training measures, of features from other layers or positions, or of
    layers in another order."""
    head = lm.drafter.head
    taps = tuple(tap + layers for tap in head.taps)
    online = targets.Online(
        texts=texts, params=lm.params, config=lm.target.config, taps=taps
    )
    rows = np.arange(len(texts))
    batch = online[rows]
    shift = (positions, order * lm.target.config.hidden_size)
    batch["features"] = np.roll(batch["features"], shift, axis=(1, 2))
    if not hasattr(head, "has_head_norms"):
        batch = block.anchors_of(head, seed=0, hot=None)(batch, rows, None)
    batch = jax.tree.map(jnp.asarray, batch)
    params = lm.drafter_params
    teacher = targets.teacher_of(lm.params, params.hot)
    if hasattr(head, "has_head_norms"):
        return eagle3.measure(head, params, batch, teacher, steps=steps)
    return block.measure(head, params, batch, teacher)


@functools.cache
def texts_of(count):
    """What the embedded target writes behind prompts."""
    prompts = prompt_files.parse(str(count), default_file=prompt_files.BUNDLED)
    written = sj.decode(
        sj.load(),
        [one.messages[0]["content"] for one in prompts],
        max_tokens=48,
        ignore_eos=True,
    )
    tokens = np.array([one.tokens for one in written], np.int32)
    return targets.Texts(tokens=tokens, mask=np.ones(tokens.shape, bool))


@pytest.mark.slow
@pytest.mark.parametrize("name", loading.shipped_heads())
def test_the_held_out_measure_is_that_of_rounds(name):
    """Fails if what a training calls the accepted length is another measure than that
    of decoding: a mean over all positions, or of drafts after the end. Where sums round
    another way than the rows of decoding, single rounds may differ."""
    lm = sj.load(drafter=name)
    prompts = [
        one.messages[0]["content"]
        for one in prompt_files.parse("6", default_file=prompt_files.BUNDLED)
    ]
    drafts = 7
    written = [
        sj.generate(lm, x, max_tokens=32, gamma=drafts, stop=()) for x in prompts
    ]
    size = max(len(x.prompt_tokens) for x in written) + 32
    tokens, mask = np.zeros((6, size), np.int32), np.zeros((6, size), bool)
    for row, one in enumerate(written):
        text = [*one.prompt_tokens, *one.tokens]
        tokens[row, : len(text)] = text
        mask[row, len(one.prompt_tokens) - 1 : len(text) - 1] = True
    texts = targets.Texts(tokens=tokens, mask=mask)
    found = np.asarray(measured(lm, texts, steps=drafts)["accepted_length"])
    live = np.sum([[32, x.metrics["rounds"]] for x in written], axis=0)
    assert found[0] == live[0] and abs(found[1] - live[1]) <= 2, (found, live)


@pytest.mark.slow
def test_a_shipped_eagle3_drafts_less_from_shifted_features():
    """Alarms: a layer further on costs it something. It reads the feature beside each
    token, and a neighbouring position halves what is accepted."""
    lm, texts = sj.load(drafter="eagle3", impl="xla"), texts_of(6)
    right = accepted(lm, texts)
    assert right > 0.5
    assert accepted(lm, texts, layers=1) < right
    assert max(accepted(lm, texts, positions=shift) for shift in (1, -1)) < right / 2


def with_slots_of_others(lm):
    """Each draft is of the slot after its own, or before it."""
    head = lm.drafter.head
    other = "fill-in" if head.slots == "anchor-first" else "anchor-first"
    changed = dataclasses.replace(head, slots=other)
    drafter = dataclasses.replace(
        lm.drafter, head=changed, gamma_max=min(changed.num_drafts, head.num_drafts)
    )
    return dataclasses.replace(lm, drafter=drafter)


def with_norm(lm, name, change):
    """The weights of a norm are read with another convention."""
    params = lm.drafter_params
    if hasattr(params, name):
        params = params.replace(**{name: change(getattr(params, name))})
    else:
        layers = [x.replace(**{name: change(getattr(x, name))}) for x in params.layers]
        params = params.replace(layers=tuple(layers))
    return dataclasses.replace(lm, drafter_params=params)


FAULTS = {
    # What is planted, and the most of its drafts that a head may keep: what was
    # measured (see the test), and a third of the way to all of them.
    "norm of features": (
        lambda lm: (with_norm(lm, "hidden_norm", lambda w: w - 1), {}),
        0.5,
    ),
    "norm of the MLP": (
        lambda lm: (with_norm(lm, "mlp_norm", lambda w: w + 1), {}),
        0.5,
    ),
    "slot convention": (lambda lm: (with_slots_of_others(lm), {}), 0.7),
    "position, later": (lambda lm: (lm, {"positions": 1}), 0.8),
    "position, earlier": (lambda lm: (lm, {"positions": -1}), 0.9),
    "layer index": (lambda lm: (lm, {"layers": 1}), 0.95),
    "layer index, below": (lambda lm: (lm, {"layers": -1}), 0.97),
    "order of layers": (lambda lm: (lm, {"order": 1}), 0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_shipped_dspark_drafts_less_with_what_is_off_by_one(fault):
    """Alarms. Of 32 texts, the share of drafts that is left of the shipped DSpark's,
    and of those of a DFlash that has the same backbone and no head after it:

        norm of features   0.31  0.27        position, later      0.67  0.64
        norm of the MLP    0.17  0.19        position, earlier    0.87  0.80
        slot convention    0.59  0.06        layer index          0.91  0.88
        order of layers    0.36  0.32        layer index, below   0.86  0.86

    A neighbouring position or layer does not halve what is kept, of either: a block
    sees the whole context, of which neighbours say much the same. The Markov head
    drafts half of it from the token before alone, which hides a wrong slot. All are
    caught because a draft is no longer the one of the files:
    `tests/drafters/test_block.py` plants them.
    """
    lm, texts = sj.load(drafter="dspark", impl="xla"), texts_of(6)
    plant, most = FAULTS[fault]
    planted, shifted = plant(lm)
    right = accepted(lm, texts)
    assert right > 1.9
    assert accepted(planted, texts, **shifted) < most * right
