"""Continuations of texts by the target, greedy or drawn: what a drafter will meet.

Sixteen sequences at a time are decoded as the rows of one slab, with the weights as
they are shipped (bfloat16), so that the text is the target's own to the last bit.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from rich import progress

from spec_jax.model import config as config_lib, params as params_lib, qwen3
from spec_jax.ops import argmax
from spec_jax.paging import allocator, cache
from spec_jax.rules import sampling


SLOTS = 16
PAGE_SIZE = 64


def generate(
    params: params_lib.Params,
    config: config_lib.Qwen3Config,
    prefixes: np.ndarray,
    *,
    length: int,
    impl: str,
    kept: pathlib.Path,
    lengths: np.ndarray | None = None,
    seeds: np.ndarray | None = None,
) -> np.ndarray:
    """Continues `prefixes [n, P]` to int32 `[n, length]`; `n` of whole slabs.

    Args:
      lengths: tokens of each prefix `[n]`; all `P` of them if None.
      seeds: `[n]`, of sequences drawn at temperature 1; those below 0 are greedy, and
        so are all if None.
      kept: a file to which each slab is added when it is finished. A run that finds
        it goes on after its last whole slab; it stays behind.

    Raises:
      ValueError: `kept` is of other prefixes, or a slab would be left incomplete.
    """
    if len(prefixes) % SLOTS:
        raise ValueError(
            f"{len(prefixes)} rollouts are not of whole slabs of {SLOTS}; choose a "
            "multiple as --rollouts"
        )
    if lengths is None:
        lengths = np.full(len(prefixes), prefixes.shape[1], np.int32)
    done = _whole_slabs(kept, prefixes, lengths, length)
    with kept.open("ab") as file:
        file.truncate(done.nbytes)  # The slab that a kill cut short.
        starts = range(len(done), len(prefixes), SLOTS)
        bar = progress.track(
            starts,
            "rollouts",
            total=len(prefixes) // SLOTS,
            completed=len(done) // SLOTS,
        )
        for start in bar:
            batch = jnp.asarray(prefixes[start : start + SLOTS], jnp.int32)
            slab = slice(start, start + SLOTS)
            text = _continue(
                params,
                batch,
                jnp.asarray(lengths[slab], jnp.int32),
                None if seeds is None else _settings(seeds[slab]),
                config=config,
                length=length,
                impl=impl,
            )
            file.write(np.asarray(text).tobytes())
            file.flush()
    return np.fromfile(kept, np.int32).reshape(-1, length)


def _settings(seeds):
    """Settings of the slots of one slab."""
    made = [
        sampling.make_settings(temperature=float(seed >= 0), seed=max(int(seed), 0))
        for seed in seeds
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)


def _whole_slabs(kept, prefixes, lengths, length):
    """What `kept` holds of whole slabs, `[rows, length]`; none where it is missing."""
    if not kept.exists():
        return np.empty((0, length), np.int32)
    tokens = np.fromfile(kept, np.int32)
    rows = len(tokens) // (SLOTS * length) * SLOTS
    done = tokens[: rows * length].reshape(rows, length)
    given = np.arange(prefixes.shape[1]) < lengths[:rows, None]
    same = done[:, : prefixes.shape[1]] == prefixes[:rows].astype(np.int32)
    if not same[given].all():
        raise ValueError(f"{kept}: text of other prefixes or another length; delete it")
    return done


@functools.partial(jax.jit, static_argnames=("config", "length", "impl"))
def _continue(params, prefixes, lengths, settings, *, config, length, impl):
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
    text = jnp.pad(prefixes, ((0, 0), (0, length - prefixes.shape[1])))

    def step(position, carry):
        kv, text = carry
        rows = qwen3.Rows(
            tokens=text[:, position],
            slots=slots,
            positions=jnp.full((SLOTS,), position, jnp.int32),
            num_active=jnp.int32(SLOTS),
        )
        kv, outputs = qwen3.forward_rows(params, config, rows, kv, impl=impl)
        chosen = argmax.argmax(outputs.logits, num_active=rows.num_active, impl=impl)
        if settings is not None:
            draws = settings.temperature != 0
            drawn = sampling.sample_each(
                outputs.logits,
                settings,
                positions=jnp.full((SLOTS,), position + 1, jnp.int32),
                draws=draws,
            )
            chosen = jnp.where(draws, drawn, chosen)
        given = text[:, position + 1]
        is_given = position + 1 < lengths
        return kv, text.at[:, position + 1].set(jnp.where(is_given, given, chosen))

    _, text = jax.lax.fori_loop(0, length - 1, step, (kv, text))
    return text
