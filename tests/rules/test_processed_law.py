"""The exact laws of rejection and block verification under a processor.

The rules are given what rounds give them: rows that `processing.process_rows` made of a
window's logits, along its paths. The true law is computed by definition, in float64;
drafts are drawn with the processor or without. See `enumeration` and `test_tree_law`.
"""

import functools
import itertools

import enumeration
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_tree_law as tree_law

from spec_jax.engine import processing, protocols
from spec_jax.processors import built_in, processor as processor_lib


V, GAMMA = 3, 2
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


def begun() -> processing.Processing:
    """Returns the processing of one slot, after the prompt."""
    text = np.array([*PROMPT, 0, 0, 0], np.int32)
    one = processing.begin(made(), text, np.int32(len(PROMPT)), vocab_size=V)
    return processing.of_slots(one, 1)


@functools.partial(jax.jit, static_argnames="depth_max")
def _rows(state, tokens, logits, parents, depth_max=None):
    """Returns the distributions of a window's columns, as rounds make them."""
    count = tokens.shape[0]
    columns = jnp.arange(count, dtype=jnp.int32)
    window = protocols.Window(
        tokens=tokens[None],
        start=jnp.array([len(PROMPT) - 1], jnp.int32),
        num_active=jnp.array([count], jnp.int32),
        parents=None if parents is None else parents[None],
        depth_max=depth_max,
    )
    verified = protocols.Verified(
        logits=logits,
        slots=jnp.zeros_like(columns),
        positions=columns,
        num_active=jnp.int32(count),
        at=columns[None],
    )
    return jax.nn.softmax(processing.process_rows(state, verified, window).logits)


def processed(logits: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the table that rounds compute: each prefix is a window's path."""
    state, most = begun(), len(logits) - 1

    def law(prefix, row):
        tokens = np.zeros((most + 1,), np.int32)
        tokens[0], tokens[1 : len(prefix) + 1] = PROMPT[-1], prefix
        rows = np.stack([logits[i][tuple(prefix[:i])] for i in range(len(prefix) + 1)])
        padded = np.zeros((most + 1, V), np.float32)
        padded[: len(rows)] = rows
        return np.asarray(_rows(state, tokens, padded, None))[len(prefix)]

    return table_of(logits, law)


def raw(logits: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the table without a processor."""
    return [np.asarray(jax.nn.softmax(entry), np.float32) for entry in logits]


def random_logits(rng, depth: int) -> list[np.ndarray]:
    return enumeration.table(lambda n: 2 * rng.standard_normal((n, V)), V, depth)


def case_of(rng, target=processed, draft=processed) -> enumeration.Case:
    logits = random_logits(rng, GAMMA + 1)
    near = [x + rng.standard_normal(x.shape).astype(np.float32) for x in logits[:GAMMA]]
    given = draft(near)
    return enumeration.Case(
        truth=table_of(logits, by_definition),
        target=target(logits),
        drawn=given,
        draft=given,
    )


@pytest.mark.parametrize("draft", [processed, raw])
@pytest.mark.parametrize("rule", enumeration.RULES)
def test_chains_have_the_processed_law(rule, draft, rng):
    """Checks chains whose drafts were drawn with the processor, or without it."""
    case = case_of(rng, draft=draft)
    for num_drafted in range(GAMMA + 1):
        found = enumeration.bias(enumeration.RULES[rule], case, num_drafted)
        assert found < 2 * enumeration.ROUNDING


@pytest.mark.parametrize("rule", enumeration.RULES)
def test_rows_without_the_processor_are_caught(rule, rng):
    """Negative control: the target's rows are not processed."""
    case = case_of(rng, target=raw)
    assert enumeration.bias(enumeration.RULES[rule], case) > tree_law.BIASED


def _of_parent(real):
    def after(processor, state, tokens, parents, column):
        return real(processor, state, tokens, parents, parents[column])

    return after


@pytest.mark.parametrize("rule", enumeration.RULES)
def test_a_state_of_the_parents_is_caught(rule, rng, monkeypatch):
    """Negative control: each row is processed with the state of its parent."""
    monkeypatch.setattr(processing, "after", _of_parent(processing.after))
    _rows.clear_cache()
    case = case_of(rng)
    _rows.clear_cache()
    assert enumeration.bias(enumeration.RULES[rule], case) > tree_law.BIASED


def test_a_draft_that_is_cut_because_of_its_token_is_caught(rng):
    """Negative control: drawn drafts are cut, which `processing.cut` must not do."""
    case = case_of(rng, draft=raw)
    target = case.target

    def cut(chain):
        rows = [target[i][tuple(chain[:i])][chain[i]] > 0 for i in range(GAMMA)]
        return [*rows, False].index(False)

    found = enumeration.bias(enumeration.REJECTION, case, cut)
    assert found > tree_law.BIASED


@pytest.mark.parametrize("shape", ["two children", "1-2-1", "mixed"])
@pytest.mark.parametrize("draft", [processed, raw])
def test_trees_have_the_processed_law(shape, draft, rng):
    """Checks the law of rejection on trees of several shapes."""
    case = tree_law.make_case(shape, rng)
    logits = random_logits(rng, case.depth_max + 1)
    given = draft(random_logits(rng, case.depth_max))
    told = tree_law.Case(parents=case.parents, target=processed(logits), draft=given)
    truth = table_of(logits, by_definition)
    found = tree_law.bias("rejection", told, case.depth_max, truth=truth)
    assert found < 2 * enumeration.ROUNDING
