"""Texts that drafters are trained on: rollouts of the target, and cached features."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair
from head_runs import args_of, command, job_of

from experiments import train_drafter
from experiments.heads import jobs, rollouts
from spec_jax import testing
from spec_jax.model import load, sequence, tokenizer
from spec_jax.training import targets


def test_rollouts_are_half_greedy(target, work):
    """Fails unless half of the texts are the greedy choices in whole sequences."""
    texts = job_of(target, work).online.texts
    assert texts.tokens.shape == (20, 16)
    config, params = load.load(target)
    logits_of = jax.jit(sequence.logits, static_argnums=1)
    logits = np.asarray(logits_of(params, config, jnp.asarray(texts.tokens)))
    is_first = logits[:, :-1].argmax(axis=-1) == texts.tokens[:, 1:]
    written = texts.mask[:, :-1]
    shares = [row[mask].mean() for row, mask in zip(is_first, written, strict=True)]
    assert sum(share == 1 for share in shares) == 10
    assert sum(share < 0.9 for share in shares) >= 8


def assert_cached(store, online, rows, source=None):
    """Asserts that rows of a cache have the bits that the target computes."""
    cached = targets.cached(source or online, store)[rows]
    for name, array in online[rows].items():
        testing.assert_same_bits(cached[name], array, what=name)


def test_a_cache_has_the_bits_of_the_target(target, work, tmp_path):
    """Fails if bits differ, `--texts` does not find it, or it serves another target."""
    online = job_of(target, work).online
    store, rows = targets.store_of(work / "cache", online), np.array([7, 0, 19])
    assert targets.missing(store, online.texts) == []
    assert_cached(store, online, rows)
    turned = dataclasses.replace(online.config, rope_theta=5e5)  # of the same weights
    for what, other in (
        ("taps", job_of(target, work, "--taps", "0,2,1").online),
        ("target_config", dataclasses.replace(online, config=turned)),
    ):
        with pytest.raises(ValueError, match=f"cache.json: of another {what}; delete"):
            targets.store_of(work / "cache", other)
    elsewhere = args_of(target, tmp_path, "--texts", str(work))
    assert targets.missing(jobs.store_of(elsewhere, online), online.texts) == []


def test_a_cache_goes_on_where_it_was_killed(target, work, tmp_path):
    """Fails if half a text is kept, a whole one computed again, or a later one lost."""
    online = job_of(target, work).online
    store, first = targets.store_of(tmp_path, online), online.texts.read(0)
    with pytest.raises(ValueError, match=r"rows float32\[3, 4\] of a text of "):
        store.add(first, np.zeros((3, 4), np.float32))
    store.add(first, online.rows_of(0))
    (whole,) = tmp_path.glob("*.rows")
    half = store._path(online.texts.read(1))
    half.with_name(f"{half.name}.partial").write_bytes(whole.read_bytes()[:10])
    store, made = targets.store_of(tmp_path, online), []
    with pytest.raises(ValueError, match="lacks 19 of 20 texts; run the stage cache"):
        targets.cached(online, store)
    targets.write(store, online, after_text=lambda: made.append(None))
    assert len(made) == 19
    for again in (store, targets.store_of(tmp_path, online)):
        assert_cached(again, online, np.arange(20))


def test_choices_are_computed_once(target, work, tmp_path):
    """Fails if a cache computes the target's choices again, or keeps other bits."""
    shutil.copytree(work / "cache", tmp_path / "cache")
    online = dataclasses.replace(job_of(target, work).online, normalizers=True)
    store, rows = targets.store_of(tmp_path / "cache", online), np.array([7, 0, 19])
    blind = dataclasses.replace(online, params=None)
    for source in (online, blind):  # The second computes nothing.
        assert_cached(store, online, rows, source)
    with pytest.raises(AttributeError):  # Control: a text that was not read before.
        targets.cached(blind, store)[np.array([1])]
    # A greedy text shows its own choices, whatever the cache holds.
    kept = targets.cached(online, store)
    told = dataclasses.replace(online, normalizers=False)
    one = rows[online.texts.is_greedy[rows]][:1]
    text, expected = online.texts.read(int(one[0])), told[one]["best"]
    planted = np.array(kept._choices[text])
    planted["best"] += 1
    kept._choices.add(text, planted)
    testing.assert_same_bits(targets.cached(told, store)[one]["best"], expected)
    assert (kept[one]["best"] != expected).any()  # Control: the cache is read.


def test_a_chat_is_not_cut(target, tmp_path, capsys):
    """Fails if a chat loses its beginning, or one without room for a text is run."""
    folder = shutil.copytree(target, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text(tiny_pair.TEMPLATE)
    long, words = ("--length", "4000"), tokenizer.load(folder)
    args = args_of(folder, tmp_path, *long, stage="rollouts")
    assert min(map(len, rollouts.prompt_ids(args, words))) > args.prefix
    args.raw = True
    assert max(map(len, rollouts.prompt_ids(args, words))) == 9
    assert train_drafter.main(command(folder, tmp_path, "rollouts")) == 1
    assert "10 of 10 prompts have up to" in capsys.readouterr().err
    # Options reach the template.
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ tools }}")
    option = [*long, "--chat-option", '{"tools": [7]}']
    args = args_of(folder, tmp_path, *option, stage="rollouts")
    shown = tokenizer.load(folder).encode("[7]")
    assert rollouts.writer_of(args).prompts[0][-len(shown) :] == shown
