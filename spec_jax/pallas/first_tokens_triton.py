"""Which tokens top-k and top-p keep, for rows on a GPU (Pallas Triton): one launch.

Tokens are ordered by logit, highest first, and equal ones by index, lowest first, as in
`rules.sampling`, which orders scores: here two logits whose scores round to one value
still differ. Both filters keep first tokens of that order, and so the last token kept
says all: its logit, as an integer of the same order, and where its equals end.

Program `r` has row `r`, and searches that integer two bits at a time: each pass over
the row's logits weighs the tokens from four thresholds on. A filter that is off costs
no pass, and a row that does not draw reads nothing.

Sums are float32. Lane `j` of `BLOCK` adds what tokens `j`, `j + BLOCK`, .. weigh, in
this order, and the lanes are added by one reduction of a block of fixed size, by a
fixed number of warps: the order depends on nothing but the vocabulary's size. Tokens
below a threshold add zeros, so that a sum of fewer tokens never rounds to more, and the
mass of all is the first threshold's of the first pass: of the same code.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import attention_plan as plan, slab


BLOCK = 4096  # logits that a program holds at once
NUM_WARPS = 16
WAYS = 4  # thresholds of a pass
BITS = 2  # of the boundary that a pass finds
MAX_VOCABULARY = 2**22  # counts of tokens are exact in float32
_LOWEST = -(2**31)  # below every logit


class Kept(NamedTuple):
    """The tokens of each row that the filters keep, and what their scores hang from.

    Token `i` is kept if its `rank` is above `last`, or is `last` and `i` below `end`.
    Of rows that do not draw it is uninitialised.
    """

    highest: jax.Array  # [R] float32, the largest logit
    last: jax.Array  # [R] int32
    end: jax.Array  # [R] int32


def first_tokens(
    logits: jax.Array,  # [R, V] float32 or bfloat16
    *,
    temperature: jax.Array,  # [R] float32, not 0 where a row draws with a top-p
    top_k: jax.Array,  # [R] int32
    top_p: jax.Array,  # [R] float32
    draws: jax.Array,  # [R] bool
    interpret: bool,
) -> Kept:
    """Returns what top-k and then top-p keep of each row that draws.

    Raises:
      ValueError: no logits, too many, or settings that are not of each row.
    """
    R, V = logits.shape
    if not 0 < V < MAX_VOCABULARY:
        raise ValueError(f"rows of {V} logits are not in 1..{MAX_VOCABULARY - 1}")
    rows = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "draws": draws}
    slab.check_shapes(**{name: (array, (R,)) for name, array in rows.items()})
    inputs = logits, temperature, top_k, top_p, programs_that_draw(draws)
    out = [jax.ShapeDtypeStruct((R,), dtype) for dtype in ("float32", "int32", "int32")]
    return Kept(
        *pl.pallas_call(
            _kernel,
            grid=inputs[-1].shape,
            in_specs=[plan.whole(x) for x in inputs],
            out_specs=[plan.whole(x) for x in out],
            out_shape=out,
            compiler_params=plt.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
            interpret=interpret,
            name="sampling_first_tokens",
        )(*inputs)
    )


def programs_that_draw(draws: jax.Array) -> jax.Array:  # [R] bool
    """Whether each program draws: one for each row, and at least two, int32.

    The only program of a grid is compiled to other code, and a row alone must have the
    code of a row among others.
    """
    missing = max(2 - draws.shape[0], 0)
    return jnp.pad(draws.astype(jnp.int32), (0, missing))


def rank(logits: jax.Array) -> jax.Array:
    """Integers that compare as float32 logits do, both zeros one value."""
    as_int = jax.lax.bitcast_convert_type(logits, jnp.int32)
    as_int = jnp.where(as_int == _LOWEST, 0, as_int)  # minus zero
    return jnp.where(as_int < 0, as_int ^ jnp.int32(2**31 - 1), as_int)


def is_kept(ranks: jax.Array, index: jax.Array, last: jax.Array, end: jax.Array):
    """Whether each token is one of `Kept`."""
    return (ranks > last) | ((ranks == last) & (index < end))


def _kernel(
    logits_ref,  # [R, V]
    temperature_ref,  # [R]
    top_k_ref,  # [R]
    top_p_ref,  # [R]
    draws_ref,  # one for each program, int32
    highest_ref,  # [R]
    last_ref,  # [R]
    end_ref,  # [R]
):
    row = pl.program_id(0)

    @pl.when(draws_ref[row] != 0)
    def _():
        V = logits_ref.shape[1]
        reads = functools.partial(_fold, logits_ref, row, width=V)
        low = jnp.full((1, BLOCK), -jnp.inf, jnp.float32)
        every = reads(lambda best, logits, index: jnp.maximum(best, logits), low)
        highest = jnp.max(every)
        highest_ref[row] = highest

        top_k = top_k_ref[row]
        by_k = _search(
            reads,
            lambda logits, index: jnp.ones_like(logits),
            lambda total: jnp.minimum(top_k, V).astype(jnp.float32),
            is_on=top_k < V,
            width=V,
        )
        temperature, top_p = temperature_ref[row], top_p_ref[row]

        def weigh(logits, index):
            weights = jnp.exp((logits - highest) / temperature)
            return jnp.where(is_kept(rank(logits), index, *by_k), weights, 0.0)

        by_p = _search(
            reads, weigh, lambda total: top_p * total, is_on=top_p < 1, width=V
        )
        last_ref[row], end_ref[row] = (
            jnp.where(top_p < 1, p, k) for p, k in zip(by_p, by_k, strict=True)
        )


def _fold(ref, row, step, start, *, width, is_on=None):
    """Folds `step(carry, logits, index)` over the blocks of a row; `is_on`: or none."""
    lane = jnp.arange(BLOCK, dtype=jnp.int32)[None, :]

    def body(block, carry):
        index = block * BLOCK + lane
        logits = plt.load(ref.at[row, index], mask=index < width, other=-jnp.inf)
        return step(carry, logits.astype(jnp.float32), index)

    num_blocks = jnp.int32(pl.cdiv(width, BLOCK))
    if is_on is not None:
        num_blocks = jnp.where(is_on, num_blocks, jnp.int32(0))
    return jax.lax.fori_loop(jnp.int32(0), num_blocks, body, start)


def _search(reads, weigh, wanted_of, *, is_on, width):
    """`Kept.last` and `Kept.end` of the shortest run of tokens that weighs enough.

    Args:
      weigh: of logits and their indices, what each token weighs.
      wanted_of: of what all tokens weigh together, what the run must.
      is_on: all tokens are kept, and none is read, where this is false.
    """
    way = jnp.arange(WAYS, dtype=jnp.int32)[:, None]

    def halve(keeps, low, bits, wanted, is_on):
        """The largest `t` from `low` on at which `keeps(ranks, index, t)` weighs
        enough, in `bits` bits, and what was wanted."""

        def narrow(number, carry):
            low, wanted = carry
            step = jnp.int32(1) << (bits - BITS * (number + 1))
            thresholds = low + way * step

            def add(sums, logits, index):
                weights = jnp.where(index < width, weigh(logits, index), 0.0)
                kept = keeps(rank(logits), index, thresholds)
                return sums + jnp.where(kept, weights, 0.0)

            zeros = jnp.zeros((WAYS, BLOCK), jnp.float32)
            sums = jnp.sum(reads(add, zeros), axis=1, keepdims=True)
            total = jnp.sum(jnp.where(way == 0, sums, 0.0))
            wanted = jnp.where(wanted < 0, wanted_of(total), wanted)
            enough = jnp.sum((sums >= wanted).astype(jnp.int32))
            return low + jnp.maximum(enough - 1, 0) * step, wanted

        num_passes = jnp.where(is_on, jnp.int32(bits // BITS), jnp.int32(0))
        return jax.lax.fori_loop(jnp.int32(0), num_passes, narrow, (low, wanted))

    last, wanted = halve(
        lambda ranks, index, t: ranks >= t,
        jnp.int32(_LOWEST),
        32,
        jnp.float32(-1),
        is_on,
    )
    equal = reads(
        lambda count, logits, index: (
            count + ((rank(logits) == last) & (index < width)).astype(jnp.int32)
        ),
        jnp.zeros((1, BLOCK), jnp.int32),
        is_on=is_on,
    )
    # An even number of bits, and so that an end past the last token is among them.
    bits = 2 * pl.cdiv(width.bit_length(), 2)
    span = 2**bits
    num_cut, _ = halve(
        lambda ranks, index, t: is_kept(ranks, index, last, span - t),
        jnp.int32(0),
        bits,
        wanted,
        is_on & (jnp.sum(equal) > 1),
    )
    return last, span - num_cut
