"""Texts and prompts that the target writes: resuming, ends, padding, and choices."""

import argparse
import dataclasses
import json
import re
import types

import decoding
import jax
import numpy as np
import pytest
import tiny_pair
from script_runs import rows_of, write_rows

from experiments.heads import own_prompts, rollouts
from experiments.lib import terminal
from spec_jax import loading
from spec_jax.drafters import ngram
from spec_jax.model import params as params_lib, row_model, tokenizer as tokenizer_lib


LENGTH, PREFIX, COUNT = 12, 5, 6
CONFIG = tiny_pair.config(
    vocab_size=32, hidden_size=16, intermediate_size=24, head_dim=8,
    max_position_embeddings=64,
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_slot(monkeypatch):
    """Sets one slot, to share one program; `test_head_texts.py` has many slots."""
    monkeypatch.setattr(rollouts, "SLOTS", 1)


def writer(*, key=0, config=CONFIG, impl=None, stop_ids=(), **changes):
    """Returns a writer of six texts, of which every second one is drawn."""
    random, impl = np.random.default_rng(0), impl or decoding.quickest().impl
    lm = loading.LanguageModel(
        target=row_model.RowModel(
            config=config, impl=impl, slab=row_model.slab_for(impl, 8)
        ),
        params=params_lib.init(jax.random.key(key), CONFIG, stddev=0.3),
        drafter=ngram.PromptLookup(gamma_max=1),
        drafter_params=None,
        tokenizer=types.SimpleNamespace(stop_ids=stop_ids),
    )
    settings = {
        "prompts": random.integers(0, CONFIG.vocab_size, (COUNT, PREFIX)).tolist(),
        "seeds": [-1, 3] * (COUNT // 2),
        "length": LENGTH,
    }
    return rollouts.Writer(lm=lm, **settings | changes)


def written(one: rollouts.Writer, folder) -> list[list[int]]:
    return rollouts.write(argparse.Namespace(work=folder, ray=None), one)


def test_a_killed_run_goes_on_with_the_texts_that_are_missing(
    tmp_path, monkeypatch, capsys
):
    """Fails if texts are lost or written twice, or half a line is read."""
    monkeypatch.setattr(terminal, "INTERVAL_S", 0.0)
    one = writer()
    whole = written(one, tmp_path)
    said = re.findall(r"texts: .* (\d+)/", capsys.readouterr().err.replace("\r", "\n"))
    assert said == [str(done) for done in range(COUNT + 1)]
    assert all(len(text) == LENGTH - PREFIX for text in whole)
    (kept,) = tmp_path.iterdir()
    lines = kept.read_bytes().splitlines(keepends=True)
    asked = []
    inner = rollouts.Writer.__call__

    def counted(self, numbers):
        asked.extend(numbers)
        return inner(self, numbers)

    monkeypatch.setattr(rollouts.Writer, "__call__", counted)
    kept.write_bytes(b"".join(lines[:4]) + lines[4][:-3])
    assert written(one, tmp_path) == whole
    assert len(asked) == COUNT - 4
    # With more prompts, only the texts that are missing are written.
    asked.clear()
    more = writer(prompts=[*one.prompts, [1, 2, 3]], seeds=[*one.seeds, 9])
    assert written(more, tmp_path)[:COUNT] == whole and asked == [COUNT]
    # Negative control: a text that was changed in the file is not written anew.
    key, tokens = json.loads(lines[0])
    changed = [key, [(token + 1) % CONFIG.vocab_size for token in tokens]]
    kept.write_text(json.dumps(changed) + "\n")
    assert changed[1] in written(one, tmp_path)


def test_texts_end_at_the_stop_token_which_is_kept(tmp_path):
    (first, *_) = written(writer(), tmp_path)
    stop = first[3]
    (ended, *_) = written(writer(stop_ids=(stop,)), tmp_path)
    assert ended == first[: first.index(stop) + 1]


def test_texts_are_padded_behind_their_ends():
    """Fails if a prompt's row other than its last counts, or a text's last row does."""
    prompts = [[9, 1], [1, 2, 3], [1, 2]]
    one = writer(prompts=prompts, stop_ids=(8, 9), length=6)
    tokens, mask = rollouts.padded(one, [[2, 9], [8], [3, 4, 5, 6]])
    expected = [[9, 1, 2, 9, 9, 9], [1, 2, 3, 8, 8, 8], [1, 2, 3, 4, 5, 6]]
    assert tokens.tolist() == expected
    assert [np.flatnonzero(row).tolist() for row in mask] == [[1, 2], [2], [1, 2, 3, 4]]


def test_a_file_is_named_after_all_that_decides_its_texts():
    """Fails if other settings reuse a run's texts, or prompts or seeds share a key."""
    one = writer()
    others = {
        "key": 1,
        "config": dataclasses.replace(CONFIG, rms_norm_eps=1e-4),
        "length": LENGTH + 1,
        "impl": "interpret",
        "stop_ids": (3,),
    }
    found = [writer(**{name: value}).digest for name, value in others.items()]
    assert len({one.digest, *found}) == 1 + len(others)
    assert writer().digest == one.digest
    same = writer(prompts=[[1, 2]] * 2 + [[1, 3]], seeds=[-1, 4, -1])
    assert len({same.key(number) for number in range(3)}) == 3


def chat(tmp_path, template: str) -> tokenizer_lib.Tokenizer:
    tiny_pair.byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return dataclasses.replace(tokenizer_lib.load(tmp_path), chat_template=template)


def test_the_bare_turn_ends_where_the_user_begins(tmp_path):
    """Fails if the user's words are returned, or a bare template is accepted."""
    template = "A:{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}B:"
    words = chat(tmp_path, template)
    assert words.decode(own_prompts.bare_turn(words)) == "A:<user>"
    for wrong in ("{{ messages[0].content }}", "nothing"):
        other = dataclasses.replace(words, chat_template=wrong)
        with pytest.raises(ValueError, match="name --prompts of your own"):
            own_prompts.bare_turn(other)


def test_prompts_are_kept_if_they_are_none_before():
    texts = {
        "How do birds find their way home in winter?": None,
        "How do birds find their way home in summer?": "like another",
        "why do cats purr so loudly when they sleep": "like another",  # avoided
        "Hello there": "short",
        "1 2 3 4 5": "short",
        "tell me more and " * 6: "repeats itself",
        "How do fish sleep?": None,
        "How do fish sleep!": "like another",
    }
    avoided = ["Why do cats purr so loudly when they sleep?"]
    kept, dropped = own_prompts.distinct([*texts], avoided)
    assert kept == [text for text, why in texts.items() if why is None]
    assert dropped == {"like another": 3, "short": 2, "repeats itself": 1}


def test_what_is_chosen_ends_and_is_none_of_an_evaluation(tmp_path):
    words = chat(tmp_path, "<{{ messages[0].content }}>")
    words = dataclasses.replace(words, stop_ids=(0,))
    texts = ["Where does the wind come from today", "A poem about the sea, please"]
    ids = [[*words.encode(text), 0] for text in texts]
    avoided = write_rows(tmp_path / "evaluation.jsonl", [{"prompt": texts[1]}])
    kept, dropped = own_prompts.choose(words, [*ids, ids[0][:-1]], [str(avoided)])
    assert kept == texts[:1]
    assert dropped == {"like another": 1, "does not end": 1}
    own_prompts.save(kept, tmp_path / "prompts.jsonl")
    assert rows_of(tmp_path / "prompts.jsonl") == [{"prompt": texts[0]}]
