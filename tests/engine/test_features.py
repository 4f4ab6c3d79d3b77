"""Features that rounds hand to a drafter are those of decoding, as integers.

Drafters here record the features that they get, by position. The negative controls hand
out those of other rows, and require that the same comparison fails.
"""

import dataclasses
import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import planting
import pytest
from decoding import SMALL, Ask
from test_trees import ScriptedTree, scheduler_of

from spec_jax import testing
from spec_jax.engine import round as round_lib
from spec_jax.model import qwen3
from spec_jax.paging import allocator


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


@functools.partial(jax.jit, static_argnames=("model",))
def _step(model, params, kv, token, position):
    kv = allocator.reserve(kv, 0, position + 1)
    one = jnp.zeros((model.slab,), jnp.int32)
    row = qwen3.Rows(
        tokens=one.at[0].set(token),
        slots=one,
        positions=one.at[0].set(position),
        num_active=jnp.int32(1),
    )
    return qwen3.forward_rows(
        params, model.config, row, kv, impl=model.impl, taps=TAPS, with_logits=False
    )


def of_decoding(setting, ask) -> np.ndarray:
    """Returns the features of a text but for its last token, decoded row by row."""
    model, text = setting.target, decoding.text(decoding.decoded(setting, ask))
    kv = model.new_cache(**setting.sizes)
    kv, features = model.prefill(setting.weights, kv, list(ask.prompt[:-1]), taps=TAPS)
    found = [np.asarray(features)[: len(ask.prompt) - 1]]
    for position in range(len(ask.prompt) - 1, len(text) - 1):
        kv, outputs = _step(
            model, setting.weights, kv, text[position], jnp.int32(position)
        )
        found.append(np.asarray(outputs.features)[:1])
    return np.concatenate(found)


ASKS = (
    Ask(max_tokens=24, run=2),
    Ask(prompt=(9,), max_tokens=20, gamma=3, run=1),
    Ask(prompt=tuple(range(30, 50)), max_tokens=18, run=3),
    Ask(prompt=(7, 3, 90), max_tokens=9, gamma=0),
)


def check_features(state, asks) -> None:
    """Raises unless every slot was handed the features of decoding, and no others."""
    for slot, ask in enumerate(asks):
        table = np.asarray(state.memory.slots["table"][slot])
        expected = of_decoding(SMALL, ask)
        end = len(expected)
        assert end
        testing.assert_same_bits(table[:end], expected)
        assert np.isnan(table[end:]).all()


DRAFTERS = pytest.mark.parametrize("drafter", [CHAIN, TREE], ids=["chain", "tree"])


@DRAFTERS
def test_features_are_those_of_decoding(drafter):
    """Fails if features of a rejected row or another branch are given, or too many."""
    scheduler = scheduler_of(drafter=drafter, num_slots=len(ASKS))
    check_features(decoding.checked(SMALL, ASKS, scheduler=scheduler), ASKS)


def _late(real):
    """Plants a fault: features of the row before."""
    return lambda verified, *rest: real(
        verified.replace(at=jnp.roll(verified.at, 1, axis=1)), *rest
    )


def _rejected(real):
    """Plants a fault: features of the first columns, whichever path was kept."""

    def features(verified, outcome, num_kept, depth_max):
        columns = jnp.broadcast_to(
            1 + jnp.arange(depth_max), (verified.at.shape[0], depth_max)
        )
        return real(verified, outcome.replace(path=columns), num_kept, depth_max)

    return features


def _one_more(real):
    return lambda verified, outcome, num_kept, *rest: jnp.roll(
        real(verified, outcome, num_kept + 1, *rest), -1, axis=1
    )


FAULTS = {CHAIN: (_late, _one_more), TREE: (_late, _rejected)}


@DRAFTERS
def test_planted_faults_are_caught(drafter):
    """Negative control: features a position early or late, or of another branch."""
    asks, scheduler = ASKS[:1], scheduler_of(drafter=drafter)
    requests = [decoding.scripted(SMALL, ask) for ask in asks]
    faults = [(round_lib, "_features", plant) for plant in FAULTS[drafter]]
    check = lambda state: check_features(state, asks)
    begin = lambda: decoding.admit(scheduler, requests)
    planting.check_faults(scheduler.speculator, begin, faults, check)


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
