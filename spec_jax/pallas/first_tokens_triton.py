"""Which tokens top-k and top-p keep, for rows on a GPU (Pallas Triton).

The search is `token_order`'s. Lane `j` of `LANES` adds what tokens `j`, `j + LANES`, ..
of a chunk weigh, in this order; lanes, and then chunks, are added by one reduction of a
block of fixed size.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import attention_plan as plan, early_launch, token_order as order


CHUNK, LANES = 2048, 256  # tokens of a program, and those that it holds at once


def first_tokens(logits: jax.Array, *args, interpret: bool, **kwargs) -> order.Kept:
    """See `token_order.first_tokens`."""
    return order.first_tokens(
        logits,
        *args,
        **kwargs,
        launch=functools.partial(_launch, interpret=interpret),
        num_sums=pl.cdiv(logits.shape[1], CHUNK),
        unroll=not interpret,
    )


def _launch(number, rows: order.Rows, search: order.Search, *, is_mass, interpret):
    """A `token_order.Launch`."""
    call = pl.pallas_call(
        functools.partial(_kernel, is_mass=is_mass, interpret=interpret),
        grid=(*rows.asked.shape, search.sums.shape[2]),
        in_specs=[plan.whole(x) for x in (number, *rows, *search)],
        out_specs=[plan.whole(x) for x in search],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in search],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="sampling_top_p" if is_mass else "sampling_top_k",
    )
    return order.Search(*call(number, *rows, *search))


def _kernel(
    number_ref,  # [1] int32, of the launch
    *refs,  # `Rows`, `Search` before this launch, and after it
    is_mass: bool,
    interpret: bool,
):
    rows = order.Rows(*refs[:7])
    before, after = order.Search(*refs[7:11]), order.Search(*refs[11:])
    row, chunk = pl.program_id(0), pl.program_id(1)
    width = rows.logits.shape[1]
    way = jnp.arange(order.WAYS, dtype=jnp.int32)[:, None]

    @pl.when(rows.asked[early_launch.program(0, interpret=interpret)] != 0)
    def _():
        number, target = number_ref[0], rows.target[row]
        wanted_of = functools.partial(order.wanted_of, target, is_mass=is_mass)
        last, cut, wanted = _settle(
            before, row, way, wanted_of, number=number - 1, width=width
        )

        @pl.when(chunk == 0)
        def _():
            after.last[row], after.cut[row] = last, cut
            after.wanted[row] = wanted

        bounds = order.thresholds(way, number, last, cut, width=width)
        highest, temperature = (
            rows.highest[row].astype(jnp.float32),
            rows.temperature[row],
        )
        kept = rows.last[row], rows.end[row]
        lane = jnp.arange(LANES, dtype=jnp.int32)[None, :]

        def add(block, sums):
            index = chunk * CHUNK + block * LANES + lane
            inside = index < width
            logits = plt.load(rows.logits.at[row, index], mask=inside, other=-jnp.inf)
            logits = logits.astype(jnp.float32)
            ranks = order.rank(logits)
            weights = order.weights_of(logits, highest, temperature, is_mass=is_mass)
            if is_mass:
                inside &= order.is_kept(ranks, index, *kept)
            weighs = inside & order.is_kept(ranks, index, *bounds)
            return sums + jnp.where(weighs, weights, 0.0)

        zeros = jnp.zeros((order.WAYS, LANES), jnp.float32)
        sums = jax.lax.fori_loop(0, CHUNK // LANES, add, zeros)
        sums = jnp.sum(sums, axis=1, keepdims=True)
        plt.store(after.sums.at[row, way, chunk], sums)


def _settle(before, row, way, wanted_of, *, number, width):
    """`Search` of a row by what launch `number` weighed; its start if that is -1."""
    last, cut = order.begun(number, before.last[row], before.cut[row])
    num_chunks = before.sums.shape[2]
    column = jnp.arange(pl.next_power_of_2(num_chunks), dtype=jnp.int32)[None, :]
    places = before.sums.at[row, way, column]
    parts = plt.load(places, mask=column < num_chunks, other=0.0)
    sums = jnp.sum(parts, axis=1, keepdims=True)
    total = jnp.sum(jnp.where(way == 0, sums, 0.0))
    wanted = jnp.where(number == 0, wanted_of(total), before.wanted[row])
    enough = jnp.maximum(jnp.sum((sums >= wanted).astype(jnp.int32)) - 1, 0)
    return *order.settled(number, last, cut, enough, width=width), wanted
