"""`import spec_jax as sj`: text, ids or messages in; text, origins and numbers out."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair
import tokenizers

import spec_jax as sj
from experiments.lib import prompt_files, prompts
from spec_jax import testing
from spec_jax.engine import round as round_lib
from spec_jax.gamma import goodput, threshold


TEXT = "añ日🙂"
"""Characters of one byte to four; no byte occurs twice."""

PROMPTS = ["def f(x):", "import os", "x = [1, 2]"]


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    """Returns a tiny model of random weights, with a chat template; a token is a byte.

    It drafts by lookup, whose loops compile in half the time of a draft model's. It has
    the shape of `cycle`, so that the two share their programs.
    """
    folder = tiny_pair.write_chat(tmp_path_factory.mktemp("random"))
    return sj.load(folder, drafter="ngram", gamma_max=4)


@pytest.fixture(scope="module")
def cycle(tmp_path_factory):
    """Returns a model that writes `TEXT` again and again, with a lookup drafter."""
    folder = tiny_pair.write_cycle(tmp_path_factory.mktemp("cycle"), TEXT)
    return sj.load(folder, drafter="ngram", gamma_max=4)


GENERATE = functools.partial(sj.generate, gamma=3)
"""`generate` with one program for all tests, and without measured costs."""


def test_prompts_of_any_kind(lm):
    """Fails if kinds of a prompt differ in tokens, or a list of one gives no list."""
    ids = lm.tokenizer.encode(PROMPTS[0])
    expected = sj.decode(lm, PROMPTS[0], max_tokens=6)
    for prompt in (PROMPTS[0], ids, jnp.asarray(ids)):
        for call in (GENERATE, sj.decode):
            out = call(lm, prompt, max_tokens=6)
            assert isinstance(out, sj.Generation)
            assert (out.tokens, out.prompt_tokens) == (expected.tokens, ids)
            (listed,) = call(lm, [prompt], max_tokens=6)
            assert listed.tokens == expected.tokens
    assert expected.text == lm.tokenizer.decode(expected.tokens)


def test_messages_go_through_the_chat_template(lm):
    """Compares a chat, alone and in a list, with its text by the template."""
    chat = [{"role": "user", "content": "hi"}]
    text = "[user]hi[assistant]"
    expected = sj.decode(lm, text, max_tokens=6)
    out = GENERATE(lm, chat, max_tokens=6)
    assert (out.tokens, out.prompt_tokens) == (expected.tokens, expected.prompt_tokens)
    outs = GENERATE(lm, [chat, text, tuple(chat)], max_tokens=6, num_slots=1)
    assert [one.tokens for one in outs] == [expected.tokens] * 3


def test_a_text_begins_as_its_tokenizer_says(lm):
    """Fails if a text lacks Llama's first token, or a chat or a stop text gets it."""
    backend = tokenizers.Tokenizer.from_str(lm.tokenizer.backend.to_str())
    begin = tiny_pair.END_OF_TEXT
    first = backend.token_to_id(begin)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, first)]
    )
    tokenizer = dataclasses.replace(lm.tokenizer, backend=backend)
    other = dataclasses.replace(lm, tokenizer=tokenizer)
    ids = lm.tokenizer.encode("hi")
    chat = [{"role": "user", "content": "hi"}]
    asked = sj.decode(other, ["hi", ids, chat], max_tokens=2, stop=["a"])
    of_chat = lm.tokenizer.encode("[user]hi[assistant]")
    assert [one.prompt_tokens for one in asked] == [[first, *ids], ids, of_chat]
    named = [prompt_files.Prompt(id="1", text="hi", category=None)]
    assert prompts.encode(other, named, raw=True) == [[first, *ids]]
    assert prompts.encode(other, named, raw=False) == [of_chat]
    # The text may have it already, as a chat template may have written it.
    assert tokenizer.encode(f"{begin}hi", begins=True) == [first, *ids]


def test_metrics_and_provenance_hang_on_the_result(cycle):
    """Checks that counters agree with origins, and that what decides bits is named."""
    out = GENERATE(cycle, TEXT, max_tokens=25)
    kept = out.origins.count(sj.Origin.ACCEPTED)
    assert len(out.origins) == len(out.tokens) == out.metrics["tokens"] == 25
    assert out.metrics["accepted"] == kept > 0
    assert kept + out.metrics["rounds"] == 25
    rate = out.metrics["accepted"] / out.metrics["proposed"]
    assert out.metrics["acceptance_rate"] == pytest.approx(rate)
    assert out.metrics["e2e_s"] > 0
    assert out.provenance["impl"] == cycle.target.impl
    assert out.provenance["slab"] == cycle.target.slab == 8
    assert (out.provenance["rule"], out.provenance["dtype"]) == ("coupled", "float32")
    plain = sj.decode(cycle, TEXT, max_tokens=25)
    assert set(plain.origins) == {sj.Origin.BONUS} and plain.metrics["rounds"] == 25


def test_stop_as_ids_and_as_text(cycle):
    """Checks that a stop token ends any text, and that without one only the folder's
    do. A text ends before a stop text, whose tokens stay (`test_front_door_stops`)."""
    (stop,) = cycle.tokenizer.encode("a")
    for given in ("a", ["a"], stop, [stop], np.array([stop]), {stop, "a"}):
        shown = "" if "a" in np.ravel(given).tolist() or given == {stop, "a"} else "a"
        for call in (GENERATE, sj.decode):
            out = call(cycle, TEXT, max_tokens=25, stop=given)
            assert out.status is sj.Status.STOP and out.text == shown
            assert out.tokens == [stop]
            out = call(cycle, "a", max_tokens=25, stop=given)
            assert out.text == TEXT[1:] + shown and out.tokens[-1] == stop
    assert cycle.stop_ids == (0,)  # the folder's, which is never written here
    for given in ((), None):
        out = GENERATE(cycle, "a", max_tokens=25, stop=given)
        assert out.status is sj.Status.LENGTH and len(out.tokens) == 25


def test_given_stops_add_to_those_of_the_folder(cycle):
    """Checks both kinds of stops, ignoring the folder's, and showing special tokens."""
    (first,), (later,) = map(cycle.tokenizer.encode, ("a", "b"))
    tokenizer = dataclasses.replace(
        cycle.tokenizer, stop_ids=(first,), special_tokens={"eos_token": "a"}
    )
    ends = dataclasses.replace(cycle, tokenizer=tokenizer)
    rest = TEXT[1:]
    for call in (GENERATE, sj.decode, _streamed):
        for stop in (None, (), later, [later, first]):
            out = call(ends, "a", max_tokens=25, stop=stop)
            assert out.status is sj.Status.STOP
            assert out.tokens[-1] == first and out.text == rest
            shown = call(ends, "a", max_tokens=25, stop=stop, skip_special_tokens=False)
            assert shown.text == rest + "a" and shown.tokens == out.tokens
        out = call(ends, "a", max_tokens=25, ignore_eos=True)
        assert out.status is sj.Status.LENGTH and len(out.tokens) == 25
        out = call(ends, "a", max_tokens=25, ignore_eos=True, stop=[first])
        assert out.status is sj.Status.STOP


def _streamed(lm, prompt, **settings):
    return tiny_pair.streamed(lm, prompt, gamma=3, **settings)[1]


def test_options_reach_the_chat_template(lm):
    """Checks that options given to every call reach the template of messages."""
    template = "{{ messages[0].content }}{% if enable_thinking %}!{% endif %}"
    tokenizer = dataclasses.replace(lm.tokenizer, chat_template=template)
    other = dataclasses.replace(lm, tokenizer=tokenizer)
    chat = [{"role": "user", "content": "hi"}]
    for call in (GENERATE, sj.decode, _streamed):
        for options, text in ((None, "hi"), ({"enable_thinking": True}, "hi!")):
            out = call(other, chat, max_tokens=2, chat=options)
            assert out.prompt_tokens == lm.tokenizer.encode(text)
    how = {"chat": {"enable_thinking": 1}, "num_slots": 2, "gamma": 3}
    report = sj.check_lossless(other, [chat] * 2, max_tokens=2, **how)
    assert report.comparisons[0].prompt_tokens == 3


@pytest.mark.parametrize(("max_tokens", "gamma"), [(20, 0), (20, 3), (22, 3)])
def test_streamed_pieces_are_whole_characters(cycle, max_tokens, gamma):
    """Fails if a piece cuts a character, or the pieces make up another text.

    A text of 22 tokens ends in half a character, streamed or from `generate`.
    """
    settings = {"max_tokens": max_tokens, "gamma": gamma}
    out = sj.generate(cycle, TEXT, **settings)
    pieces, end = tiny_pair.streamed(cycle, TEXT, **settings)
    assert end.tokens == out.tokens and end.text == out.text
    assert all("\N{REPLACEMENT CHARACTER}" not in one.text for one in pieces[:-1])
    assert out.text.startswith(TEXT * 2) and len(out.tokens) == max_tokens
    half = out.text.endswith("\N{REPLACEMENT CHARACTER}")
    assert half == (max_tokens == 22)
    spread = [(token, one.origin) for one in pieces for token in one.tokens]
    assert spread == list(zip(out.tokens, out.origins, strict=True))
    if gamma:  # A window ended within a character, and a piece was drafted.
        assert any(piece.tokens and not piece.text for piece in pieces)
        assert sj.Origin.ACCEPTED in out.origins


def test_gamma_is_a_number_or_a_policy(lm):
    """Checks that policies change no token, and ask for a state that they need."""
    expected = sj.decode(lm, PROMPTS[0], max_tokens=12).tokens
    ladder = threshold.Threshold(ladder=(0, 1, 2, 4))
    for first in (None, ladder.init(4)):
        out = sj.generate(
            lm, PROMPTS[0], max_tokens=12, gamma=ladder, policy_state=first
        )
        assert out.tokens == expected
    times = goodput.Goodput(gamma_max=4)
    with pytest.raises(ValueError, match=r"Goodput .* policy_state=policy.init\(round"):
        sj.generate(lm, PROMPTS[0], gamma=times)


def test_a_model_without_a_tokenizer_takes_ids(lm):
    """Checks that it returns ids without text, and refuses texts and streams."""
    bare = dataclasses.replace(lm, tokenizer=None)
    ids = lm.tokenizer.encode(PROMPTS[0])
    out = GENERATE(bare, ids, max_tokens=6)
    assert out.text == "" and out.tokens == sj.decode(lm, ids, max_tokens=6).tokens
    with pytest.raises(ValueError, match="the model has no tokenizer: give token ids"):
        sj.generate(bare, PROMPTS[0])
    with pytest.raises(
        ValueError, match="stream yields text, and the model has no tok"
    ):
        sj.stream(bare, ids)


def _flip(array, *at):
    """Returns the array with the lowest bit of one element flipped."""
    bits = testing.bits(array).copy()
    bits[at] ^= 1
    return jnp.asarray(bits.view(np.asarray(array).dtype))


FAULTS = {
    "kv": lambda kept, kv: kept.replace(
        cache=kv.replace(v=(*kv.v[:-1], _flip(kv.v[-1], int(kv.page_table[1, 0]), 2)))
    ),
    "log_probs": lambda kept, kv: kept.replace(log_prob=_flip(kept.log_prob, 1, 12)),
    "logits": lambda kept, kv: kept.replace(logits_hash=_flip(kept.logits_hash, 1, 12)),
}
"""Faults that flip a bit which rounds left in the second slot, by what they change."""


@pytest.mark.parametrize("what", FAULTS)
def test_a_planted_fault_makes_check_lossless_false(lm, what, monkeypatch):
    """Negative control: one bit of one prompt is flipped, and the table says which."""
    real = round_lib.generate

    def generate(*arguments, **settings):
        state = real(*arguments, **settings)
        return state.replace(cache=FAULTS[what](state.cache, state.cache.cache))

    monkeypatch.setattr(round_lib, "generate", generate)
    report = sj.check_lossless(lm, PROMPTS[:2], max_tokens=8, num_slots=2, gamma=3)
    assert not report and not report.equal
    first, second = (one.differences for one in report.comparisons)
    assert not first and [one.what for one in second] == [what]
    lines = str(report).splitlines()
    assert "differ" not in lines[1] and lines[2].count("differ") == 1
    assert len(lines) == 4 and lines[3].strip().startswith(f"{what} from position")
