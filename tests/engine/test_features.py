"""Features that rounds hand to a drafter are those of decoding, as integers.

Drafters here record the features that they get, by position. The negative controls,
which hand out those of other rows, are `FEATURES` among the mutants.
"""

import dataclasses

import decoding
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import SMALL, Ask
from test_trees import ScriptedTree, scheduler_of

from spec_jax import testing


TAPS = (1, 0)  # not in order; of two layers, without the last output


class Noted:
    """A mixin that records the features that a drafter gets, beside its script."""

    def init(self, *, capacity, page_size):
        script = super().init(capacity=capacity, page_size=page_size)
        table = jnp.full((script.shape[0], len(self.taps), 48), jnp.nan)
        return {"script": script, "table": table, "end": jnp.int32(0)}

    def prefill(self, params, memory, prompt, features):
        script = super().prefill(params, memory["script"], prompt)
        end = len(prompt) - 1
        table = memory["table"].at[:end].set(features[:end])
        return {"script": script, "table": table, "end": jnp.int32(end)}

    def propose(self, params, memory, **asked):
        _, proposal = super().propose(params, memory["script"], **asked)
        return memory, proposal

    def commit(self, params, memory, length, features=None):
        if features is None:  # The slot is released.
            return memory | {"end": length - 1}
        steps = jnp.arange(features.shape[0])
        at = memory["end"] + steps
        at = jnp.where(at < length - 1, at, memory["table"].shape[0])
        table = memory["table"].at[at].set(features, mode="drop")
        return memory | {"table": table, "end": length - 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotedChain(Noted, decoding.Scripted):
    """Proposes the script."""

    taps: tuple[int, ...] = TAPS


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotedTree(Noted, ScriptedTree):
    """Proposes trees, right in some branches."""

    taps: tuple[int, ...] = TAPS


CHAIN, TREE = NotedChain(), NotedTree()


def of_decoding(ask) -> np.ndarray:
    """Returns the features of all but the last token of a text, from rows of many
    columns, which give what decoding gives."""
    kv, text = SMALL.target.new_cache(**SMALL.sizes), decoding.decoded(SMALL, ask)
    how = {"taps": TAPS, "by_rows": True}
    text = decoding.text(text)[:-1]
    _, features = SMALL.target.prefill(SMALL.weights, kv, text, **how)
    return np.asarray(features)[: len(text)]


ASKS = (
    Ask(max_tokens=24, run=2),
    Ask(prompt=(9,), max_tokens=20, gamma=3, run=1),
    Ask(prompt=tuple(range(30, 50)), max_tokens=18, run=3),
    Ask(prompt=(7, 3, 90), max_tokens=9, gamma=0),
)


@pytest.mark.parametrize("drafter", [CHAIN, TREE], ids=["chain", "tree"])
def test_features_are_those_of_decoding(drafter):
    """Fails if features of a rejected row or another branch are given, or too many."""
    scheduler = scheduler_of(drafter=drafter, num_slots=len(ASKS))
    state = decoding.checked(SMALL, ASKS, scheduler=scheduler)
    for slot, ask in enumerate(ASKS):
        table = np.asarray(state.memory.slots["table"][slot])
        expected = of_decoding(ask)
        testing.assert_same_bits(table[: len(expected)], expected)
        assert np.isnan(table[len(expected) :]).all()


@pytest.mark.parametrize("impl", ["native", "xla"])
def test_rows_have_the_features_of_the_sequence(impl):
    """Compares features of rows with a sequence's, which equal Hugging Face's."""
    model, prompt = decoding.setting_of(impl).target, list(range(30, 50))
    made = []
    for by_rows in (True, False):
        kv, how = model.new_cache(**SMALL.sizes), {"taps": TAPS, "by_rows": by_rows}
        _, features = model.prefill(SMALL.weights, kv, prompt, **how)
        made.append(np.moveaxis(np.asarray(features)[: len(prompt)], 1, 0))
    for found, expected in zip(*made, strict=True):
        testing.assert_rows_close(found, expected, dtype="float32", reduction=200)
