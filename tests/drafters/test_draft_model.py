"""Draft models, alone and beside suffix statistics, against the kit."""

import dataclasses
import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import rounds, session, testing
from spec_jax.drafters import draft_model, hybrid, suffix
from spec_jax.model import params as params_lib
from spec_jax.testing import bench


GAMMA_MAX = 4
BENCH = decoding.quickest_bench(GAMMA_MAX)
DRAFT = draft_model.DraftModel(
    model=dataclasses.replace(BENCH.target, slab=2), gamma_max=GAMMA_MAX
)
ROUND_LOCAL = dataclasses.replace(
    DRAFT,
    model=dataclasses.replace(DRAFT.model, cache="static"),
    draft_cache="round",
)
HYBRID = hybrid.Hybrid(
    suffix=suffix.SuffixDecoding(gamma_max=GAMMA_MAX), draft=DRAFT, threshold=2.0
)


def nearly_the_target() -> params_lib.Params:
    """The target's weights and noise: a draft that is right and wrong by turns."""
    noise = params_lib.init(jax.random.key(2), bench.TINY, stddev=0.02)
    return jax.tree.map(lambda x, n: x + n if x.ndim > 1 else x, BENCH.params, noise)


def hybrid_params() -> hybrid.HybridParams:
    return hybrid.HybridParams(draft=nearly_the_target(), corpus=suffix.empty_corpus(8))


@pytest.mark.parametrize("drafter", [DRAFT, ROUND_LOCAL], ids=["kept", "round"])
def test_a_draft_model_keeps_the_contract(drafter):
    checked = testing.check_drafter(drafter, nearly_the_target(), BENCH)
    assert checked == tuple(testing.CLAUSES)


class Hoarder(draft_model.DraftModel):
    """Keeps the keys of drafts that were not committed."""

    def commit(self, params, memory, length):
        return memory


def test_a_cache_that_is_not_cut_is_caught():
    """Negative control of the kit's truncation, on a cache and not on a number."""
    drafter = Hoarder(model=DRAFT.model, gamma_max=GAMMA_MAX)
    with pytest.raises(AssertionError, match="truncation: .* from a fresh memory"):
        testing.check_truncation(drafter, nearly_the_target(), BENCH)


def test_a_hybrid_keeps_the_contract():
    checked = testing.check_drafter(HYBRID, hybrid_params(), BENCH)
    assert checked == tuple(testing.CLAUSES)


@functools.partial(jax.jit, static_argnames="drafter")
def propose(drafter, params, memory, tokens, length):
    return drafter.propose(
        params, memory, tokens=tokens, length=length, gamma=jnp.int32(GAMMA_MAX)
    )


def after(drafter, params, text):
    """Memory and proposal after a text that was prefilled."""
    memory = drafter.prefill(params, drafter.init(**BENCH.sizes), text)
    tokens = np.zeros((BENCH.capacity + 1,), np.int32)
    tokens[: len(text)] = text
    return propose(drafter, params, memory, jnp.asarray(tokens), jnp.int32(len(text)))


def test_the_draft_model_is_asked_only_where_statistics_are_not_sure():
    """Fails if both are paid for, or the wrong one is heard."""
    params = hybrid_params()
    sure, unsure = [1, 2, 3, 4] * 3, [1, 2, 3, 4, 5, 6, 7]
    memory, proposal = after(HYBRID, params, sure)
    testing.assert_same_bits(proposal.tokens, jnp.asarray([1, 2, 3, 4], jnp.int32))
    assert int(memory.length[0]) == len(sure) - 1  # No row was run.
    memory, proposal = after(HYBRID, params, unsure)
    alone, expected = after(DRAFT, params.draft, unsure)
    testing.assert_same_bits(proposal, expected)
    testing.assert_same_bits(memory, alone)
    assert int(memory.length[0]) == len(unsure) - 1 + GAMMA_MAX


def test_a_threshold_is_a_threshold():
    """Negative control: out of reach, the statistics are never heard."""
    never = dataclasses.replace(HYBRID, threshold=100.0)
    memory, _ = after(never, hybrid_params(), [1, 2, 3, 4] * 3)
    assert int(memory.length[0]) == 11 + GAMMA_MAX


def test_the_hybrids_cache_is_not_copied():
    """Fails if the branch hands the pool through: nothing of its size is temporary."""
    sizes = {"capacity": 8 * 1024, "page_size": 8}
    model = dataclasses.replace(DRAFT.model, impl="xla")
    drafter = dataclasses.replace(HYBRID, draft=dataclasses.replace(DRAFT, model=model))
    target, params = bench.tiny(GAMMA_MAX).target, (BENCH.params, hybrid_params())
    state = session.begin(
        target,
        drafter,
        params,
        target.new_cache(capacity=8, page_size=8),
        drafter.init(**sizes),
        [5],
        max_tokens=4,
    )
    usage = (
        rounds.generate.lower(
            target,
            drafter,
            params,
            state,
            gamma=jnp.int32(GAMMA_MAX),
            stop_ids=session.stop_array(()),
            max_rounds=jnp.int32(4),
        )
        .compile()
        .memory_analysis()
    )
    pool_bytes = sum(x.nbytes for x in (*state.memory.k, *state.memory.v))
    assert usage.alias_size_in_bytes >= pool_bytes
    assert usage.temp_size_in_bytes < pool_bytes / 8


def test_hybrids_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match="gamma_max=3 and the draft model gamma_max=4"):
        hybrid.Hybrid(suffix=suffix.SuffixDecoding(gamma_max=3), draft=DRAFT)
    with pytest.raises(ValueError, match="threshold=0.0 must be above 0"):
        dataclasses.replace(HYBRID, threshold=0.0)


@pytest.mark.parametrize("catch_up_rows", [0, 8])
def test_a_cache_that_was_full_drafts_again(catch_up_rows):
    """Fails if a round without room is remembered, or takes up room that is there."""
    drafter = dataclasses.replace(DRAFT, catch_up_rows=catch_up_rows)
    params, sizes = nearly_the_target(), {"capacity": 16, "page_size": 8}
    text = [7, 3, 90, 41, 5, 66, 23, 8, 14, 2, 77, 9, 31, 60, 12, 4, 88, 19, 50, 6]
    tokens = jnp.zeros((BENCH.capacity + 1,), jnp.int32).at[:20].set(jnp.asarray(text))

    def drafts_after(memory, length):
        """The drafts, none of which is committed, and the memory without them."""
        n = jnp.int32(length)
        memory = drafter.commit(params, memory, n)
        memory, proposal = propose(drafter, params, memory, tokens, n)
        drafts = proposal.tokens[: int(proposal.num_drafted)].tolist()
        return drafter.commit(params, memory, n), drafts

    def fresh(length):
        memory = drafter.prefill(params, drafter.init(**sizes), text[:length])
        return drafts_after(memory, length)[1]

    memory = drafter.prefill(params, drafter.init(**sizes), text[:14])
    # The last draft needs no room: 16 positions hold what the 17th token follows.
    for length, count in ((14, 3), (17, 0), (20, 0), (16, 1), (10, 4), (5, 4)):
        memory, drafts = drafts_after(memory, length)
        assert len(drafts) == count, length
        assert drafts == (fresh(length) if length <= 16 else [])
    # A pool that others emptied, and gave back.
    memory = drafter.commit(params, memory, jnp.int32(2))
    free = {"num_free": memory.num_free, "free_pages": memory.free_pages}
    free = jax.tree.map(jnp.array, free)
    memory, drafts = drafts_after(memory.replace(num_free=jnp.int32(0)), 14)
    assert drafts == []
    _, drafts = drafts_after(memory.replace(**free), 14)
    assert drafts == fresh(14)
