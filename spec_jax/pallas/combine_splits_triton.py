"""The last step of split attention: a row's splits into one, in their order.

    out[r, n] = sum_s w[s] sums[s] / sum_s w[s] totals[s],   w[s] = 2 ** (max[s] - max)

over the row's own splits `s = 0, 1, ...`, added one after another: the number of splits
that the table has room for, and what other rows have, does not come in. One launch:
program `(head, row)` reads `4 * (H + 2)` bytes for each split and writes `H` values.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import attention_plan as plan


AT_ONCE = 8  # splits whose loads are in flight together


def combine_splits(
    sums: jax.Array,  # [K, rows, heads, splits, width] float32
    maxima: jax.Array,  # [K, rows, heads, splits] float32, to base 2
    totals: jax.Array,  # [K, rows, heads, splits] float32
    *,
    lengths: jax.Array,  # [R] int32
    lay: plan.Layout,
    split: int,
    dtype: jnp.dtype,
    interpret: bool,
) -> jax.Array:
    """Each row's attended heads `[R, N, H]`; 0 if it is dead, and NaN if it is lost.

    Args:
      lengths: of `row_jobs.RowJobs`. Splits past a row's own may hold anything.
    """
    (R,), (K, _, _, splits, _) = lengths.shape, sums.shape
    inputs = sums, maxima, totals, lengths
    output = jax.ShapeDtypeStruct((R, K * lay.group, lay.head_dim), dtype)
    return pl.pallas_call(
        functools.partial(_kernel, lay=lay, split=split, splits=splits),
        grid=(K * lay.group, R),
        in_specs=[plan.whole(x) for x in inputs],
        out_specs=plan.whole(output),
        out_shape=output,
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="paged_attention_combine",
    )(*inputs)


def _kernel(
    sums_ref,  # [K, rows, heads, splits, width]
    maxima_ref,  # [K, rows, heads, splits]
    totals_ref,  # [K, rows, heads, splits]
    lengths_ref,  # [R]
    out_ref,  # [R, N, H]
    *,
    lay,
    split,
    splits,
):
    div, rem = jax.lax.div, jax.lax.rem  # Nothing here is negative.
    head, row = pl.program_id(0), pl.program_id(1)
    at = div(head, lay.group), row, rem(head, lay.group)
    length = lengths_ref[row]
    count = div(jnp.maximum(length, 0) + split - 1, split)
    width = jnp.arange(lay.width, dtype=jnp.int32)
    every = jnp.arange(pl.next_power_of_2(splits), dtype=jnp.int32)
    maxima = plt.load(maxima_ref.at[*at, every], mask=every < count, other=-jnp.inf)
    maximum = jnp.max(maxima)  # the same in any order
    # Where every score was -inf, -inf - -inf would be NaN.
    shift = jnp.where(maximum == -jnp.inf, jnp.float32(0), maximum)

    def add(turn, carry):
        """Adds the next `AT_ONCE` splits, in the order of their positions."""
        for i in range(AT_ONCE):
            index = turn * AT_ONCE + i
            mine = index < count
            at_split = *at, jnp.minimum(index, splits - 1)
            weight = jnp.exp2(maxima_ref[at_split] - shift)
            part = plt.load(sums_ref.at[*at_split, width]) * weight
            total, weighted = carry
            # By selection: what lies past the row's splits may be NaN.
            carry = (
                jnp.where(mine, total + totals_ref[at_split] * weight, total),
                jnp.where(mine, weighted + part, weighted),
            )
        return carry

    zero = jnp.float32(0), jnp.zeros(width.shape, jnp.float32)
    turns = div(count + AT_ONCE - 1, AT_ONCE)
    total, weighted = jax.lax.fori_loop(0, turns, add, zero)
    # A lost row has no splits, and 0 / 0 is its result.
    out = jnp.where(length == 0, 0.0, weighted / total).astype(out_ref.dtype)
    plt.store(out_ref.at[row, head, width], out, mask=width < lay.head_dim)
