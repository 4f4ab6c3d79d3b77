"""Noisy log weights; a draw takes the highest (Pallas Triton): one launch.

    log weight + Gumbel noise of a token that the filters keep;  -inf of another one

as `rules.sampling.noisy_weights` with the noise of `Stream.SAMPLE`, or without noise as
`log_weights` above temperature 0. The noise has the bits of `rules.sampling.noise`, by
Threefry (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405). All of it
is elementwise: a token's noise depends on seed, position and the token alone. Program
`(r, c)` has `CHUNK` tokens of row `r`. Rows that do not draw are neither read nor
written.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import argmax_triton, first_tokens_triton as order, launch, slab


CHUNK = 1024  # tokens of a program

_TINY = float(jnp.finfo(jnp.float32).tiny)
_ONE = 0x3F800000  # the bits of 1.0


class Rows(NamedTuple):
    """Inputs of a kernel for each row: arrays, or references to them."""

    logits: Any  # [R, V] float32 or bfloat16
    highest: Any  # [R], each row's largest logit
    kept: order.Kept
    temperature: Any  # [R] float32
    min_p: Any  # [R] float32
    seeds: Any  # [R] uint32
    positions: Any  # [R] int32, of the tokens to be drawn
    draws: Any  # int32 [max(R, 2)]: which rows draw


def noisy_weights(
    logits: jax.Array,  # [R, V] float32 or bfloat16
    highest: jax.Array,  # [R], each row's largest logit
    settings: Any,  # `sampling.SamplingSettings` with leaves [R]
    positions: jax.Array,  # [R] int32, of the tokens to be drawn
    draws: jax.Array,  # [R] bool
    *,
    with_noise: bool,
) -> jax.Array:
    """Returns the noisy log weights `[R, V]` float32 of the rows that draw.

    Other rows are uninitialised. Rows of temperature 0 have their logits, unchanged.

    Raises:
      ValueError: settings of another shape.
    """
    R, V = logits.shape
    each = {"positions": positions, "draws": draws, "highest": highest}
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        each[name] = getattr(settings, name)
    slab.check_shapes(**{name: (array, (R,)) for name, array in each.items()})
    rows = Rows(
        logits=logits,
        highest=highest,
        kept=order.first_tokens(logits, highest, settings, draws),
        temperature=settings.temperature,
        min_p=settings.min_p,
        seeds=settings.seed,
        positions=positions,
        draws=order.programs_that_draw(draws),
    )
    return launch.run(
        _kernel,
        (rows,),
        jax.ShapeDtypeStruct((R, V), jnp.float32),
        grid=(*rows.draws.shape, pl.cdiv(V, CHUNK)),
        name="sampling_noisy_weights" if with_noise else "sampling_log_weights",
        with_noise=with_noise,
    )


def _kernel(rows: Rows, out_ref, *, with_noise):
    row, chunk = pl.program_id(0), pl.program_id(1)

    @pl.when(rows.draws[launch.program(0)] != 0)
    def _():
        index = chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        width = rows.logits.shape[1]
        inside = index < width
        logits = plt.load(rows.logits.at[row, index], mask=inside, other=-jnp.inf)
        logits = logits.astype(jnp.float32)
        temperature = rows.temperature[row]
        is_greedy = temperature == 0
        scores = logits - rows.highest[row].astype(jnp.float32)
        scores = scores / jnp.where(is_greedy, jnp.float32(1), temperature)
        ranks, kept = argmax_triton.rank(logits), [each[row] for each in rows.kept]
        kept = order.is_kept(ranks, index, *kept)
        kept &= jnp.exp(scores) >= rows.min_p[row]
        if with_noise:
            key = _key(rows.seeds[row], rows.positions[row])
            scores += _gumbel(key, index, width)
        noisy = jnp.where(kept, scores, -jnp.inf)
        noisy = jnp.where(is_greedy, logits, noisy)
        plt.store(out_ref.at[row, index], noisy, mask=inside)


def _key(seed: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the bits of `rules.sampling.noise_key` for `Stream.SAMPLE`, offset 0."""
    zero = jnp.zeros_like(seed)
    key = zero, seed
    for part in (zero, position.astype(jnp.uint32), zero):
        key = threefry(key, zero, part)
    return key


def _gumbel(key, index: jax.Array, vocab_size: int) -> jax.Array:
    """Returns elements `index` of `jax.random.gumbel(key, vocab_size, mode="high")`."""

    def uniform(number):
        number = number.astype(jnp.uint32)
        one, other = threefry(key, jnp.zeros_like(number), number)
        bits = (one ^ other) >> 9 | jnp.uint32(_ONE)
        return jax.lax.bitcast_convert_type(bits, jnp.float32) - 1

    high, low = uniform(index), uniform(index + vocab_size)
    x = jnp.where(high >= 0.5, high, high + (low * 2.0**-23 + _TINY))
    return -jnp.log(-jnp.log1p(-x))


def threefry(key, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns Threefry-2x32 of the counters `(high, low)`; all are uint32."""
    keys = [*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA)]
    x, y = high + keys[0], low + keys[1]
    for turn in range(5):
        for by in (17, 29, 16, 24) if turn % 2 else (13, 15, 26, 6):
            x = x + y
            y = (y << by | y >> (32 - by)) ^ x
        x = x + keys[(turn + 1) % 3]
        y = y + keys[(turn + 2) % 3] + jnp.uint32(turn + 1)
    return x, y
