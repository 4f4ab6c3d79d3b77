"""A head's drafts in one call: those of the path row by row, and its memory."""

import dataclasses
import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_eagle3 as eagle

from spec_jax import testing
from spec_jax.drafters import each, eagle3 as eagle3_lib, features as features_lib
from spec_jax.model import eagle3, eagle3_params
from spec_jax.rules import sampling as sampling_lib


MAX_LEN = 40
FULL = dataclasses.replace(eagle.HEAD, draft_vocab_size=96, norm_output=True)


def make(head=eagle.HEAD, dtype="float32", **changes):
    """A drafter on native kernels, and its parameters."""
    decoding.needs("native")
    head = dataclasses.replace(head, layer=dataclasses.replace(head.layer, dtype=dtype))
    drafter = eagle.make("native")
    model = dataclasses.replace(drafter.model, config=head.layer)
    drafter = dataclasses.replace(drafter, head=head, model=model, **changes)
    hot = eagle.HOT if head.draft_vocab_size < 96 else None
    params = eagle3_params.init(
        jax.random.key(3),
        head,
        embed=decoding.TARGET_PARAMS.embed.astype(dtype),
        hot=hot,
        stddev=0.3,
    )
    return drafter, eagle3_params.prepare(params, "native")


def plan(num_slots, *, seed, num_rounds, sits_out=0.2):
    """Yields lengths of the texts, and gammas, round after round."""
    rng = np.random.default_rng(seed)
    length = rng.integers(1, 9, num_slots)
    for _ in range(num_rounds):
        gamma = rng.integers(1, 5, num_slots) * (rng.random(num_slots) > sits_out)
        yield length, gamma
        length = np.minimum(length + rng.integers(1, 6, num_slots), MAX_LEN)


def settings_of(*slots):
    """Settings of each slot; "greedy", "plain" or "filtered"."""
    kinds = {
        "greedy": {"temperature": 0.0},
        "plain": {"temperature": 1.0},
        "filtered": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    }
    found = [
        sampling_lib.make_settings(**kinds[kind], seed=seed)
        for seed, kind in enumerate(slots)
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)


def compiled(slots, *given):
    """`propose(params, memory, asked)` in one call and row by row."""
    leaves, structure = jax.tree.flatten(given)
    shapes = (jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    return _compiled(slots, structure, *shapes)


@functools.cache
def _compiled(slots, structure, *shapes):
    """Compiles both for arrays of these shapes: once, whatever they hold."""

    def compile_now():
        propose = lambda params, memory, asked: slots.propose(params, memory, **asked)
        given = jax.tree.unflatten(structure, shapes)
        return jax.jit(propose).lower(*given).compile()

    with pytest.MonkeyPatch.context() as patch:
        whole = compile_now()
        patch.setattr(eagle3, "CHAIN_IMPLS", ())
        by_rows = compile_now()
    assert "spec_jax_head_chains" in whole.as_text()
    assert "spec_jax_head_chains" not in by_rows.as_text()
    return whole, by_rows


def rounds(
    drafter,
    params,
    planned,
    *,
    sampling=None,
    fault=lambda memory, sampling: (memory, sampling),
    **sizes,
):
    """Proposes in every round by both paths, and compares all that they return.

    Args:
      fault: of what the call is given.

    Returns:
      The drafts of every round and slot.
    """
    rng = np.random.default_rng(0)
    (length, _), *_ = planned = list(planned)
    num_slots, head = len(length), drafter.head
    slots = each.lift(drafter, num_slots)
    tokens = rng.integers(0, 96, (num_slots, MAX_LEN + 1)).astype(np.int32)
    shape = num_slots, MAX_LEN, len(head.taps), head.target_hidden_size
    features = rng.standard_normal(shape).astype(np.float32)
    memory = slots.init(**sizes)
    for slot, count in enumerate(length):
        prompt = tokens[slot, :count].tolist()
        memory = slots.prefill(
            params, memory, prompt, slot=slot, features=jnp.asarray(features[slot])
        )
    everyone, made = jnp.ones((num_slots,), bool), []
    for number, (length, gamma) in enumerate(planned):
        asked = {
            "tokens": jnp.asarray(tokens),
            "length": jnp.asarray(length, jnp.int32),
            "gamma": jnp.asarray(gamma, jnp.int32),
            "sampling": sampling,
        }
        whole, by_rows = compiled(slots, params, memory, asked)
        expected_memory, expected = by_rows(params, memory, asked)
        planted, drawn = fault(memory, sampling)
        is_planted = planted is not memory
        memory, found = whole(params, planted, asked | {"sampling": drawn})
        if is_planted:  # What is made of the fault is to differ, not the fault itself.
            ring = memory.ring.replace(features=expected_memory.ring.features)
            memory = memory.replace(ring=ring)
        counts = np.asarray(found.num_drafted)
        np.testing.assert_array_equal(counts, expected.num_drafted)
        for row, other, count in zip(
            found.tokens, expected.tokens, counts, strict=True
        ):
            assert row[:count].tolist() == other[:count].tolist()
            made.append(row[:count].tolist())
        assert (found.probs is None) == (drafter.draws != "independent")
        if found.probs is not None:
            is_made = np.arange(slots.gamma_max) < counts[:, None]
            ours, theirs = (np.asarray(x.probs)[is_made] for x in (found, expected))
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
        testing.assert_same_bits(memory, expected_memory)
        if number + 1 < len(planned):
            after = planned[number + 1][0]
            handed = np.zeros((num_slots, 1 + slots.gamma_max, *shape[2:]), np.float32)
            for slot, (old, new) in enumerate(zip(length, after, strict=True)):
                handed[slot, : new - old] = features[slot, old - 1 : new - 1]
            memory = decoding.commit(
                slots,
                params,
                memory,
                jnp.asarray(after, jnp.int32),
                asked=everyone,
                features=jnp.asarray(handed, head.layer.dtype),
            )
    return made


ROOM = {"capacity": 48, "page_size": 4}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("head", "dtype", "num_slots"),
    [
        (eagle.HEAD, "float32", 1),
        (eagle.HEAD, "bfloat16", 3),
        (FULL, "float32", 3),
        pytest.param(FULL, "bfloat16", 1, marks=eagle.SLOW),
    ],
    ids=["reduced", "bfloat16", "full", "full bfloat16"],
)
def test_drafts_and_memory_are_those_of_rows(head, dtype, num_slots):
    """Fails if a draft, a key or a page is another one; slots sit out at times."""
    drafter, params = make(head, dtype)
    planned = plan(num_slots, seed=1, num_rounds=9)
    made = rounds(drafter, params, planned, **ROOM)
    assert sum(map(len, made)) > 8 * num_slots


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [pytest.param(1, marks=eagle.SLOW), 3])
def test_a_slot_that_is_far_behind(num_slots, monkeypatch):
    """Fails if more than a round's features are not taken in, or too early."""
    drafter, params = make()
    planned = []
    for number, (length, _) in enumerate(plan(num_slots, seed=2, num_rounds=9)):
        turn = (number + np.arange(num_slots)) % 4
        planned.append((length, np.where(turn == 3, 4, 0)))
    made = rounds(drafter, params, planned, **ROOM)
    assert sum(map(len, made)) >= 8
    monkeypatch.setattr(features_lib, "RING_ROWS", 4)  # and 5 of a round
    assert rounds(drafter, params, planned, **ROOM) == made


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "num_slots", "capacity", "num_pages"),
    [
        ("paged", 3, 48, 11),
        ("paged", 1, 16, None),
        ("paged", 3, 24, None),
        ("static", 3, 24, None),
    ],
)
def test_where_pages_run_out(kind, num_slots, capacity, num_pages):
    """Fails if a slot drafts further than its pages, or another one gets them."""
    drafter, params = make()
    model = dataclasses.replace(drafter.model, cache=kind)
    drafter = dataclasses.replace(drafter, model=model)
    sizes = {"capacity": capacity, "page_size": 4, "num_pages": num_pages}
    for seed in range(3):
        planned = list(plan(num_slots, seed=seed, num_rounds=9, sits_out=0.3))
        made = rounds(drafter, params, planned, **sizes)
        asked = [int(count) for _, gamma in planned for count in gamma]
        assert any(len(row) < count for row, count in zip(made, asked, strict=True))


def test_a_hidden_state_of_another_pair_is_caught():
    """Negative control: features of the round that are one place early."""
    drafter, params = make()

    def early(memory, sampling):
        ring = memory.ring
        moved = jnp.roll(ring.features, 1, axis=1)
        return memory.replace(ring=ring.replace(features=moved)), sampling

    with pytest.raises(AssertionError):
        rounds(drafter, params, plan(1, seed=1, num_rounds=4), fault=early, **ROOM)


SAMPLED = ("plain", "greedy", "filtered")


@pytest.mark.few(1)
@pytest.mark.parametrize("draws", ["coupled", "independent"])
@pytest.mark.parametrize(
    ("head", "dtype"),
    [(eagle.HEAD, "float32"), pytest.param(FULL, "bfloat16", marks=eagle.SLOW)],
    ids=["reduced", "full bfloat16"],
)
def test_drawn_drafts_are_those_of_rows(head, dtype, draws):
    """Fails if a token is drawn with other noise, or from other tokens, than by XLA, or
    from another distribution than is stated."""
    drafter, params = make(head, dtype, draws=draws)
    planned, sampling = list(plan(3, seed=1, num_rounds=9)), settings_of(*SAMPLED)
    made = rounds(drafter, params, planned, sampling=sampling, **ROOM)
    assert sum(map(len, made)) > 24
    greedy = rounds(
        drafter, params, planned, sampling=settings_of(*["greedy"] * 3), **ROOM
    )
    of_slot = lambda found, slot: [row for row in found[slot::3] if row]
    assert of_slot(made, 1)[0] == of_slot(greedy, 1)[0]
    assert of_slot(made, 0) != of_slot(greedy, 0)


def test_noise_of_another_seed_is_caught():
    """Negative control: the call draws with the seed after each slot's."""
    drafter, params = make()

    def other(memory, sampling):
        return memory, sampling.replace(seed=sampling.seed + 1)

    how = {"sampling": settings_of("plain"), "fault": other, **ROOM}
    with pytest.raises(AssertionError):
        rounds(drafter, params, plan(1, seed=1, num_rounds=4), **how)


def test_what_is_one_call():
    """Fails if a tree, or a head of another implementation, is taken for chains."""
    of = lambda drafter: eagle3_lib.SlotEagle3(drafter=drafter, num_slots=1)
    drafter, _ = make()
    assert of(drafter)._is_one_call
    assert not of(eagle.make("xla"))._is_one_call
    assert not of(eagle.TREE)._is_one_call


@pytest.mark.slow
def test_a_slot_that_was_never_opened():
    """Fails, by never ending, if a loop waits for pages that are refused."""
    drafter, params = make()
    slots = each.lift(drafter, 2)
    memory = slots.init(**ROOM)
    features = jnp.ones((8, 2, 48))
    for slot in range(2):
        memory = slots.prefill(params, memory, [5, 7, 9], slot=slot, features=features)
    kv = memory.kv.replace(registered=jnp.array([False, True]))
    after, proposal = jax.jit(slots.propose)(
        params,
        memory.replace(kv=kv),
        tokens=jnp.ones((2, 20), jnp.int32),
        length=jnp.array([3, 3]),
        gamma=jnp.array([2, 2]),
        sampling=None,
    )
    assert proposal.num_drafted.tolist() == [0, 2]
    assert after.kv.refused.tolist() == [True, False]


def test_the_pool_of_a_head_is_not_copied():
    """Fails if the pool of a proposal goes through a copy."""
    drafter, params = make()
    slots = each.lift(drafter, 3)
    memory = slots.init(capacity=8 * 1024, page_size=8)
    decoding.assert_proposes_in_place(slots, params, memory, memory.kv)
