"""The row contract of a whole model on the Triton kernels, interpreted on a CPU.

The oracle is one active row, decoded alone in row 0 of the slab. What a GPU makes of
the same kernels is seen in `test_hopper_model`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model import test_family_rows as families_lib, test_rows as rows_lib

from spec_jax import testing
from spec_jax.drafters import draft_model, each
from spec_jax.engine import (
    baseline,
    checks,
    requests as requests_lib,
    round as round_lib,
    rows,
    scheduler,
)
from spec_jax.model import params as params_lib, row_model
from spec_jax.ops import projection
from spec_jax.paging import cache
from spec_jax.pallas import skinny_gemm_triton
from spec_jax.rules import sampling as sampling_lib


SLAB = 16
PREFIX = 250  # a window crosses a page, a block and a split of the keys
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
}


_forward = rows_lib.compile_forward()


def window(count, slot=0, start=PREFIX):
    """Rows of a slot's own text."""
    text = rows_lib.text(slot, PREFIX + SLAB)
    return [(int(text[p]), slot, p) for p in range(start, start + count)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(rows_lib.Model):
    """One executable for everything: prefix, decoding and verification."""

    def run(self, kv, rows, *, forward=_forward):
        return super().run(kv, rows, slab=SLAB, forward=forward)

    def fill(self, kv, *, slot=0, length=PREFIX):
        for start in range(0, length, SLAB):
            kv, _ = self.run(kv, window(min(SLAB, length - start), slot, start))
        return kv

    def decode_one_by_one(self, kv, rows, **options):
        outputs = []
        for row in rows:
            kv, one = self.run(kv, [row], **options)
            outputs.append(one)
        return kv, jax.tree.map(lambda *rows: np.concatenate(rows), *outputs)


def make_model(**changes) -> Model:
    made = rows_lib.make_model("bfloat16", "interpret", **SIZES, **changes)
    return Model(config=made.config, params=made.params, impl=made.impl)


@pytest.fixture(scope="module")
def model():
    return make_model(num_layers=1)


@pytest.fixture(scope="module")
def filled(model):
    """Two slots of a pool of NaN, on pages in random order, their prefixes written."""
    kv = rows_lib.make_cache(model.config, num_slots=2)
    for slot in range(2):
        kv = model.fill(kv, slot=slot)
    return kv


def first(outputs, count):
    return jax.tree.map(lambda x: x[:count], outputs)


def written(kv, length, slot=0):
    return rows_lib.written(kv, slot, length)


def test_verifying_equals_decoding_one_by_one(model, filled):
    """Fails if a row's bits depend on how many rows are active, or on padding."""
    decoded_kv, decoded = model.decode_one_by_one(filled, window(SLAB))
    assert np.isfinite(decoded.logits).all()
    for count in (1, 2, 5, SLAB):
        verified_kv, verified = model.run(filled, window(count))
        testing.assert_same_bits(verified, first(decoded, count), what=f"{count} live")
        length = PREFIX + count
        testing.assert_same_bits(
            written(verified_kv, length), written(decoded_kv, length)
        )


def test_another_implementation_agrees_but_for_rounding(model, filled):
    """A wrong weight must show; so must an op that runs another kernel's meaning."""
    reference = dataclasses.replace(model, impl="xla")
    kv = reference.fill(rows_lib.make_cache(model.config))
    expected = reference.run(kv, window(SLAB))[1].logits
    actual = model.run(filled, window(SLAB))[1].logits
    assert np.abs(actual - expected).max() <= 0.04 * np.abs(expected).max()


def test_a_plan_by_active_rows_is_caught(monkeypatch):
    """Negative control: sums in another order where one row is live. One layer."""
    model = make_model(num_layers=1)
    kv, rows = rows_lib.make_cache(model.config), window(5, start=0)
    real = projection.project

    def planted(x, w, *, num_active, **options):
        if x.shape[1] != model.config.hidden_size:
            return real(x, w, num_active=num_active, **options)
        plan = skinny_gemm_triton.Plan(block_n=16, block_k=16)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(skinny_gemm_triton, "plan_for", lambda *_, **__: plan)
            other = real(x, w, num_active=num_active, **options)
        return jnp.where(
            num_active == 1, other, real(x, w, num_active=num_active, **options)
        )

    monkeypatch.setattr(projection, "project", planted)
    forward = rows_lib.compile_forward()
    _, alone = model.decode_one_by_one(kv, rows, forward=forward)
    _, together = model.run(kv, rows, forward=forward)
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(together, alone)


@pytest.mark.slow
def test_rows_of_other_families(family="qwen2"):
    """Fails if a row depends on others where there are biases, or half a rotation."""
    families_lib.test_rows_are_what_each_is_alone(family, "bfloat16", "interpret")


GAMMAS, MAX_TOKENS = (4, 18), 24  # windows of one slab, and of two
PROMPT = [7, 3, 90, 41, 5, 66, 23, 8, 14, 2, 77]
SIZES_OF_CACHES = {"capacity": 64, "page_size": 8}


@pytest.fixture(scope="module", params=GAMMAS)
def pair(request):
    """A target of one layer, and a drafter of the same shape."""
    config = rows_lib.make_config("bfloat16", **SIZES, num_layers=1)
    target = row_model.RowModel(config=config, impl="interpret", slab=SLAB)
    params = params_lib.init(jax.random.key(0), config, stddev=0.1)
    return target, draft_model.DraftModel(model=target, gamma_max=request.param), params


def run_rounds(pair, draft_params, gamma, sampling, rule="coupled"):
    target, drafter, params = pair
    speculator = round_lib.Speculator(
        params=(params, draft_params),
        target=rows.SlotRows(model=target, num_slots=1),
        drafter=each.lift(drafter, 1, rule=rule),
        rule=rule,
    )
    slots = scheduler.Scheduler(speculator=speculator, **SIZES_OF_CACHES)
    request = requests_lib.Request(
        prompt=PROMPT, max_tokens=MAX_TOKENS, gamma=gamma, sampling=sampling
    )
    state = slots.begin(request)
    state = round_lib.generate(speculator, state, max_rounds=jnp.int32(100))
    slot = requests_lib.slot_of(state.slots, 0)
    checks.check_slot(slot, vocab_size=target.config.vocab_size)
    checks.check_refused([state.cache, state.memory])
    cache.check_integrity(state.cache)
    return slot, state.cache


SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 5},
)
"""Data: the same executables."""


def noisy_params(pair):
    """Those of a drafter that is sometimes right."""
    target, _, params = pair
    noise = params_lib.init(jax.random.key(2), target.config, stddev=0.02)
    return jax.tree.map(lambda x, n: x + n if x.ndim > 1 else x, params, noise)


@pytest.mark.slow
def test_a_generation_is_that_of_plain_decoding(pair):
    """Fails if tokens or committed K/V are not those of plain decoding.

    The perfect drafter is the target itself, and proposes from a cache and through
    kernels of its own: any proposal that is refused is a bit that differed.
    """
    target, drafter, params = pair
    most, noisy = drafter.gamma_max, noisy_params(pair)
    texts = set()
    for values in SAMPLINGS:
        sampling = sampling_lib.make_settings(**values)
        kv = target.new_cache(**SIZES_OF_CACHES)
        plain = baseline.begin(
            target, params, kv, PROMPT, max_tokens=MAX_TOKENS, sampling=sampling
        )
        plain = baseline.generate(target, params, plain, max_steps=jnp.int32(100))
        length = int(plain.length)
        assert length == len(PROMPT) + MAX_TOKENS
        texts.add(tuple(np.asarray(plain.tokens).tolist()))
        accepted = set()
        for gamma in (2, most) if values == SAMPLINGS[0] else (most,):
            for draft_params in (params, noisy):
                slot, kv = run_rounds(pair, draft_params, gamma, sampling)
                assert int(slot.length) == length
                testing.assert_same_bits(
                    (slot.tokens, written(kv, length - 1)),
                    (plain.tokens, written(plain.cache, length - 1)),
                    what=f"gamma {gamma}, {values}",
                )
                rate = int(slot.num_accepted) / int(slot.num_proposed)
                assert draft_params is noisy or rate == 1
                accepted.add(rate)
        assert min(accepted) < 1
    assert len(texts) == len(SAMPLINGS)
