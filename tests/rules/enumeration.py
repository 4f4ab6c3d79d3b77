"""The exact law of what an acceptance rule commits, over tiny vocabularies.

Every tree of tokens that a drafter may draw, of which a chain is one, and every outcome
of the uniforms, is given to the rule as it is (jitted, in float32); their probabilities
are summed in float64. A uniform is put just below its probability, where it succeeds,
or on it, where it fails. Only the draw of the target's token is not enumerated, but
taken from its weights: a Gumbel argmax draws in proportion to them, which
`tests/rules/test_sampling.py` checks.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.rules import acceptance, multi_path, traversal, tree_acceptance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule under test: how it decides, and by which probabilities.

    Attributes:
      is_of_trees: both functions take trees, and not chains.
      widest: trees are padded to so many nodes, by some that were not drafted, to share
        a program; 0: they are not, as where a rule depends on the shape.
    """

    accept: Callable
    probabilities: Callable
    is_of_trees: bool = False
    widest: int = 0


DEEPEST = 3


def _of_trees(accept: Callable, probabilities: Callable, **how) -> Rule:
    """Returns a rule of trees, whose functions take the same arguments."""
    names = "tokens parents draft_probs target_probs num_drafted wanted".split()

    def of(*told):
        given = dict(zip(names, told, strict=True))
        return probabilities(tree_acceptance.Drafted(**given, depth_max=DEEPEST))

    accept = functools.partial(accept, depth_max=DEEPEST)
    return Rule(accept=accept, probabilities=of, is_of_trees=True, **how)


REJECTION = Rule(
    accept=acceptance.accept_rejection, probabilities=acceptance.rejection_probabilities
)
BLOCK = Rule(
    accept=acceptance.accept_block, probabilities=acceptance.block_probabilities
)
RULES = {"rejection": REJECTION, "block": BLOCK}
OF_TREES = {
    "rejection": _of_trees(
        tree_acceptance.accept_tree, tree_acceptance.tree_probabilities, widest=6
    ),
    "block": _of_trees(
        traversal.accept_traversal,
        lambda tree: traversal.traversal_probabilities(tree)[0],
        widest=6,
    ),
    "multipath": _of_trees(
        multi_path.accept_multi_path, multi_path.multi_path_probabilities
    ),
}

ROUNDING = 1e-6
"""The total variation that sums in float32 may cause."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A tree, and two tiny models: next-token probabilities after every prefix.

    Entry `i` of a table is `[V] * i + [V]` float32: the row after each prefix of length
    `i`. `truth` and `target` have an entry more than the tree is deep, the others not.

    Attributes:
      parents: of each node, its parent's column.
      truth: the target's true probabilities.
      target: the target's probabilities that the rule is told.
      drawn: the probabilities that drafts are drawn from.
      draft: the draft's probabilities that the rule is told.
      is_certain: drafts are the most probable tokens; the rule is told no draft rows.
      with_replacement: siblings are drawn with replacement, as "multipath" needs them.
    """

    parents: tuple[int, ...]
    truth: list[np.ndarray]
    target: list[np.ndarray]
    drawn: list[np.ndarray]
    draft: list[np.ndarray]
    is_certain: bool = False
    with_replacement: bool = False


def honest(target: list[np.ndarray], draft: list[np.ndarray], parents=None, **kinds):
    """Returns the case in which the rule is told the true probabilities, by default of
    a chain."""
    parents = tuple(range(len(draft))) if parents is None else parents
    told = {"truth": target, "target": target, "drawn": draft, "draft": draft}
    return Case(parents=parents, **told, **kinds)


def table(rows: Callable, vocab_size: int, depth: int) -> list[np.ndarray]:
    """Returns a table of `depth` entries from `rows(n) -> [n, V]`."""
    return [
        np.asarray(rows(vocab_size**i), np.float32).reshape((vocab_size,) * (i + 1))
        for i in range(depth)
    ]


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


def drawn_trees(case: Case) -> Iterator[tuple]:
    """Yields `(chance, tokens, rows of draft and target by column)`."""
    V = len(case.target[0])
    # After the deepest nodes nothing is drafted.
    rows = [*case.draft, np.full_like(case.target[-1], 1 / V)]
    for tokens in itertools.product(range(V), repeat=len(case.parents)):
        prefixes, chance, drawn = [()], 1.0, {}
        for token, parent in zip(tokens, case.parents, strict=True):
            prefixes.append((*prefixes[parent], token))
            row = case.drawn[len(prefixes[parent])][prefixes[parent]].astype(np.float64)
            before = drawn.setdefault(parent, [])
            if case.is_certain:  # The next in rank is certain.
                chance *= token == np.argsort(-row)[len(before)]
            else:
                if not case.with_replacement:
                    row[before] = 0
                chance *= row[token] / row.sum()
            before.append(token)
        if chance:
            target = np.stack([case.target[len(p)][p] for p in prefixes])
            draft = np.stack([rows[len(p)][p] for p in prefixes[:-1]])
            yield chance, tokens, draft, target


@functools.lru_cache(maxsize=64)
def _evaluate(rule: Rule, is_certain: bool):
    """Returns a jitted function: the rule on all trees and outcomes of uniforms."""

    def one(parents, wanted, tokens, draft, target, number, succeeds):
        told = tokens, None if is_certain else draft, target, number
        if rule.is_of_trees:
            told = (tokens, parents, *told[1:], wanted)
        probabilities = rule.probabilities(*told)
        below = jnp.maximum(jnp.nextafter(probabilities.keep, jnp.float32(-1)), 0)
        uniforms = jnp.where(succeeds, below, probabilities.keep)
        noise = jnp.zeros(target.shape[-1], jnp.float32)
        outcome = rule.accept(*told, uniforms=uniforms, noise=noise)
        last = outcome.num_accepted
        if rule.is_of_trees:
            last = jnp.append(0, outcome.path)[last]
        own = probabilities.own[last]
        # The target's row at the limit; and in a chain, where rounding alone rejects.
        is_whole = outcome.num_accepted >= wanted if rule.is_of_trees else ~own.any()
        own = jnp.where(is_whole, target[last], own)
        return outcome, probabilities.keep, own

    over_uniforms = jax.vmap(one, in_axes=(None,) * 6 + (0,))
    return jax.jit(jax.vmap(over_uniforms, in_axes=(None,) * 2 + (0,) * 4 + (None,)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcomes:
    """All `[n]` outcomes of a round that are possible."""

    mass: np.ndarray  # [n] float64, the probability of each outcome
    tokens: np.ndarray  # [n, D + 1]; the first `counts` were drafted
    counts: np.ndarray  # [n]
    own: np.ndarray  # [n, V] float64, weights of the own token

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


def outcomes(rule: Rule, case: Case, num_drafted=None, *, wanted=9):
    """Returns the `Outcomes` of a rule in a case; `num_drafted` drafts are verified, or
    as many as a function of all tokens says."""
    if not callable(num_drafted):
        count = len(case.parents) if num_drafted is None else num_drafted
        num_drafted = lambda tokens: count
    chances, *drawn = map(np.array, zip(*drawn_trees(case), strict=True))
    drawn.append(np.array(list(map(num_drafted, drawn[0].tolist()))))
    size = rule.widest or len(case.parents)
    # Trees that are added have no chance.
    rest = (0, rule.widest and len(case.target[0]) ** size - len(chances))
    more = ((0, size - len(case.parents)), (0, 0))
    tokens, draft, target, number = (
        np.pad(x, (rest, *more[: x.ndim - 1]), mode="edge") for x in drawn
    )
    patterns = np.array(list(itertools.product((True, False), repeat=size)))
    outcome, keep, own = jax.device_get(
        _evaluate(rule, case.is_certain)(
            np.pad(case.parents, more[0]).astype(np.int32),
            *(jnp.int32(wanted), tokens.astype(np.int32)),
            *(draft.astype(np.float32), target.astype(np.float32)),
            *(number.astype(np.int32), patterns),
        )
    )
    keep = keep.astype(np.float64)
    mass = np.pad(chances, rest)[:, None]
    mass = mass * np.where(patterns, keep, 1 - keep).prod(axis=-1)
    at = np.nonzero(mass)
    found = {"tokens": outcome.tokens, "counts": outcome.num_accepted, "own": own}
    return Outcomes(mass=mass[at], **{name: x[at] for name, x in found.items()})


def bias(rule: Rule, case: Case, num_drafted=None, **how) -> float:
    """Returns the total variation between the committed law and the target's own."""
    law = outcomes(rule, case, num_drafted, **how).law(case.truth)
    return 0.5 * np.abs(law - continuations(case.truth)[0]).sum()


def mean_by_theory(rule: Rule, case: Case) -> float:
    """Returns the mean number of accepted drafts of a chain: the sum of the chances by
    which prefixes stay. One by one, a prefix stays with the product of `min(1, target /
    draft)`. As a block it does with `p_i = min(1, p_{i-1} * target / draft)`, by Sun et
    al. (2024)."""
    total = 0.0
    for chance, tokens, draft, target in drawn_trees(case):
        stays, at = 1.0, np.arange(len(tokens))
        for ratio in _normalised(target)[at, tokens] / _normalised(draft)[at, tokens]:
            stays = min(1, stays * ratio) if rule is BLOCK else stays * min(1, ratio)
            total += chance * stays
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
    """Returns a chain of one of `KINDS`."""
    of_target, of_draft = KINDS[kind]
    target = table(_rows_of(of_target, rng, vocab_size), vocab_size, gamma + 1)
    draft = table(_rows_of(of_draft, rng, vocab_size), vocab_size, gamma)
    if of_draft == "identical":
        draft = target[:gamma]
    if of_draft == "almost":
        draft = [np.nextafter(x, np.float32(rng.random())) for x in target[:gamma]]
    return honest(target, draft)
