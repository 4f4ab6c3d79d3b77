"""Which tokens top-k and top-p keep, for rows on a GPU (Pallas Triton).

Tokens are ordered by logit, highest first, and equal ones by index, lowest first, as in
`rules.sampling`, which orders scores: here two logits whose scores round to one value
still differ. Both filters keep first tokens of that order, and so the last token kept
says all: its logit, as an integer of the same order, and where its equals end.

That integer, and then that end, are searched `BITS` bits a launch: program `(r, c)`
adds up what the launch before it weighed of row `r`, which settles those bits, and
weighs the tokens of chunk `c` from `WAYS` thresholds on. A filter that no row asks for
is not launched, and programs of rows that do not ask for it read nothing.

Sums are float32. Lane `j` of `LANES` adds what tokens `j`, `j + LANES`, .. of a chunk
weigh, in this order; lanes, and then chunks, are added by one reduction of a block of
fixed size: the order depends on nothing but the vocabulary's size. Tokens below a
threshold add zeros, so that a sum of fewer tokens never rounds to more, and the mass of
all is the first threshold's of the first launch: of the same code.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import attention_plan as plan, slab


CHUNK, LANES = 2048, 256  # tokens of a program, and those that it holds at once
BITS = 4  # of the boundary that a launch finds
WAYS = 2**BITS  # thresholds of a launch
MAX_VOCABULARY = 2**22  # counts of tokens are exact in float32
_RANK_PASSES = 32 // BITS
_LOWEST = -(2**31)  # below every logit


class Kept(NamedTuple):
    """The tokens of each row that the filters keep.

    Token `i` is kept if its `rank` is above `last`, or is `last` and `i` below `end`.
    """

    last: jax.Array  # [R] int32
    end: jax.Array  # [R] int32


class _Search(NamedTuple):
    """How far a search is, of rows that ask for it."""

    last: jax.Array  # [R] int32, `Kept.last` as far as it is known
    cut: jax.Array  # [R] int32, how far below the most `Kept.end` is, likewise
    wanted: jax.Array  # [R] float32, what the tokens kept must weigh
    sums: jax.Array  # [R, WAYS, chunks] float32, what was weighed last


def first_tokens(
    logits: jax.Array,  # [R, V] float32 or bfloat16
    highest: jax.Array,  # [R], the largest of each row
    *,
    temperature: jax.Array,  # [R] float32, not 0 where a row draws with a top-p
    top_k: jax.Array,  # [R] int32
    top_p: jax.Array,  # [R] float32
    draws: jax.Array,  # [R] bool
    interpret: bool,
) -> Kept:
    """Returns what top-k and then top-p keep of each row that draws; of others, all.

    Raises:
      ValueError: no logits, too many, or settings that are not of each row.
    """
    R, V = logits.shape
    if not 0 < V < MAX_VOCABULARY:
        raise ValueError(f"rows of {V} logits are not in 1..{MAX_VOCABULARY - 1}")
    rows = {"highest": highest, "temperature": temperature, "top_k": top_k}
    rows |= {"top_p": top_p, "draws": draws}
    slab.check_shapes(**{name: (array, (R,)) for name, array in rows.items()})
    every = Kept(jnp.full((R,), _LOWEST), jnp.full((R,), _span(V)))
    search = functools.partial(
        _search, logits, highest, temperature, interpret=interpret
    )
    by_k = search(every, top_k, draws & (top_k < V), is_mass=False)
    return search(by_k, top_p, draws & (top_p < 1), is_mass=True)


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


def _index_passes(width: int) -> int:
    """Launches that find where the equals of the last token end."""
    return pl.cdiv(width.bit_length(), BITS)


def _span(width: int) -> int:
    """An end that cuts no token."""
    return 2 ** (BITS * _index_passes(width))


def _search(logits, highest, temperature, kept, target, asked, *, is_mass, interpret):
    """`kept`, or less of it: the shortest run of its first tokens that weighs enough.

    Args:
      target: the number of tokens, or with `is_mass` their share of the mass of `kept`.
      asked: the rows that ask for it, `[R]` bool.
    """
    R, V = logits.shape
    programs = programs_that_draw(asked)
    inputs = logits, highest, temperature, *kept, target, programs
    # Nothing of it counts in the first launch: arrays that are there anyhow.
    start = _Search(
        last=kept.last,
        cut=kept.end,
        wanted=temperature,
        sums=jnp.zeros((R, WAYS, pl.cdiv(V, CHUNK)), jnp.float32),
    )
    call = pl.pallas_call(
        functools.partial(_kernel, is_mass=is_mass),
        grid=(*programs.shape, start.sums.shape[2]),
        in_specs=[plan.whole(x) for x in (jnp.zeros((1,)), *inputs, *start)],
        out_specs=[plan.whole(x) for x in start],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in start],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="sampling_top_p" if is_mass else "sampling_top_k",
    )

    def run():
        def narrow(number, search):
            return _Search(*call(jnp.full((1,), number, jnp.int32), *inputs, *search))

        # The last one settles what the one before it weighed. On a GPU the host would
        # be asked whether a loop goes on.
        num_passes = _RANK_PASSES + _index_passes(V) + 1
        found = jax.lax.fori_loop(0, num_passes, narrow, start, unroll=not interpret)
        return Kept(
            last=jnp.where(asked, found.last, kept.last),
            end=jnp.where(asked, _span(V) - found.cut, kept.end),
        )

    return jax.lax.cond(jnp.any(asked), run, lambda: kept)


def _kernel(
    number_ref,  # [1] int32, of the launch
    logits_ref,  # [R, V]
    highest_ref,  # [R]
    temperature_ref,  # [R]
    kept_last_ref,  # [R], `kept` of `_search`
    kept_end_ref,  # [R]
    target_ref,  # [R] int32 or float32
    asked_ref,  # one for each row of programs, int32
    last_ref,  # [R], and so on: `_Search` before this launch
    cut_ref,
    wanted_ref,
    sums_ref,  # [R, WAYS, chunks]
    new_last_ref,  # and after it
    new_cut_ref,
    new_wanted_ref,
    new_sums_ref,
    *,
    is_mass: bool,
):
    row, chunk = pl.program_id(0), pl.program_id(1)
    width = logits_ref.shape[1]
    way = jnp.arange(WAYS, dtype=jnp.int32)[:, None]

    @pl.when(asked_ref[row] != 0)
    def _():
        number, target = number_ref[0], target_ref[row]
        wanted_of = lambda total: target * total if is_mass else _float(target)
        prior = last_ref[row], cut_ref[row], wanted_ref[row]
        last, cut, wanted = _settle(
            prior, sums_ref, row, way, wanted_of, number=number - 1, width=width
        )

        @pl.when(chunk == 0)
        def _():
            new_last_ref[row], new_cut_ref[row] = last, cut
            new_wanted_ref[row] = wanted

        is_rank = number < _RANK_PASSES
        steps = way * _step(number, width)
        lasts = jnp.where(is_rank, last + steps, last)
        ends = _span(width) - jnp.where(is_rank, 0, cut + steps)
        highest, temperature = (
            highest_ref[row].astype(jnp.float32),
            temperature_ref[row],
        )
        kept = kept_last_ref[row], kept_end_ref[row]
        lane = jnp.arange(LANES, dtype=jnp.int32)[None, :]

        def add(block, sums):
            index = chunk * CHUNK + block * LANES + lane
            inside = index < width
            logits = plt.load(logits_ref.at[row, index], mask=inside, other=-jnp.inf)
            logits = logits.astype(jnp.float32)
            ranks, weights = rank(logits), jnp.ones_like(logits)
            if is_mass:
                weights = jnp.exp((logits - highest) / temperature)
                inside &= is_kept(ranks, index, *kept)
            weighs = inside & is_kept(ranks, index, lasts, ends)
            return sums + jnp.where(weighs, weights, 0.0)

        zeros = jnp.zeros((WAYS, LANES), jnp.float32)
        sums = jax.lax.fori_loop(0, CHUNK // LANES, add, zeros)
        sums = jnp.sum(sums, axis=1, keepdims=True)
        plt.store(new_sums_ref.at[row, way, chunk], sums)


def _float(count: jax.Array) -> jax.Array:
    return count.astype(jnp.float32)


def _step(number: jax.Array, width: int) -> jax.Array:
    """How far apart the thresholds of a launch are."""
    ends = jnp.int32(_RANK_PASSES), jnp.int32(_RANK_PASSES + _index_passes(width))
    after = jnp.where(number < _RANK_PASSES, *ends)
    return jnp.int32(1) << (BITS * jnp.maximum(after - 1 - number, 0))


def _settle(prior, sums_ref, row, way, wanted_of, *, number, width):
    """`_Search` of a row by what launch `number` weighed; its start if that is -1."""
    last, cut, wanted = prior
    # Of a number of Python Triton's lowering may make a bit.
    lowest, zero = jnp.int32(_LOWEST), jnp.int32(0)
    last, cut = jnp.where(number < 0, lowest, last), jnp.where(number < 0, zero, cut)
    num_chunks = sums_ref.shape[2]
    column = jnp.arange(pl.next_power_of_2(num_chunks), dtype=jnp.int32)[None, :]
    parts = plt.load(sums_ref.at[row, way, column], mask=column < num_chunks, other=0.0)
    sums = jnp.sum(parts, axis=1, keepdims=True)
    total = jnp.sum(jnp.where(way == 0, sums, 0.0))
    wanted = jnp.where(number == 0, wanted_of(total), wanted)
    enough = jnp.sum((sums >= wanted).astype(jnp.int32))
    steps = jnp.maximum(enough - 1, 0) * _step(number, width)
    is_rank = number < _RANK_PASSES
    last += jnp.where((number >= 0) & is_rank, steps, zero)
    return last, cut + jnp.where(is_rank, zero, steps), wanted
