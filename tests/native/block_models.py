"""Block drafters, caches and rows that tests of native calls share."""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
from model import block_cases

from spec_jax.model import block_params, decoder, params, row_model
from spec_jax.ops import projection
from spec_jax.paging import allocator


CAPACITY, SLOTS = 40, 3
SIZE = block_cases.DFLASH.block_size
PLAIN = block_cases.DFLASH
PASSED = block_cases.with_heads("rnn", slots="fill-in")
HEADS = {
    "none": PLAIN,
    "all": block_cases.with_heads("vanilla"),
    "few": block_cases.with_heads("vanilla", draft_vocab_size=32, slots="fill-in"),
    "gated": block_cases.with_heads("gated", draft_vocab_size=32),
    "rnn": block_cases.with_heads("rnn", markov_rank=19),  # not whole vectors
    "passed": PASSED,
}


def make(config=PLAIN, dtype="float32", form=None):
    """Returns a drafter's config, and its weights for the kernels."""
    decoding.needs("native")
    is_small = config.draft_vocab_size == 32
    hot = jnp.arange(3, 96, 2, dtype=jnp.int32)[:32] if is_small else None
    config = dataclasses.replace(
        config, layer=dataclasses.replace(config.layer, dtype=dtype)
    )
    target = params.init(jax.random.key(9), block_cases.TARGET, stddev=0.3)
    target = params.cast(target, dtype)
    shared = {"embed": target.embed, "lm_head": target.head, "hot": hot}
    weights = block_params.init(jax.random.key(5), config, **shared, stddev=0.3)
    if (markov := weights.markov) is not None:
        markov = markov.replace(out=8 * markov.out)  # The token before decides.
        if markov.mix_bias is not None:
            bias = jax.random.normal(jax.random.key(6), markov.mix_bias.shape)
            markov = markov.replace(mix_bias=bias.astype(dtype))
        weights = weights.replace(markov=markov)
    return config, block_params.prepare(weights, "native", form=form)


def new_slots(layer, num_slots=SLOTS):
    """Returns a cache with pages for all positions of its slots."""
    model = row_model.RowModel(config=layer, impl="native", slab=SIZE)
    kv = model.new_slots(num_slots, capacity=CAPACITY, page_size=8)
    for slot in range(num_slots):
        kv = allocator.reserve(kv, slot, jnp.int32(CAPACITY))
    return kv


def native_norm(x, weight, eps):
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
