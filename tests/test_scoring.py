"""Log-probabilities of scoring and of generating are the same integers."""

import numpy as np
import pytest
import recorded_runs
import tiny_pair
from slow_cases import slow

import spec_jax as sj
from spec_jax import scoring, testing


PROMPTS = ["def f(x):", "import os", "x = [1, 2]"]
DRAWN = sj.Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=5)
SHORT = {"max_tokens": 11, "ignore_eos": True}


@pytest.fixture(scope="module", params=["native", slow("xla")])
def lm(request, folders):
    """Returns a tiny pair of random weights; a token is a byte."""
    return sj.load(folders[0], draft=folders[1], gamma_max=4, impl=request.param)


def of_all_tokens(lm, sampling=None):
    """Returns the log-probabilities of every token after the first prompt, by the model
    and by `sampling`."""
    size = lm.target.config.vocab_size
    texts = [PROMPTS[0]] * size, [[token] for token in range(size)]
    found = sj.score(lm, *texts, sampling=sampling)
    return np.array([(one.log_probs[0], one.drawn_log_probs[0]) for one in found]).T


def same(found, expected) -> None:
    for name in scoring.NAMES:
        testing.assert_same_bits(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("sampling", [slow(None), DRAWN], ids=["greedy", "drawn"])
def test_they_are_those_of_decoding(lm, sampling):
    """Fails if a number depends on drafts, on a tree, on a batch, or on the other rows
    of its slab."""
    top = {"sampling": sampling, "top_logprobs": 3}
    settings = SHORT | top
    plain = sj.decode(lm, PROMPTS, **settings)
    for made in (
        sj.generate(lm, PROMPTS, num_slots=2, gamma=4, **settings),
        sj.generate(lm, PROMPTS, gamma=sj.Tree.parse("2x2:5"), **settings),
        sj.score(lm, PROMPTS, [one.tokens for one in plain], **top),
        [sj.score(lm, one.prompt_tokens, one.tokens, **top) for one in plain],
    ):
        for found, expected in zip(made, plain, strict=True):
            assert found.tokens == expected.tokens
            same(found, expected)
    one = plain[0]
    if lm.target.prefills_by_rows:  # Then a prompt has the K/V of decoding, too.
        for count, token in [*enumerate(one.tokens)][::4]:
            prompt = [*one.prompt_tokens, *one.tokens[:count]]
            alone = sj.score(lm, prompt, [token], sampling=sampling)
            testing.assert_same_bits(alone.log_probs[0], one.log_probs[count])
    # Negative control: the numbers of another prompt.
    other = sj.score(lm, PROMPTS[1], one.tokens, sampling=sampling)
    assert np.all(other.log_probs[1:] != one.log_probs[1:])


def test_the_likeliest_tokens(lm):
    """Fails if they are not the highest of all log-probabilities, in order, with the
    bits that `score` gives each token, or if asking for them changes a bit."""
    (one,) = sj.generate(lm, [PROMPTS[0]], gamma=2, top_logprobs=5, **SHORT)
    (asked,) = sj.generate(lm, [PROMPTS[0]], gamma=2, log_probs=True, **SHORT)
    for name in ("log_probs", "drawn_log_probs"):
        testing.assert_same_bits(getattr(one, name), getattr(asked, name))
    assert asked.top_tokens is None and one.top_tokens.dtype == np.int32
    first, _ = of_all_tokens(lm)
    order = np.argsort(-first, kind="stable")[:5]
    assert one.top_tokens.shape == one.top_log_probs.shape == (SHORT["max_tokens"], 5)
    assert one.top_tokens[0].tolist() == order.tolist()
    testing.assert_same_bits(one.top_log_probs[0], first[order])
    # Written greedily, the first is the token itself.
    assert one.top_tokens[:, 0].tolist() == one.tokens
    testing.assert_same_bits(one.top_log_probs[:, 0].copy(), one.log_probs)
    _, end = tiny_pair.streamed(lm, PROMPTS[0], gamma=2, top_logprobs=5, **SHORT)
    same(end, one)


def test_they_are_those_of_the_rows_that_decided(lm):
    """Fails if log-probabilities are not computed from the logits of the rounds."""
    settings = SHORT | {"gamma": 4}
    (seen,) = recorded_runs.evidence_of(lm, [PROMPTS[0]], **settings)
    (found,) = sj.generate(lm, [PROMPTS[0]], log_probs=True, **settings)
    assert found.tokens == list(seen.tokens)
    testing.assert_same_bits(found.log_probs.view(np.uint32), seen.log_probs)


def test_they_are_of_distributions(lm):
    """Fails if chances do not add up to one, or if filters keep more than `top_k`."""
    raw, drawn = of_all_tokens(lm, DRAWN).astype(float)
    for log_probs in (raw, drawn):
        assert np.exp(log_probs).sum() == pytest.approx(1, abs=1e-5)
    kept = np.isfinite(drawn)
    assert 1 < kept.sum() <= DRAWN.top_k
    # By definition: the kept logits over the temperature, normalised.
    scaled = raw[kept] / DRAWN.temperature
    expected = scaled - np.log(np.sum(np.exp(scaled)))
    np.testing.assert_allclose(drawn[kept], expected, atol=1e-5)
    # Greedily only one token has a chance.
    _, greedy = of_all_tokens(lm)
    assert greedy[raw.argmax()] == 0 and np.isneginf(greedy).sum() == len(greedy) - 1


def test_nobody_asks_and_nothing_is_computed(lm):
    out = sj.generate(lm, PROMPTS[0], gamma=2, **SHORT)
    assert all(getattr(out, name) is None for name in scoring.NAMES)


REFUSED = {
    "no completion": ((PROMPTS[0], []), "completion is empty"),
    "a token of another model": ((PROMPTS[0], [10**6]), "completion has token 1000000"),
    "no row of ids": ((PROMPTS[0], [0.5]), "give one row of token ids"),
    "too few": ((PROMPTS, [[1]]), "1 completions of 3 prompts: give each"),
    "too long": ((PROMPTS[0], [1] * 10**5), "shorten it"),
    "settings": (([PROMPTS[0]], [[1]], DRAWN, DRAWN), "2 settings of .* for 1 prompts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(lm, case):
    (prompt, completion, *draws), words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        sj.score(lm, prompt, completion, sampling=draws or None)
