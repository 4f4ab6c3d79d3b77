"""Section (a), whole steps: verification of a window against decoding it."""

import functools

import jax
import jax.numpy as jnp

from experiments.support import gpu_arrays, gpu_bits, gpu_task
from spec_jax.model import row_model
from spec_jax.ops import dispatch


def check(task: gpu_task.Task) -> None:
    """Logits, choices and K/V of 1 to 16 rows in one forward, against one at a time."""
    sizes = task.sizes
    config, height = sizes.draft, sizes.height
    model = row_model.RowModel(
        config=config, impl=dispatch.resolve(task.impl), slab=height
    )
    params = gpu_arrays.weights(config, seed=7)
    text = gpu_arrays.tokens(height, config.vocab_size)
    contexts = sizes.contexts[:2]
    capacity = max(contexts) + height
    box = gpu_arrays.CacheBox(model, capacity=capacity, page_size=sizes.page_size)
    for context in contexts:
        box.kv, decoded = _decode(model, params, box.at(context), text)
        name = f"whole step at {context}"
        gpu_bits.report_hash(task, name, decoded)
        if task.only_hashes:
            continue
        wrong = elements = 0
        for live in range(1, height + 1):
            box.kv, verified = _verify(
                model, params, box.at(context), text, jnp.int32(live)
            )
            found = gpu_bits.compare_rows(
                verified, decoded, at=range(height), live=live
            )
            wrong, elements = wrong + found[0], elements + found[1]
        name = f"{name}: verification against decoding"
        gpu_bits.report(task, name, cases=height, elements=elements, wrong=wrong)


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames=("kv",))
def _decode(model, params, kv, text):
    """All of the text, one token a forward."""
    start = kv.length[row_model.SLOT]
    height, vocab = text.shape[0], model.config.vocab_size

    def step(i, carry):
        kv, logits, chosen = carry
        kv, own = model.forward(
            params, kv, tokens=text[i][None], start=start + i, num_live=jnp.int32(1)
        )
        choice = model.choose(own, jnp.int32(1))
        return kv, logits.at[i].set(own[0]), chosen.at[i].set(choice[0])

    logits = jnp.zeros((height, vocab), jnp.float32)
    carry = kv, logits, jnp.zeros((height,), jnp.int32)
    kv, logits, chosen = jax.lax.fori_loop(0, height, step, carry)
    return kv, (logits, chosen, *_window(kv, start, height))


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames=("kv",))
def _verify(model, params, kv, text, live):
    """The first `live` tokens in one forward; the others are one token again."""
    start = kv.length[row_model.SLOT]
    window = jnp.where(jnp.arange(text.shape[0]) < live, text, 0)
    kv, logits = model.forward(params, kv, tokens=window, start=start, num_live=live)
    chosen = model.choose(logits, live)
    return kv, (logits, chosen, *_window(kv, start, text.shape[0]))


def _window(kv, start, height):
    """Keys and values at `start .. start + height`, all layers: `[R, L, K, H]`."""
    positions = start + jnp.arange(height)
    pages = kv.page_table[row_model.SLOT, positions // kv.page_size]
    at = positions % kv.page_size
    return tuple(
        jnp.stack([pool[pages, at] for pool in pools], axis=1) for pools in (kv.k, kv.v)
    )
