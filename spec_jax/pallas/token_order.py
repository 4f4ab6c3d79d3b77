"""The search for the tokens that top-k and top-p keep, as far as it is no backend's.

Tokens are ordered by logit, highest first, and equal ones by index, lowest first, as in
`rules.sampling`, which orders scores: here two logits whose scores round to one value
still differ. Both filters keep first tokens of that order, and so the last token kept
says all: its logit, as an integer of the same order, and where its equals end.

That integer, and then that end, are searched `BITS` bits a launch: program `(r, c)`
adds up what the launch before it weighed of row `r`, which settles those bits, and
weighs the tokens of chunk `c` from `WAYS` thresholds on. A filter that no row asks for
is not launched, and programs of rows that do not ask for it read nothing.

Sums are float32, in an order that depends on nothing but the vocabulary's size. Tokens
below a threshold add zeros, so that a sum of fewer tokens never rounds to more, and the
mass of all is the first threshold's of the first launch: of the same code.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from spec_jax.pallas import slab


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


class Search(NamedTuple):
    """How far a search is, of rows that ask for it: arrays, or references to them."""

    last: Any  # [R] int32, `Kept.last` as far as it is known
    cut: Any  # [R] int32, how far below the most `Kept.end` is, likewise
    wanted: Any  # [R] float32, what the tokens kept must weigh
    sums: Any  # [R, WAYS, chunks or more] float32, what was weighed last


class Rows(NamedTuple):
    """What a launch reads of each row, and never changes."""

    logits: Any  # [R, V] float32 or bfloat16
    highest: Any  # [R], the largest of each row
    temperature: Any  # [R] float32
    last: Any  # [R] int32, `Kept` of the filter before
    end: Any  # [R] int32
    target: Any  # [R] int32: tokens; or float32: their share of the mass
    asked: Any  # [R], or more, int32: which rows ask


Launch = Callable[..., Search]
"""`launch(number, rows, search, is_mass=)`: launch `number [1]` int32, from 0."""


def first_tokens(
    logits: jax.Array,  # [R, V] float32 or bfloat16
    highest: jax.Array,  # [R], the largest of each row
    *,
    temperature: jax.Array,  # [R] float32, not 0 where a row draws with a top-p
    top_k: jax.Array,  # [R] int32
    top_p: jax.Array,  # [R] float32
    draws: jax.Array,  # [R] bool
    launch: Launch,
    num_sums: int,
    unroll: bool,
) -> Kept:
    """Returns what top-k and then top-p keep of each row that draws; of others, all.

    Args:
      num_sums: places for the sums of chunks.
      unroll: on a GPU the host would be asked whether a loop goes on.

    Raises:
      ValueError: no logits, too many, or settings that are not of each row.
    """
    R, V = logits.shape
    if not 0 < V < MAX_VOCABULARY:
        raise ValueError(f"rows of {V} logits are not in 1..{MAX_VOCABULARY - 1}")
    rows = {"highest": highest, "temperature": temperature, "top_k": top_k}
    rows |= {"top_p": top_p, "draws": draws}
    slab.check_shapes(**{name: (array, (R,)) for name, array in rows.items()})
    kept = Kept(jnp.full((R,), _LOWEST), jnp.full((R,), span(V)))
    filters = (top_k, draws & (top_k < V)), (top_p, draws & (top_p < 1))
    for is_mass, (target, asked) in enumerate(filters):
        inputs = Rows(
            logits, highest, temperature, *kept, target, programs_that_draw(asked)
        )
        narrow = functools.partial(launch, is_mass=bool(is_mass))
        kept = _search(narrow, inputs, asked, num_sums=num_sums, unroll=unroll)
    return kept


def _search(launch, rows, asked, *, num_sums, unroll):
    """`Kept`, or less of it: the shortest run of its first tokens that weighs enough.

    Args:
      asked: the rows that ask for it, `[R]` bool.
    """
    R, V = rows.logits.shape
    kept = Kept(rows.last, rows.end)
    # Nothing of it counts in the first launch: arrays that are there anyhow.
    start = Search(
        last=kept.last,
        cut=kept.end,
        wanted=rows.temperature,
        sums=jnp.zeros((R, WAYS, num_sums), jnp.float32),
    )

    # Traced and lowered once, and not for each launch; XLA inlines it.
    once = jax.jit(launch)

    def run():
        def narrow(number, search):
            return once(jnp.full((1,), number, jnp.int32), rows, search)

        # The last one settles what the one before it weighed.
        num_passes = _RANK_PASSES + _index_passes(V) + 1
        found = jax.lax.fori_loop(0, num_passes, narrow, start, unroll=unroll)
        return Kept(
            last=jnp.where(asked, found.last, kept.last),
            end=jnp.where(asked, span(V) - found.cut, kept.end),
        )

    return jax.lax.cond(jnp.any(asked), run, lambda: kept)


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


def thresholds(way, number, last, cut, *, width: int):
    """`Kept` of each `way`, from what is known when launch `number` weighs."""
    is_rank = number < _RANK_PASSES
    steps = way * step(number, width)
    lasts = jnp.where(is_rank, last + steps, last)
    return lasts, span(width) - jnp.where(is_rank, 0, cut + steps)


def begun(number, last, cut):
    """What is known where launch `number` is the last that has weighed; -1: nothing."""
    # Of a number of Python Triton's lowering may make a bit.
    lowest, zero = jnp.int32(_LOWEST), jnp.int32(0)
    return jnp.where(number < 0, lowest, last), jnp.where(number < 0, zero, cut)


def settled(number, last, cut, way, *, width: int):
    """What is known since `way` is the last that weighs enough in launch `number`."""
    zero = jnp.int32(0)
    steps, is_rank = way * step(number, width), number < _RANK_PASSES
    last += jnp.where((number >= 0) & is_rank, steps, zero)
    return last, cut + jnp.where(is_rank, zero, steps)


def wanted_of(target, total, *, is_mass: bool):
    """What the tokens kept must weigh, float32, where all of them weigh `total`."""
    return target * total if is_mass else target.astype(jnp.float32)


def weights_of(logits, highest, temperature, *, is_mass: bool):
    """What each token weighs: one, or its share, unnormed."""
    if not is_mass:
        return jnp.ones_like(logits)
    return jnp.exp((logits - highest) / temperature)


def step(number: jax.Array, width: int) -> jax.Array:
    """How far apart the thresholds of a launch are."""
    ends = jnp.int32(_RANK_PASSES), jnp.int32(_RANK_PASSES + _index_passes(width))
    after = jnp.where(number < _RANK_PASSES, *ends)
    return jnp.int32(1) << (BITS * jnp.maximum(after - 1 - number, 0))


def span(width: int) -> int:
    """An end that cuts no token."""
    return 2 ** (BITS * _index_passes(width))


def _index_passes(width: int) -> int:
    """Launches that find where the equals of the last token end."""
    return pl.cdiv(width.bit_length(), BITS)
