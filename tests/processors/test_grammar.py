"""Grammars: tables compared with the automaton, texts with `re` and `json`."""

import json
import re

import numpy as np
import pytest

import spec_jax as sj
from spec_jax.processors import grammar


pytest.importorskip("outlines_core")

PATTERN = r"(ab|c)*d{2,3}[x-z]?"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0},
        "kind": {"enum": ["a", "bc"]},
    },
    "required": ["name", "age", "kind"],
}


def accepts(made: grammar.Grammar, text: str, lm) -> bool:
    """Returns whether the tables allow a text and a stop token after it."""
    state, table, classes = 0, np.asarray(made.next), np.asarray(made.classes)
    for token in [*lm.tokenizer.encode(text), lm.stop_ids[0]]:
        state = table[state, classes[token]]
        if state == grammar.FORBIDDEN:
            return False
    return True


def test_a_text_is_accepted_where_the_pattern_matches_it(lm):
    made = grammar.regex(PATTERN, lm)
    for text in ["", *"dd abcdd cabddd ddz d abd dddd bdd ddzz cabdddy".split()]:
        assert accepts(made, text, lm) == bool(re.fullmatch(PATTERN, text)), text


def test_a_text_is_accepted_where_it_is_of_the_schema(lm):
    """Fails if a rule is lost, or the tables have a column for each token."""
    made = grammar.json_schema(SCHEMA, lm)
    right = {"name": "abcd", "age": 12, "kind": "bc"}
    changes = ({"name": "abcde"}, {"age": 1.5}, {"kind": "b"}, {"x": 1})
    assert accepts(made, json.dumps(right), lm)
    for change in changes:
        assert not accepts(made, json.dumps(right | change), lm), change
    for cut in (json.dumps({"name": "abcd", "age": 12}), json.dumps(right)[:-1]):
        assert not accepts(made, cut, lm), cut
    assert made.next.shape[1] < 60 < made.classes.shape[0] == 264


def test_a_token_of_several_characters_goes_through_several_states():
    """Fails if letters of a token are skipped, or a second token of a text is lost."""
    pieces = [b"", b"a", b"ab", b"bc", b"c", b"abc", b"ab"]
    made = grammar.of_pieces("abcc*", pieces, stop_ids=[0], vocab_size=9)
    table, classes = np.asarray(made.next), np.asarray(made.classes)
    allowed = lambda state: np.flatnonzero(table[state, classes] >= 0).tolist()
    assert allowed(0) == [1, 2, 5, 6]
    after = lambda state, token: table[state, classes[token]]
    assert allowed(after(0, 1)) == [3]
    assert after(0, 2) == after(0, 6)
    done = after(0, 5)
    assert allowed(done) == [0, 4]
    end = after(done, 0)
    assert allowed(end) == [0] and after(end, 0) == end


PATTERNS = ("[ab]{2,5}c", "(de|f)+g", "[ab]{2,5}c", "h{4}")


def test_requests_of_a_batch_have_grammars_of_their_own(lm):
    """Fails if a request continues in the automaton of another, or if a join, which may
    split classes of tokens, changes a transition."""
    made = [grammar.regex(pattern, lm) for pattern in PATTERNS]
    settings = {"max_tokens": 12, "sampling": sj.Sampling(seed=2)}
    found = sj.generate(lm, ["x"] * 4, processors=made, num_slots=2, **settings)
    plain = sj.decode(lm, ["x"] * 4, processors=made, **settings)
    for one, other, pattern in zip(found, plain, PATTERNS, strict=True):
        assert re.fullmatch(pattern, one.text) or one.status is sj.Status.LENGTH
        assert one.tokens == other.tokens
    assert found[3].text == "hhhh"


def test_a_text_that_leaves_the_grammar_is_scored(lm):
    """Fails unless the forbidden token scores -inf, and later ones a finite number."""
    made = grammar.regex("ab*", lm)
    ids = [*lm.tokenizer.encode("abxy"), lm.stop_ids[0]]
    found = sj.score(lm, "q", ids, sampling=sj.Sampling(), processors=made)
    is_none = np.isneginf(found.drawn_log_probs)
    assert is_none.tolist() == [False, False, True, False, False]
    assert np.isfinite(found.log_probs).all()


small = lambda stop_ids: grammar.of_pieces("a", [b"a"], stop_ids=stop_ids, vocab_size=4)
written = lambda lm, *made: sj.generate(lm, ["a"] * len(made), processors=list(made))
REFUSED = {
    "a pattern": (lambda lm: grammar.regex("(", lm), r"pattern '\(' cannot be compil"),
    "a schema": (lambda lm: grammar.json_schema("{", lm), "JSON schema cannot be used"),
    "a kind of value": (lambda lm: grammar.json_schema({"type": "thing"}, lm),
        "the JSON schema cannot be used"),
    "no stop token": (lambda lm: small([]), "the model has no stop token"),
    "a table that is too large": (lambda lm: grammar.regex("[ab]{3}", lm),
        "a grammar of 5 states and 3 classes of tokens or more: the table has more"),
    "another vocabulary": (lambda lm: written(lm, small([1])),
        "a grammar over 4 tokens, and the model has 264: compile it with this model"),
    "two vocabularies in a batch": (
        lambda lm: written(lm, grammar.regex("ab", lm), small([1])),
        "a grammar over 4 tokens, and the model has 264"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(lm, case, monkeypatch):
    made, words = REFUSED[case]
    if "large" in case:
        monkeypatch.setattr(grammar, "MAX_ENTRIES", 14)
    with pytest.raises(ValueError, match=words) as caught:
        made(lm)
    assert "\n" not in str(caught.value)
