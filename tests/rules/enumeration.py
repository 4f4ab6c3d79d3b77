"""The exact law of what an acceptance rule commits, over tiny vocabularies.

Every chain or tree that a drafter may draw, and every outcome of the uniforms, is given
to the rule as it is (jitted, in float32); their probabilities are summed in float64. A
uniform is put just below its probability, where it succeeds, or on it, where it fails.
Only the draw of the target's token is not enumerated, but taken from its weights: a
Gumbel argmax draws in proportion to them, as `tests/rules/test_sampling.py` checks.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import planting

from spec_jax.rules import acceptance, multi_path, traversal, tree_acceptance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule under test: how it decides, and by which probabilities.

    Attributes:
      widest: drafts that all trees are padded to, with nodes that were not drafted, so
        that they share a program; 0: none are. None: a rule of chains.
    """

    accept: Callable
    probabilities: Callable
    widest: int | None = None


REJECTION = Rule(
    accept=acceptance.accept_rejection, probabilities=acceptance.rejection_probabilities
)
BLOCK = Rule(
    accept=acceptance.accept_block, probabilities=acceptance.block_probabilities
)
RULES = {"rejection": REJECTION, "block": BLOCK}

WIDEST, DEEPEST = 6, 3
OF_TREES = {
    "rejection": Rule(
        accept=tree_acceptance.accept_tree,
        probabilities=tree_acceptance.tree_probabilities,
        widest=WIDEST,
    ),
    "block": Rule(
        accept=traversal.accept_traversal,
        probabilities=lambda tree: traversal.traversal_probabilities(tree)[0],
        widest=WIDEST,
    ),
    # It depends on the shape.
    "multipath": Rule(
        accept=multi_path.accept_multi_path,
        probabilities=multi_path.multi_path_probabilities,
        widest=0,
    ),
}

ROUNDING = 1e-6
"""The total variation that sums in float32 may cause."""

PLANTED = ((acceptance, "residual", lambda _: lambda target, draft: target),)
"""A fault: the residual is not subtracted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Two tiny models: next-token probabilities after every prefix.

    Entry `i` of a table is `[V] * i + [V]` float32: the row after each prefix of length
    `i`. `truth` and `target` have an entry more than the others, one for each depth.

    Attributes:
      truth: the target's true probabilities.
      target: the target's probabilities that the rule is told.
      drawn: the probabilities that drafts are drawn from.
      draft: the draft's probabilities that the rule is told.
      parents: the column of each draft's parent.
      is_certain: drafts are the most probable tokens; the rule is told no draft rows.
      with_replacement: siblings are drawn with replacement, as "multipath" needs them.
    """

    truth: list[np.ndarray]
    target: list[np.ndarray]
    drawn: list[np.ndarray]
    draft: list[np.ndarray]
    parents: tuple[int, ...]
    is_certain: bool = False
    with_replacement: bool = False

    @property
    def vocab_size(self) -> int:
        return self.truth[0].shape[0]


def honest(target: list[np.ndarray], draft: list[np.ndarray], **more) -> Case:
    """Returns the case in which the rule is told the true probabilities; a chain if no
    parents are given."""
    more = {"parents": tuple(range(len(draft)))} | more
    return Case(truth=target, target=target, drawn=draft, draft=draft, **more)


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


@functools.lru_cache(maxsize=64)
def _evaluate(rule: Rule, is_certain: bool):
    """Returns a jitted function: the rule on all drafts and outcomes of uniforms."""

    def one(parents, wanted, fault, tokens, draft, target, number, succeeds):
        draft = None if is_certain else draft
        told, how = (tokens, draft, target, number), {}
        drafted = told
        if rule.widest is not None:
            told, how = (tokens, parents, *told[1:], wanted), {"depth_max": DEEPEST}
            names = "tokens parents draft_probs target_probs num_drafted wanted".split()
            named = dict(zip(names, told, strict=True))
            drafted = (tree_acceptance.Drafted(**named, **how),)
        with planting.planted(PLANTED, fault):
            probabilities = rule.probabilities(*drafted)
            below = jnp.maximum(jnp.nextafter(probabilities.keep, jnp.float32(-1)), 0)
            how["uniforms"] = jnp.where(succeeds, below, probabilities.keep)
            how["noise"] = jnp.zeros(target.shape[-1], jnp.float32)
            outcome = rule.accept(*told, **how)
        last, is_cut = outcome.num_accepted, False
        if outcome.path is not None:
            is_cut = last >= wanted
            last = jnp.append(0, outcome.path)[last]
        # No weight is left where rounding alone rejects: the target's row.
        own = acceptance.or_else(probabilities.own[last], target[last])
        return outcome, probabilities.keep, jnp.where(is_cut, target[last], own)

    over_uniforms = jax.vmap(one, in_axes=(None,) * 7 + (0,))
    return jax.jit(jax.vmap(over_uniforms, in_axes=(None,) * 3 + (0,) * 4 + (None,)))


def _all(values, length: int) -> np.ndarray:
    return np.asarray(list(itertools.product(values, repeat=length)))


def _drawn(case: Case):
    """Yields all drafts: `(chance, tokens, rows of draft and target by column)`."""
    V = case.vocab_size
    # After the deepest nodes nothing is drafted.
    draft = [*case.draft, np.full_like(case.target[-1], 1 / V)]
    for tokens in itertools.product(range(V), repeat=len(case.parents)):
        prefixes, chance, before = [()], 1.0, {}
        for token, parent in zip(tokens, case.parents, strict=True):
            prefix, siblings = prefixes[parent], before.setdefault(parent, [])
            row = case.drawn[len(prefix)][prefix].astype(np.float64)
            if case.is_certain:  # The next in rank is certain.
                chance *= token == np.argsort(-row)[len(siblings)]
            else:
                if not case.with_replacement:
                    row[siblings] = 0
                chance *= row[token] / row.sum()
            siblings.append(token)
            prefixes.append((*prefix, token))
        rows = [draft[len(p)][p] for p in prefixes[:-1]]
        yield chance, tokens, rows, [case.target[len(p)][p] for p in prefixes]


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


def outcomes(
    rule: Rule,
    case: Case,
    num_drafted: int | Callable | None = None,
    *,
    wanted: int = 9,
    fault: int = 0,
) -> Outcomes:
    """Returns what a rule may commit in a case.

    Args:
      num_drafted: how many drafts are verified, or a function of their tokens; None:
        all.
      wanted: drafts to keep, at most, of a tree.
      fault: the number of one of `PLANTED`.
    """
    chances, tokens, draft, target = map(np.array, zip(*_drawn(case), strict=True))
    if not callable(num_drafted):
        constant = len(case.parents) if num_drafted is None else num_drafted
        num_drafted = lambda tokens: constant
    numbers = np.array([num_drafted(one) for one in tokens], np.int32)
    # Padding has no chance.
    more, rest = (0, 0), (0, 0)
    if rule.widest:
        more = 0, rule.widest - len(case.parents)
        rest = 0, case.vocab_size**rule.widest - len(chances)
    patterns = _all((True, False), len(case.parents) + more[1])
    told = (
        np.pad(tokens, (rest, more)).astype(np.int32),
        np.pad(draft, (rest, more, (0, 0)), mode="edge").astype(np.float32),
        np.pad(target, (rest, more, (0, 0)), mode="edge").astype(np.float32),
        np.pad(numbers, rest),
    )
    parents = np.pad(case.parents, more).astype(np.int32)
    how = parents, jnp.int32(wanted), jnp.int32(fault)
    run = _evaluate(rule, case.is_certain)
    outcome, keep, own = jax.device_get(run(*how, *told, patterns))
    # Only patterns where uniforms past the drafts succeed count: none may be read.
    is_real = (np.arange(keep.shape[-1]) < told[-1][:, None])[:, None]
    keep = np.where(is_real, keep, 1.0)
    return Outcomes.possible(np.pad(chances, rest), keep, patterns, outcome, own)


def bias(rule: Rule, case: Case, num_drafted=None, **how) -> float:
    """Returns the total variation between the committed law and the target's own."""
    law = outcomes(rule, case, num_drafted, **how).law(case.truth)
    gap = law - continuations(case.truth)[0]
    return 0.5 * np.abs(gap).sum()


def mean_by_theory(rule: Rule, case: Case) -> float:
    """Returns the mean number of accepted drafts: a sum over the drafted prefixes. One
    by one, a prefix stays with the product of `min(1, target / draft)`. As a block it
    does with `p_i = min(1, p_{i-1} * target / draft)`, by Sun et al. (2024)."""
    total = 0.0
    for length in range(1, len(case.draft) + 1):
        for chain in itertools.product(range(case.vocab_size), repeat=length):
            chance = stays = 1.0
            for i, token in enumerate(chain):
                t, d = (
                    _normalised(entries[i][chain[:i]])[token]
                    for entries in (case.target, case.draft)
                )
                # A prefix that is never drafted counts 0, whatever its ratio.
                chance, ratio = chance * d, t / (d or 1)
                one_by_one = stays * min(1, ratio)
                stays = min(1, stays * ratio) if rule is BLOCK else one_by_one
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
    """Returns a case of one of `KINDS`."""
    of_target, of_draft = KINDS[kind]
    target = table(_rows_of(of_target, rng, vocab_size), vocab_size, gamma + 1)
    draft = table(_rows_of(of_draft, rng, vocab_size), vocab_size, gamma)
    if of_draft == "identical":
        draft = target[:gamma]
    if of_draft == "almost":
        draft = [np.nextafter(x, np.float32(rng.random())) for x in target[:gamma]]
    return honest(target, draft)
