"""Tokenizers: exact ids, pieces that add up, the folder's own template and stops. Stop
texts, compared with an oracle that looks at every prefix of a whole text."""

import dataclasses
import json
import pathlib

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from spec_jax.model import stop_texts, tokenizer as tokenizer_lib


THUMBS_UP = "\N{THUMBS UP SIGN}"
CORPUS = ["hello world, hello again", "naïve café", f"{THUMBS_UP} fine", "日本語"]


def build(*added: str, vocab_size: int = 280) -> tokenizers.Tokenizer:
    """Builds a small byte-level tokenizer; `added` tokens come after the vocabulary."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(list(added))
    return backend


def save(folder: pathlib.Path, *added: str, **others) -> pathlib.Path:
    """Saves a small tokenizer and other files: `name_json={...}`; returns `folder`."""
    build(*added).save(str(folder / "tokenizer.json"))
    for name, contents in others.items():
        (folder / name.replace("_json", ".json")).write_text(json.dumps(contents))
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tokenizer_lib.Tokenizer:
    """Loads added tokens that are no byte-level text: spaces, CJK, letters of bytes."""
    folder = tmp_path_factory.mktemp("small")
    return tokenizer_lib.load(save(folder, "<|end|>", " a b ", "日本", "éé"))


def test_special_tokens_are_recognised_and_none_is_added(small):
    end = small.backend.token_to_id("<|end|>")
    hello = small.encode("hello")
    assert hello and end not in hello
    assert small.encode("<|end|>hello<|end|>") == [end, *hello, end]
    assert small.encode("") == []


@given(ids=st.lists(st.integers(0, 300), max_size=12))
@settings(max_examples=100)
def test_decoding_is_that_of_the_library(small, ids):
    """Compares any ids: halves of characters, invalid bytes, ids past the vocabulary.
    An added token whose letters stand for bytes is left out: the library garbles it."""
    ids = [one for one in ids if one != small.backend.token_to_id("éé")]
    expected = small.backend.decode(ids, skip_special_tokens=False)
    assert small.decode(ids) == expected
    assert "".join(small.decode_pieces(ids)) == expected


@pytest.mark.parametrize("added", ["éé", "ilÖveyou", "đem", "<|Ġ|>", "é"])
def test_added_tokens_are_written_as_they_are(tmp_path, added):
    """Fails if letters that stand for bytes elsewhere do so in added tokens, too."""
    tokenizer = tokenizer_lib.load(save(tmp_path, added))
    ids = tokenizer.encode(f"a{added}b")
    assert len(ids) == 3 and tokenizer.decode_pieces(ids) == ["a", added, "b"]


def test_special_tokens_are_left_out_where_that_is_asked_for(tmp_path):
    """Fails unless it omits just the tokens that the file marks or the config names."""
    settings = {"eos_token": "l"}
    backend = build("<|end|>")
    backend.add_tokens(["<think>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = tokenizer_lib.load(tmp_path)
    ids = tokenizer.encode("ü<|end|>é<think>")
    ids[1:1] = tokenizer.encode("l")  # Between the bytes of a character.
    shown = tokenizer.decode_pieces(ids, skip_special_tokens=True)
    assert shown == ["", "", "ü", "", "é", "<think>"]
    assert "<|end|>" in tokenizer.decode(ids)


def test_a_character_belongs_to_the_token_that_completes_it(small):
    text = "\N{SNOWMAN}"  # Not in the training text: three tokens of one byte.
    ids = small.encode(f"a{text}b")
    assert small.decode_pieces(ids) == ["a", "", "", text, "b"]
    assert small.decode_pieces(ids[:3]) == ["a", "", "\N{REPLACEMENT CHARACTER}"]


def test_ids_without_a_token_have_no_text(small):
    ids = [*small.encode("a"), small.vocab_size + 5, *small.encode("b")]
    assert small.decode_pieces(ids) == ["a", "", "b"]
    with pytest.raises(ValueError, match="token_id=-1 is negative"):
        small.decode([-1])


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    """Fails if a long prompt silently loses its end."""
    backend = build()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "hello world, hello again"
    tokenizer = tokenizer_lib.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({"generation_config_json": {"eos_token_id": [7, 5, 7]}}, (7, 5)),
        ({"generation_config_json": {"eos_token_id": 7}}, (7, )),
        ({"generation_config_json": {"eos_token_id": 7},
         "config_json": {"eos_token_id": 9}, }, (7, )),
        ({"generation_config_json": {"temperature": 0.6},
         "config_json": {"eos_token_id": 9},
         "tokenizer_config_json": {"eos_token": "<|im_end|>"}, }, (9, )),
        ({"config_json": {"eos_token_id": None},
         "tokenizer_config_json": {"eos_token": "<|im_end|>"}, }, ("<|im_end|>", )),
        ({"tokenizer_config_json": {"eos_token": {"content": "<|im_end|>"}}},
         ("<|im_end|>", )),
        ({"tokenizer_config_json": {"eos_token": "<|gone|>"}}, ("<|endoftext|>", )),
        ({}, ("<|endoftext|>", )),
    ],
)  # fmt: skip
def test_stop_ids(tmp_path, others, expected):
    tokenizer = tokenizer_lib.load(
        save(tmp_path, "<|endoftext|>", "<|im_end|>", **others)
    )
    to_id = tokenizer.backend.token_to_id
    assert tokenizer.stop_ids == tuple(
        to_id(stop) if isinstance(stop, str) else stop for stop in expected
    )


def test_a_tokenizer_that_another_folder_has(tmp_path):
    """Fails if two models cannot share a file, or the wrong one of two is taken."""
    draft = tmp_path / "draft"
    for folder in (draft, tmp_path / "target"):
        folder.mkdir()
    theirs = tokenizer_lib.load(save(tmp_path / "target", "<|end|>"))
    settings = {"tokenizer_file": "../target/tokenizer.json", "eos_token": "<|end|>"}
    (draft / "tokenizer_config.json").write_text(json.dumps(settings))
    shared = tokenizer_lib.load(draft)
    assert shared.fingerprint == theirs.fingerprint
    # Other files beside it are the other model's, and are not read.
    assert shared.special_tokens and not theirs.special_tokens
    own = tokenizer_lib.load(save(draft, "<|other|>"))
    assert own.fingerprint != theirs.fingerprint


TEMPLATE = """{%- for message in messages %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
[{{ message.role }}] {{ message.content | tojson }}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}
{%- if enable_thinking is false %} no thoughts{% endif %}"""


def test_template_of_its_own_file_wins(tmp_path):
    settings = {"chat_template": "other", "eos_token": "<|end|>"}
    save(tmp_path, "<|end|>", tokenizer_config_json=settings)
    assert tokenizer_lib.load(tmp_path).apply_chat("hi") == "other"
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = tokenizer_lib.load(tmp_path)
    assert tokenizer.has_chat_template
    # `<` and `é` stand as they are: Jinja's own tojson would escape both.
    assert tokenizer.apply_chat("<é>") == (
        '[user] "<é>"<|end|>\n[assistant] no thoughts'
    )
    said = enumerate(("user", "assistant", "user"), 1)
    turns = [{"role": role, "content": str(turn)} for turn, role in said]
    assert tokenizer.apply_chat(turns, enable_thinking=True) == (
        '[user] "1"<|end|>\n[assistant] "2"<|end|>\n[assistant]'
    )


def test_options_of_a_template(tmp_path):
    """Fails if an option is lost, or one that the template does not read is taken."""
    template = "{{ enable_thinking }} {{ tools }} {{ bos_token }}"
    settings = {"chat_template": template, "bos_token": "!"}
    tokenizer = tokenizer_lib.load(save(tmp_path, tokenizer_config_json=settings))
    assert tokenizer.apply_chat("hi") == "False None !"
    assert tokenizer.apply_chat("hi", enable_thinking=1, tools=[7]) == "1 [7] !"
    fixed = dataclasses.replace(tokenizer, chat_options={"enable_thinking": True})
    assert fixed.apply_chat("hi", tools=[]) == "True [] !"
    for name in ("thinking", "bos_token", "messages"):
        with pytest.raises(
            ValueError, match=f"does not read {name}; its options are enable_t.*, tools"
        ):
            tokenizer.apply_chat("hi", **{name: "x"})


def test_no_template(tmp_path):
    tokenizer = tokenizer_lib.load(save(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="has no chat template"):
        tokenizer.apply_chat("hi")


def broken(name, text):
    return lambda folder: (folder / name).write_text(text)


def stating(name, **values):
    return broken(name, json.dumps(values))


BAD_FOLDERS = {
    "tokenizer.json: no such file": lambda at: (at / "tokenizer.json").unlink(),
    "tokenizer.json: not valid JSON": broken("tokenizer.json", "{"),
    "tokenizer.json: not a JSON object": broken("tokenizer.json", "[]"),
    "tokenizer.json: only byte-level": broken("tokenizer.json", "{}"),
    "tokenizer.json: not a valid tokenizer":
        stating("tokenizer.json", decoder={"type": "ByteLevel"}),
    "generation_config.json: not valid JSON": broken("generation_config.json", "{"),
    r"generation_config.json: eos_token_id=.* token ids from 0 to 279":
        stating("generation_config.json", eos_token_id=[5, 280]),
    # A stop token may be an embedding row without a token, but not past the rows.
    "config.json: eos_token_id=300 must be":
        stating("config.json", vocab_size=300, eos_token_id=300),
    "tokenizer_config.json: tokenizer_file=7 is not a path": lambda at: (
        (at / "tokenizer.json").unlink(),
        stating("tokenizer_config.json", tokenizer_file=7)(at),
    ),
    "tokenizer_config.json: unreadable chat_template":
        stating("tokenizer_config.json", chat_template=["x"]),
    "chat_template.jinja: is a directory":
        lambda at: (at / "chat_template.jinja").mkdir(),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_FOLDERS)
def test_bad_folders_are_refused(tmp_path, message):
    save(tmp_path)
    BAD_FOLDERS[message](tmp_path)
    with pytest.raises(ValueError, match=message):
        tokenizer_lib.load(tmp_path)


PARTS = [*"ab\n", " ", "é", "日"]
"""Parts of texts and of stop texts: few, so that they meet, overlap and repeat."""

stops_strategy = st.lists(
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map("".join), max_size=3
)


@st.composite
def tokens_strategy(draw):
    """Draws the bytes of tokens: a text cut anywhere, even inside characters."""
    text = "".join(draw(st.lists(st.sampled_from(PARTS), max_size=24))).encode()
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    ends = [*cuts, len(text)]
    return [text[start:end] for start, end in zip([0, *cuts], ends, strict=True)]


class Words:
    """The part of a tokenizer that pieces need: token `i` has the bytes `raws[i]`."""

    def __init__(self, raws, special=()):
        self.raws, self.special_ids = raws, frozenset(special)

    def bytes_of(self, token_id):
        return self.raws[token_id]

    def pieces(self, **options):
        ids = range(len(self.raws))
        return tokenizer_lib.Tokenizer.decode_pieces(self, ids, **options)


def oracle(raws, stops) -> tuple[bytes, int | None]:
    """Returns the bytes before the first complete stop text, and how many tokens stay.
    If several are complete at the same byte, the longest one counts."""
    text = b"".join(raws)
    for end in range(1, len(text) + 1):
        sizes = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if sizes:
            lengths = [len(b"".join(raws[:count])) for count in range(len(raws) + 1)]
            kept = next(count for count, length in enumerate(lengths) if length >= end)
            return text[: end - max(sizes)], kept
    return text, None


@given(raws=tokens_strategy(), stops=stops_strategy, turns=st.integers(1, 5))
def test_ends_are_those_of_the_oracle(raws, stops, turns):
    """Fails if ends depend on how tokens cut the text, or on how rounds group them, or
    if a token shows the bytes of another."""
    stops = [stop_texts.encode(stop) for stop in stops]
    text, kept = oracle(raws, stops)
    ends = stop_texts.Ends(raws.__getitem__, stops)
    found = None
    for seen in range(turns, len(raws) + turns, turns):
        found = ends(7, range(min(seen, len(raws))))
        if found is not None:
            assert found > seen - turns
            break
    assert found == kept
    shown = stop_texts.before_stop(raws, stops)
    assert b"".join(shown) == text
    assert all(map(bytes.startswith, raws, shown))


@given(raws=tokens_strategy(), stops=stops_strategy, special=st.integers(0, 12))
def test_streamed_text_is_settled(raws, stops, special):
    """Fails if a stream takes back what it has shown, or holds back more than it must.
    Token `special` counts in the search for stop texts, but is not shown."""
    stops = [stop_texts.encode(stop) for stop in stops]
    words = Words(raws, [special])
    text = "".join(words.pieces(stops=stops, skip_special_tokens=True))
    decoder = tokenizer_lib.PieceDecoder(words, stops=stops, skip_special_tokens=True)
    shown = ""
    for one in range(len(raws)):
        shown += decoder.decode([one])
        assert text.startswith(shown)
    all_shown = b"".join(raw for one, raw in enumerate(raws) if one != special)
    if oracle(raws, stops)[1] is None:
        longest = max(map(len, stops), default=1)
        # It may hold back a stop text's beginning and half a character.
        assert len(all_shown) - len(shown.encode()) < longest + 3
    shown += decoder.decode([], final=True)
    assert shown == text
    whole = b"".join(stop_texts.before_stop(raws, stops)).decode(errors="replace")
    assert "".join(words.pieces(stops=stops)) == whole


def test_texts_that_stop_nothing_are_refused():
    with pytest.raises(ValueError, match="stop has an empty text, which every text h"):
        stop_texts.encode("")
    with pytest.raises(ValueError, match=r"stop text 'a\\ud800' has half a character"):
        stop_texts.encode("a\ud800")
