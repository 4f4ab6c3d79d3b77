"""Stop texts: a text ends at the same place however it is generated and read."""

import dataclasses

import pytest
import tiny_pair
import tokenizers
from tokenizers import decoders, models

import spec_jax as sj
from spec_jax.engine import round as round_lib
from spec_jax.model import tokenizer as tokenizer_lib


NAMES = "abcdefghi"
TOKENS = (b"f(", b"x", b")\n", b"    ", b"re", b"turn", b" \xe6\x97", b"\xa5", b"<eot>")
"""Tokens that the model repeats: `f(x)`, a line, and a character cut in two."""

PROMPT = tiny_pair.byte_tokenizer().encode(NAMES).ids * 2
"""Ids of two cycles, so that lookup finds what the model writes next."""

MAX_TOKENS = 24


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    """Returns a model that writes `TOKENS` again and again, with a lookup drafter. It
    is made for a cycle of bytes, whose tokens get other names; the last is special."""
    lm = tiny_pair.load_cycle(tmp_path_factory.mktemp("cycle"), NAMES)
    old = lm.tokenizer.backend
    letters = {byte: letter for letter, byte in tokenizer_lib._byte_alphabet().items()}
    vocab = dict(old.get_vocab())
    for name, raw in zip(NAMES, TOKENS, strict=True):
        vocab["".join(letters[byte] for byte in raw)] = vocab.pop(name)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = dataclasses.replace(
        lm.tokenizer, backend=backend, special_tokens={"eos_token": "<eot>"}
    )
    return dataclasses.replace(lm, tokenizer=tokenizer)


def streamed(lm, prompt, **settings):
    """Returns the result of a stream, and fails if the stream takes a text back."""
    pieces, out = tiny_pair.streamed(lm, prompt, **settings)
    shown = ""
    for piece in pieces:
        shown += piece.text
        assert out.text.startswith(shown)
    return out


def batched(lm, prompt, **settings):
    """Returns one of three results of two slots, which must be equal."""
    outs = sj.generate(lm, [prompt] * 3, num_slots=2, **settings)
    ends = [(out.text, out.tokens, out.status) for out in outs]
    assert ends[0] == ends[1] == ends[2]
    return outs[2]


WAYS = {
    "plain": sj.decode,
    "rounds of one token": lambda *args, **how: sj.generate(*args, gamma=0, **how),
    "chains": lambda *args, **how: sj.generate(*args, gamma=4, **how),
    "trees": lambda *args, **how: sj.generate(
        *args, gamma=sj.Tree(top_k=2, depth=3, nodes=4), **how
    ),
    "batch": lambda *args, **how: batched(*args, gamma=3, **how),
    "stream": lambda *args, **how: streamed(*args, gamma=3, **how),
}

WHOLE = "f(x)\n    return 日" * 2 + "f(x)\n    return"

STOPS = {
    "inside a token": (["\n"], "f(x)", 3),
    "at once": (["f"], "", 1),
    "across tokens": (["\n    re"], "f(x)", 5),
    "a character of two tokens": (["日"], "f(x)\n    return ", 8),
    "a special token's name": (["<eot>"], "f(x)\n    return 日", 9),
    "part of a special token": (["日<"], "f(x)\n    return ", 9),
    "in the second turn": (["日<eot>f"], "f(x)\n    return ", 10),
    "two in a token": (["\n", ")"], "f(x", 3),
    "complete first": (["(x)\n    re", "x)"], "f(", 3),
    "two at one byte": (["x)", "(x)"], "f", 3),
    "late": (["turn 日<eot>f(x)\n    r"], "f(x)\n    re", 14),
    "a token before a text": ([PROMPT[1], "\n"], "f(x", 2),
    "a text before a token": (["f(", PROMPT[1]], "", 1),
    "begun only": (["\n    rx", "日!"], WHOLE, MAX_TOKENS),
}
"""Stop texts and ids, the text that they leave, and how many tokens stay."""


def expected(name):
    """Returns the text, the number of tokens and the status."""
    _, text, count = STOPS[name]
    return text, count, sj.Status.LENGTH if text == WHOLE else sj.Status.STOP


def ended(lm, way, name):
    out = WAYS[way](lm, PROMPT, max_tokens=MAX_TOKENS, stop=STOPS[name][0])
    assert len(out.tokens) == len(out.origins) == out.metrics["tokens"]
    assert out.tokens == (PROMPT[:9] * 3)[: len(out.tokens)]
    return out.text, len(out.tokens), out.status


@pytest.mark.parametrize("way", WAYS)
def test_ends_are_one_however_a_text_is_written(lm, way):
    """Fails if rounds, trees, slots or pieces move an end."""
    found = {name: ended(lm, way, name) for name in STOPS}
    assert found == {name: expected(name) for name in STOPS}


def test_what_is_decoded_in_vain(lm, monkeypatch):
    """Fails if a slot goes on after a stop text, or if metrics omit what was cut. Four
    answers of three tokens in two slots take six rounds, as many as if each had ended
    by itself."""
    calls, real = [], round_lib.generate

    def generate(*arguments, **settings):
        calls.append(int(settings["max_rounds"]))
        return real(*arguments, **settings)

    monkeypatch.setattr(round_lib, "generate", generate)
    settings = {"max_tokens": MAX_TOKENS, "stop": ["\n"], "num_slots": 2}
    outs = sj.generate(lm, [PROMPT] * 4, gamma=0, **settings)
    assert [out.metrics["rounds"] for out in outs] == [3] * 4 and calls == [1] * 6
    outs = sj.generate(lm, [PROMPT] * 4, gamma=4, log_probs=True, **settings)
    for out in outs:
        numbers = out.metrics
        assert numbers["cut"] > 0
        rounds, length = numbers["rounds"], numbers["mean_accepted_length"]
        assert rounds * length == len(out.tokens) + numbers["cut"]
        assert rounds * numbers["tokens_per_target_step"] == len(out.tokens) == 3
        assert out.log_probs.shape == out.drawn_log_probs.shape == (3,)
    # Without stop texts the host looks when a slot ends, and not more often.
    del calls[:]
    settings["stop"] = [PROMPT[2]]
    outs = sj.generate(lm, [PROMPT] * 4, gamma=0, **settings)
    assert [len(out.tokens) for out in outs] == [3] * 4
    assert len(calls) == 2 and min(calls) > 1


def test_an_end_at_the_limit_is_a_stop(lm):
    """Fails if a stop text that ends at `max_tokens` is not a stop, as a token is."""
    for call in map(WAYS.get, ("plain", "chains", "stream")):
        out = call(lm, PROMPT, max_tokens=3, stop=["\n"])
        assert (out.text, out.status) == ("f(x)", sj.Status.STOP)
        out = call(lm, PROMPT, max_tokens=2, stop=["\n"])
        assert (out.text, out.status) == ("f(x", sj.Status.LENGTH)
