"""`steps.chains`: drafting in one call has the bits of steps one after the other."""

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import slow

from spec_jax import testing
from spec_jax.engine import protocols, round as round_lib, rows as rows_lib
from spec_jax.model import params as params_lib, row_model
from spec_jax.paging import allocator


WIDTH, MOST, PAGE_SIZE = 2, 5, 4
TEXTS = ((3, 1, 4, 1, 5), (9, 2), (6, 5, 3, 5, 8, 9, 7))
PENDING, COUNTS = (2, 1, 1), (4, 5, 0)


def make(dtype="bfloat16", **changes):
    config = decoding.make_config(dtype=dtype, num_layers=2, **changes)
    params = params_lib.init(jax.random.key(3), config, stddev=0.3)
    model = row_model.RowModel(config=config, impl="native", slab=WIDTH)
    target = rows_lib.SlotRows(model=model, num_slots=len(TEXTS))
    return target, params_lib.prepare(params, "native")


def filled(target, params, *, num_pages=None):
    """Returns a cache with each text but its pending tokens."""
    kv = target.new_cache(capacity=16, page_size=PAGE_SIZE, num_pages=num_pages)
    for slot, (text, pending) in enumerate(zip(TEXTS, PENDING, strict=True)):
        # `prefill` leaves the last token out.
        kept = list(text[: len(text) - pending + 1])
        kv = target.prefill(params, kv, kept, slot=slot, by_rows=True)
    return kv


def step_by_step(target, params, kv, counts):
    """Drafts each token in a window of its own; returns the cache and the drafts."""
    verify, drafts = jax.jit(target.verify), []
    for slot, count in enumerate(counts):
        text = list(TEXTS[slot])
        for _ in range(count):
            rest = text[int(kv.length[slot]) :]
            tokens = jnp.zeros((len(TEXTS), WIDTH), jnp.int32)
            asked = jnp.zeros((len(TEXTS),), jnp.int32).at[slot].set(len(rest))
            window = protocols.Window(
                tokens=tokens.at[slot, : len(rest)].set(jnp.asarray(rest, jnp.int32)),
                start=kv.length,
                num_active=asked,
            )
            kv, verified = verify(params, kv, window)
            last = verified.logits[verified.at[slot, len(rest) - 1]]
            text.append(int(np.argmax(last)))
        drafts.append(text[len(TEXTS[slot]) :])
    return kv, drafts


def chains(target, params, kv, counts, *, pending=PENDING):
    tokens = [
        (list(text[len(text) - count :]) + [0, 0])[:WIDTH]
        for text, count in zip(TEXTS, PENDING, strict=True)
    ]
    given = {"tokens": tokens, "pending": pending, "counts": counts}
    given = {name: jnp.asarray(value, jnp.int32) for name, value in given.items()}
    run = jax.jit(target.run_chains, static_argnames="most")
    return run(params, kv, most=MOST, **given)


def committed(kv):
    """Returns the K/V of each slot."""
    lengths = np.asarray(kv.length)
    return [decoding.held(kv, length, slot=slot) for slot, length in enumerate(lengths)]


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_drafts_are_those_of_single_steps(dtype):
    """Fails if a chain takes another row, place or token than steps would."""
    target, params = make(dtype)
    expected_kv, expected = step_by_step(target, params, filled(target, params), COUNTS)
    kv, drafts, made = chains(target, params, filled(target, params), COUNTS)
    assert [row[:n].tolist() for row, n in zip(drafts, made, strict=True)] == expected
    assert made.tolist() == list(COUNTS) and (np.asarray(drafts)[2] == 0).all()
    np.testing.assert_array_equal(kv.length, expected_kv.length)
    testing.assert_same_bits(committed(kv), committed(expected_kv))
    assert not np.asarray(kv.refused).any()
    # Negative control: another start gives other drafts.
    late = allocator.truncate(filled(target, params), 0, jnp.int32(2))
    other = chains(target, params, late, COUNTS)[1]
    assert other[0].tolist() != drafts[0].tolist()


def test_without_pages_a_slot_goes_as_far_as_it_can():
    """Fails if drafts are made, or written, without a page."""
    target, params = make()
    # One, one and two pages are held, and one is free.
    kv = filled(target, params, num_pages=5)
    assert int(kv.num_free) == 1
    after, drafts, made = chains(target, params, kv, (5, 5, 5))
    held = np.asarray(after.num_owned) * PAGE_SIZE
    expected = [min(5, held[slot] + 1 - len(text)) for slot, text in enumerate(TEXTS)]
    assert made.tolist() == expected and min(expected) < 5
    _, all_drafts, _ = chains(target, params, filled(target, params), (5, 5, 5))
    for row, other, count in zip(drafts, all_drafts, expected, strict=True):
        assert row[:count].tolist() == other[:count].tolist()
        assert (np.asarray(row)[count:] == 0).all()


@pytest.mark.parametrize("pending", [0, -1, WIDTH + 1])
def test_a_text_that_is_stored_or_far_ahead_sits_out(pending):
    """Fails if the kernel reads beyond the tokens that it is given."""
    target, params = make()
    kv, drafts, made = chains(
        target, params, filled(target, params), COUNTS, pending=(pending, 1, 1)
    )
    assert made.tolist() == [0, 5, 0]
    assert int(kv.length[0]) == len(TEXTS[0]) - PENDING[0]
    assert (np.asarray(drafts)[0] == 0).all()


def test_all_drafts_of_a_round_are_one_call():
    """Fails if each draft is a step of its own, with XLA in between."""

    def calls(**changes):
        """Counts the calls of chains and of steps in a program of rounds."""
        changes = {"catch_up_rows": 16} | changes
        drafter = decoding.draft_drafter(impl="native", **changes)
        setting = decoding.Setting(target=decoding.NATIVE)
        made = setting.scheduler(drafter, draft_params=decoding.NEARLY_TARGET)
        program = round_lib.generate.lower(
            made.speculator, made.empty(draws=False), max_rounds=jnp.int32(1)
        ).as_text()
        names = ("spec_jax_chains", "spec_jax_step")
        return [program.count(f"custom_call @{name}") for name in names]

    # The draft model's catching up, and the target's verification, are steps.
    assert calls() == [1, 2]
    # Negative control: a draft that is looked at before the next one is a step.
    assert calls(min_confidence=0.5)[0] == 0
