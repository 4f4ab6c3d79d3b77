"""The exact laws of rejection and block verification under a processor or a schedule.

The rules are given what rounds give them: rows that `processing.process_rows` made of a
window's logits, along its paths. The true law is computed by definition, in float64;
drafts are drawn with the processor or without. See `enumeration`.

No draft may be left out by a schedule because of its own token. The example is the
paper's: one slot, two drafts, survival 0.8 of the first; whether the second is worth
its row depends on the first one's token alone.
"""

import dataclasses
import itertools

import enumeration
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processors import test_built_in

from spec_jax.engine import processing, protocols
from spec_jax.gamma import schedule as schedule_lib
from spec_jax.processors import built_in, processor as processor_lib


V, GAMMA, BIASED = 3, 2, 1e-2
PROMPT = [1, 2]
PENALTIES = {"repetition": 1.6, "presence": 0.5, "frequency": 0.7}
WORDS = [[0, 1], [2, 2, 0]]


def made() -> processor_lib.Processor:
    return processor_lib.chain(
        built_in.penalties(**PENALTIES), built_in.bad_words(WORDS)
    )


def by_definition(answer, logits) -> np.ndarray:
    """Returns the law of the token after the prompt and an answer, by definition."""
    given = PROMPT, answer
    row = test_built_in.expected("penalties", *given, logits, penalties=PENALTIES)
    row = test_built_in.expected("words", *given, row, words=WORDS)
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def table_of(logits: list[np.ndarray], law) -> list[np.ndarray]:
    """Returns the table with `law(prefix, logits)` after each prefix."""
    found = [np.empty_like(entry) for entry in logits]
    for depth, entry in enumerate(logits):
        for prefix in itertools.product(range(V), repeat=depth):
            found[depth][prefix] = law(prefix, entry[prefix])
    return found


@jax.jit
def _rows(state, tokens, logits):
    """Returns the distributions of a window's columns, as rounds make them."""
    columns = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    count = jnp.int32(tokens.shape[0])
    window = protocols.Window(
        tokens=tokens[None],
        start=jnp.array([len(PROMPT) - 1], jnp.int32),
        num_active=count[None],
    )
    verified = protocols.Verified(
        logits=logits,
        slots=jnp.zeros_like(columns),
        positions=columns,
        num_active=count,
        at=columns[None],
    )
    return jax.nn.softmax(processing.process_rows(state, verified, window).logits)


def processed(logits: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the table that rounds compute: each prefix is a window's path."""
    text = np.array([*PROMPT, 0, 0, 0], np.int32)
    one = processing.begin(made(), text, np.int32(len(PROMPT)), vocab_size=V)
    state, most = processing.of_slots(one, 1), len(logits)

    def law(prefix, row):
        tokens = np.zeros((most,), np.int32)
        tokens[: len(prefix) + 1] = [PROMPT[-1], *prefix]
        padded = np.zeros((most, V), np.float32)
        for i in range(len(prefix) + 1):
            padded[i] = logits[i][prefix[:i]]
        return np.asarray(_rows(state, tokens, padded))[len(prefix)]

    return table_of(logits, law)


def raw(logits: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the table without a processor."""
    return [np.asarray(jax.nn.softmax(entry), np.float32) for entry in logits]


def case_of(rng, target=processed, draft=processed) -> enumeration.Case:
    logits = enumeration.table(lambda n: 2 * rng.standard_normal((n, V)), V, GAMMA + 1)
    near = [x + rng.standard_normal(x.shape).astype(np.float32) for x in logits[:GAMMA]]
    case = enumeration.honest(target(logits), draft(near))
    return dataclasses.replace(case, truth=table_of(logits, by_definition))


@pytest.mark.parametrize("draft", [processed, raw])
@pytest.mark.parametrize("rule", enumeration.RULES)
def test_chains_have_the_processed_law(rule, draft, rng):
    """Checks chains whose drafts were drawn with the processor, or without it."""
    case = case_of(rng, draft=draft)
    for num_drafted in range(GAMMA + 1):
        found = enumeration.bias(enumeration.RULES[rule], case, num_drafted)
        assert found < 2 * enumeration.ROUNDING


def test_what_is_not_processed_or_cut_is_caught(rng):
    """Negative controls: drawn drafts are cut because of their tokens, which
    `processing.cut` must not do; and the target's rows are not processed."""
    case = case_of(rng, draft=raw)

    def cut(chain):
        rows = [case.target[i][tuple(chain[:i])][chain[i]] > 0 for i in range(GAMMA)]
        return [*rows, False].index(False)

    assert enumeration.bias(enumeration.REJECTION, case, cut) > BIASED
    assert enumeration.bias(enumeration.BLOCK, case_of(rng, target=raw)) > BIASED


DEAR, CHEAP = (1.0, 1.0, 1 / 0.5, 1 / 0.45), (1.0, 1.0, 1.6, 1.7)
"""The seconds of a step by its rows; more rows cost less in the second."""

CASE = enumeration.honest(
    target=[np.array(p, np.float32) for p in ([0.7, 0.3], [[0.7, 0.3]] * 2)]
    + [np.full((2, 2, 2), 0.5, np.float32)],
    draft=[np.full((2,) * n, 0.5, np.float32) for n in (1, 2)],
)
A = 0  # The token that the target prefers.


def verified(survival_of, step_s=DEAR, *, stops_early=True):
    """Returns a function: how many drafts of a chain are verified, by its survivals."""

    def num_drafted(chain):
        counts = schedule_lib.schedule(
            jnp.asarray([survival_of(chain)], jnp.float32),
            jnp.array([2], jnp.int32),
            jnp.array([True]),
            jnp.asarray(step_s, jnp.float32),
            stops_early=stops_early,
        )
        return int(counts[0])

    return num_drafted


def known_before(chain):
    """Returns survivals: the first is fixed, the second depends on the first token."""
    return 0.8, 0.8 * (0.9 if chain[0] == A else 0.0)


def of_itself(chain):
    """Plants survivals of which the first depends on the first token itself."""
    first = 0.99 if chain[0] == A else 0.1
    return first, first * 0.99


def counts_of(num_drafted):
    return {num_drafted(chain) for chain in itertools.product(range(2), repeat=2)}


def law_of(num_drafted, rule):
    found = enumeration.outcomes(enumeration.RULES[rule], CASE, num_drafted)
    return found.law(CASE.truth).sum(axis=(1, 2))


@pytest.mark.parametrize("rule", enumeration.RULES)
def test_the_papers_example_is_exact_with_the_stop_alone(rule):
    """Checks for (0.7, 0.3) by the stop, the paper's (0.85, 0.15) by the maximum."""
    stop = verified(known_before)
    assert counts_of(stop) == {0}
    np.testing.assert_allclose(law_of(stop, rule), [0.7, 0.3], atol=1e-6)
    everything = verified(known_before, stops_early=False)
    assert everything([A, A]) == 2 and everything([1 - A, A]) == 0
    np.testing.assert_allclose(law_of(everything, rule), [0.85, 0.15], atol=1e-6)


@pytest.mark.parametrize("rule", enumeration.RULES)
def test_a_schedule_may_see_the_tokens_before(rule):
    """Fails if the law is not exact; negative control: a draft's own confidence."""
    honest = verified(known_before, CHEAP)
    assert counts_of(honest) == {1, 2}
    bias = lambda num_drafted: enumeration.bias(
        enumeration.RULES[rule], CASE, num_drafted
    )
    assert bias(honest) < enumeration.ROUNDING
    assert bias(verified(of_itself, CHEAP)) > 1000 * enumeration.ROUNDING
