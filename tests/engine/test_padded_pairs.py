"""Pairs of GPT-NeoX, and of Qwen3, whose vocabularies are padded differently."""

import re

import jax
import jax.numpy as jnp
import pytest
import tiny_pair
from slow_cases import slow

import spec_jax as sj
from spec_jax.model import families, load as load_lib, params as params_lib
from spec_jax.ops import dispatch


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
def pair(tmp_path_factory):
    """Writes a target and a draft whose vocabularies are padded differently."""
    folder = tmp_path_factory.mktemp("pair")
    target = write_model(folder / "target", seed=0)
    return target, write_model(folder / "draft", seed=0, vocab_size=264)


@pytest.mark.parametrize("how", [{"cache": "static"}, slow({"tree": "2x3:5"})], ids=str)
def test_drafts_change_no_token(pair, how):
    """Fails if tokens, greedy or drawn, differ from decoding's, or one is padding."""
    target, draft = pair
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


def test_auto_takes_what_was_tested_on_the_device(pair, caplog):
    """Fails if a named implementation is not taken; "auto" takes XLA instead of one
    that was not tested, and says once what that costs."""
    config, _ = load_lib.load(pair[0])
    assert families.runnable(config, "triton") == "triton"
    families._say_xla_runs.cache_clear()
    for resolved in ("xla", "triton", "triton"):
        assert families.runnable(config, resolved, is_named=False) == "xla"
    (line,) = caplog.messages
    assert re.search("'xla' and not 'triton' for gpt_neox .* may have other bits", line)
