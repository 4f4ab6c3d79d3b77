"""What a draft model's cache holds after a round: committed tokens, no others."""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import pytest
from decoding import GAMMA_MAX, PROMPT

from spec_jax import rounds, session, testing
from spec_jax.drafters import draft_model
from spec_jax.model import params as params_lib, row_model
from spec_jax.ops import dispatch
from spec_jax.paging import cache


SIZES = {"capacity": decoding.CAPACITY, "page_size": decoding.PAGE_SIZE}


def native(model: row_model.RowModel) -> row_model.RowModel:
    """The model on native kernels, whose K/V is the same however rows are grouped."""
    try:
        dispatch.resolve("native")
    except NotImplementedError as error:
        pytest.skip(str(error))
    return dataclasses.replace(model, impl="native")


def nearly_the_target() -> params_lib.Params:
    """A draft that is right and wrong by turns: the target's weights, and noise."""
    noise = params_lib.init(jax.random.key(2), decoding.TARGET.config, stddev=0.06)
    return jax.tree.map(
        lambda x, n: x + n if x.ndim > 1 else x, decoding.TARGET_PARAMS, noise
    )


def run(draft_params, *, num_rounds):
    """The drafter, and the states after each of the first rounds."""
    target = native(decoding.TARGET)
    model = row_model.RowModel(config=target.config, impl="native", slab=2)
    drafter = draft_model.DraftModel(model=model, gamma_max=GAMMA_MAX)
    params = (decoding.TARGET_PARAMS, draft_params)
    caches = target.new_cache(**SIZES), model.new_cache(**SIZES)
    state = session.begin(target, drafter, params, *caches, PROMPT, max_tokens=40)
    states = []
    for _ in range(num_rounds):
        state = rounds.generate(
            target,
            drafter,
            params,
            state,
            gamma=jnp.int32(GAMMA_MAX),
            stop_ids=decoding.NO_STOP,
            max_rounds=jnp.int32(1),
        )
        session.check_state(state)
        states.append(jax.tree.map(jnp.array, state))  # the state is donated
    return drafter, states


def read(kv, layer, held):
    """Keys and values `[0, held)`; gathered whole, so that nothing compiles anew."""
    return [
        x[:held] for x in jax.device_get(cache.gather(kv, layer, 0, decoding.CAPACITY))
    ]


def assert_only_committed(drafter, draft_params, state):
    """Asserts that the draft's K/V is that of the committed text, and no longer."""
    cache.check_integrity(state.memory)
    held = int(state.memory.length[0])
    assert held <= int(state.length) - 1
    text = decoding.text(state)[: held + 1]
    fresh = drafter.model.new_cache(**SIZES)
    fresh = session.prefill(drafter.model, draft_params, fresh, text)
    for layer in range(len(fresh.k)):
        testing.assert_same_bits(
            read(state.memory, layer, held), read(fresh, layer, held), what=f"{layer=}"
        )


def test_a_rejected_draft_leaves_nothing_behind():
    """Fails if the K/V of a rejected draft stays, or of a kept one is lost."""
    draft_params = nearly_the_target()
    drafter, states = run(draft_params, num_rounds=6)
    for state in states:
        assert_only_committed(drafter, draft_params, state)
    # The rounds are not vacuous: some drafts were kept, and some were not.
    last = states[-1]
    assert 0 < int(last.num_accepted) < int(last.num_proposed)


def test_the_target_as_its_own_draft_is_always_right():
    """Fails if a draft is read from another row than the last live one."""
    drafter, states = run(decoding.TARGET_PARAMS, num_rounds=5)
    for state in states:
        assert int(state.num_accepted) == int(state.num_proposed)
        assert_only_committed(drafter, decoding.TARGET_PARAMS, state)


@pytest.mark.parametrize("shift", [1, 2])
def test_drafts_left_behind_are_caught(shift):
    """Negative control: a cache that says it holds more, of what was rejected."""
    draft_params = nearly_the_target()
    drafter, states = run(draft_params, num_rounds=6)
    rejecting = next(
        after
        for before, after in zip(states, states[1:], strict=False)
        if int(after.num_accepted - before.num_accepted) == 0
    )
    assert int(rejecting.memory.length[0]) == int(rejecting.length) - 1
    longer = rejecting.memory.replace(length=rejecting.memory.length + shift)
    spoilt = rejecting.replace(memory=longer, length=rejecting.length + shift)
    with pytest.raises((AssertionError, ValueError)):
        assert_only_committed(drafter, draft_params, spoilt)
