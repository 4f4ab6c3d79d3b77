"""Partial sums over the splits of a row's keys, and their ordered sum in a kernel.

    out[r, n] = sum_s w[s] sums[s] / sum_s w[s] totals[s],   w[s] = 2 ** (max[s] - max)

over the row's own splits `s = 0, 1, ...`, added one after another: neither the number
of splits that the table has room for nor other rows change a row's bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import attention_plan as plan


AT_ONCE = 4  # splits whose loads are in flight together

# Nothing here is negative: no need for the signs of `//` and `%`.
div = jax.lax.div


class Splits(NamedTuple):
    """References to each query's maximum, total and unnormed sum of each split.

    Float32, maxima to base 2. Entries that no job writes are uninitialised.
    """

    maxima: Any  # [K, rows, heads, splits]
    totals: Any  # [K, rows, heads, splits]
    sums: Any  # [K, rows, heads, splits, width]


def shapes(num_kv_heads: int, lay: plan.Layout, splits: int) -> Splits:
    """Returns the shapes of the arrays for `splits` splits of each row."""
    shape = (num_kv_heads, lay.rows, lay.heads, splits)
    each = jax.ShapeDtypeStruct(shape, jnp.float32)
    wide = jax.ShapeDtypeStruct((*shape, lay.width), jnp.float32)
    return Splits(maxima=each, totals=each, sums=wide)


def nothing(queries: int, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the running softmax of queries before their first key."""
    return (
        jnp.full((queries,), -jnp.inf, jnp.float32),
        jnp.zeros((queries,), jnp.float32),
        jnp.zeros((queries, width), jnp.float32),
    )


def store(refs: Splits, values, *, kv_head, rows, heads, split, mask) -> None:
    """Stores a running softmax as the queries' own of one split."""
    at = kv_head, rows, heads, split
    for ref, each in zip(refs[:2], values[:2], strict=True):
        plt.store(ref.at[at], each, mask=mask)
    column = jnp.arange(values[2].shape[1], dtype=jnp.int32)[None, :]
    wide = kv_head, rows[:, None], heads[:, None], split, column
    plt.store(refs.sums.at[wide], values[2], mask=mask[:, None])


def combine(
    refs: Splits,
    *,
    kv_head: jax.Array,  # [] int32
    rows: jax.Array,  # [queries] int32
    heads: jax.Array,  # [queries] int32
    counts: jax.Array,  # [queries] int32, splits of each; 0: result is NaN, unused
) -> jax.Array:
    """Combines each query's own splits to normed sums `[queries, width]`."""
    splits, width = refs.sums.shape[3:]
    column = jnp.arange(width, dtype=jnp.int32)[None, :]

    def add(turn, carry):
        """Adds the next `AT_ONCE` splits, in the order of their positions."""
        coming = []
        for i in range(AT_ONCE):
            index = turn * AT_ONCE + i
            mine, at = index < counts, jnp.minimum(index, splits - 1)
            where = kv_head, rows, heads, at
            wide = kv_head, rows[:, None], heads[:, None], at, column
            coming.append(
                (
                    mine,
                    plt.load(refs.maxima.at[where], mask=mine, other=-jnp.inf),
                    plt.load(refs.totals.at[where], mask=mine, other=0.0),
                    plt.load(refs.sums.at[wide], mask=mine[:, None], other=0.0),
                )
            )
        for mine, maximum, total, weighted in coming:
            summed = _added(carry, (maximum, total, weighted))
            # A selection: other splits than the query's own add nothing, not even 0.
            selects = mine, mine, mine[:, None]
            carry = tuple(map(jnp.where, selects, summed, carry))
        return carry

    turns = div(jnp.max(counts) + AT_ONCE - 1, AT_ONCE)
    zero = nothing(rows.shape[0], width)
    return normed(jax.lax.fori_loop(0, turns, add, zero))


def alone(
    sums: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a query's only split with the bits of `combine`: no -0."""
    maximum, total, weighted = sums
    return maximum, total + 0.0, weighted + 0.0


def normed(sums: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    """Returns the result of a running softmax, `[queries, width]`."""
    _, total, weighted = sums
    return weighted / total[:, None]


def _added(one, other):
    """Adds two running softmaxes, of which `other` comes later."""
    maximum = jnp.maximum(one[0], other[0])
    shift = _shift(maximum)
    scales = [jnp.exp2(each[0] - shift) for each in (one, other)]
    total = one[1] * scales[0] + other[1] * scales[1]
    wide = [_spread(scale, one[2].shape) for scale in scales]
    return maximum, total, one[2] * wide[0] + other[2] * wide[1]


def with_block(
    sums: tuple[jax.Array, jax.Array, jax.Array],
    scores: jax.Array,  # [queries, keys], -inf where a key is not seen
    weigh: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds one block of keys to a running softmax.

    Args:
      weigh: returns the values' sum by the keys' weights `[queries, keys]`.
    """
    maximum, total, weighted = sums
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1))
    shift = _shift(new_maximum)
    rescale = jnp.exp2(maximum - shift)
    probs = jnp.exp2(scores - _spread(shift, scores.shape))
    return (
        new_maximum,
        total * rescale + jnp.sum(probs, axis=1),
        weighted * _spread(rescale, weighted.shape) + weigh(probs),
    )


def _shift(maximum):
    """Returns what scores are shifted by: 0 for -inf, as -inf - -inf would be NaN."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def _spread(values, shape):
    """Broadcasts one value for each query over the last axis."""
    return jax.lax.broadcast_in_dim(values, shape, (0,))
