"""The exact law of what rules by uniforms commit from a tree, over tiny vocabularies.

As in `enumeration`, every tree of tokens that a drafter may draw, and every outcome of
the uniforms, goes through the rule as it is, jitted and in float32; probabilities are
summed in float64. Planted biases go through the same sums.
"""

import dataclasses
import functools
import itertools

import enumeration
import jax
import jax.numpy as jnp
import numpy as np
import planting
import pytest
from slow_cases import slow

from spec_jax.rules import acceptance, multi_path, traversal, tree_acceptance


V = 3
SHAPES = {
    "chain": (0, 1),
    "two children": (0, 0),
    "2x2": (0, 0, 1, 1, 2, 2),
    "1-2-1": (0, 1, 1, 2),
    "mixed": (0, 0, 2, 1, 2),
    "2-1-1": (0, 0, 1, 2, 3, 4),
    "3-1": (0, 0, 0, 1, 2, 3),
}
BIASED = 1e-2


RULES = {
    "rejection": (tree_acceptance.tree_probabilities, tree_acceptance.accept_tree),
    "block": (
        lambda tree: traversal.traversal_probabilities(tree)[0],
        traversal.accept_traversal,
    ),
    "multipath": (multi_path.multi_path_probabilities, multi_path.accept_multi_path),
}
"""The probabilities of each rule of trees, and the function that decides by them."""
COMPILED = {
    name: jax.jit(accept, static_argnames="depth_max")
    for name, (_, accept) in RULES.items()
}


def decide(rule, tokens, parents, draft, target, *, number=None, **how):
    """Returns what a rule keeps of one tree; more is wanted than any path has."""
    number = len(tokens) if number is None else number
    tokens, parents = (jnp.asarray(x, jnp.int32) for x in (tokens, parents))
    wanted = jnp.int32(9)
    return COMPILED[rule](
        tokens, parents, draft, target, jnp.int32(number), wanted, **how
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A tree and two models, as `[V] * i + [V]` tables of rows after each prefix.

    Attributes:
      is_certain: drafts are the most probable tokens; the rule is told no draft rows.
      with_replacement: siblings are drawn with replacement, as "multipath" needs them.
      drops: planted fault: the last draft is left out if it is less likely than 1 / V.
    """

    parents: tuple[int, ...]
    target: list[np.ndarray]
    draft: list[np.ndarray]
    is_certain: bool = False
    with_replacement: bool = False
    drops: bool = False


def make_case(rule, shape, rng, **kinds) -> Case:
    """Returns a case whose siblings are drawn as the rule needs them."""
    kinds.setdefault("with_replacement", rule == "multipath")
    depth, parents = 0, SHAPES[shape]
    column = len(parents)
    while column:
        depth, column = depth + 1, parents[column - 1]
    rows = lambda n: rng.dirichlet(np.ones(V), size=n)
    target = enumeration.table(rows, V, depth + 1)
    draft = enumeration.table(rows, V, depth)
    return Case(parents=parents, target=target, draft=draft, **kinds)


def trees(case: Case):
    """Yields `(chance, tokens, rows of draft and target by column, drafts made)`."""
    # After the deepest nodes nothing is drafted.
    rows = [*case.draft, np.full_like(case.target[-1], 1 / V)]
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
            if case.is_certain:  # The next in rank is certain.
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
            draft = [rows[len(p)][p] for p in prefixes[:-1]]
            yield chance, tokens, np.stack(draft), target, number


PLANTED = ((acceptance, "residual", lambda _: lambda target, draft: target),)
"""A fault: the residual is not subtracted."""

WIDEST, DEEPEST = 6, 3


@functools.cache
def _evaluate(rule, size, is_certain):
    """Returns a jitted function: the rule on all trees and outcomes of uniforms."""
    probabilities_of, accept = RULES[rule]

    def one(parents, wanted, fault, tokens, draft, target, number, succeeds):
        draft = None if is_certain else draft
        tree = tree_acceptance.Drafted(
            tokens=tokens,
            parents=parents,
            draft_probs=draft,
            target_probs=target,
            num_drafted=number,
            wanted=wanted,
            depth_max=DEEPEST,
        )
        with planting.planted(PLANTED, fault):
            probabilities = probabilities_of(tree)
            below = jnp.maximum(jnp.nextafter(probabilities.keep, jnp.float32(-1)), 0)
            outcome = accept(
                *(tokens, parents, draft, target, number, wanted),
                uniforms=jnp.where(succeeds, below, probabilities.keep),
                noise=jnp.zeros((V,), jnp.float32),
                depth_max=DEEPEST,
            )
        last = jnp.append(0, outcome.path)[outcome.num_accepted]
        is_cut = outcome.num_accepted >= wanted
        own = jnp.where(is_cut, target[last], probabilities.own[last])
        return outcome, probabilities.keep, own

    over_uniforms = jax.vmap(one, in_axes=(None,) * 7 + (0,))
    return jax.jit(jax.vmap(over_uniforms, in_axes=(None,) * 3 + (0,) * 4 + (None,)))


def outcomes(rule: str, case: Case, wanted=9, fault=0) -> enumeration.Outcomes:
    """Returns what a rule may commit of all trees of a case. Trees are padded to one
    size with nodes that were not drafted; but not under "multipath", which depends on
    the shape."""
    chances, tokens, draft, target, number = map(
        np.array, zip(*trees(case), strict=True)
    )
    size = WIDEST if rule != "multipath" else len(case.parents)
    # Trees that are added have no chance.
    rest, more = (0, V**WIDEST - len(chances)), (0, size - len(case.parents))
    told = (
        np.pad(case.parents, more).astype(np.int32), jnp.int32(wanted),
        jnp.int32(fault), np.pad(tokens, (rest, more)).astype(np.int32),
        np.pad(draft, (rest, more, (0, 0)), mode="edge").astype(np.float32),
        np.pad(target, (rest, more, (0, 0)), mode="edge").astype(np.float32),
        np.pad(number, rest).astype(np.int32),
    )  # fmt: skip
    patterns = enumeration._all((True, False), size)
    outcome, keep, own = jax.device_get(
        _evaluate(rule, size, case.is_certain)(*told, patterns)
    )
    chances = np.pad(chances, rest)
    return enumeration.Outcomes.possible(chances, keep, patterns, outcome, own)


def bias(rule: str, case: Case, wanted=9, fault=0) -> float:
    """Returns the total variation between the committed law and the target's own."""
    law = outcomes(rule, case, wanted, fault).law(case.target)
    return 0.5 * np.abs(law - enumeration.continuations(case.target)[0]).sum()


def mean_accepted(rule: str, case: Case) -> float:
    """Returns the expected number of drafts that stay."""
    return outcomes(rule, case).mean


LAWS = [
    *itertools.product(("rejection", "block"), ("2x2", "mixed", "certain")),
    ("multipath", "2-1-1"),
    *(slow(rule, "two children") for rule in ("rejection", "block")),
    *(slow("multipath", shape) for shape in ("2x2", "3-1")),
]


@pytest.mark.parametrize("rule, shape", LAWS)
def test_the_output_has_the_targets_distribution(rule, shape, rng):
    is_certain = shape == "certain"
    shape = "mixed" if is_certain else shape
    case = make_case(rule, shape, rng, is_certain=is_certain)
    for wanted in (9, 1, 0):
        assert bias(rule, case, wanted) < enumeration.ROUNDING


def test_the_best_of_paths_need_not_be_the_best_to_verify(rng):
    """Checks `accept_multi_path`'s docstring: it keeps more than `accept_block` does of
    one path, but not where the draft is the target, and one path is kept whole."""
    gains = []
    for _ in range(4):
        case = make_case("multipath", "2x2", rng)
        alone = dataclasses.replace(case, parents=SHAPES["chain"])
        gains.append(mean_accepted("multipath", case) - mean_accepted("block", alone))
    assert min(gains) > BIASED
    same = dataclasses.replace(case, draft=case.target[:-1])
    alone = dataclasses.replace(same, parents=SHAPES["chain"])
    assert mean_accepted("block", alone) == pytest.approx(2)
    assert mean_accepted("multipath", same) < 2 - BIASED
    assert bias("multipath", same) < enumeration.ROUNDING


@pytest.mark.parametrize(
    "shape, is_certain",
    [slow("two children", False), ("mixed", False), ("mixed", True)],
)
def test_whole_paths_keep_at_least_as_many(shape, is_certain, rng):
    """Fails if verifying whole paths keeps fewer drafts than token by token."""
    gains = []
    for _ in range(4):
        case = make_case("block", shape, rng, is_certain=is_certain)
        token_by_token = mean_accepted("rejection", case)
        gains.append(mean_accepted("block", case) - token_by_token)
    assert min(gains) > -enumeration.ROUNDING
    # The rules are the same where each path has one draft, or where drafts are certain:
    # then none is less likely in the draft's row than in the target's.
    assert (max(gains) > BIASED) == (shape == "mixed" and not is_certain)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("planted", ("other siblings", "drops"))
def test_trees_that_may_not_be_drawn(planted, rule, rng):
    """Negative control: siblings are drawn with replacement, or under "multipath"
    without it; or a child is left out because of its token."""
    kinds = {"drops": True}
    if planted == "other siblings":
        kinds = {"with_replacement": rule != "multipath"}
    shape = "3-1" if rule == "multipath" else "two children"
    cases = [make_case(rule, shape, rng, **kinds) for _ in range(3)]
    assert max(bias(rule, case) for case in cases) > BIASED


@pytest.mark.parametrize("rule", RULES)
def test_a_planted_bias_is_caught(rule, rng):
    """Negative control: the fault biases by ten thousand times what rounding may."""
    assert bias(rule, make_case(rule, "2x2", rng), fault=1) > BIASED


@pytest.mark.parametrize(
    "rule, is_certain",
    [*itertools.product(("rejection", "block"), (False, True)), ("multipath", False)],
)
def test_on_a_chain_it_is_the_rule_of_chains(is_certain, rule, rng):
    """Compares the number kept and all tokens with the rule for chains, as integers."""
    gamma, of_chains = 3, "block" if rule == "multipath" else rule
    accept = jax.jit(getattr(acceptance, f"accept_{of_chains}"))
    for _ in range(40):
        tokens = jnp.asarray(rng.integers(0, V + 2, gamma), jnp.int32)
        draft, target = (
            jnp.asarray(rng.dirichlet(np.ones(V), size=n), jnp.float32)
            for n in (gamma, gamma + 1)
        )
        if is_certain:
            draft = jax.nn.one_hot(tokens, V, dtype=jnp.float32)
        number = jnp.int32(rng.integers(0, gamma + 1))
        noise = {
            "uniforms": jnp.asarray(rng.random(gamma), jnp.float32),
            "noise": jnp.asarray(rng.gumbel(size=V), jnp.float32),
        }
        told = None if is_certain else draft
        how = noise | {"number": number, "depth_max": gamma}
        found = decide(rule, tokens, range(gamma), told, target, **how)
        expected = accept(tokens, draft, target, number, **noise)
        assert found.num_accepted == expected.num_accepted
        np.testing.assert_array_equal(found.tokens, expected.tokens)


@pytest.mark.parametrize("rule", RULES)
def test_children_that_are_too_deep_are_not_tried(rule):
    """Fails if a child deeper than `depth_max`, which is not tried, changes the own
    token after its parent. With a larger `depth_max` it is tried, and not kept."""
    draft = jnp.asarray([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    target = jnp.asarray([[0.0, 0.0, 1.0]] + [[0.6, 0.3, 0.1]] * 3)
    noise = {"uniforms": jnp.array([0.5, 0.9, 0.9]), "noise": jnp.zeros((V,))}
    args = rule, [2, 0, 0], [0, 1, 3], draft, target
    for depth_max, own in ((1, 0), (3, 1)):
        found = decide(*args, number=2, depth_max=depth_max, **noise)
        assert found.tokens[:2].tolist() == [2, own]


@pytest.mark.parametrize("rule", RULES)
def test_what_no_draw_can_have(rule):
    """Fails if a draft is kept that has no probability or is not in the vocabulary."""
    target = jnp.full((4, V), 1 / V, jnp.float32)
    noise = dict.fromkeys(("uniforms", "noise"), jnp.zeros((3,), jnp.float32))
    for wrong in (jnp.nan, -1.0, 0.0):
        draft = jnp.full((3, V), wrong, jnp.float32)
        tokens = [V, -1, 0]
        outcome = decide(rule, tokens, [0] * 3, draft, target, depth_max=1, **noise)
        assert int(outcome.num_accepted) == 0
        assert 0 <= int(outcome.tokens[0]) < V
