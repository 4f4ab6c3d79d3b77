"""The tokens that top-k and top-p keep, for rows on a GPU (Pallas Triton).

Tokens are ordered by logit, highest first, and equal ones by index, lowest first, as in
`rules.sampling`, which orders scores: here two logits whose scores round to one value
still differ. Both filters keep a prefix of that order, so that the last token kept
describes it: its rank, which is its logit as an integer of the same order, and the
index where its equals end. Top-k keeps all its equals.

The rank, and for top-p then the end, are searched `BITS` bits a launch. Program
`(r, c)` adds up the weights that the launch before found for row `r`, which settles
that launch's bits, and weighs what each of `WAYS` thresholds keeps of chunk `c`. A
filter is launched only if a row asks for it; rows that do not ask read nothing.

Sums are float32, in an order that depends on nothing but the vocabulary's size. Tokens
below a threshold add zeros, so that a sum of fewer tokens never rounds to more. The
mass of all tokens is the sum of the first threshold of the first launch: the same code.
Lane `j` of `LANES` adds the weights of tokens `j`, `j + LANES`, .. of a chunk in order;
one reduction of a block of fixed size adds the lanes, and another one the chunks.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import argmax_triton, launch


CHUNK, LANES = 2048, 256  # tokens of a program; tokens of one of its loads
BITS = 4  # of the rank or the end, found by one launch
WAYS = 2**BITS  # thresholds of a launch
_RANK_PASSES = 32 // BITS
_LOWEST = -(2**31)  # below every logit


class Kept(NamedTuple):
    """The tokens of each row that the filters keep.

    Token `i` is kept if its `rank` is above `last`, or is `last` and `i` below `end`.
    """

    last: jax.Array  # [R] int32
    end: jax.Array  # [R] int32


class Search(NamedTuple):
    """The state of a search, for rows that ask: arrays, or references to them."""

    last: Any  # [R] int32, `Kept.last` as far as it is known
    cut: Any  # [R] int32, `_span - Kept.end` as far as it is known
    wanted: Any  # [R] float32, the least weight of the tokens kept
    sums: Any  # [R, WAYS, chunks] float32, the last launch's weights


class Rows(NamedTuple):
    """Inputs of a launch for each row, the same for all launches of a search."""

    logits: Any  # [R, V] float32 or bfloat16
    highest: Any  # [R], each row's largest logit
    temperature: Any  # [R] float32
    kept: Kept  # of the filter before
    target: Any  # [R] int32: number of tokens; or float32: share of the mass
    asked: Any  # int32 [max(R, 2)]: which rows ask


def first_tokens(
    logits: jax.Array,  # [R, V] float32 or bfloat16
    highest: jax.Array,  # [R], each row's largest logit
    settings: Any,  # `sampling.SamplingSettings` with leaves [R]
    draws: jax.Array,  # [R] bool
) -> Kept:
    """Returns what top-k and then top-p keep of each row that draws; others keep all.

    Rows are such as `argmax_triton` takes: counts of tokens are exact in float32.
    """
    R, V = logits.shape
    kept = Kept(jnp.full((R,), _LOWEST), jnp.full((R,), _span(V)))
    top_k, top_p = settings.top_k, settings.top_p
    filters = (top_k, draws & (top_k < V)), (top_p, draws & (top_p < 1))
    for is_mass, (target, asked) in enumerate(filters):
        programs = programs_that_draw(asked)
        rows = Rows(logits, highest, settings.temperature, kept, target, programs)
        kept = _search(rows, asked, is_mass=bool(is_mass))
    return kept


def _search(rows, asked, *, is_mass):
    """Searches for the fewest first tokens that weigh enough; returns their `Kept`.

    Args:
      asked: the rows that ask for it, `[R]` bool; others keep what they kept.
    """
    R, V = rows.logits.shape
    kept = rows.kept
    # The first launch ignores these values: only shapes and dtypes matter.
    start = Search(
        last=kept.last,
        cut=kept.end,
        wanted=rows.temperature,
        sums=jnp.zeros((R, WAYS, pl.cdiv(V, CHUNK)), jnp.float32),
    )

    # Traced and lowered once, not once for each launch; XLA inlines it.
    once = jax.jit(functools.partial(_launch, is_mass=is_mass))

    def run():
        """Narrows the bounds of the rows that ask, launch by launch."""

        def narrow(number, search):
            return once(jnp.full((1,), number, jnp.int32), rows, search)

        # The last launch settles what the one before it weighed.
        num_passes = _RANK_PASSES + 1 + is_mass * _index_passes(V)
        # On a GPU a loop would ask the host at each turn whether to go on.
        unroll = not launch.is_interpreted()
        found = jax.lax.fori_loop(0, num_passes, narrow, start, unroll=unroll)
        return Kept(
            last=jnp.where(asked, found.last, kept.last),
            end=jnp.where(asked, _span(V) - found.cut, kept.end),
        )

    return jax.lax.cond(jnp.any(asked), run, lambda: kept)


def _launch(number, rows: Rows, search: Search, *, is_mass):
    """Returns the search after launch `number [1]` int32, from 0."""
    (found,) = launch.run(
        _kernel,
        (number, rows, search),
        (search,),
        grid=(*rows.asked.shape, search.sums.shape[2]),
        name="sampling_top_p" if is_mass else "sampling_top_k",
        is_mass=is_mass,
    )
    return found


def _kernel(
    number_ref,  # [1] int32, the number of the launch
    rows: Rows,
    before: Search,
    after: Search,  # this launch
    *,
    is_mass: bool,
):
    row, chunk = pl.program_id(0), pl.program_id(1)
    width = rows.logits.shape[1]
    way = jnp.arange(WAYS, dtype=jnp.int32)[:, None]

    @pl.when(rows.asked[launch.program(0)] != 0)
    def _():
        number, target = number_ref[0], rows.target[row]
        last, cut, wanted = _settle(
            before, row, way, target, is_mass=is_mass, number=number - 1, width=width
        )

        @pl.when(chunk == 0)
        def _():
            after.last[row], after.cut[row] = last, cut
            after.wanted[row] = wanted

        bounds = _thresholds(way, number, last, cut, width)
        highest, temperature = (
            rows.highest[row].astype(jnp.float32),
            rows.temperature[row],
        )
        kept = rows.kept.last[row], rows.kept.end[row]
        lane = jnp.arange(LANES, dtype=jnp.int32)[None, :]

        def add(block, sums):
            index = chunk * CHUNK + block * LANES + lane
            inside = index < width
            logits = plt.load(rows.logits.at[row, index], mask=inside, other=-jnp.inf)
            logits = logits.astype(jnp.float32)
            ranks, weights = argmax_triton.rank(logits), jnp.ones_like(logits)
            if is_mass:
                weights = jnp.exp((logits - highest) / temperature)
                inside &= is_kept(ranks, index, *kept)
            weighs = inside & is_kept(ranks, index, *bounds)
            return sums + jnp.where(weighs, weights, 0.0)

        zeros = jnp.zeros((WAYS, LANES), jnp.float32)
        sums = jax.lax.fori_loop(0, CHUNK // LANES, add, zeros)
        sums = jnp.sum(sums, axis=1, keepdims=True)
        plt.store(after.sums.at[row, way, chunk], sums)


def _settle(before, row, way, target, *, is_mass, number, width):
    """Returns a row's bounds and wanted weight after launch `number`; -1: at start."""
    last, cut = before.last[row], before.cut[row]
    # Triton's lowering may turn a Python number into one bit.
    lowest, zero = jnp.int32(_LOWEST), jnp.int32(0)
    last = jnp.where(number < 0, lowest, last)
    cut = jnp.where(number < 0, zero, cut)
    num_chunks = before.sums.shape[2]
    column = jnp.arange(pl.next_power_of_2(num_chunks), dtype=jnp.int32)[None, :]
    places = before.sums.at[row, way, column]
    parts = plt.load(places, mask=column < num_chunks, other=0.0)
    sums = jnp.sum(parts, axis=1, keepdims=True)
    total = jnp.sum(jnp.where(way == 0, sums, 0.0))
    # The least weight of the kept tokens, given that of all.
    begins = target * total if is_mass else target.astype(jnp.float32)
    wanted = jnp.where(number == 0, begins, before.wanted[row])
    enough = jnp.maximum(jnp.sum((sums >= wanted).astype(jnp.int32)) - 1, 0)
    steps, is_rank = enough * _step(number, width), number < _RANK_PASSES
    last += jnp.where((number >= 0) & is_rank, steps, zero)
    return last, cut + jnp.where(is_rank, zero, steps), wanted


def programs_that_draw(draws: jax.Array) -> jax.Array:  # [R] bool
    """Returns for each program, one a row and at least two, if it draws: int32.

    A grid of one program is compiled to other code, and a row alone must have the code
    of a row among others.
    """
    missing = max(2 - draws.shape[0], 0)
    return jnp.pad(draws.astype(jnp.int32), (0, missing))


def is_kept(ranks: jax.Array, index: jax.Array, last: jax.Array, end: jax.Array):
    """Returns which tokens are in `Kept(last, end)`."""
    return (ranks > last) | ((ranks == last) & (index < end))


def _thresholds(way, number, last, cut, width):
    """Returns the `Kept` that launch `number` weighs for each `way`."""
    is_rank = number < _RANK_PASSES
    steps = way * _step(number, width)
    lasts = jnp.where(is_rank, last + steps, last)
    return lasts, _span(width) - jnp.where(is_rank, 0, cut + steps)


def _step(number: jax.Array, width: int) -> jax.Array:
    """Returns the distance between the thresholds of a launch."""
    ends = jnp.int32(_RANK_PASSES), jnp.int32(_RANK_PASSES + _index_passes(width))
    after = jnp.where(number < _RANK_PASSES, *ends)
    return jnp.int32(1) << (BITS * jnp.maximum(after - 1 - number, 0))


def _span(width: int) -> int:
    """Returns the largest `Kept.end`, which cuts no token."""
    return 2 ** (BITS * _index_passes(width))


def _index_passes(width: int) -> int:
    """Returns how many launches find where the equals of the last token end."""
    return pl.cdiv(width.bit_length(), BITS)
