"""Prompt lookup and suffix statistics against searches in plain Python, prompt lookup
against Hugging Face, and native kernels against XLA."""

import collections
import dataclasses
import fractions
import functools
import itertools

import decoding
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from spec_jax.drafters import ngram, suffix, suffix_match
from spec_jax.testing import compare


MAX_LEN, GAMMA_MAX, CORPUS = 24, 4, 16
token = st.integers(0, 2)
texts = st.lists(token, min_size=1, max_size=MAX_LEN)
gammas = st.integers(0, GAMMA_MAX)


def asked(text, gamma, behind=0, size=MAX_LEN):
    """Returns what a drafter is asked after a text, with `behind` behind it."""
    (tokens,) = decoding.padded([text], size, behind=behind)
    return {"tokens": tokens, "length": jnp.int32(len(text)), "gamma": jnp.int32(gamma)}


def drafts_of(proposal) -> list[int]:
    return np.asarray(proposal.tokens)[: int(proposal.num_drafted)].tolist()


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


def looked_up(drafter, text, gamma=GAMMA_MAX, behind=0) -> list[int]:
    found = decoding.propose(drafter, None, (), **asked(text, gamma, behind))
    return drafts_of(found[1])


sizes = st.sampled_from([(1, 1), (3, 2), (5, 3)])


@pytest.mark.parametrize(("match", "stop_ids"), [("last", ()), ("first", (2,))])
@hypothesis.settings(deadline=None, max_examples=100, derandomize=True)
@hypothesis.given(texts, sizes, gammas, token)
def test_drafts_are_those_of_a_search(match, stop_ids, text, sizes, gamma, behind):
    """Fails if another occurrence wins, or tokens behind the text are read."""
    options = {"n_max": sizes[0], "n_min": sizes[1]}
    options |= {"match": match, "stop_ids": stop_ids}
    drafter = ngram.PromptLookup(gamma_max=GAMMA_MAX, **options)
    expected = lookup(text, gamma=gamma, **options)
    assert looked_up(drafter, text, gamma, behind) == expected


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
            assert looked_up(drafter, text) == expected, text
            num_drafted += len(expected)
    assert num_drafted > 400


STATISTICS = suffix.SuffixDecoding(
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

    def path(self, context, budget):
        """Returns the greedy path from a node: its tokens, and their probabilities."""
        tokens, probabilities, probability = [], [], fractions.Fraction(1)
        while len(tokens) < budget:
            counts = self.followers.get((*context, *tokens))
            if not counts:
                break
            # A counter keeps the order in which tokens were first met.
            token, count = max(counts.items(), key=lambda item: item[1])
            probability *= fractions.Fraction(count, sum(counts.values()))
            if probability < fractions.Fraction(str(STATISTICS.min_probability)):
                break
            tokens.append(token)
            probabilities.append(probability)
        return tokens, probabilities

    def best(self, text, gamma, match_min):
        """Returns the best score over all lengths of match, and its tokens."""
        best = (fractions.Fraction(0), [])
        for m in range(match_min, min(STATISTICS.match_max, len(text)) + 1):
            budget = min(gamma, int(m * STATISTICS.max_factor))
            tokens, probabilities = self.path(text[-m:], budget)
            if sum(probabilities) >= best[0]:
                best = sum(probabilities, fractions.Fraction(0)), tokens
        return best


def counted(text, corpus, gamma, match_min=1):
    """Returns the score and tokens that the rules give, in fractions."""
    bodies = [text], corpus
    local, earlier = (Tree(texts).best(text, gamma, match_min) for texts in bodies)
    return local if local[0] >= earlier[0] else earlier


@functools.partial(jax.jit, static_argnames="drafter")
def look_up(drafter, corpus, asked) -> suffix.Lookup:
    return drafter.look_up(corpus, **asked)


def run(text, corpus, gamma=GAMMA_MAX, behind=0, **changes):
    drafter = dataclasses.replace(STATISTICS, **changes)
    found = look_up(drafter, corpus, asked(text, gamma, behind))
    return float(found.score), drafts_of(found.proposal)


def corpus_of(*generations) -> suffix.Corpus:
    return functools.reduce(
        suffix.remember, map(list, generations), suffix.empty_corpus(CORPUS)
    )


earlier = st.lists(st.lists(token, max_size=6), max_size=2)


@pytest.mark.parametrize("least", [1, 3])
@hypothesis.settings(deadline=None, max_examples=100, derandomize=True)
@hypothesis.given(texts, earlier, gammas, token)
def test_counts_are_those_of_a_suffix_tree(least, text, earlier, gamma, behind):
    """Fails if a place is counted wrongly, or another rule decides ties."""
    score, drafts = run(text, corpus_of(*earlier), gamma, behind, match_min=least)
    expected, tokens = counted(text, earlier, gamma, least)
    assert score == pytest.approx(float(expected), rel=1e-5)
    assert drafts == tokens


def test_another_count_is_caught():
    """Negative control: to count the token behind a text too changes the drafts."""
    text = [1, 2, 1, 3, 1, 2, 1]
    expected = counted(text, [], GAMMA_MAX)[1]
    assert run([*text, 3], corpus_of())[1] != expected == run(text, corpus_of())[1]


LONG = st.lists(st.integers(0, 3), min_size=1, max_size=90)


@hypothesis.settings(deadline=None, max_examples=60, derandomize=True)
@hypothesis.given(
    LONG, st.lists(LONG, max_size=4), st.integers(0, 8), st.sampled_from([1, 4])
)
def test_native_kernels_find_the_same(text, earlier, gamma, least):
    """Fails if a token, or a bit of a probability or a score, differs from XLA's."""
    drafter = suffix.SuffixDecoding(
        gamma_max=8, match_min=least, max_factor=1.7, min_probability=0.05
    )
    native = dataclasses.replace(drafter, impl="native")
    corpus = functools.reduce(suffix.remember, earlier, suffix.empty_corpus(150))
    of_text = asked(text, gamma, behind=1, size=90)
    expected, found = (look_up(one, corpus, of_text) for one in (drafter, native))
    assert drafts_of(found.proposal) == drafts_of(expected.proposal)
    compare.assert_same_bits(found.score, expected.score)
    compare.assert_same_bits(found.proposal.survival, expected.proposal.survival)
    # Control: a text that ends with an unknown token has no match.
    other = asked([*text[:-1], 9], gamma, behind=1, size=90)
    assert look_up(native, corpus, other).score == 0


def test_a_corpus_forgets_its_oldest_tokens():
    """Fails if a shape changes, or the newest generation has no room."""
    corpus = corpus_of(range(10), range(20, 30))
    assert corpus.tokens.tolist() == [*range(5, 10), suffix_match.NONE, *range(20, 30)]
    assert corpus_of(range(100)).tokens.tolist() == list(range(84, 100))
    groups = corpus.groups
    assert groups.shape == (CORPUS,) and groups.dtype == jnp.int32
    assert len(set(groups.tolist())) == CORPUS


@pytest.mark.parametrize("impl", ["xla", "native"])
def test_a_factor_beyond_int32_is_no_bound(impl):
    """Fails if a budget overflows, so that nothing is drafted."""
    decoding.needs(impl)
    expected, *found = [
        run([7, 1, 2, 3, 4, 7], corpus_of(), max_factor=factor, impl=impl)
        for factor in (100.0, float("inf"), 2.8e8)
    ]
    assert found == [expected] * 2 and len(expected[1]) == 4


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (ngram.PromptLookup, {"n_min": 0}, "n_min=0 and n_max=. are not 1 <= n_min"),
        (ngram.PromptLookup, {"n_max": 2, "n_min": 3}, "n_min=3 and n_max=2 are not"),
        (suffix.SuffixDecoding, {"match_min": 0}, "match_min=0 must be at least 1"),
        (suffix.SuffixDecoding, {"match_max": 0}, "match_min=1 .* most match_max=0"),
        (suffix.SuffixDecoding, {"max_factor": 0.1}, "max_factor=0.1 drafts nothing"),
        (suffix.SuffixDecoding, {"min_probability": 0.0}, r"is outside \(0, 1\]"),
        (suffix.SuffixDecoding, {"min_probability": 1.5}, r"is outside \(0, 1\]"),
    ],
)
def test_impossible_settings_are_refused(kind, settings, words):
    with pytest.raises(ValueError, match=words):
        kind(gamma_max=4, **settings)
