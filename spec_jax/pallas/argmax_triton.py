"""Argmax over a vocabulary on a GPU (Pallas Triton): two kernels with fixed blocks.

A program of the first owns `CHUNK` logits of one row, and finds the largest and its
first index; the second has one program a row, which chooses among the chunks. Logits
are compared as integers of the same order, so that NaN is the largest of all and both
zeros are one value: nothing is rounded, and the order of comparisons does not matter.
Programs of padding rows read no logits.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import launch


CHUNK = 4096  # logits of one program of the first kernel
MAX_CHUNKS = 1024  # of one row, the most in a block of the second kernel

NAN = 0x7FFFFFFF  # above every number: infinity is 0x7F800000
NOTHING = -0x80000000  # below every number; also the bits of minus zero


def rank(x: jax.Array) -> jax.Array:
    """Returns integers that compare as the float32 numbers of `x` do; NaN has any."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    # Minus zero equals zero. A comparison of floats would not do: XLA on a CPU takes
    # denormals for zeros.
    bits = jnp.where(bits == NOTHING, 0, bits)
    return jnp.where(bits < 0, bits ^ NAN, bits)


def _ordered(x: jax.Array) -> jax.Array:
    """Returns integers that compare as the floats of `x` do, NaN above all."""
    x = x.astype(jnp.float32)
    ordered = rank(x)
    return jnp.where(x != x, NAN, ordered)


def _first_of_largest(keys: jax.Array, indices: jax.Array):
    """Returns the largest of `keys [1, n]` and the least of its `indices`."""
    largest = jnp.max(keys, axis=-1, keepdims=True)
    candidates = jnp.where(keys == largest, indices, NAN)
    return largest, jnp.min(candidates, axis=-1, keepdims=True)


def _chunk_kernel(
    num_active_ref,  # [1]
    x_ref,  # [1, CHUNK]
    key_ref,  # [1, 1] int32
    index_ref,  # [1, 1] int32
    *,
    width: int,
):
    chunk = launch.released(pl.program_id(1))[:, None]
    indices = chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)[None, :]
    inside = indices < width

    @pl.when(pl.program_id(0) < num_active_ref[0])
    def _():
        keys = _ordered(plt.load(x_ref.at[...], mask=inside, other=0))
        keys = jnp.where(inside, keys, NOTHING)
        key_ref[...], index_ref[...] = _first_of_largest(keys, indices)


def _row_kernel(
    num_active_ref,  # [1]
    key_ref,  # [1, block] int32
    index_ref,  # [1, block] int32
    out_ref,  # [1, 1] int32
    *,
    num_chunks: int,
):
    row = launch.released(pl.program_id(0))[:, None]
    is_active = row < num_active_ref[0]
    inside = (jnp.arange(key_ref.shape[1])[None, :] < num_chunks) & is_active
    keys = plt.load(key_ref.at[...], mask=inside, other=NOTHING)
    indices = plt.load(index_ref.at[...], mask=inside, other=NAN)
    _, index = _first_of_largest(keys, indices)
    out_ref[...] = jnp.where(is_active, index, 0)


def argmax(
    logits: jax.Array,  # [R, V] float32 or bfloat16
    *,
    num_active: jax.Array,  # [] int32
) -> jax.Array:  # [R] int32
    """Returns the index of each active row's largest logit, or of its first NaN.

    The first of equals, as `jnp.argmax`. A row's result depends on that row alone; the
    result of a padding row is 0.

    Raises:
      ValueError: rows without logits, or with more than `CHUNK * MAX_CHUNKS`.
      NotImplementedError: logits that are neither float32 nor bfloat16.
    """
    R, V = logits.shape
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"logits are float32 or bfloat16, not {logits.dtype}")
    if not 0 < V <= CHUNK * MAX_CHUNKS:
        raise ValueError(f"rows of {V} logits are not in 1..{CHUNK * MAX_CHUNKS}")
    if R == 0:
        return jnp.zeros((0,), jnp.int32)
    num_chunks, num_active = pl.cdiv(V, CHUNK), num_active.reshape(1)
    partial = jax.ShapeDtypeStruct((R, num_chunks), jnp.int32)
    one = pl.BlockSpec((1, 1), lambda r, c: (r, c))
    number = launch.whole(num_active)
    keys, indices = launch.run(
        _chunk_kernel,
        (num_active, logits),
        (partial, partial),
        in_specs=[number, pl.BlockSpec((1, CHUNK), lambda r, c: (r, c))],
        out_specs=(one, one),
        grid=(R, num_chunks),
        name="argmax_chunks",
        width=V,
    )
    chunks = pl.BlockSpec((1, pl.next_power_of_2(num_chunks)), lambda r: (r, 0))
    out = launch.run(
        _row_kernel,
        (num_active, keys, indices),
        jax.ShapeDtypeStruct((R, 1), jnp.int32),
        in_specs=[number, chunks, chunks],
        out_specs=pl.BlockSpec((1, 1), lambda r: (r, 0)),
        grid=(R,),
        num_warps=1,
        name="argmax_rows",
        num_chunks=num_chunks,
    )
    return out[:, 0]
