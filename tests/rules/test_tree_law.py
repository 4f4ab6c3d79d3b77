"""The exact law of what rules by uniforms commit from a tree, over tiny vocabularies.

See `enumeration`. Trees that may not be drawn go through the same sums.
"""

import dataclasses
import itertools

import enumeration
import jax
import jax.numpy as jnp
import numpy as np
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


RULES = enumeration.OF_TREES
COMPILED = {
    "rejection": tree_acceptance.accept_tree,
    "block": traversal.accept_traversal,
    "multipath": multi_path.accept_multi_path,
}
COMPILED = {
    name: jax.jit(accept, static_argnames="depth_max")
    for name, accept in COMPILED.items()
}


def decide(rule, tokens, parents, draft, target, *, number=None, **how):
    """Returns what a rule keeps of one tree; more is wanted than any path has."""
    number = len(tokens) if number is None else number
    tokens, parents = (jnp.asarray(x, jnp.int32) for x in (tokens, parents))
    wanted = jnp.int32(9)
    return COMPILED[rule](
        tokens, parents, draft, target, jnp.int32(number), wanted, **how
    )


def make_case(rule, shape, rng, **kinds) -> enumeration.Case:
    """Returns a case whose siblings are drawn as the rule needs them."""
    kinds.setdefault("with_replacement", rule == "multipath")
    depth, parents = 0, SHAPES[shape]
    column = len(parents)
    while column:
        depth, column = depth + 1, parents[column - 1]
    rows = lambda n: rng.dirichlet(np.ones(V), size=n)
    target = enumeration.table(rows, V, depth + 1)
    draft = enumeration.table(rows, V, depth)
    return enumeration.honest(target, draft, parents, **kinds)


def bias(rule: str, case: enumeration.Case, *num_drafted, **how) -> float:
    return enumeration.bias(RULES[rule], case, *num_drafted, **how)


def mean_accepted(rule: str, case: enumeration.Case) -> float:
    """Returns the expected number of drafts that stay."""
    return enumeration.outcomes(RULES[rule], case).mean


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
        assert bias(rule, case, wanted=wanted) < enumeration.ROUNDING


def test_the_best_of_paths_need_not_be_the_best_to_verify(rng):
    """Checks `accept_multi_path`'s docstring: it keeps more than `accept_block` does of
    one path, but not where the draft is the target, and one path is kept whole."""
    gains = []
    for _ in range(4):
        case = make_case("multipath", "2x2", rng)
        alone = dataclasses.replace(case, parents=SHAPES["chain"])
        gains.append(mean_accepted("multipath", case) - mean_accepted("block", alone))
    assert min(gains) > BIASED
    same = enumeration.honest(
        case.target, case.target[:-1], case.parents, with_replacement=True
    )
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
    kinds, num_drafted = {}, lambda tokens: len(tokens) - (tokens[-1] == 1)
    if planted == "other siblings":
        kinds, num_drafted = {"with_replacement": rule != "multipath"}, None
    shape = "3-1" if rule == "multipath" else "two children"
    cases = [make_case(rule, shape, rng, **kinds) for _ in range(3)]
    assert max(bias(rule, case, num_drafted) for case in cases) > BIASED


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
