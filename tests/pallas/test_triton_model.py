"""The row contract of a whole model on the Triton kernels, interpreted on a CPU.

The oracle is one active row, decoded alone in row 0 of the slab. The code of the same
kernels for a GPU is tested in `test_hopper_model`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model import test_family_rows as families_lib, test_rows as rows_lib
from slow_cases import slow

from spec_jax import testing
from spec_jax.ops import projection
from spec_jax.pallas import skinny_gemm_triton


SLAB = 16
PREFIX = 250  # a window crosses a page, a block and a split of the keys
SIZES = {"hidden_size": 64, "intermediate_size": 96}
SIZES |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def window(count, slot=0, start=PREFIX):
    """Lists rows of a slot's own text."""
    text = rows_lib.text(slot, PREFIX + SLAB)
    return [(int(text[p]), slot, p) for p in range(start, start + count)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(rows_lib.Model):
    """One executable for everything: prefix, decoding and verification."""

    slab = SLAB

    def fill(self, kv, *, slot=0, length=PREFIX):
        for start in range(0, length, SLAB):
            kv, _ = self.run(kv, window(min(SLAB, length - start), slot, start))
        return kv


def make_model(**changes) -> Model:
    made = rows_lib.make_model("bfloat16", "interpret", **SIZES, **changes)
    return Model(config=made.config, params=made.params, impl=made.impl)


SLOW_BYTES = slow("q8_0")


@pytest.fixture(scope="module", params=["dense", SLOW_BYTES])
def model(request):
    return make_model(num_layers=1, weights=request.param)


@pytest.fixture(scope="module")
def filled(model):
    """Returns a pool of NaN, with a slot's prefix on pages in random order."""
    return model.fill(rows_lib.make_cache(model.config))


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


@pytest.mark.slow
def test_another_implementation_agrees_but_for_rounding(model, filled):
    """Fails if a weight is wrong, or an operation runs a kernel of another meaning."""
    reference = dataclasses.replace(model, impl="xla")
    kv = reference.fill(rows_lib.make_cache(model.config))
    expected = reference.run(kv, window(SLAB))[1].logits
    actual = model.run(filled, window(SLAB))[1].logits
    assert np.abs(actual - expected).max() <= 0.04 * np.abs(expected).max()


def test_a_plan_by_active_rows_is_caught(monkeypatch):
    """Negative control: sums in another order where one row is live, in one layer."""
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
@pytest.mark.parametrize("family", ["qwen2", "gpt_neox"])
def test_rows_of_other_families(family):
    """Fails if a row depends on others in a family whose projections have biases, or
    whose norms are no RMSNorms."""
    families_lib.test_rows_are_what_each_is_alone(family, "bfloat16", "interpret")
