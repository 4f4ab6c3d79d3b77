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


def lacking(cached) -> list[int]:
    """Returns the texts whose rows a cache lacks."""
    texts = cached.texts
    return [row for row in range(len(texts)) if texts.read(row) not in cached.store]


def assert_cached(cached, online, rows):
    """Asserts that rows of a cache have the bits that the target computes."""
    found = cached[rows]
    for name, array in online[rows].items():
        testing.assert_same_bits(found[name], array, what=name)


def test_a_cache_has_the_bits_of_the_target(target, work, tmp_path):
    """Fails if bits differ, `--texts` does not find it, or it serves another target."""
    online = job_of(target, work).online
    cached = targets.cached(online, work / "cache")
    assert lacking(cached) == []
    assert_cached(cached, online, np.array([7, 0, 19]))
    turned = dataclasses.replace(online.config, rope_theta=5e5)  # of the same weights
    for what, other in (
        ("taps", job_of(target, work, "--taps", "0,2,1").online),
        ("target_config", dataclasses.replace(online, config=turned)),
    ):
        with pytest.raises(ValueError, match=f"cache.json: of another {what}; delete"):
            targets.cached(other, work / "cache")
    elsewhere = args_of(target, tmp_path, "--texts", str(work))
    assert lacking(jobs.cached(elsewhere, online)) == []


def test_a_cache_goes_on_where_it_was_killed(target, work, tmp_path):
    """Fails if half a text is kept, a whole one computed again, or a later one lost."""
    online = job_of(target, work).online
    cached = targets.cached(online, tmp_path)
    cached.rows_of(0)
    (whole,) = tmp_path.glob("*.rows")
    half = cached.store._path(online.texts.read(1))
    half.with_name(f"{half.name}.partial").write_bytes(whole.read_bytes()[:10])
    again = targets.cached(online, tmp_path)
    assert lacking(again) == [*range(1, 20)]
    dataclasses.replace(again, params=None).rows_of(0)  # It computes nothing.
    assert_cached(again, online, np.arange(20))
    assert lacking(cached) == []


def test_choices_are_computed_once(target, work, tmp_path):
    """Fails if a cache computes the target's choices again, or keeps other bits."""
    shutil.copytree(work / "cache", tmp_path / "cache")
    online = dataclasses.replace(job_of(target, work).online, normalizers=True)
    kept = targets.cached(online, tmp_path / "cache")
    blind, rows = dataclasses.replace(kept, params=None), np.array([7, 0, 19])
    for cached in (kept, blind):  # The second computes nothing.
        assert_cached(cached, online, rows)
    with pytest.raises(AttributeError):  # Control: a text that was not read before.
        blind[np.array([1])]
    # A greedy text shows its own choices, whatever the cache holds.
    told = dataclasses.replace(kept, normalizers=False)
    one = rows[online.texts.greedy[rows]][:1]
    text = online.texts.read(int(one[0]))
    expected = dataclasses.replace(told, store=None)[one]["best"]
    planted = np.array(kept._choices[text])
    planted["best"] += 1
    kept._choices.add(text, planted)
    testing.assert_same_bits(told[one]["best"], expected)
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
