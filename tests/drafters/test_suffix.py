"""Suffix statistics against a dictionary of strings; native kernels against XLA."""

import collections
import dataclasses
import fractions
import functools

import decoding
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from spec_jax.drafters import suffix, suffix_match
from spec_jax.testing import compare


MAX_LEN, GAMMA_MAX, CORPUS = 20, 4, 16
DRAFTER = suffix.SuffixDecoding(
    gamma_max=GAMMA_MAX, match_max=5, max_factor=1.5, min_probability=0.3
)


class Tree:
    """The suffix tree of some texts, as a dictionary: which tokens follow a string."""

    def __init__(self, texts):
        self.followers = collections.defaultdict(collections.Counter)
        for text in texts:
            for end in range(len(text)):
                for start in range(end + 1):
                    self.followers[tuple(text[start:end])][text[end]] += 1

    def path(self, drafter, context, budget):
        """Returns the greedy path from a node: its tokens, and their probabilities."""
        tokens, probabilities, probability = [], [], fractions.Fraction(1)
        while len(tokens) < budget:
            counts = self.followers.get((*context, *tokens))
            if not counts:
                break
            # A counter keeps the order in which tokens were first met.
            token, count = max(counts.items(), key=lambda item: item[1])
            probability *= fractions.Fraction(count, sum(counts.values()))
            if probability < fractions.Fraction(str(drafter.min_probability)):
                break
            tokens.append(token)
            probabilities.append(probability)
        return tokens, probabilities

    def best(self, drafter, text, gamma):
        """Returns the best score over all lengths of match, and its tokens."""
        best = (fractions.Fraction(0), [])
        for m in range(1, min(drafter.match_max, len(text)) + 1):
            budget = min(gamma, int(m * drafter.max_factor))
            tokens, probabilities = self.path(drafter, text[-m:], budget)
            if sum(probabilities) >= best[0]:
                best = sum(probabilities, fractions.Fraction(0)), tokens
        return best


def oracle(drafter, text, corpus, gamma):
    """Returns the score and tokens that the rules give, in fractions."""
    local = Tree([text]).best(drafter, text, gamma)
    earlier = Tree(corpus).best(drafter, text, gamma)
    return local if local[0] >= earlier[0] else earlier


@functools.partial(jax.jit, static_argnames="drafter")
def look_up(drafter, corpus, tokens, length, gamma) -> suffix.Lookup:
    return drafter.look_up(corpus, tokens=tokens, length=length, gamma=gamma)


def run(drafter, text, corpus, gamma, *, behind=0):
    (tokens,) = decoding.padded([text], MAX_LEN, behind=behind)
    found = look_up(drafter, corpus, tokens, jnp.int32(len(text)), jnp.int32(gamma))
    num_drafted = int(found.proposal.num_drafted)
    drafts = np.asarray(found.proposal.tokens)[:num_drafted].tolist()
    return float(found.score), drafts


def corpus_of(*generations) -> suffix.Corpus:
    corpus = suffix.empty_corpus(CORPUS)
    for generation in generations:
        corpus = suffix.remember(corpus, list(generation))
    return corpus


token = st.integers(0, 2)
texts = st.lists(token, min_size=1, max_size=MAX_LEN)
earlier = st.lists(st.lists(token, max_size=6), max_size=2)


@hypothesis.settings(deadline=None, max_examples=100, derandomize=True)
@hypothesis.given(texts, earlier, st.integers(0, GAMMA_MAX), token)
def test_counts_are_those_of_a_suffix_tree(text, earlier, gamma, behind):
    """Fails if a place is counted wrongly, or another rule decides ties."""
    score, drafts = run(DRAFTER, text, corpus_of(*earlier), gamma, behind=behind)
    expected, tokens = oracle(DRAFTER, text, earlier, gamma)
    assert score == pytest.approx(float(expected), rel=1e-5)
    assert drafts == tokens


NATIVE = dataclasses.replace(DRAFTER, impl="native")
LONG = st.lists(st.integers(0, 3), min_size=1, max_size=90)


@hypothesis.settings(deadline=None, max_examples=60, derandomize=True)
@hypothesis.given(LONG, st.lists(LONG, max_size=4), st.integers(0, 8))
def test_native_kernels_find_the_same(text, earlier, gamma):
    """Fails if a token, or a bit of a probability or a score, differs from XLA's."""
    drafter = suffix.SuffixDecoding(gamma_max=8, max_factor=1.7, min_probability=0.05)
    corpus = functools.reduce(suffix.remember, earlier, suffix.empty_corpus(150))
    (tokens,) = decoding.padded([text], 90, behind=1)
    of_text = (corpus, tokens, jnp.int32(len(text)), jnp.int32(gamma))
    expected = look_up(drafter, *of_text)
    found = look_up(dataclasses.replace(drafter, impl="native"), *of_text)
    count = expected.proposal.num_drafted
    assert found.proposal.num_drafted == count
    tokens = (x.proposal.tokens[:count] for x in (found, expected))
    np.testing.assert_array_equal(*tokens)
    compare.assert_same_bits(found.score, expected.score)
    compare.assert_same_bits(found.proposal.survival, expected.proposal.survival)
    # Control: a text that ends with an unknown token has no match.
    if count > 0:
        other = of_text[1].at[len(text) - 1].set(9)
        assert look_up(NATIVE, corpus, other, *of_text[2:]).score == 0


def test_matches_do_not_reach_over_generations():
    """Fails if the end of one generation is followed by the beginning of the next."""
    assert run(DRAFTER, [7, 1], corpus_of([1], [2, 2]), GAMMA_MAX) == (0.0, [])
    assert run(DRAFTER, [7, 1], corpus_of([1, 2, 2]), GAMMA_MAX)[1] == [2]


def test_a_corpus_forgets_its_oldest_tokens():
    """Fails if a shape changes, or the newest generation has no room."""
    corpus = corpus_of(range(10), range(20, 30))
    assert corpus.tokens.tolist() == [*range(5, 10), suffix_match.NONE, *range(20, 30)]
    assert corpus_of(range(100)).tokens.tolist() == list(range(84, 100))
    groups = corpus.groups
    assert groups.shape == (CORPUS,) and groups.dtype == jnp.int32
    assert len(set(groups.tolist())) == CORPUS


class CountsTheEnd(suffix.SuffixDecoding):
    """Counts the token behind the text as a continuation of the text's end."""

    def look_up(self, corpus, *, tokens, length, gamma):
        end = jnp.minimum(length + 1, tokens.shape[0])
        return super().look_up(corpus, tokens=tokens, length=end, gamma=gamma)


def test_another_count_is_caught():
    """Negative control: one place too many changes the drafts."""
    drafter = CountsTheEnd(**dataclasses.asdict(DRAFTER))
    text = [1, 2, 1, 3, 1, 2, 1]
    expected = oracle(DRAFTER, text, [], GAMMA_MAX)[1]
    assert run(drafter, text, corpus_of(), GAMMA_MAX, behind=3)[1] != expected


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"match_max": 0}, "match_max=0 must be at least 1"),
        ({"max_factor": 0.1}, "max_factor=0.1 drafts nothing even for a match of"),
        ({"min_probability": 0.0}, r"min_probability=0.0 is outside \(0, 1\]"),
        ({"min_probability": 1.5}, r"min_probability=1.5 is outside \(0, 1\]"),
    ],
)
def test_impossible_settings_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        suffix.SuffixDecoding(gamma_max=4, **sizes)


@pytest.mark.parametrize("impl", ["xla", "native"])
def test_a_factor_beyond_int32_is_no_bound(impl):
    """Fails if a budget overflows, so that nothing is drafted."""
    decoding.needs(impl)
    text = [7, 1, 2, 3, 4, 7]
    expected, *found = [
        run(dataclasses.replace(DRAFTER, max_factor=x, impl=impl), text, corpus_of(), 4)
        for x in (100.0, float("inf"), 2.8e8)
    ]
    assert found == [expected] * 2 and len(expected[1]) == 4
