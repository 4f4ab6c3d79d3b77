"""The row contract of a whole model on the Triton kernels, interpreted on a CPU.

The oracle is one active row, decoded alone in row 0 of the slab; for blocks of more
rows than a slab it is the block of one slot, run alone: 17 rows in two slabs. The code
of the same kernels for a GPU is tested in `test_hopper_model`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model import head_layouts, test_rows as rows_lib
from slow_cases import slow

from spec_jax import testing
from spec_jax.drafters import block
from spec_jax.model import row_model
from spec_jax.paging import allocator


SIZES = {"hidden_size": 64, "intermediate_size": 96}
SIZES |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(rows_lib.Model):
    """One executable for everything: prefix, decoding and verification."""

    def fill(self, kv, *, slot=0, length=rows_lib.PREFIX):
        text = [(int(x), slot, at) for at, x in enumerate(rows_lib.text(slot)[:length])]
        for start in range(0, length, self.slab):
            kv, _ = self.run(kv, text[start : start + self.slab])
        return kv


@pytest.mark.parametrize("weights", ["dense", slow("q8_0")])
def test_verifying_equals_decoding_one_by_one(weights):
    """Fails if a row's bits depend on how many rows are active, or on padding."""
    changes = SIZES | {"num_layers": 1, "weights": weights}
    made = rows_lib.make_model("bfloat16", "interpret", **changes)
    model = Model(config=made.config, params=made.params, impl=made.impl)
    rows_lib.assert_verifying_is_decoding(model, (1, 2, rows_lib.WINDOW))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "gpt_neox"])
def test_rows_of_other_families(family):
    """Fails if a row depends on others in a family whose projections have biases, or
    whose norms are no RMSNorms."""
    changes = {"family": family, "num_layers": 1}
    model = rows_lib.make_model("bfloat16", "interpret", **changes)
    rows_lib.test_rows_do_not_depend_on_their_place_or_neighbours(model)


SIZE, SLOTS = 17, 4  # 68 rows: more than run at once
CONTEXT = (0, 3, 9, 5)
ANCHORS = (3, 5, 7, 11)
HEAD = dataclasses.replace(
    head_layouts.DFLASH,
    layer=dataclasses.replace(head_layouts.LAYER, num_layers=1, dtype="bfloat16"),
    block_size=SIZE,
)


def run(params, impl, which):
    """Returns a batch's keys, and hidden states and logits of blocks, of these slots.
    The context of each slot is random keys and values."""
    which = np.asarray(which)
    slab = row_model.slab_for(impl, SIZE)
    model = row_model.RowModel(config=HEAD.layer, impl=impl, slab=slab)
    drafter = block.BlockDrafter(head=HEAD, model=model, gamma_max=HEAD.num_drafts)
    slots = drafter.for_slots(len(which))
    memory = slots.init(capacity=16, page_size=8)
    kv = memory.kv
    pools = [np.zeros(pages.shape, jnp.bfloat16) for pages in (*kv.k, *kv.v)]
    for slot, known in enumerate(which):
        kv = allocator.reserve(kv, slot, kv.slot_capacity)
        rng = np.random.default_rng(known)
        for pool in pools:
            at = np.asarray(kv.page_table)[slot]
            pool[at] = rng.normal(size=(len(at), *pool.shape[1:]))
    k, v = map(jnp.asarray, pools)
    lengths, anchors = (jnp.asarray(x, jnp.int32)[which] for x in (CONTEXT, ANCHORS))

    @jax.jit
    def blocks(params, kv):
        asked = jnp.ones(len(which), bool)
        kv, *outputs = slots._run_block(params, kv, anchors[:, None], lengths, asked)
        return kv.k[0][kv.page_table], *outputs

    kv = kv.replace(k=(k,), v=(v,), length=lengths)
    return jax.tree.map(np.asarray, blocks(params, kv))


@pytest.mark.slow  # More slabs are in `test_pallas_plans`, too.
def test_a_block_is_that_block_alone_and_by_xla():
    """Fails if a row's bits depend on how many slabs or tiles there are, or if a row
    sees less than its block, or another block."""
    params = head_layouts.make_params(HEAD, "bfloat16")
    together = run(params, "interpret", range(SLOTS))
    alone = run(params, "interpret", [2])
    testing.assert_same_bits(alone, tuple(x[2:3] for x in together))
    found = together[1].astype(np.float32)
    expected = run(params, "xla", range(SLOTS))[1].astype(np.float32)
    size = np.linalg.norm(expected, axis=2)
    assert (np.linalg.norm(found - expected, axis=2) < 0.02 * size).all()
    # Negative control: the block of another slot.
    assert (np.linalg.norm(found[1:] - expected[:-1], axis=2) > 0.1 * size[1:]).all()
