"""Draft models whose tokenizer is not the target's, or whose vocabulary is padded
otherwise: pairs of GPT-NeoX, and of Qwen3."""

import json
import re

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair
from slow_cases import slow

import spec_jax as sj
from spec_jax import loading, results
from spec_jax.engine import rows
from spec_jax.model import (
    families,
    load as load_lib,
    params as params_lib,
    save as save_lib,
    tokenizer,
    translated,
)
from spec_jax.ops import dispatch


DROPPED = 400
"""Merges, and therefore tokens, that the other tokenizer lacks."""

PROMPT = "def add(a, b):\n    return"
HOW = {"drafter": "draft-model", "gamma_max": 4}
RUN = {"max_tokens": 24, "ignore_eos": True, "gamma": 4}
DRAWN = {"sampling": sj.Sampling(temperature=0.7, seed=3)}


def other_words(folder):
    """Writes the embedded tokenizer without its last tokens, and with the other ids in
    another order; returns the old id of each new one."""
    words = json.loads((loading.EMBEDDED_TARGET / "tokenizer.json").read_text())
    model = words["model"]
    gone = {"".join(pair) for pair in model["merges"][len(model["merges"]) - DROPPED :]}
    model["merges"] = model["merges"][: len(model["merges"]) - DROPPED]
    special = {token["content"] for token in words["added_tokens"]}
    kept = [token for token in model["vocab"] if token not in gone]
    free = [token for token in kept if token not in special]
    order = np.random.default_rng(0).permutation(len(free))
    fixed = sorted(special, key=model["vocab"].get)
    named = [*fixed, *(free[i] for i in order)]
    old = np.array([model["vocab"][token] for token in named])
    model["vocab"] = {token: number for number, token in enumerate(named)}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    return old


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Writes the embedded draft with another tokenizer; returns the folder."""
    folder = tmp_path_factory.mktemp("words")
    old = other_words(folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    config, params = load_lib.load(loading.EMBEDDED_DRAFT, impl="xla")
    config = config.__class__(**vars(config) | {"vocab_size": len(old)})
    embed = params.embed[old]
    head = None if params.lm_head is None else params.lm_head[old]
    words = tokenizer.load(folder)
    made = tmp_path_factory.mktemp("draft")
    params = params.replace(embed=embed, lm_head=head)
    save_lib.save(made, config, params, tokenizer=words)
    return made


@pytest.fixture(scope="module")
def pair(foreign):
    return sj.load(draft=foreign, **HOW)


def accepted(generation) -> int:
    return generation.origins.count(results.Origin.ACCEPTED)


def tables(folder):
    """Returns both tokenizers, what the draft reads, and what it drafts."""
    both = tokenizer.load(loading.EMBEDDED_TARGET), tokenizer.load(folder)
    return *both, *translated.tables(*both, num_entries=4096, size=4096 - DROPPED)


def test_tokens_are_the_same_if_their_bytes_are(foreign):
    """Fails if tokens of different bytes count as one, or a shared one is missed."""
    target, own, read, drafted = tables(foreign)
    shared = np.flatnonzero(drafted < 4096 - DROPPED)
    assert shared.size == 4096 - DROPPED and len({*drafted[shared]}) == shared.size
    for token in shared:
        assert target.bytes_of(token) == own.bytes_of(int(drafted[token]))
        assert read[token] == drafted[token]
    for token in np.flatnonzero(drafted == 4096 - DROPPED):
        text = target.bytes_of(int(token)).decode()
        assert read[token] == own.encode(text)[-1]


def test_a_special_token_is_not_one_of_the_same_letters(foreign, tmp_path):
    """Fails if a special token counts as the ordinary token of the same letters."""
    stated = json.loads((foreign / "tokenizer.json").read_text())
    stated["added_tokens"][0]["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(stated))
    assert tables(tmp_path)[-1][0] == 4096 - DROPPED


@pytest.mark.parametrize(
    ("temperature", "tree"),
    [(0.7, None), slow(0.7, "4x4:11"), slow(0.0, None), slow(0.0, "4x4:11")],
)
def test_rounds_are_those_of_the_draft_in_the_targets_vocabulary(
    pair, tree, temperature
):
    """Fails if far fewer drafts are accepted from a draft with other ids, or if another
    token is committed."""
    how = RUN if tree is None else RUN | {"gamma": 11}
    if temperature:
        how = how | DRAWN
    both = [lm.with_tree(tree) if tree else lm for lm in (pair, sj.load(**HOW))]
    mine, theirs = (sj.generate(lm, PROMPT, **how) for lm in both)
    assert mine.tokens == theirs.tokens
    # Less than a tenth of the tokens is missing, and none of the most frequent ones.
    assert accepted(mine) >= 0.8 * accepted(theirs) > 0


def test_tokens_that_the_draft_lacks_are_never_drafted(pair):
    """Fails if logits allow a token that the draft's head has no row for."""
    model, params = pair.drafter.model, pair.drafter_params
    kv = model.new_cache(capacity=64, page_size=16)
    kv, _ = model.prefill(params, kv, [5, 6, 7])
    _, logits = decoding.forward(model, params, kv, [8, 9], 3)
    lacks, logits = np.asarray(params.drafted) == model.own_size, np.asarray(logits)[:2]
    assert np.isneginf(logits[:, lacks]).all()
    assert np.isfinite(logits[:, ~lacks]).all()
    assert not rows.SlotRows(model=model, num_slots=1).runs_chains


def test_no_token_in_common(foreign, monkeypatch):
    """Fails if a draft that can draft nothing is loaded."""
    none = lambda *a, **k: (np.zeros(4096, np.int32), np.full(4096, 4096, np.int32))
    monkeypatch.setattr(translated, "tables", none)
    with pytest.raises(ValueError, match="no token in common: take a draft model"):
        sj.load(draft=foreign, **HOW)


def write_model(folder, *, seed: int, **changes):
    """Writes a folder of random weights with the byte tokenizer of 257 entries."""
    config = tiny_pair.neox_config(**{"vocab_size": 272} | changes)
    params = params_lib.init(jax.random.key(seed), config, stddev=0.3)
    # Entries without a token get the highest logits: they would always be drawn.
    padding = jnp.arange(config.vocab_size)[:, None] >= 257
    params = params.replace(
        final_norm=params.final_norm.replace(bias=params.final_norm.bias + 1.0),
        lm_head=jnp.where(padding, 10.0, params.lm_head),
    )
    return tiny_pair.write_model(folder, config, params=params)


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """Writes a target and a draft whose vocabularies are padded differently."""
    folder = tmp_path_factory.mktemp("pair")
    target = write_model(folder / "target", seed=0)
    return target, write_model(folder / "draft", seed=0, vocab_size=264)


@pytest.mark.parametrize("how", [{"cache": "static"}, slow({"tree": "2x3:5"})], ids=str)
def test_drafts_change_no_token(padded, how):
    """Fails if tokens, greedy or drawn, differ from decoding's, or one is padding."""
    target, draft = padded
    lm = sj.load(target, draft=draft, gamma_max=4, **how)
    assert lm.target.impl == dispatch.resolve("auto")
    assert lm.target.config.vocab_size == lm.drafter.vocab_size == 257
    prompts = ["abcabcab", "def f(x):"]
    draws = [sj.Sampling(temperature=0.0), sj.Sampling(temperature=0.7, seed=3)]
    settings = {"max_tokens": 24, "sampling": draws, "stop": ()}
    outs = sj.generate(lm, prompts, gamma=4, **settings)
    plain = sj.decode(lm, prompts, **settings)
    assert [out.tokens for out in outs] == [out.tokens for out in plain]
    assert max(max(out.tokens) for out in plain) < 257
    assert sum(out.metrics["accepted"] for out in outs) > 0


def test_qwen3_pairs_of_different_padding(tmp_path):
    """Fails if a pair of different padding is refused, or keeps its padding entries."""
    target, draft = (
        tiny_pair.write_model(tmp_path / str(size), tiny_pair.config(vocab_size=size))
        for size in (264, 272)
    )
    lm = sj.load(target, draft=draft, gamma_max=3)
    assert lm.target.config.vocab_size == lm.drafter.vocab_size == 257


def test_entries_that_a_tokenizer_asks_for_and_a_model_lacks(tmp_path):
    folder = write_model(tmp_path, seed=0, vocab_size=250)
    with pytest.raises(ValueError, match="vocab_size=250 .* has ids up to 256"):
        sj.load(folder, drafter="ngram")


def test_auto_takes_what_was_tested_on_the_device(padded, caplog):
    """Fails if a named implementation is not taken; "auto" takes XLA instead of one
    that was not tested, and says once what that costs."""
    config, _ = load_lib.load(padded[0])
    assert families.runnable(config, "triton") == "triton"
    families._say_xla_runs.cache_clear()
    for resolved in ("xla", "triton", "triton"):
        assert families.runnable(config, resolved, is_named=False) == "xla"
    (line,) = caplog.messages
    assert re.search("'xla' and not 'triton' for gpt_neox .* may have other bits", line)
