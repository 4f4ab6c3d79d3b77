"""`steps.step`: one call has the bits of the operations one by one; `steps.chains`:
drafting in one call has those of steps one after the other."""

import functools

import block_models as models
import decoding
import jax
import jax.numpy as jnp
import numpy as np
import page_tables
import pytest
from slow_cases import slow

from spec_jax import testing
from spec_jax.engine import protocols, round as round_lib, rows as rows_lib
from spec_jax.model import decoder, params as params_lib, row_model
from spec_jax.native import steps


SLAB = 9
TAPS = (0, 2, 1)


def make(dtype, **changes):
    config = decoding.make_config(dtype=dtype, num_layers=2, **changes)
    params = params_lib.init(jax.random.key(3), config, stddev=0.1)
    if config.is_bytes:
        params = params_lib.to_bytes(params, config.weights)
    return config, params_lib.prepare(params, "native")


def compile_(config, *, taps=TAPS, **how):
    """Returns a step, which is compiled once."""
    how |= {"config": config, "impl": "native", "taps": taps}
    return jax.jit(functools.partial(decoder.forward_rows, **how))


def run(config, params, live, *, num_kept=None, forward=None, **how):
    """Runs two slabs of two slots; returns logits and features of `num_kept` rows, or
    of the active ones, and both pools."""
    forward = forward or compile_(config, **how)
    kept = slice(live if num_kept is None else num_kept)
    kv, found = models.new_slots(config, 2), []
    for rows in models.two_slabs(live, SLAB):
        kv, outputs = forward(params, rows=rows, kv=kv)
        found += [outputs.logits[kept], outputs.features[kept]]
    return jax.tree.map(np.asarray, (found, kv.k, kv.v))


@pytest.mark.parametrize(
    ("dtype", "live", "changes"),
    [
        pytest.param("float32", 6, {}, id="float32-6"),
        pytest.param("float32", 3, {"tie_word_embeddings": False}, id="own head"),
        pytest.param("bfloat16", 1, {}, id="bfloat16-1"),
        pytest.param("bfloat16", 6, {"weights": "q8_0"}, id="q8_0"),
        pytest.param("bfloat16", 9, {"weights": "q4_1"}, id="q4_1"),
    ],
)
def test_a_step_is_its_operations(dtype, live, changes):
    """Fails if the step leaves out an operation, rounds or sums otherwise, or takes the
    embedding for the head although there is a head."""
    config, params = make(dtype, **changes)
    assert isinstance(params.embed, jax.Array) == ("tie_word_embeddings" in changes)
    one_by_one = run(config, params, live, observe=lambda layer, name, value: value)
    testing.assert_same_bits(run(config, params, live), one_by_one)


@pytest.mark.parametrize("taps", [TAPS, TAPS[::2]])
@pytest.mark.parametrize(
    ("head_dim", "weights"), [(8, "dense"), (10, "dense"), (8, "q8_0")]
)
def test_without_logits_the_rest_is_the_same(head_dim, weights, taps):
    """Fails if features, keys or values change when the head is left out, and, where
    no tap needs it, the last layer but for its keys and values. With a head size of 10,
    the first key is not the first output of a panel."""
    config, params = make("bfloat16", head_dim=head_dim, weights=weights)
    whole, *pools = run(config, params, 4, taps=taps)
    less, *same = run(config, params, 4, taps=taps, with_logits=False)
    testing.assert_same_bits(same, pools)
    assert all(np.count_nonzero(pool[-1]) for pool in pools)
    testing.assert_same_bits(less[1::2], whole[1::2])
    assert [logits.shape for logits in less[::2]] == [(0, config.vocab_size)] * 2


@pytest.fixture
def poisoned(monkeypatch):
    """Gives steps memory of NaN to write their results to."""
    call = steps.calls.call

    def poison(target, outputs, *arguments, updated, **how):
        if target == "step":
            # Kernels take any number of arguments between the last layer and the pools.
            nans = [jnp.full(shape, jnp.nan, dtype) for shape, dtype in outputs]
            outputs, updated = [], [*nans, *updated]
        return call(target, outputs, *arguments, updated=updated, **how)

    monkeypatch.setattr(steps.calls, "call", poison)


@pytest.mark.parametrize("with_logits", [False, True])
@pytest.mark.parametrize("live", [0, 4, SLAB])
def test_padding_rows_of_features_are_zeros(live, with_logits, poisoned):
    """Fails if they keep old memory, whose NaN would stop `jax_debug_nans`."""
    how = {"with_logits": with_logits, "num_kept": SLAB}
    found, *_ = run(*make("bfloat16"), live, **how)
    for features in found[1::2]:
        assert not features[live:].any() and np.isfinite(features[:live]).all()
    if with_logits and live < SLAB:  # Negative control: the memory is NaN.
        assert all(np.isnan(logits[live:]).all() for logits in found[::2])


def test_refusals():
    """Fails if the kernel runs on weights of another shape or form."""
    config, params = make("float32")
    kv = models.new_slots(config, 2)
    first, second = params.layers
    number = jnp.zeros((2,), jnp.int32)
    angle = jnp.zeros((2, config.head_dim // 2))
    rows = decoder.Rows(
        tokens=number, slots=number, positions=number, num_active=jnp.int32(1)
    )
    how = {"rows": rows, "angles": (angle, angle), "taps": (), "with_logits": True}
    bad = second.replace(down=second.gate_up)
    half = second.replace(k_norm=None)
    pools = (kv.k[0][:2],) * 2
    for message, (weights, cache, change) in {
        r"taps=\(3,\) of 2 layers": (params, kv, {"taps": (3,)}),
        "cos has shape": (params, kv, {"angles": (angle[:1], angle)}),
        "page_table has shape": (params, kv.replace(page_table=number), {}),
        "both, or neither": (params.replace(layers=(first, half)), kv, {}),
        "down has shape": (params.replace(layers=(first, bad)), kv, {}),
        "v_pages has shape": (params, kv.replace(v=pools), {}),
        "of panels": (params.replace(embed=jnp.zeros(params.embed.shape)), kv, {}),
    }.items():
        with pytest.raises(ValueError, match=message):
            steps.step(model=steps.Model(weights, config, cache), **(how | change))


WIDTH, MOST, PAGE_SIZE = 2, 5, 4
TEXTS = ((3, 1, 4, 1, 5), (9, 2), (6, 5, 3, 5, 8, 9, 7))
PENDING, COUNTS = (2, 1, 1), (4, 5, 0)


def of_texts(dtype="bfloat16"):
    """Returns a target with a slot for each text, and its weights."""
    config = decoding.make_config(dtype=dtype, num_layers=2)
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
    target, params = of_texts(dtype)
    expected_kv, expected = step_by_step(target, params, filled(target, params), COUNTS)
    kv, drafts, made = chains(target, params, filled(target, params), COUNTS)
    assert [row[:n].tolist() for row, n in zip(drafts, made, strict=True)] == expected
    assert made.tolist() == list(COUNTS) and (np.asarray(drafts)[2] == 0).all()
    np.testing.assert_array_equal(kv.length, expected_kv.length)
    testing.assert_same_bits(committed(kv), committed(expected_kv))
    assert not np.asarray(kv.refused).any()
    # Negative control: another start gives other drafts.
    late = page_tables.truncate(filled(target, params), 0, jnp.int32(2))
    other = chains(target, params, late, COUNTS)[1]
    assert other[0].tolist() != drafts[0].tolist()


def test_without_pages_a_slot_goes_as_far_as_it_can():
    """Fails if drafts are made, or written, without a page."""
    target, params = of_texts()
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
    target, params = of_texts()
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
