"""The exact law of what rejection commits from a tree, over tiny vocabularies.

As `enumeration`: every tree of tokens that a drafter may draw, and every outcome of the
uniforms, goes through the rule as it is, jitted and in float32; probabilities are
summed in float64. Planted biases go through the same sums.
"""

import dataclasses
import functools
import itertools

import enumeration
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.rules import acceptance, tree_acceptance


V = 3
SHAPES = {
    "chain": (0, 1),
    "two children": (0, 0),
    "all children": (0, 0, 0),
    "2x2": (0, 0, 1, 1, 2, 2),
    "1-2-1": (0, 1, 1, 2),
    "mixed": (0, 0, 2, 1, 2),
}
BIASED = 1e-2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A tree and two models, as `[V] * i + [V]` tables of rows after each prefix.

    Attributes:
      is_certain: drafts are the most probable tokens, and the rule knows no row.
      with_replacement: planted; siblings may be drawn twice.
      drops: planted; a last child that is not likely is taken back.
    """

    parents: tuple[int, ...]
    target: list[np.ndarray]
    draft: list[np.ndarray]
    is_certain: bool = False
    with_replacement: bool = False
    drops: bool = False

    @property
    def depths(self) -> list[int]:
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    @property
    def depth_max(self) -> int:
        return max(self.depths)


def make_case(shape, rng, **kinds) -> Case:
    parents = SHAPES[shape]
    case = Case(parents=parents, target=[], draft=[], **kinds)
    rows = lambda n: rng.dirichlet(np.ones(V), size=n)
    depth = case.depth_max
    return dataclasses.replace(
        case,
        target=enumeration.table(rows, V, depth + 1),
        draft=enumeration.table(rows, V, depth),
    )


def trees(case: Case):
    """Each `(chance, tokens, rows of draft and target by column, drafts made)`."""
    for tokens in itertools.product(range(V), repeat=len(case.parents)):
        prefixes = [()]
        for token, parent in zip(tokens, case.parents, strict=True):
            prefixes.append((*prefixes[parent], token))
        chance, number, drawn = 1.0, len(tokens), {}
        for column, (token, parent) in enumerate(
            zip(tokens, case.parents, strict=True), 1
        ):
            row = case.draft[len(prefixes[parent])][prefixes[parent]].astype(np.float64)
            before = drawn.setdefault(parent, [])
            if case.is_certain:  # The rank decides.
                chance *= token == np.argsort(-row)[len(before)]
            else:
                left = row.copy()
                if not case.with_replacement:
                    left[before] = 0
                chance *= left[token] / left.sum()
            before.append(token)
            if case.drops and column == len(tokens) and row[token] < 1 / V:
                number -= 1
        if chance:
            target = np.stack([case.target[len(p)][p] for p in prefixes])
            rows = [p if len(p) < len(case.draft) else None for p in prefixes[:-1]]
            draft = np.stack(
                [np.ones(V) / V if p is None else case.draft[len(p)][p] for p in rows]
            )
            yield chance, tokens, draft, target, number


@functools.cache
def _evaluate(parents, depth_max, is_certain):
    """The rule on trees of tokens and outcomes of the uniforms, compiled once."""
    parents = jnp.asarray(parents, jnp.int32)

    def one(tokens, draft, target, number, wanted, succeeds):
        given = tokens, parents, None if is_certain else draft, target, number
        probabilities = tree_acceptance.tree_probabilities(*given)
        below = jnp.maximum(jnp.nextafter(probabilities.keep, jnp.float32(-1)), 0)
        outcome = tree_acceptance.accept_tree(
            *given,
            wanted,
            uniforms=jnp.where(succeeds, below, probabilities.keep),
            noise=jnp.zeros((V,), jnp.float32),
            depth_max=depth_max,
        )
        last = jnp.append(0, outcome.path)[outcome.num_accepted]
        is_cut = outcome.num_accepted >= wanted
        own = jnp.where(is_cut, target[last], probabilities.own[last])
        return outcome, probabilities.keep, own

    over_uniforms = jax.vmap(one, in_axes=(None,) * 5 + (0,))
    return jax.jit(jax.vmap(over_uniforms, in_axes=(0, 0, 0, 0, None, None)))


def committed_law(case: Case, wanted: int) -> np.ndarray:
    """The law of the first `D + 1` tokens, `[V] * (D + 1)` float64."""
    columns = zip(*trees(case), strict=True)
    chances, tokens, draft, target, number = map(np.array, columns)
    size = len(case.parents)
    patterns = enumeration._all((True, False), size)
    outcomes, keep, own = jax.device_get(
        _evaluate(case.parents, case.depth_max, case.is_certain)(
            jnp.asarray(tokens, jnp.int32),
            jnp.asarray(draft, jnp.float32),
            jnp.asarray(target, jnp.float32),
            jnp.asarray(number, jnp.int32),
            jnp.int32(wanted),
            jnp.asarray(patterns),
        )
    )
    keep = keep.astype(np.float64)
    mass = chances[:, None] * np.where(patterns, keep, 1 - keep).prod(axis=-1)
    later = enumeration.continuations(case.target)
    law = np.zeros((V,) * (case.depth_max + 1))
    for t, p in np.argwhere(mass > 0):
        count = int(outcomes.num_accepted[t, p])
        path = tuple(outcomes.tokens[t, p, :count].tolist())
        weights = own[t, p].astype(np.float64)
        rest = later[count + 1][path]
        law[path] += (
            mass[t, p]
            * (weights / weights.sum()).reshape((-1,) + (1,) * (rest.ndim - 1))
            * rest
        )
    return law


def bias(case: Case, wanted: int = 9) -> float:
    """Total variation between what is committed and what the target would write."""
    gap = committed_law(case, wanted) - enumeration.continuations(case.target)[0]
    return 0.5 * np.abs(gap).sum()


@pytest.mark.few(6)
@pytest.mark.parametrize("is_certain", (False, True), ids=("drawn", "certain"))
@pytest.mark.parametrize("shape", SHAPES)
def test_the_output_has_the_targets_distribution(shape, is_certain, rng):
    case = make_case(shape, rng, is_certain=is_certain)
    for wanted in (9, 1, 0):
        assert bias(case, wanted) < enumeration.ROUNDING


@pytest.mark.parametrize("planted", ("with_replacement", "drops"))
def test_trees_that_may_not_be_drawn(planted, rng):
    """Negative control: siblings that repeat, and a child that its token decides on."""
    cases = [make_case("two children", rng, **{planted: True}) for _ in range(5)]
    assert max(map(bias, cases)) > BIASED


FAULTS = {
    "the residual is not subtracted": ("residual", lambda target, draft: target),
    "the draft's whole row is taken away from what is left": (
        "residual",
        lambda target, draft: jnp.maximum(target - draft / 2, 0.0),
    ),
    "drafts are kept by the target's probability": ("ratio", lambda part, whole: part),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_biases_are_caught(fault, rng, monkeypatch):
    """Negative control, by ten thousand times what rounding may cause."""
    monkeypatch.setattr(acceptance, *FAULTS[fault])
    _evaluate.cache_clear()
    try:
        assert bias(make_case("2x2", rng)) > BIASED
    finally:
        _evaluate.cache_clear()


@pytest.mark.parametrize("is_certain", (False, True), ids=("drawn", "certain"))
def test_on_a_chain_it_is_rejection(is_certain, rng):
    """As integers: what is kept, and the own token."""
    gamma, vocab_size = 4, 7
    chain = jnp.arange(gamma, dtype=jnp.int32)
    accept_tree = jax.jit(tree_acceptance.accept_tree, static_argnames="depth_max")
    accept = jax.jit(acceptance.accept_rejection)
    for _ in range(100):
        rows = lambda n: rng.dirichlet(np.ones(vocab_size), size=n).astype(np.float32)
        tokens = jnp.asarray(rng.integers(0, vocab_size + 2, gamma), jnp.int32)
        draft, target = jnp.asarray(rows(gamma)), jnp.asarray(rows(gamma + 1))
        if is_certain:
            draft = jax.nn.one_hot(tokens, vocab_size, dtype=jnp.float32)
        number = jnp.int32(rng.integers(0, gamma + 1))
        noise = {
            "uniforms": jnp.asarray(rng.random(gamma), jnp.float32),
            "noise": jnp.asarray(rng.gumbel(size=vocab_size), jnp.float32),
        }
        found = accept_tree(
            tokens,
            chain,
            None if is_certain else draft,
            target,
            number,
            jnp.int32(9),
            depth_max=gamma,
            **noise,
        )
        expected = accept(tokens, draft, target, number, **noise)
        assert found.num_accepted == expected.num_accepted
        np.testing.assert_array_equal(found.tokens, expected.tokens)


@pytest.mark.parametrize("depth_max, own", ((1, 0), (2, 1)))
def test_children_that_are_too_deep_are_not_tried(depth_max, own):
    """Fails if the own token after a node lacks what children would have, of which none
    was tried: with `depth_max` 2 the second draft is, and is not kept."""
    draft = jnp.asarray([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]], jnp.float32)
    target = jnp.asarray([[0.0, 0.0, 1.0]] + [[0.6, 0.3, 0.1]] * 2, jnp.float32)
    found = tree_acceptance.accept_tree(
        jnp.array([2, 0], jnp.int32),
        jnp.array([0, 1], jnp.int32),
        draft,
        target,
        jnp.int32(2),
        jnp.int32(9),
        uniforms=jnp.array([0.5, 0.9], jnp.float32),
        noise=jnp.zeros((V,), jnp.float32),
        depth_max=depth_max,
    )
    assert found.tokens[:2].tolist() == [2, own]


def test_what_no_draw_can_have():
    """Fails if a draft outside the vocabulary is kept, or one of no probability."""
    target = jnp.full((4, V), 1 / V, jnp.float32)
    for wrong in (jnp.nan, -1.0, 0.0):
        draft = jnp.full((3, V), wrong, jnp.float32)
        tokens = jnp.array([V, -1, 0])
        outcome = tree_acceptance.accept_tree(
            tokens,
            jnp.zeros((3,), jnp.int32),
            draft,
            target,
            jnp.int32(3),
            jnp.int32(9),
            uniforms=jnp.zeros((3,), jnp.float32),
            noise=jnp.zeros((V,), jnp.float32),
            depth_max=1,
        )
        assert int(outcome.num_accepted) == 0
        assert 0 <= int(outcome.tokens[0]) < V
