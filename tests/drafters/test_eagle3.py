"""EAGLE-3 heads of random weights: lossless, and their proposals those of a fresh head.

The oracle of proposals is the head run over whole sequences, `eagle3.forward_sequence`.
"""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import pytest
from decoding import SMALL, Ask

from spec_jax.drafters import eagle3 as drafting, tree_shapes
from spec_jax.model import eagle3_params, row_model


HOT = jnp.arange(0, 96, 2, dtype=jnp.int32)
HEAD = eagle3_params.Eagle3Config(
    layer=decoding.make_config(num_layers=1),
    draft_vocab_size=len(HOT),
    target_hidden_size=48,
    taps=(1, 0),  # of two layers
).validate()
PARAMS = eagle3_params.init(
    jax.random.key(3),
    HEAD,
    embed=decoding.TARGET_PARAMS.embed,
    hot=HOT,
    stddev=0.3,
)


def make(impl=SMALL.target.impl, **changes) -> drafting.Eagle3:
    model = row_model.RowModel(config=HEAD.layer, impl=impl, slab=4)
    return drafting.Eagle3(**{"head": HEAD, "model": model, "gamma_max": 4} | changes)


CHAIN = make()
TREE = CHAIN.for_tree(tree_shapes.parse("3x3:4@1"))
FIXED = CHAIN.for_tree(tree_shapes.parse("2-1"))
WARM = (("temperature", 0.7), ("seed", 3))
PLAIN = (("temperature", 1.0), ("seed", 5))

ASKS = (
    Ask(max_tokens=24),
    Ask(prompt=(9,), max_tokens=20, gamma=3),
    Ask(prompt=tuple(range(30, 50)), max_tokens=18),
    Ask(prompt=(7, 3, 90), max_tokens=9, gamma=0),
)


def drawn(sampling):
    """The same sequences; the last stays greedy."""
    one = lambda ask: dataclasses.replace(ask, sampling=sampling)
    return (*map(one, ASKS[:3]), ASKS[3])


def run(setting, drafter, asks, *, params=PARAMS, **changes):
    """All rounds of the sequences, drafted by a head; checked."""
    scheduler = setting.scheduler(
        drafter, num_slots=len(asks), draft_params=params, **changes
    )
    requests = [ask.request() for ask in asks]
    state = decoding.generate(scheduler, decoding.admit(scheduler, requests))
    return state


def setting_of(impl):
    decoding.needs(impl)
    target = dataclasses.replace(SMALL.target, impl=impl)
    return dataclasses.replace(SMALL, target=target)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("sampling", [(), WARM, PLAIN], ids=["greedy", "0.7", "1"])
@pytest.mark.parametrize("drafter", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("num_asks", [1, 4])
@pytest.mark.parametrize("impl", ["native", pytest.param("xla", marks=SLOW)])
@pytest.mark.few(3)
def test_tokens_are_those_of_decoding(impl, num_asks, drafter, sampling):
    """Fails if a head can change a token, or the K/V of the target."""
    setting = setting_of(impl)
    model = dataclasses.replace(drafter.model, impl=impl)
    drafter = dataclasses.replace(drafter, model=model)
    asks = drawn(sampling)[:num_asks] if sampling else ASKS[:num_asks]
    state = run(setting, drafter, asks)
    decoding.assert_as_decoded(setting, state, asks)
    assert int(state.slots.num_proposed[0]) > 0
    decoding.check_cache(state.memory.kv)
