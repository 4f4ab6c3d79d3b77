"""Prompt lookup against a search in plain Python, and against the kit."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from spec_jax import acceptance, protocols, testing
from spec_jax.drafters import ngram


MAX_LEN, GAMMA_MAX = 24, 4


def lookup(text, *, n_max, n_min, gamma) -> list[int]:
    """Hugging Face's search, window by window: the oracle."""
    for n in range(min(n_max, len(text) - 1), n_min - 1, -1):
        for start in range(len(text) - n):
            if text[start : start + n] == text[len(text) - n :]:
                return text[start + n :][:gamma]
    return []


@functools.partial(jax.jit, static_argnames="drafter")
def propose(drafter, tokens, length, gamma) -> protocols.Proposal:
    return drafter.propose(None, (), tokens=tokens, length=length, gamma=gamma)[1]


def drafts(drafter, text, *, gamma, behind=acceptance.PAD) -> list[int]:
    tokens = np.full((MAX_LEN,), behind, np.int32)
    tokens[: len(text)] = text
    proposal = propose(
        drafter, jnp.asarray(tokens), jnp.int32(len(text)), jnp.int32(gamma)
    )
    return np.asarray(proposal.tokens)[: int(proposal.num_drafted)].tolist()


texts = st.lists(st.integers(0, 2), min_size=1, max_size=MAX_LEN)
sizes = st.sampled_from([(1, 1), (3, 1), (3, 2), (5, 3)])


@hypothesis.settings(deadline=None, max_examples=300, derandomize=True)
@hypothesis.given(texts, sizes, st.integers(0, GAMMA_MAX), st.integers(0, 2))
def test_drafts_are_those_of_a_search(text, sizes, gamma, behind):
    """Fails if another occurrence wins, or what is behind the text is read."""
    n_max, n_min = sizes
    drafter = ngram.PromptLookup(gamma_max=GAMMA_MAX, n_max=n_max, n_min=n_min)
    expected = lookup(text, n_max=n_max, n_min=n_min, gamma=gamma)
    assert drafts(drafter, text, gamma=gamma, behind=behind) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 7, 1, 2, 8, 1, 2], [7, 1, 2, 8]),  # the earliest of equals
        ([2, 9, 1, 2, 8, 1, 2], [8, 1, 2]),  # a longer match before an earlier one
        ([5, 5], [5]),  # an overlap with the end, and then nothing
        ([3, 1, 3], [1, 3]),  # the continuation ends with the text
        ([1, 2, 3], []),  # nothing matches
        ([4], []),
    ],
)
def test_ties_and_ends_by_hand(text, expected):
    assert drafts(ngram.PromptLookup(gamma_max=4), text, gamma=4) == expected


def test_it_keeps_the_contract():
    checked = testing.check_drafter(ngram.PromptLookup(gamma_max=GAMMA_MAX), None)
    assert checked == tuple(testing.CLAUSES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latest(ngram.PromptLookup):
    """Takes the latest occurrence in place of the earliest."""

    def propose(self, params, memory, *, tokens, length, gamma):
        at = jnp.arange(tokens.shape[0])
        matched = (tokens == tokens[length - 1]) & (at < length - 1)
        start = jnp.max(jnp.where(matched, at, -1)) + 1
        behind = jnp.pad(tokens, (0, self.gamma_max))
        known = jnp.where(jnp.any(matched), jnp.minimum(gamma, length - start), 0)
        drafts = jax.lax.dynamic_slice_in_dim(behind, start, self.gamma_max)
        return memory, protocols.Proposal(tokens=drafts, num_drafted=known)


def test_another_occurrence_is_caught():
    """Negative control of the search: a rule for ties that is not the oracle's."""
    drafter = Latest(gamma_max=4, n_max=1)
    assert drafts(drafter, [1, 7, 2, 1], gamma=4) == [7, 2, 1]
    text = [1, 7, 1, 8, 1]
    expected = lookup(text, n_max=1, n_min=1, gamma=4)
    assert drafts(drafter, text, gamma=4) != expected == [7, 1, 8, 1]


@pytest.mark.parametrize(
    "sizes", [{"n_max": 0}, {"n_min": 0}, {"n_max": 2, "n_min": 3}]
)
def test_impossible_matches_are_refused(sizes):
    with pytest.raises(ValueError, match="n_min=. and n_max=. are not 1 <= n_min"):
        ngram.PromptLookup(gamma_max=4, **sizes)
