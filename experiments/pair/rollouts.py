"""Greedy continuations of corpus text by the target: what the draft will meet.

Sixteen sequences at a time are decoded as the rows of one slab, with the weights as
they are shipped (bfloat16), so that the text is the target's own to the last bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from rich import progress

from spec_jax.model import config as config_lib, params as params_lib, qwen3
from spec_jax.ops import argmax
from spec_jax.paging import allocator, cache


SLOTS = 16
PAGE_SIZE = 64


def generate(
    params: params_lib.Params,
    config: config_lib.Qwen3Config,
    prefixes: np.ndarray,
    *,
    length: int,
    impl: str,
) -> np.ndarray:
    """Continues `prefixes [n, P]` greedily to `[n, length]`; `n` of whole slabs."""
    parts = []
    for start in progress.track(range(0, len(prefixes), SLOTS), "rollouts"):
        batch = jnp.asarray(prefixes[start : start + SLOTS], jnp.int32)
        text = _continue(params, batch, config=config, length=length, impl=impl)
        parts.append(np.asarray(text))  # Waits, so that the progress shown is real.
    return np.concatenate(parts)


@functools.partial(jax.jit, static_argnames=("config", "length", "impl"))
def _continue(params, prefixes, *, config, length, impl):
    """One slab of sequences: each step decodes one token of every slot."""
    pages = -(-length // PAGE_SIZE)
    kv = cache.init(
        num_layers=config.num_layers,
        num_slots=SLOTS,
        num_pages=SLOTS * pages,
        page_size=PAGE_SIZE,
        pages_per_slot=pages,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=config.dtype,
    )
    for slot in range(SLOTS):
        kv = allocator.reserve(allocator.register(kv, slot), slot, length)
    slots = jnp.arange(SLOTS, dtype=jnp.int32)
    num_given = prefixes.shape[1]
    text = jnp.pad(prefixes, ((0, 0), (0, length - num_given)))

    def step(position, carry):
        kv, text = carry
        rows = qwen3.Rows(
            tokens=text[:, position],
            slots=slots,
            positions=jnp.full((SLOTS,), position, jnp.int32),
            num_live=jnp.int32(SLOTS),
        )
        kv, outputs = qwen3.forward_rows(params, config, rows, kv, impl=impl)
        chosen = argmax.argmax(outputs.logits, num_live=rows.num_live, impl=impl)
        given = text[:, position + 1]
        is_given = position + 1 < num_given
        return kv, text.at[:, position + 1].set(jnp.where(is_given, given, chosen))

    _, text = jax.lax.fori_loop(0, length - 1, step, (kv, text))
    return text
