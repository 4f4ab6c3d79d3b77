"""Which tokens top-k and top-p keep, for rows on a GPU (Pallas Mosaic).

The search is `token_order`'s. A chunk's tokens are added by one reduction of a block of
fixed size, and so are chunks. The last chunk of a row ends where the row does: of what
lies in the one before it too, the weight here is zero.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from spec_jax.pallas import token_order as order, warpgroup


CHUNK = 2048  # tokens of a program


def first_tokens(logits: jax.Array, *args, interpret: Any, **kwargs) -> order.Kept:
    """See `token_order.first_tokens`.

    Raises:
      ValueError: besides, rows that `warpgroup.chunk_of` refuses.
    """
    return order.first_tokens(
        logits,
        *args,
        **kwargs,
        launch=functools.partial(_launch, interpret=interpret),
        num_sums=warpgroup.whole(_num_chunks(logits.shape[1])),
        unroll=not interpret,
    )


def _num_chunks(width: int) -> int:
    return pl.cdiv(width, warpgroup.chunk_of(width, CHUNK))


def _launch(number, rows: order.Rows, search: order.Search, *, is_mass, interpret):
    """A `token_order.Launch`."""

    def search_tokens(number_ref: Any, *refs: Any) -> None:
        of_rows, refs = order.Rows(*refs[:7]), refs[7:]
        before, after = order.Search(*refs[:4]), order.Search(*refs[4:])
        row = jax.lax.axis_index("r")

        @pl.when(of_rows.asked[row] != 0)
        def _():
            _narrow(number_ref[0], row, of_rows, before, after, is_mass)

    search_tokens.__name__ = "sampling_top_p" if is_mass else "sampling_top_k"
    found = warpgroup.kernel(
        search_tokens,
        outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in search],
        grid={"r": rows.asked.shape[0], "chunk": _num_chunks(rows.logits.shape[1])},
        interpret=interpret,
    )(number, *rows, *search)
    return order.Search(*found)


def _narrow(number, row, rows, before, after, is_mass):
    """Settles what was weighed of a row, and weighs one chunk of it."""
    width, chunk = rows.logits.shape[1], jax.lax.axis_index("chunk")
    last, cut, wanted = _settle(before, row, rows, number - 1, is_mass)

    @pl.when(chunk == 0)
    def _():
        after.last[row], after.cut[row], after.wanted[row] = last, cut, wanted

    size = warpgroup.chunk_of(width, CHUNK)
    first = jnp.minimum(chunk * size, width - size)
    index = first + warpgroup.line_numbers(size)
    view = rows.logits.at[row, pl.ds(first, size)]
    logits = warpgroup.load(view, warpgroup.line(size)).astype(jnp.float32)
    ranks, highest = order.rank(logits), rows.highest[row].astype(jnp.float32)
    weights = order.weights_of(logits, highest, rows.temperature[row], is_mass=is_mass)
    counts = index >= chunk * size
    if is_mass:
        counts &= order.is_kept(ranks, index, rows.last[row], rows.end[row])
    weights = jnp.where(counts, weights, 0.0)

    def weigh(way, _):
        bounds = order.thresholds(way, number, last, cut, width=width)
        kept = order.is_kept(ranks, index, *bounds)
        after.sums[row, way, chunk] = jnp.sum(jnp.where(kept, weights, 0.0))

    jax.lax.fori_loop(0, order.WAYS, weigh, None)


def _settle(before, row, rows, number, is_mass):
    """`Search` of a row by what launch `number` weighed; its start if that is -1."""
    width, places = rows.logits.shape[1], before.sums.shape[2]
    last, cut = order.begun(number, before.last[row], before.cut[row])
    inside = warpgroup.line_numbers(places) < _num_chunks(width)

    def weight_of(way):
        parts = warpgroup.load(before.sums.at[row, way], warpgroup.line(places))
        return jnp.sum(jnp.where(inside, parts, 0.0))

    wanted = order.wanted_of(rows.target[row], weight_of(0), is_mass=is_mass)
    wanted = jnp.where(number == 0, wanted, before.wanted[row])
    found = jnp.int32(0)
    # The further a threshold, the less it weighs: bit for bit the last that suffices.
    for bit in reversed(range(order.BITS)):
        further = found + 2**bit
        found = jnp.where(weight_of(further) >= wanted, further, found)
    return *order.settled(number, last, cut, found, width=width), wanted
