"""Planted biases of rules and probabilities, which the enumeration must catch."""

import dataclasses
import itertools

import acceptance_cases as cases
import enumeration
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.rules import acceptance, sampling


def changing(change):
    """Makes rules with probabilities `change(right, chain, target, num_drafted)`."""

    def of(base):
        def probabilities(chain, draft, target, num_drafted):
            right = base.probabilities(chain, draft, target, num_drafted)
            return change(right, chain, target, num_drafted)

        return from_probabilities(probabilities, longest=base is enumeration.BLOCK)

    return of


@changing
def target_in_place_of_residual(right, chain, target, num_drafted):
    """Draws the own token from the target's row, without subtracting the draft's."""
    return right.replace(own=target)


@changing
def bonus_of_the_row_before(right, chain, target, num_drafted):
    """Draws the own token after a full acceptance from the row before the last."""
    wrong = target[num_drafted - 1]
    return right.replace(own=right.own.at[num_drafted].set(wrong))


@changing
def draft_probability_ignored(right, chain, target, num_drafted):
    """Keeps a draft with the target's probability alone."""
    return right.replace(keep=target[jnp.arange(len(chain)), chain])


def other_order_of_uniforms(base):
    """Reads the uniforms of one rule's probabilities as the other rule does."""
    return from_probabilities(base.probabilities, longest=base is enumeration.REJECTION)


def padding_is_read(base):
    """Takes all gamma drafts for real ones."""

    def of_all(function):
        return lambda chain, draft, target, _, **noise: function(
            chain, draft, target, jnp.int32(len(chain)), **noise
        )

    return enumeration.Rule(
        accept=of_all(base.accept), probabilities=of_all(base.probabilities)
    )


def from_probabilities(probabilities, *, longest):
    """Returns a rule that reads uniforms as block if `longest`, else as rejection."""

    def accept(chain, draft, target, num_drafted, *, uniforms, noise):
        lengths = jnp.arange(1, chain.shape[0] + 1)
        stays = uniforms < probabilities(chain, draft, target, num_drafted).keep
        stays = stays & (lengths <= num_drafted)
        run = jnp.sum(jnp.cumprod(stays.astype(jnp.int32)))
        last = jnp.max(jnp.where(stays, lengths, 0))
        return acceptance.Outcome(
            num_accepted=last if longest else run,
            tokens=jnp.append(chain, acceptance.PAD),
        )

    return enumeration.Rule(accept=accept, probabilities=probabilities)


BIASED_RULES = {
    "residual not subtracted": target_in_place_of_residual,
    "bonus from the row before": bonus_of_the_row_before,
    "draft probability ignored": draft_probability_ignored,
    "uniforms read as by the other rule": other_order_of_uniforms,
    "padding read": padding_is_read,
}


@pytest.mark.parametrize(
    ("planted", "rule"),
    [*zip(BIASED_RULES, itertools.cycle(enumeration.RULES), strict=False)],
)
def test_enumeration_catches_a_biased_rule(rule, planted, rng):
    """Negative control: a fault biases by a thousand times what rounding may cause."""
    case = cases.make_case("random", rng, 3, 2)
    biased = BIASED_RULES[planted](enumeration.RULES[rule])
    num_drafted = 1 if planted == "padding read" else 2
    assert enumeration.bias(biased, case, num_drafted) > 1000 * enumeration.ROUNDING


def test_the_probabilities_are_what_the_rules_read(rng):
    """Fails if the rule that the planted ones are made from is biased without them."""
    case = cases.make_case("random", rng, 3, 2)
    for rule in (enumeration.REJECTION, enumeration.BLOCK):
        same = from_probabilities(rule.probabilities, longest=rule is enumeration.BLOCK)
        assert enumeration.bias(same, case) < enumeration.ROUNDING


def rounded_softmax(logits):
    """Returns probabilities that went through bfloat16, as a draft model's may."""
    rows = jax.nn.softmax(jnp.asarray(logits, jnp.bfloat16), axis=-1)
    return np.asarray(rows.astype(jnp.float32))


def one_sided_case(planted, rng):
    """Returns a case in which the rule is told wrong probabilities of one model."""
    kind = {"temperature": {"temperature": 0.6}, "filter": {"top_p": 0.7}}
    what = planted.split()[0]
    settings = sampling.make_settings(**kind.get(what, {}))
    bare = sampling.make_settings()
    logits, others = cases.random_logits(rng, 5, 3)
    target = [cases.probs(x, settings) for x in logits]
    draft = [cases.probs(x, settings) for x in others]
    case = enumeration.honest(target, draft)
    if what == "bfloat16":
        return dataclasses.replace(case, drawn=[rounded_softmax(x) for x in others])
    if planted.endswith("draft only"):
        return dataclasses.replace(case, target=[cases.probs(x, bare) for x in logits])
    return dataclasses.replace(case, draft=[cases.probs(x, bare) for x in others])


@pytest.mark.parametrize(
    ("planted", "rule"),
    [
        ("bfloat16 drafts, float32 probabilities", "block"),
        ("temperature on the draft only", "rejection"),
        ("filter on the target only", "block"),
    ],
)
def test_enumeration_catches_probabilities_that_are_not_those_drawn_from(
    rule, planted, rng
):
    """Negative control: where the name says "only", in truth both models have it."""
    assert (
        enumeration.bias(enumeration.RULES[rule], one_sided_case(planted, rng))
        > 100 * enumeration.ROUNDING
    )
