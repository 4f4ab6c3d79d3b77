"""The row contract of a whole model on the Triton kernels, interpreted on a CPU.

The oracle is one active row, decoded alone in row 0 of the slab. The code of the same
kernels for a GPU is tested in `test_hopper_model`.
"""

import dataclasses

import numpy as np
import pytest
from model import test_rows as rows_lib
from slow_cases import slow

from spec_jax import testing


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


@pytest.mark.parametrize("weights", ["dense", slow("q8_0")])
def test_verifying_equals_decoding_one_by_one(weights):
    """Fails if a row's bits depend on how many rows are active, or on padding."""
    changes = SIZES | {"num_layers": 1, "weights": weights}
    made = rows_lib.make_model("bfloat16", "interpret", **changes)
    model = Model(config=made.config, params=made.params, impl=made.impl)
    # A pool of NaN, with a slot's prefix on pages in random order.
    filled = model.fill(rows_lib.make_cache(model.config))
    decoded_kv, decoded = model.decode_one_by_one(filled, window(SLAB))
    assert np.isfinite(decoded.logits).all()
    for count in (1, 2, 5, SLAB):
        verified_kv, verified = model.run(filled, window(count))
        expected = rows_lib.first(decoded, count)
        testing.assert_same_bits(verified, expected, what=f"{count} live")
        testing.assert_same_bits(
            *(
                rows_lib.written(kv, 0, PREFIX + count)
                for kv in (verified_kv, decoded_kv)
            )
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "gpt_neox"])
def test_rows_of_other_families(family):
    """Fails if a row depends on others in a family whose projections have biases, or
    whose norms are no RMSNorms."""
    changes = {"family": family, "num_layers": 1}
    model = rows_lib.make_model("bfloat16", "interpret", **changes)
    rows_lib.test_rows_do_not_depend_on_their_place_or_neighbours(model)
