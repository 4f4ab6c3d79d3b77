"""Acceptance of chains: exact match against a loop, rejection and block verification.

Laws and mean lengths are enumerated; `test_acceptance_biases` sends planted biases
through the same enumeration.
"""

import itertools

import acceptance_cases as cases
import chex
import enumeration
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.rules import acceptance


def accept_in_python(drafts, targets, num_drafted):
    """Walks the chain and stops at the first disagreement, in plain Python."""
    kept = []
    for i in range(num_drafted):
        if drafts[i] != targets[i]:
            break
        kept.append(drafts[i])
    return len(kept), [*kept, targets[len(kept)]]


accept = jax.jit(acceptance.accept_exact)


def test_every_small_case():
    """Compares all chains of 3 over 2 tokens, cut at 0 to 3 drafts, with a loop."""
    for drafts in itertools.product((1, 2), repeat=3):
        for targets in itertools.product((1, 2), repeat=4):
            for num_drafted in range(4):
                outcome = accept(
                    jnp.asarray(drafts), jnp.asarray(targets), jnp.int32(num_drafted)
                )
                count, tokens = accept_in_python(drafts, targets, num_drafted)
                assert int(outcome.num_accepted) == count
                padded = tokens + [acceptance.PAD] * (4 - len(tokens))
                np.testing.assert_array_equal(outcome.tokens, padded)


def test_shapes_are_checked():
    """Fails if gamma target tokens pass in place of gamma + 1."""
    with pytest.raises(Exception, match="gamma"):
        acceptance.accept_exact(jnp.asarray([1, 2]), jnp.asarray([1, 2]), jnp.int32(2))


SIZES = ((2, 3), (3, 2))


@pytest.mark.parametrize("vocab_size, gamma", SIZES)
@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("rule", enumeration.RULES)
def test_the_law_is_the_targets(rule, kind, vocab_size, gamma, rng):
    """Fails if the law is biased by more than rounding, for any number of drafts."""
    case = cases.make_case(kind, rng, vocab_size, gamma)
    for num_drafted in range(gamma + 1):
        assert (
            enumeration.bias(enumeration.RULES[rule], case, num_drafted)
            < enumeration.ROUNDING
        )


@pytest.mark.parametrize("kind", cases.KINDS)
def test_accepted_lengths_follow_theory(kind, rng):
    """Compares mean lengths with the papers' sums; block's must not be smaller."""
    case = cases.make_case(kind, rng, 5, 3)
    rejection = enumeration.outcomes(enumeration.REJECTION, case, 3).mean
    block = enumeration.outcomes(enumeration.BLOCK, case, 3).mean
    assert rejection == pytest.approx(
        enumeration.mean_accepted_by_rejection(case), abs=enumeration.ROUNDING
    )
    assert block == pytest.approx(
        enumeration.mean_accepted_by_block(case), abs=enumeration.ROUNDING
    )
    assert block >= rejection - enumeration.ROUNDING


def test_the_papers_own_example():
    """Compares with Sun et al. (2024): 10/9 drafts stay one by one, 11/9 as a block."""
    target = enumeration.table(lambda n: np.tile([1 / 3, 2 / 3], (n, 1)), 2, 4)
    draft = enumeration.table(lambda n: np.tile([2 / 3, 1 / 3], (n, 1)), 2, 3)
    case = enumeration.honest(target, draft)
    accepted = [
        enumeration.outcomes(enumeration.RULES[name], case, 2).mean
        for name in enumeration.RULES
    ]
    assert accepted == pytest.approx([10 / 9, 11 / 9], abs=enumeration.ROUNDING)


COMPILED = {name: jax.jit(rule.accept) for name, rule in enumeration.RULES.items()}


def few(rng, *, gamma=2, vocab_size=4):
    """Returns arguments of a rule, without uniforms and noise."""
    rows = cases.random_rows(rng, vocab_size)
    return (
        jnp.asarray(rng.integers(vocab_size, size=gamma), jnp.int32),
        jnp.asarray(rows(gamma), jnp.float32),
        jnp.asarray(rows(gamma + 1), jnp.float32),
        jnp.int32(gamma),
    )


@pytest.mark.parametrize("rule", enumeration.RULES)
def test_the_own_token_is_the_gumbel_argmax_of_its_weights(rule, rng):
    """Checks that noise changes the winner of two tokens where their weights say."""
    args = few(rng)
    probabilities = jax.jit(enumeration.RULES[rule].probabilities)(*args)
    for uniforms, count in (([1.0, 1.0], 0), ([0.0, 1.0], 1), ([0.0, 0.0], 2)):
        weights = np.asarray(probabilities.own[count])
        for x, y in itertools.permutations(np.flatnonzero(weights), 2):
            for gap, winner in ((-1e-3, x), (1e-3, y)):
                noise = np.full(weights.shape, -100.0, np.float32)
                noise[x], noise[y] = 0.0, np.log(weights[x] / weights[y]) + gap
                outcome = COMPILED[rule](
                    *args, uniforms=np.asarray(uniforms, np.float32), noise=noise
                )
                assert int(outcome.num_accepted) == count
                assert int(outcome.tokens[count]) == winner


def kept_on_zero(accept):
    """Returns whether uniform 0 keeps, or noise draws, an impossible token."""
    draft = jnp.asarray([[0.5, 0.5]])
    target = jnp.asarray([[1.0, 0.0], [1.0, 0.0]])
    noise = {"uniforms": jnp.zeros((1,)), "noise": jnp.asarray([-90.0, 90.0])}
    drafted = jnp.asarray([1]), draft, target, jnp.int32(1)
    outcome = jax.jit(accept)(*drafted, **noise)
    return int(outcome.num_accepted) > 0 or int(outcome.tokens[0]) != 0


def accept_on_equal_uniforms(*drafted, uniforms, noise):
    """Accepts by rejection with `<=`: off by 1e-30, as a denormal may count as 0."""
    lower = uniforms - 1e-30
    return acceptance.accept_rejection(*drafted, uniforms=lower, noise=noise)


def test_what_the_target_cannot_choose_is_never_kept():
    """Fails if a token of probability 0 is kept on uniform 0, or is drawn where noise
    prefers it. The negative control decides by `<=`."""
    assert not kept_on_zero(acceptance.accept_rejection)
    assert not kept_on_zero(acceptance.accept_block)
    assert kept_on_zero(accept_on_equal_uniforms)


@pytest.mark.parametrize("rule", enumeration.RULES)
def test_a_rejection_with_nothing_left_draws_from_the_target(rule):
    """Fails if an empty residual, of nearly equal rows, gives impossible token 0."""
    target = jnp.asarray([[0.0, 0.5, 0.5], [0.0, 0.5, 0.5]], jnp.float32)
    draft = target[:1].at[0, 2].set(jnp.nextafter(jnp.float32(0.5), jnp.float32(1)))
    uniforms, noise = jnp.nextafter(jnp.ones((1,)), jnp.float32(0)), jnp.zeros((3,))
    drafted = jnp.asarray([2], jnp.int32), draft, target, jnp.int32(1)
    outcome = COMPILED[rule](*drafted, uniforms=uniforms, noise=noise)
    assert int(outcome.num_accepted) == 0 and int(outcome.tokens[0]) == 1


@pytest.mark.parametrize("rule", enumeration.RULES)
def test_rows_past_the_drafts_may_hold_anything(rule, rng):
    """Fails if NaN in rows that were not drafted changes the outcome."""
    tokens, draft, target, _ = few(rng, gamma=3)
    more = {"uniforms": jnp.asarray([0.1, 0.9, 0.0]), "noise": jnp.zeros((4,))}
    clean = COMPILED[rule](tokens, draft, target, jnp.int32(1), **more)
    poisoned = COMPILED[rule](
        tokens.at[1:].set(99),
        draft.at[1:].set(jnp.nan),
        target.at[2:].set(jnp.nan),
        jnp.int32(1),
        **more,
    )
    chex.assert_trees_all_equal(clean, poisoned)


@pytest.mark.parametrize("token", [4, -1])
@pytest.mark.parametrize("rule", enumeration.RULES)
def test_a_draft_outside_the_vocabulary_is_never_kept(rule, token, rng):
    """Fails if uniform 0 keeps the draft, even by a row of zeros (`jax.nn.one_hot`)."""
    tokens, draft, target, count = few(rng)
    more = {"uniforms": jnp.zeros((2,)), "noise": jnp.zeros((4,))}
    for row in (jnp.zeros((4,)), draft[0]):
        args = tokens.at[0].set(token), draft.at[0].set(row), target, count
        assert int(COMPILED[rule](*args, **more).num_accepted) == 0
        probabilities = jax.jit(enumeration.RULES[rule].probabilities)(*args)
        assert float(probabilities.keep[0]) == 0
        np.testing.assert_array_equal(
            probabilities.own[0], np.maximum(target[0] - row, 0)
        )


@pytest.mark.parametrize("prob", [np.nan, 0.0, -1.0])
@pytest.mark.parametrize("rule", enumeration.RULES)
def test_a_draft_that_cannot_have_been_drawn_is_never_kept(rule, prob, rng):
    """Fails if the draft is kept, or the own token is not from the target's row."""
    tokens, draft, target, count = few(rng)
    more = {"uniforms": jnp.zeros((2,)), "noise": jnp.zeros((4,))}
    draft = draft.at[0].set(prob)
    outcome = COMPILED[rule](tokens, draft, target, count, **more)
    assert int(outcome.num_accepted) == 0
    assert int(outcome.tokens[0]) == int(jnp.argmax(target[0]))


def capped_branches(target, draft, chain, *, caps=True):
    """Returns `h` and the resampling rows of hierarchical speculative decoding, by
    equations 16 to 20 of Zhou et al. (2026), https://arxiv.org/abs/2601.05724."""
    gamma = len(chain)
    steps = np.arange(gamma)
    ratios = target[steps, chain] / draft[steps, chain]
    joint = np.concatenate([[1.0], np.cumprod(ratios)])  # r of each prefix
    drawn = np.concatenate([[1.0], np.cumprod(draft[steps, chain])])

    def capped(length):
        """Returns r* of each continuation of a prefix by one token."""
        highest = int(np.argmax(joint[1 : length + 1])) + 1 if length else 0
        if joint[highest] <= 1 or not caps:
            highest = 0
        later = joint[length] / joint[highest] * target[length] / draft[length]
        return min(joint[highest], 1) * later

    keep, rows = [], []
    for length in range(gamma):
        excess = drawn[length] * draft[length] * (capped(length) - 1)
        more, less = np.maximum(excess, 0).sum(), np.maximum(-excess, 0).sum()
        keep.append(more / max(more, less))  # more > less only without the cap.
        rows.append(np.maximum(excess, 0) / (more or 1))  # 0 without excess.
    return [*keep[1:], min(capped(gamma - 1)[chain[-1]], 1)], rows


def test_hierarchical_branch_resampling_is_block_verification(rng):
    """Checks that capped ratios are the joint ratios of Sun et al.: both verify a chain
    by the same numbers. Ratios without the cap are the negative control."""
    probabilities, differs = jax.jit(acceptance.block_probabilities), []
    for _ in range(20):
        target, draft = rng.dirichlet(np.ones(4), size=4), rng.dirichlet(np.ones(4), 3)
        chain = rng.integers(0, 4, 3)
        found = probabilities(
            jnp.asarray(chain, jnp.int32),
            jnp.asarray(draft, jnp.float32),
            jnp.asarray(target, jnp.float32),
            jnp.int32(3),
        )
        keep, rows = capped_branches(target, draft, chain)
        np.testing.assert_allclose(found.keep, keep, rtol=1e-4, atol=1e-6)
        own = np.asarray(found.own[:3])
        total = own.sum(axis=-1, keepdims=True)
        own = own / np.where(total > 0, total, 1)
        np.testing.assert_allclose(own, rows, rtol=1e-4, atol=1e-6)
        keep, _ = capped_branches(target, draft, chain, caps=False)
        differs.append(not np.allclose(found.keep, keep, rtol=1e-2))
    assert any(differs)
