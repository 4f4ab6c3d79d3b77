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


TEXT = tiny_pair.CYCLE
PROMPTS = ["def f(x):", "import os"]
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    """Returns a tiny model of random weights, with a chat template; a token is a byte.
    It drafts by lookup, whose loops compile in half the time of a draft model's. It has
    the shape of `cycle`, so that the two share their programs."""
    folder = tiny_pair.write_chat(tmp_path_factory.mktemp("random"))
    return sj.load(folder, drafter="ngram", gamma_max=4)


GENERATE = functools.partial(sj.generate, gamma=3)
"""`generate` with one program for all tests, and without measured costs."""


def test_prompts_of_any_kind(lm):
    """Fails if kinds of a prompt differ in tokens, or a list of one gives no list."""
    text = "[user]hi[assistant]"
    ids = lm.tokenizer.encode(text)
    expected = sj.decode(lm, text, max_tokens=6)
    for prompt in (text, ids, jnp.asarray(ids), CHAT):
        for call in (GENERATE, sj.decode):
            out = call(lm, prompt, max_tokens=6)
            assert isinstance(out, sj.Generation)
            assert (out.tokens, out.prompt_tokens) == (expected.tokens, ids)
            (listed,) = call(lm, [prompt], max_tokens=6)
            assert listed.tokens == expected.tokens
    assert expected.text == lm.tokenizer.decode(expected.tokens)
    outs = GENERATE(lm, [CHAT, text, tuple(CHAT)], max_tokens=6, num_slots=1)
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
    asked = sj.decode(other, ["hi", ids, CHAT], max_tokens=2, stop=["a"])
    of_chat = lm.tokenizer.encode("[user]hi[assistant]")
    assert [one.prompt_tokens for one in asked] == [[first, *ids], ids, of_chat]
    named = [prompt_files.Prompt(id="1", text="hi", category=None)]
    for raw, wanted in ((True, [first, *ids]), (False, of_chat)):
        (encoded,) = prompts.encode(tokenizer, named, raw=raw)
        assert encoded.ids == wanted
    # The text may have it already, as a chat template may have written it.
    assert tokenizer.encode(f"{begin}hi", begins=True) == [first, *ids]


def test_metrics_and_provenance_hang_on_the_result(cycle):
    """Checks that counters agree with origins, and that what decides bits is named."""
    out = GENERATE(cycle, TEXT, max_tokens=25)
    kept = out.origins.count(sj.Origin.ACCEPTED)
    assert len(out.origins) == len(out.tokens) == out.metrics["tokens"] == 25
    assert out.metrics["accepted"] == kept > 0
    assert kept + out.metrics["rounds"] == 25 and out.metrics["e2e_s"] > 0
    said = {"impl": cycle.target.impl, "slab": 8, "rule": "coupled"}
    assert out.provenance | said | {"dtype": "float32"} == out.provenance
    plain = sj.decode(cycle, TEXT, max_tokens=25)
    assert set(plain.origins) == {sj.Origin.BONUS} and plain.metrics["rounds"] == 25


def test_stop_as_ids_and_as_text(cycle):
    """Checks that a stop ends any text, however it is given, and that without one only
    the folder's do."""
    (stop,) = cycle.tokenizer.encode("a")
    for given in ("a", ["a"], stop, [stop], np.array([stop]), {stop, "a"}):
        out = GENERATE(cycle, TEXT, max_tokens=25, stop=given)
        assert (out.status, out.tokens) == (sj.Status.STOP, [stop])
        out = GENERATE(cycle, "a", max_tokens=25, stop=given)
        assert out.text.startswith(TEXT[1:]) and out.tokens[-1] == stop
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
    for call in (GENERATE, sj.decode, _streamed):
        for options, text in ((None, "hi"), ({"enable_thinking": True}, "hi!")):
            out = call(other, CHAT, max_tokens=2, chat=options)
            assert out.prompt_tokens == lm.tokenizer.encode(text)
    how = {"chat": {"enable_thinking": 1}, "num_slots": 2, "gamma": 3}
    report = sj.check_lossless(other, [CHAT] * 2, max_tokens=2, **how)
    assert report.comparisons[0].prompt_tokens == 3


@pytest.mark.parametrize(("max_tokens", "gamma"), [(20, 0), (20, 3), (22, 3)])
def test_streamed_pieces_are_whole_characters(cycle, max_tokens, gamma):
    """Fails if a piece cuts a character, or the pieces make up another text. A text of
    22 tokens ends in half a character, streamed or from `generate`."""
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
    how = {"max_tokens": 12, "gamma": ladder}
    for first in (None, ladder.init(4)):
        out = sj.generate(lm, PROMPTS[0], policy_state=first, **how)
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
    for call, prompt, words in (
        (sj.generate, PROMPTS[0], "the model has no tokenizer: give token ids"),
        (sj.stream, ids, "stream yields text, and the model has no tokenizer"),
    ):
        with pytest.raises(ValueError, match=words):
            call(bare, prompt)


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
    report = sj.check_lossless(lm, PROMPTS, max_tokens=8, num_slots=2, gamma=3)
    assert not report and not report.equal
    first, second = (one.differences for one in report.comparisons)
    assert not first and [one.what for one in second] == [what]
    lines = str(report).splitlines()
    assert "differ" not in lines[1] and lines[2].count("differ") == 1


NAMES = {
    "temperature": r"sampling=sj.Sampling\(temperature=...\)",
    "do_sample": r"sampling=sj.Sampling\(\), or nothing",
    "num_return_sequences": r"(generate\(..., )?n=...",
    "enable_thinking": r"chat=\{'enable_thinking': ...\}",
    "maxtokens": "max_tokens",
    "nonsense_of_all_kinds": "lm, prompt, max_tokens",
}
"""Names of other libraries and mistyped ones, and what is to be written instead."""


@pytest.mark.parametrize("name", NAMES)
def test_other_names_point_to_the_right_one(lm, name):
    """Fails if a message names the unexpected keyword and not what to write instead."""
    for call in (sj.generate, sj.stream, sj.decode, sj.check_lossless):
        message = f"^{call.__name__} has no argument '{name}': write {NAMES[name]}"
        with pytest.raises(TypeError, match=message):
            call(lm, PROMPTS[0], **{name: 1})


BAD = {
    "no prompt": ({"prompt": []}, "the list of prompts is empty"),
    "an empty text": ({"prompt": ""}, "prompt is empty"),
    "no token for one": ({"prompt": "", "max_tokens": 1}, "prompt is empty"),
    "no text at all": ({"prompt": 7}, "type int: give text, token ids, messages"),
    "a prompt of numbers": ({"prompt": [[1.5]]}, "give one row of token ids"),
    "a prompt of one number": ({"prompt": [1.0]}, "dtype float64: give one row"),
    "a message": ({"prompt": CHAT[0]}, "type dict: messages are a list, even one"),
    "nothing among prompts": ({"prompt": ["a", None]}, "a prompt of type NoneType"),
    "options of no chat": ({"chat": {"thinking": True}}, "no prompt has messages"),
    "options by place": ({"prompt": CHAT, "chat": ["tools"]}, "no mapping of names"),
    "an option of no template": (
        {"prompt": CHAT, "chat": {"thinking": True}}, "does not read thinking; its opt"
    ),
    "a token of another vocabulary": ({"prompt": [3, 264]}, r"264, outside \[0, 264\)"),
    "rows of ids": ({"prompt": np.ones((2, 2), int)}, r"prompt has shape \[2, 2\]"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens=0 must be a whole number"),
    "a long answer": ({"max_tokens": 3000}, "3009 positions, and the model has 2048"),
    "many tokens": ({"max_tokens": 2**31}, "max_tokens=2147483648 is above 2147483647"),
    "gamma": ({"gamma": 5}, "gamma=5 is above 4: give less"),
    "half a gamma": ({"gamma": 1.5}, "gamma=1.5 must be a whole number of at"),
    "a rule": ({"rule": "luck"}, "rule='luck' is not one of coupled, rejection, block"),
    "no slots": ({"num_slots": 0}, "num_slots=0 must be a whole number of at least 1"),
    "slots in words": ({"num_slots": "a"}, "num_slots='a' must be a whole number of"),
    "no page": ({"page_size": 0}, "page_size=0 must be a whole number of at least 1"),
    "a page larger than any text": ({"page_size": 10**9}, "ask for smaller pages"),
    "an empty stop text": ({"stop": ["ab", ""]}, "stop has an empty text"),
    "a stop outside": ({"stop": np.array(300)}, "stop has token 300, outside"),
    "a large stop": ({"stop": [2**31]}, r"stop has token 2147483648, outside \[0, 264"),
    "a negative stop": ({"stop": -1}, r"stop has token -1, outside \[0, 264\)"),
    "stop bytes": ({"stop": b"ab"}, "stop=b'ab': give token ids and texts"),
    "a stop number": ({"stop": 1.5}, "stop has shape .* give one row of token ids"),
    "no stop": ({"stop": [None]}, "stop has shape .* give one row of token ids"),
    "sampling by number": ({"sampling": 0.7}, "sampling=0.7: give a Sampling"),
    "no sampling for one": ({"prompt": ["a", "b"], "sampling": [sj.Sampling(), None]},
        r"sampling\[1\]=None: give a Sampling for each prompt"),
    "sampling": ({"prompt": ["a", "b"], "sampling": [sj.Sampling()]},
        "1 settings of sampling for 2 prompts"),
    "no sample": ({"n": 0}, "n=0 must be a whole number of at least 1"),
    "greedy samples": ({"n": 2}, "n=2 samples drawn greedily are one text"),
    "greedy samples of settings": ({"n": 2, "sampling": sj.Sampling(temperature=0)},
        "n=2 samples drawn greedily are one text"),
    "more samples than a seed has": ({"n": 4097, "sampling": sj.Sampling()},
        "request=0 and sample=4096 of one seed: it has noise for"),
    "fewer than no likely tokens": ({"top_logprobs": -1}, "top_logprobs=-1 must be a"),
    "too many likely tokens": ({"top_logprobs": 265}, "top_logprobs=265 is above 264"),
    "an empty prefix": ({"prefix": ""}, "prefix='': give one text, row of token"),
    "several prefixes": ({"prefix": ["a", "b"]}, "give one text, row of token ids or"),
    "a prefix of no kind": ({"prefix": 7}, "a prompt of type int: give text"),
    "a chat after a text": ({"prompt": CHAT, "prefix": "a"}, "both of messages, or"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_bad_inputs_are_refused_in_one_line(lm, bad):
    """Checks that one line names the values and the remedy, before anything runs."""
    arguments, message = BAD[bad]
    arguments = {"prompt": PROMPTS[0], **arguments}
    with pytest.raises(ValueError, match=message) as caught:
        sj.generate(lm, **arguments)
    assert "\n" not in str(caught.value)
    own = arguments.keys() & {"num_slots", "n"}
    if not own and not isinstance(arguments["prompt"], list):
        with pytest.raises(ValueError, match=message):
            sj.stream(lm, **arguments)


def test_a_stream_is_of_one_sample_of_one_prompt(lm):
    message = r"^stream has no argument 'n': write generate\(..., n=...\) or decode"
    with pytest.raises(TypeError, match=message):
        sj.stream(lm, PROMPTS[0], n=2)
    for name in ("tree", "batch_size"):  # The remedies of `generate` are refused here.
        message = f"no argument '{name}': write one of lm, prompt"
        with pytest.raises(TypeError, match=message):
            sj.decode(lm, PROMPTS[0], **{name: 2})
    with pytest.raises(ValueError, match="stream takes one prompt, not 3: call it for"):
        sj.stream(lm, [PROMPTS[0]] * 3)


def test_values_that_are_refused_before_there_is_a_model():
    """Fails if an empty folder's name or a slab of 0 means the default."""
    with pytest.raises(ValueError, match="temperature=-1"):
        sj.Sampling(temperature=-1.0)
    with pytest.raises(ValueError, match="tokenizer.json: no such file"):
        sj.load("")
    with pytest.raises(ValueError, match="needs 8 rows .* the target has 0"):
        sj.load(drafter="ngram", slab=0)
