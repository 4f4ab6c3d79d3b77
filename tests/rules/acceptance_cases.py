"""Targets and drafts of every kind, for `tests/rules/enumeration.py`."""

import enumeration
import jax
import numpy as np

from spec_jax.rules import sampling


def random_rows(rng, vocab_size, *, zeros=0.0):
    """Returns a function of n that makes n random rows; zeros never fill a row."""

    def rows(n):
        weights = rng.gamma(0.7, size=(n, vocab_size))
        weights *= rng.random(weights.shape) >= zeros
        weights[np.arange(n), rng.integers(vocab_size, size=n)] += 0.1
        return weights / weights.sum(axis=-1, keepdims=True)

    return rows


def one_hot_rows(rng, vocab_size):
    return lambda n: np.eye(vocab_size)[rng.integers(vocab_size, size=n)]


def half_rows(rng, vocab_size, half):
    """Returns a function of n: n rows with mass on the vocabulary's `half` only."""
    is_in = (np.arange(vocab_size) < vocab_size // 2) == (half == "lower")

    def rows(n):
        weights = (rng.random((n, vocab_size)) + 0.1) * is_in
        return weights / weights.sum(axis=-1, keepdims=True)

    return rows


_distribution = jax.jit(sampling.distribution)


def probs(entry, settings):
    """Returns an entry of logits as probabilities, by `sampling.distribution`."""
    # One shape compiles once: padding adds rows, and tokens that cannot be drawn.
    rows = entry.reshape(-1, entry.shape[-1])
    padded = np.pad(rows, ((0, 128 - len(rows)), (0, 0)))
    padded = np.pad(padded, ((0, 0), (0, 5 - rows.shape[1])), constant_values=-np.inf)
    found = np.asarray(_distribution(padded, settings))
    return found[: len(rows), : rows.shape[1]].reshape(entry.shape)


def random_logits(rng, vocab_size, gamma):
    """Returns tables of logits of a target and of a draft that is somewhat like it."""
    target = enumeration.table(
        lambda n: 2 * rng.standard_normal((n, vocab_size)), vocab_size, gamma + 1
    )
    draft = [
        x + rng.standard_normal(x.shape).astype(np.float32) for x in target[:gamma]
    ]
    return target, draft


def sampled_case(rng, vocab_size, gamma, settings, draft_settings):
    """Returns a case of random logits, each model with sampling settings of its own."""
    target, draft = random_logits(rng, vocab_size, gamma)
    return enumeration.honest(
        [probs(x, settings) for x in target], [probs(x, draft_settings) for x in draft]
    )


def make_case(kind, rng, vocab_size, gamma):
    """Returns a case of one kind of target and draft."""
    table = lambda rows, depth: enumeration.table(rows, vocab_size, depth)
    if kind == "filtered":
        settings = sampling.make_settings(
            temperature=0.7, top_k=vocab_size - 1, top_p=0.9, min_p=0.05
        )
        return sampled_case(rng, vocab_size, gamma, settings, settings)
    if kind == "filters differ":
        settings = sampling.make_settings(temperature=1.3, top_p=0.8)
        draft_settings = sampling.make_settings(temperature=0.5, top_k=2)
        return sampled_case(rng, vocab_size, gamma, settings, draft_settings)
    if kind == "disjoint":
        target = table(half_rows(rng, vocab_size, "lower"), gamma + 1)
        return enumeration.honest(
            target, table(half_rows(rng, vocab_size, "upper"), gamma)
        )
    zeros = 0.4 if kind == "zeros" else 0.0
    target = table(random_rows(rng, vocab_size, zeros=zeros), gamma + 1)
    draft = table(random_rows(rng, vocab_size, zeros=zeros), gamma)
    if kind == "greedy draft":
        draft = table(one_hot_rows(rng, vocab_size), gamma)
    if kind == "greedy target":
        target = table(one_hot_rows(rng, vocab_size), gamma + 1)
    if kind == "identical":
        draft = target[:gamma]
    if kind == "almost identical":
        draft = [np.nextafter(x, np.float32(rng.random())) for x in target[:gamma]]
    return enumeration.honest(target, draft)


KINDS = (
    "random", "zeros", "disjoint", "identical", "almost identical", "greedy draft",
    "greedy target", "filtered", "filters differ",
)  # fmt: skip
