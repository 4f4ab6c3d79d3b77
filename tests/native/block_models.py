"""Block drafters, caches and rows that tests of native calls share."""

import decoding
import jax.numpy as jnp
from model import head_layouts

from spec_jax.model import decoder, head_params, row_model
from spec_jax.ops import projection
from spec_jax.paging import allocator


CAPACITY, SLOTS = 40, 3
SIZE = head_layouts.DFLASH.block_size
PLAIN = head_layouts.DFLASH
PASSED = head_layouts.with_heads("rnn", slots="fill-in")
HEADS = {
    "none": PLAIN,
    "all": head_layouts.with_heads("vanilla"),
    "few": head_layouts.with_heads("vanilla", draft_vocab_size=32, slots="fill-in"),
    "gated": head_layouts.with_heads("gated", draft_vocab_size=32),
    "rnn": head_layouts.with_heads("rnn", markov_rank=19),  # not whole vectors
    "passed": PASSED,
}


def make(config=PLAIN, dtype="float32", form=None):
    """Returns a drafter's config, and its weights for the kernels."""
    decoding.needs("native")
    weights = head_layouts.make_params(config, dtype)
    if (markov := weights.markov) is not None:
        markov = markov.replace(out=8 * markov.out)  # The token before decides.
        weights = weights.replace(markov=markov)
    config = head_layouts.with_dtype(config, dtype)
    return config, head_params.prepare(weights, "native", form=form)


def new_slots(layer, num_slots=SLOTS):
    """Returns a cache with pages for all positions of its slots."""
    model = row_model.RowModel(config=layer, impl="native", slab=SIZE)
    kv = model.new_cache(num_slots, capacity=CAPACITY, page_size=8)
    for slot in range(num_slots):
        kv = allocator.reserve(kv, slot, jnp.int32(CAPACITY))
    return kv


def native_norm(x, weight, eps, **_):
    """Returns the kernels' own norm: their product of normed rows and the identity."""
    flat = x.reshape(-1, x.shape[-1])
    eye, count = jnp.eye(flat.shape[1], dtype=x.dtype), jnp.int32(flat.shape[0])
    normed = projection.project(
        flat, eye, norm=weight, num_active=count, eps=eps, impl="native"
    )
    return normed.reshape(x.shape)


def two_slabs(live, height):
    """Returns two slabs of rows of two slots, `live` of each active."""
    own = jnp.arange(height, dtype=jnp.int32)
    return [
        decoder.Rows(
            tokens=start + own,
            slots=own // 5,
            positions=start // 2 + own % 5,
            num_active=jnp.int32(live),
        )
        for start in (0, height)
    ]
