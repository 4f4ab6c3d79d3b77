"""Prompt lookup against a search in plain Python, and against Hugging Face."""

import functools
import itertools

import decoding
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from spec_jax.drafters import ngram
from spec_jax.engine import protocols
from spec_jax.rules import acceptance


MAX_LEN, GAMMA_MAX = 24, 4


def lookup(text, *, n_max, n_min, gamma, match="last", stop_ids=()) -> list[int]:
    """Returns the drafts of a search in lists, window by window: the oracle."""
    for n in range(min(n_max, len(text) - 1), n_min - 1, -1):
        found = [
            start + n
            for start in range(len(text) - n)
            if text[start : start + n] == text[len(text) - n :]
        ]
        if not found:
            continue
        behind = text[found[0] :] if match == "first" else text[found[-1] :] * gamma
        drafts = behind[:gamma]
        stops = [i for i, token in enumerate(drafts) if token in stop_ids]
        return drafts[: stops[0]] if stops else drafts
    return []


@functools.partial(jax.jit, static_argnames="drafter")
def propose(drafter, tokens, length, gamma) -> protocols.Proposal:
    return drafter.propose(None, (), tokens=tokens, length=length, gamma=gamma)[1]


def drafts(drafter, text, *, gamma, behind=acceptance.PAD) -> list[int]:
    (tokens,) = decoding.padded([text], MAX_LEN, behind=behind)
    proposal = propose(drafter, tokens, jnp.int32(len(text)), jnp.int32(gamma))
    return np.asarray(proposal.tokens)[: int(proposal.num_drafted)].tolist()


texts = st.lists(st.integers(0, 2), min_size=1, max_size=MAX_LEN)
sizes = st.sampled_from([(1, 1), (3, 2), (5, 3)])


@pytest.mark.parametrize(("match", "stop_ids"), [("last", ()), ("first", (2,))])
@hypothesis.settings(deadline=None, max_examples=100, derandomize=True)
@hypothesis.given(texts, sizes, st.integers(0, GAMMA_MAX), st.integers(0, 2))
def test_drafts_are_those_of_a_search(match, stop_ids, text, sizes, gamma, behind):
    """Fails if another occurrence wins, or tokens behind the text are read."""
    options = {"n_max": sizes[0], "n_min": sizes[1]}
    options |= {"match": match, "stop_ids": stop_ids}
    drafter = ngram.PromptLookup(gamma_max=GAMMA_MAX, **options)
    expected = lookup(text, gamma=gamma, **options)
    assert drafts(drafter, text, gamma=gamma, behind=behind) == expected


def test_drafts_are_those_of_hugging_face():
    """Compares drafts for texts of any length, with and without stop tokens."""
    torch = pytest.importorskip("torch")
    generators = pytest.importorskip("transformers.generation.candidate_generator")
    random = np.random.default_rng(0)
    num_drafted = 0
    for stop_ids, n_max in itertools.product([(), (2,), (0, 3)], (1, 2, 4)):
        drafter = ngram.hugging_face(
            gamma_max=GAMMA_MAX, n_max=n_max, stop_ids=stop_ids
        )
        theirs = generators.PromptLookupCandidateGenerator(
            eos_token_id=torch.tensor(stop_ids) if stop_ids else None,
            num_output_tokens=GAMMA_MAX,
            max_matching_ngram_size=n_max,
            max_length=MAX_LEN + 2,
        )
        for length in range(1, MAX_LEN + 1):
            text = random.integers(0, 4, length).tolist()
            candidates, _ = theirs.get_candidates(torch.tensor([text]))
            expected = candidates[0, length:].tolist()
            assert drafts(drafter, text, gamma=GAMMA_MAX) == expected, text
            num_drafted += len(expected)
    assert num_drafted > 400


@pytest.mark.parametrize("match", ngram.MATCHES)
def test_another_occurrence_is_caught(match):
    """Negative control: an oracle with the other rule for ties drafts other tokens."""
    text, drafter = [1, 7, 1, 8, 1], ngram.PromptLookup(gamma_max=4, match=match)
    found = {
        other: lookup(text, n_max=3, n_min=1, gamma=4, match=other)
        for other in ngram.MATCHES
    }
    assert found == {"last": [8, 1, 8, 1], "first": [7, 1, 8, 1]}
    assert [
        name for name in found if drafts(drafter, text, gamma=4) == found[name]
    ] == [match]


@pytest.mark.parametrize(
    "sizes", [{"n_max": 0}, {"n_min": 0}, {"n_max": 2, "n_min": 3}]
)
def test_impossible_matches_are_refused(sizes):
    with pytest.raises(ValueError, match="n_min=. and n_max=. are not 1 <= n_min"):
        ngram.PromptLookup(gamma_max=4, **sizes)
