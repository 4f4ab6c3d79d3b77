"""Acceptance of chains: exact match against a loop, rejection and block verification.

Laws and mean lengths are enumerated; mutants (`RULES`) are negative controls.
`test_sampling_noise` checks that no noise is shared, by two purposes or two rounds.
"""

import dataclasses
import itertools

import enumeration
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.rules import acceptance


accept = jax.jit(acceptance.accept_exact)
by_each_rule = pytest.mark.parametrize("rule", enumeration.RULES)


def test_every_small_case():
    """Compares all chains of 3 over 2 tokens, cut at 0 to 3 drafts, with a loop."""
    for drafts in itertools.product((1, 2), repeat=3):
        for targets in itertools.product((1, 2), repeat=4):
            for num_drafted in range(4):
                count = 0
                while count < num_drafted and drafts[count] == targets[count]:
                    count += 1
                outcome = accept(
                    jnp.asarray(drafts), jnp.asarray(targets), jnp.int32(num_drafted)
                )
                assert int(outcome.num_accepted) == count
                tokens = [*targets[: count + 1], *[acceptance.PAD] * (3 - count)]
                np.testing.assert_array_equal(outcome.tokens, tokens)


@pytest.mark.parametrize("vocab_size, gamma", ((2, 3), (3, 2)))
@pytest.mark.parametrize("kind", enumeration.KINDS)
@by_each_rule
def test_the_law_is_the_targets(rule, kind, vocab_size, gamma, rng):
    """Fails if the law is biased by more than rounding, for any number of drafts."""
    case = enumeration.make_case(kind, rng, vocab_size, gamma)
    for num_drafted in range(gamma + 1):
        found = enumeration.bias(enumeration.RULES[rule], case, num_drafted)
        assert found < enumeration.ROUNDING


@pytest.mark.parametrize("kind", enumeration.KINDS)
def test_accepted_lengths_follow_theory(kind, rng):
    """Compares mean lengths with the papers' sums; block's must not be smaller."""
    case, means = enumeration.make_case(kind, rng, 5, 3), []
    for rule in enumeration.RULES.values():
        means.append(enumeration.outcomes(rule, case, 3).mean)
        expected = enumeration.mean_by_theory(rule, case)
        assert means[-1] == pytest.approx(expected, abs=enumeration.ROUNDING)
    assert means[1] >= means[0] - enumeration.ROUNDING


@by_each_rule
def test_the_enumeration_catches_drafts_in_bfloat16(rule, rng):
    """Negative control: drafts are drawn from probabilities that were rounded, and the
    rule is told the exact ones."""
    case = enumeration.make_case("random", rng, 5, 3)
    rounded = [x.astype(jnp.bfloat16).astype(np.float32) for x in case.draft]
    case = dataclasses.replace(case, drawn=rounded)
    found = enumeration.bias(enumeration.RULES[rule], case)
    assert found > 100 * enumeration.ROUNDING


COMPILED = {
    name: (jax.jit(rule.accept), jax.jit(rule.probabilities))
    for name, rule in enumeration.RULES.items()
}
ZEROS = {"uniforms": jnp.zeros((2,)), "noise": jnp.zeros((4,))}


def few(rng):
    """Returns two drafts of four tokens, the rows of both models, and the number 2."""
    draft, target = rng.dirichlet(np.ones(4), size=2), rng.dirichlet(np.ones(4), size=3)
    return (
        jnp.asarray(rng.integers(4, size=2), jnp.int32),
        jnp.asarray(draft, jnp.float32),
        jnp.asarray(target, jnp.float32),
        jnp.int32(2),
    )


@by_each_rule
def test_the_own_token_is_the_gumbel_argmax_of_its_weights(rule, rng):
    """Checks that noise changes the winner of two tokens where their weights say, and
    draws no token of weight 0, however high it is there."""
    args, (accept, probabilities) = few(rng), COMPILED[rule]
    own, num_zeros = probabilities(*args).own, 0
    for uniforms, count in (([1.0, 1.0], 0), ([0.0, 1.0], 1), ([0.0, 0.0], 2)):
        weights = np.asarray(own[count])
        num_zeros += np.sum(weights == 0)
        for x, y in itertools.permutations(np.flatnonzero(weights), 2):
            for gap, winner in ((-1e-3, x), (1e-3, y)):
                noise = np.where(weights > 0, -100.0, 100.0).astype(np.float32)
                noise[x], noise[y] = 0.0, np.log(weights[x] / weights[y]) + gap
                outcome = accept(
                    *args, uniforms=np.asarray(uniforms, np.float32), noise=noise
                )
                assert int(outcome.num_accepted) == count
                assert int(outcome.tokens[count]) == winner
    assert num_zeros > 0


@by_each_rule
def test_a_rejection_with_nothing_left_draws_from_the_target(rule):
    """Fails if an empty residual, of nearly equal rows, gives impossible token 0."""
    target = jnp.asarray([[0.0, 0.5, 0.5], [0.0, 0.5, 0.5]], jnp.float32)
    draft = target[:1].at[0, 2].set(jnp.nextafter(jnp.float32(0.5), jnp.float32(1)))
    uniforms, noise = jnp.nextafter(jnp.ones((1,)), jnp.float32(0)), jnp.zeros((3,))
    drafted = jnp.asarray([2], jnp.int32), draft, target, jnp.int32(1)
    outcome = COMPILED[rule][0](*drafted, uniforms=uniforms, noise=noise)
    assert int(outcome.num_accepted) == 0 and int(outcome.tokens[0]) == 1


@by_each_rule
def test_rows_past_the_drafts_may_hold_anything(rule, rng):
    """Fails if NaN in rows that were not drafted changes the outcome."""
    tokens, draft, target, _ = few(rng)
    more = {"uniforms": jnp.asarray([0.1, 0.0]), "noise": jnp.zeros((4,))}
    clean = COMPILED[rule][0](tokens, draft, target, jnp.int32(1), **more)
    spoilt = draft.at[1:].set(jnp.nan), target.at[2:].set(jnp.nan)
    found = COMPILED[rule][0](tokens.at[1:].set(99), *spoilt, jnp.int32(1), **more)
    testing.assert_same_bits(found, clean)


@pytest.mark.parametrize("token", [4, -1])
@by_each_rule
def test_a_draft_outside_the_vocabulary_is_never_kept(rule, token, rng):
    """Fails if uniform 0 keeps the draft, even by a row of zeros (`jax.nn.one_hot`)."""
    (tokens, draft, target, count), (accept, probabilities) = few(rng), COMPILED[rule]
    for row in (jnp.zeros((4,)), draft[0]):
        args = tokens.at[0].set(token), draft.at[0].set(row), target, count
        assert int(accept(*args, **ZEROS).num_accepted) == 0
        found = probabilities(*args)
        assert float(found.keep[0]) == 0
        np.testing.assert_array_equal(found.own[0], np.maximum(target[0] - row, 0))


@pytest.mark.parametrize("model, prob", [(1, np.nan), (1, 0.0), (1, -1.0), (2, 0.0)])
@by_each_rule
def test_a_draft_that_one_model_cannot_have_is_never_kept(rule, model, prob, rng):
    """Fails if uniform 0 keeps the draft, or if the own token is not from what is left
    of the target's row."""
    args, (accept, probabilities) = list(few(rng)), COMPILED[rule]
    place = slice(None) if model == 1 else args[0][0]
    args[model] = args[model].at[0, place].set(prob)
    left = args[2][0] if model == 1 else jnp.maximum(args[2][0] - args[1][0], 0)
    assert int(accept(*args, **ZEROS).num_accepted) == 0
    np.testing.assert_array_equal(probabilities(*args).own[0], left)


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
    probabilities, differs = COMPILED["block"][1], []
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
