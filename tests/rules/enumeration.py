"""The exact law of what an acceptance rule commits, over tiny vocabularies.

Every chain that a drafter may draw, and every outcome of the uniforms, is given to the
rule as it is (jitted, in float32); their probabilities are summed in float64. A uniform
is put just below its probability, where it succeeds, or on it, where it fails. Only the
draw of the target's token is not enumerated, but taken from its weights: a Gumbel
argmax draws in proportion to them, which `tests/rules/test_sampling.py` checks.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.rules import acceptance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule under test: how it decides, and by which probabilities."""

    accept: Callable
    probabilities: Callable


REJECTION = Rule(
    accept=acceptance.accept_rejection, probabilities=acceptance.rejection_probabilities
)
BLOCK = Rule(
    accept=acceptance.accept_block, probabilities=acceptance.block_probabilities
)
RULES = {"rejection": REJECTION, "block": BLOCK}

ROUNDING = 1e-6
"""The total variation that sums in float32 may cause."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Two tiny models: next-token probabilities after every prefix.

    Entry `i` of a table is `[V] * i + [V]` float32: the row after each prefix of length
    `i`. `truth` and `target` have `gamma + 1` entries, the others `gamma`.

    Attributes:
      truth: the target's true probabilities.
      target: the target's probabilities that the rule is told.
      drawn: the probabilities that drafts are drawn from.
      draft: the draft's probabilities that the rule is told.
    """

    truth: list[np.ndarray]
    target: list[np.ndarray]
    drawn: list[np.ndarray]
    draft: list[np.ndarray]

    @property
    def gamma(self) -> int:
        return len(self.drawn)

    @property
    def vocab_size(self) -> int:
        return self.truth[0].shape[0]


def honest(target: list[np.ndarray], draft: list[np.ndarray]) -> Case:
    """Returns the case in which the rule is told the true probabilities."""
    return Case(truth=target, target=target, drawn=draft, draft=draft)


def table(rows: Callable, vocab_size: int, depth: int) -> list[np.ndarray]:
    """Returns a table of `depth` entries from `rows(n) -> [n, V]`."""
    return [
        np.asarray(rows(vocab_size**i), np.float32).reshape((vocab_size,) * (i + 1))
        for i in range(depth)
    ]


def _rows(entries: list[np.ndarray], chains: np.ndarray) -> np.ndarray:
    """Returns the rows along each chain, `[chains, entries, V]`."""
    along = [entry[tuple(chains[:, :i].T)] for i, entry in enumerate(entries)]
    shape = (len(chains), entries[0].shape[0])
    return np.stack([np.broadcast_to(rows, shape) for rows in along], axis=1)


def _at(rows: np.ndarray, chains: np.ndarray) -> np.ndarray:
    """Returns each row's value of the chain's next token, `[chains, entries]`."""
    return np.take_along_axis(rows, chains[:, :, None], axis=-1)[..., 0]


def _normalised(rows: np.ndarray) -> np.ndarray:
    rows = np.asarray(rows, np.float64)
    return rows / rows.sum(axis=-1, keepdims=True)


def continuations(entries: list[np.ndarray]) -> list[np.ndarray]:
    """Returns as entry `i` the law of all later tokens after prefixes of length `i`."""
    laws = [np.ones(entries[-1].shape)]
    for entry in reversed(entries):
        row = _normalised(entry)
        laws.append(
            row.reshape(row.shape + (1,) * (laws[-1].ndim - row.ndim)) * laws[-1]
        )
    return laws[::-1]


@functools.lru_cache(maxsize=64)
def _evaluate(rule: Rule):
    """Returns a jitted function: the rule on all chains and outcomes of uniforms."""

    def one(chain, draft, target, num_drafted, succeeds):
        probabilities = rule.probabilities(chain, draft, target, num_drafted)
        below = jnp.maximum(jnp.nextafter(probabilities.keep, jnp.float32(-1)), 0)
        uniforms = jnp.where(succeeds, below, probabilities.keep)
        noise = jnp.zeros(draft.shape[-1], jnp.float32)
        outcome = rule.accept(
            chain, draft, target, num_drafted, uniforms=uniforms, noise=noise
        )
        return outcome, probabilities.keep, probabilities.own[outcome.num_accepted]

    over_uniforms = jax.vmap(one, in_axes=(None, None, None, None, 0))
    return jax.jit(jax.vmap(over_uniforms, in_axes=(0, 0, 0, 0, None)))


def _all(values, length: int) -> np.ndarray:
    return np.asarray(list(itertools.product(values, repeat=length)))


def all_chains(case: Case) -> np.ndarray:
    """Returns every chain that a drafter may draw, `[chains, gamma]`."""
    return _all(range(case.vocab_size), case.gamma)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcomes:
    """All `[n]` outcomes of a round that are possible."""

    mass: np.ndarray  # [n] float64, the probability of each outcome
    tokens: np.ndarray  # [n, gamma + 1]; the first `counts` were drafted
    counts: np.ndarray  # [n]
    own: np.ndarray  # [n, V] float64, weights of the own token

    @classmethod
    def possible(cls, chances, keep, patterns, outcomes, own) -> "Outcomes":
        """Returns what is possible of `chances [drafts]` and `patterns` of uniforms.
        The others are arrays of drafts by patterns, and so are all of `outcomes`."""
        keep = keep.astype(np.float64)
        mass = chances[:, None] * np.where(patterns, keep, 1 - keep).prod(axis=-1)
        at = np.nonzero(mass)
        counts = outcomes.num_accepted[at]
        return cls(
            mass=mass[at], tokens=outcomes.tokens[at], counts=counts, own=own[at]
        )

    @property
    def mean(self) -> float:
        """The mean number of accepted drafts."""
        return float(self.mass @ self.counts)

    def law(self, truth: list[np.ndarray]) -> np.ndarray:
        """Returns the law of the first tokens, `[V] * len(truth)` float64. After the
        tokens that the round commits, the target continues by itself."""
        later, V = continuations(truth), self.own.shape[1]
        law = np.zeros((V,) * len(truth))
        own = self.mass[:, None] * _normalised(self.own)
        for count in range(len(truth)):
            at, places = self.counts == count, V ** np.arange(count)[::-1]
            committed = np.zeros((V**count, V))
            np.add.at(committed, self.tokens[at, :count] @ places, own[at])
            after = (1,) * (len(truth) - count - 1)
            law += committed.reshape((V,) * (count + 1) + after) * later[count + 1]
        return law


def outcomes(rule: Rule, case: Case, num_drafted: int | Callable) -> Outcomes:
    """Returns what a rule may commit in a case.

    Args:
      num_drafted: how many drafts are verified, or a function of the drafted chain.
    """
    chains = all_chains(case)
    if not callable(num_drafted):
        num_drafted = lambda chain, constant=num_drafted: constant
    num_drafted = np.array([num_drafted(chain) for chain in chains], np.int32)
    patterns = _all((True, False), case.gamma)
    target = _rows(case.target, chains)
    told = chains.astype(np.int32), _rows(case.draft, chains), target, num_drafted
    outcomes, keep, own = jax.device_get(_evaluate(rule)(*told, patterns))
    chance = np.prod(_at(_normalised(_rows(case.drawn, chains)), chains), axis=-1)
    # Only patterns where uniforms past the drafts succeed count: none may be read.
    is_real = (np.arange(case.gamma) < num_drafted[:, None])[:, None]
    keep = np.where(is_real, keep, 1.0)
    # No weight is left where rounding alone rejects: the target's row.
    rejected = np.take_along_axis(target, outcomes.num_accepted[..., None], axis=1)
    own = np.where(own.any(axis=-1, keepdims=True), own, rejected)
    return Outcomes.possible(chance, keep, patterns, outcomes, own)


def bias(rule: Rule, case: Case, num_drafted: int | Callable | None = None) -> float:
    """Returns the total variation between the committed law and the target's own."""
    num_drafted = case.gamma if num_drafted is None else num_drafted
    law = outcomes(rule, case, num_drafted).law(case.truth)
    gap = law - continuations(case.truth)[0]
    return 0.5 * np.abs(gap).sum()


def mean_by_theory(rule: Rule, case: Case) -> float:
    """Returns the mean number of accepted drafts: a sum over the drafted prefixes. One
    by one, a prefix stays with the product of `min(1, target / draft)`. As a block it
    does with `p_i = min(1, p_{i-1} * target / draft)`, by Sun et al. (2024)."""
    total = 0.0
    for length in range(1, case.gamma + 1):
        chains = _all(range(case.vocab_size), length)
        target, draft = (
            _at(_normalised(_rows(entries[:length], chains)), chains)
            for entries in (case.target, case.draft)
        )
        stays = np.ones(len(chains))
        for t, d in zip(target.T, draft.T, strict=True):
            # A prefix that is never drafted counts 0, whatever its ratio.
            ratio = t / np.where(d > 0, d, 1)
            one_by_one = stays * np.minimum(1, ratio)
            stays = np.minimum(1, stays * ratio) if rule is BLOCK else one_by_one
        total += (draft.prod(axis=-1) * stays).sum()
    return total


def _rows_of(kind: str, rng, vocab_size: int) -> Callable:
    """Returns a function of n that makes n rows of probabilities."""
    is_lower = np.arange(vocab_size) < vocab_size // 2

    def rows(n):
        if kind == "one-hot":
            return np.eye(vocab_size)[rng.integers(vocab_size, size=n)]
        weights = rng.gamma(0.7, size=(n, vocab_size))
        if kind == "zeros":
            weights *= rng.random(weights.shape) >= 0.4
        weights[np.arange(n), rng.integers(vocab_size, size=n)] += 0.1
        if kind in ("lower", "upper"):
            weights = (weights + 0.01) * (is_lower == (kind == "lower"))
        return weights / weights.sum(axis=-1, keepdims=True)

    return rows


KINDS = {
    "random": ("any", "any"),
    "zeros": ("zeros", "zeros"),
    "disjoint": ("lower", "upper"),
    "identical": ("any", "identical"),
    "almost identical": ("any", "almost"),
    "greedy draft": ("any", "one-hot"),
    "greedy target": ("one-hot", "any"),
}
"""Rows of the target and of the draft."""


def make_case(kind: str, rng, vocab_size: int, gamma: int) -> Case:
    """Returns a case of one of `KINDS`."""
    of_target, of_draft = KINDS[kind]
    target = table(_rows_of(of_target, rng, vocab_size), vocab_size, gamma + 1)
    draft = table(_rows_of(of_draft, rng, vocab_size), vocab_size, gamma)
    if of_draft == "identical":
        draft = target[:gamma]
    if of_draft == "almost":
        draft = [np.nextafter(x, np.float32(rng.random())) for x in target[:gamma]]
    return honest(target, draft)
