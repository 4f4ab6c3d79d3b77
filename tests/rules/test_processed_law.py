"""The exact laws of rejection and block verification under a processor.

The rules are given what rounds give them: rows that `processing.process_rows` made of a
window's logits, along its paths. The true law is computed by definition, in float64;
drafts are drawn with the processor or without. See `enumeration`.
"""

import dataclasses
import itertools

import enumeration
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.engine import processing, protocols
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
    row, text = np.array(logits, np.float64), [*PROMPT, *answer]
    for token in set(text):
        factor = PENALTIES["repetition"]
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in set(answer):
        row[token] -= PENALTIES["presence"]
        row[token] -= PENALTIES["frequency"] * list(answer).count(token)
    for *before, last in WORDS:
        if text[len(text) - len(before) :] == before:
            row[last] = -np.inf
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
