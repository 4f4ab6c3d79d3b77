"""Stop texts, compared with an oracle that looks at every prefix of a whole text."""

import pytest
from hypothesis import given, strategies as st

from spec_jax.model import stop_texts, tokenizer as tokenizer_lib


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
