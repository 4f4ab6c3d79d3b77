"""Weights of eight bits in blocks, GGUF's Q8_0, or of four, and products with them.

A row of a matrix stands in blocks of 32 values along `K`. A block is 32 integers and
one float16 scale `d`: its values are `d * q`, with `d` the largest magnitude / 127, as
llama.cpp makes them (`quantize_row_q8_0_ref`). A row that is multiplied by it is
rounded likewise, to integers from -127 to 127, ties to even, and one float32 scale a
block. Then

    y[n] = sum over blocks b of (sum_i x_q[b, i] * w_q[n, b, i]) * (x_d[b] * w_d[n, b])

The inner sum is one of integers. The outer one is of float32, in the order of blocks.

A block of four bits, GGUF's Q4_1, has a float16 minimum `m`, too: its values are
`d * q + m`, with `q` from 0 to 15 (`quantize_row_q4_1_ref`). After the block's term its
sum gets another, `m[n, b] * (x_d[b] * sum_i x_q[b, i])`. GGUF's Q4_0, `d * (q - 8)`, is
the case `m = -8 d`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import pytree
from spec_jax.native import panels


BLOCK = 32
"""Values that share a scale."""

MOST = 127
"""The largest magnitude of an integer."""

LEAST = 1e-36
"""A block of a row is rounded to zeros where no magnitude is larger."""

OFFSET = 128
"""Panels store each eight-bit integer plus this, as an unsigned byte."""


class Blocks(pytree.Node):
    """A matrix of eight bits, or of four.

    Attributes:
      values: int8 `[N, B, 32]`, zeros past `K`; of four bits uint8 `[N, B, 16]`:
        value `i` in the low half of byte `i`, value `i + 16` in the high half.
      scales: float16 `[N, B]`.
      minima: float16 `[N, B]`; None: of eight bits.
      shape: `(N, K)` of the matrix.
      of: dtype of the rows that it multiplies, and of its own where they are looked up.
    """

    values: jax.Array
    scales: jax.Array
    minima: jax.Array | None = None
    shape: tuple[int, int] = pytree.static()
    of: str = pytree.static(default="bfloat16")

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the matrix's elements where they are unpacked."""
        return jnp.dtype(self.of)


def _in_blocks(w: np.ndarray) -> np.ndarray:
    """Returns float32 `w [N, K]` in blocks `[N, B, 32]`, zeros past `K`."""
    padded = np.pad(np.asarray(w, np.float32), ((0, 0), (0, -w.shape[1] % BLOCK)))
    return padded.reshape(len(w), -1, BLOCK)


def quantise(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounds float32 `w [N, K]` to blocks as llama.cpp does, halves away from zero.

    Returns:
      int8 `[N, B, 32]` and float16 `[N, B]`; a scale beyond float16 is infinite.
    """
    x = _in_blocks(w)
    scales = np.abs(x).max(axis=-1, initial=0.0) / np.float32(MOST)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(scales > 0, np.float32(1) / scales, np.float32(0))
        x = x * inverse[..., None]
        whole = np.trunc(x)
        whole += np.copysign(np.abs(x - whole) >= 0.5, x)
        # A NaN shows in the scale; integers cannot hold it.
        whole = np.where(np.isfinite(whole), whole, np.float32(0))
        return whole.astype(np.int8), scales.astype(np.float16)


def quantise_to_four(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rounds float32 `w [N, K]` to blocks of four bits as llama.cpp does.

    Returns:
      uint8 `[N, B, 16]`, and float16 scales and minima `[N, B]`, which may be infinite.
    """
    x = _in_blocks(w)
    minima = x.min(axis=-1)
    scales = (x.max(axis=-1) - minima) / np.float32(15)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(scales > 0, np.float32(1) / scales, np.float32(0))
        x = (x - minima[..., None]) * inverse[..., None] + np.float32(0.5)
        whole = np.where(np.isfinite(x), x, np.float32(0)).clip(0, 15).astype(np.uint8)
        below, above = np.split(whole, 2, axis=-1)
        halves = scales.astype(np.float16), minima.astype(np.float16)
        return below | above << 4, *halves


def widen(
    values: np.ndarray, scales: np.ndarray, minima: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Makes blocks of eight bits of those of four, nearly without rounding.

    The values of a block are a grid, `d * q + m`. With the scale `d / k`, for a whole
    number `k`, all of them are off by as much as `m` is from a multiple of it. The `k`
    for which this is least is taken, or what `quantise` makes if that is closer. Blocks
    of Q4_0 keep their values.

    Args:
      values, scales, minima: as `quantise_to_four` returns them.

    Returns:
      As `quantise` does.
    """
    grid = np.concatenate([values & 15, values >> 4], axis=-1).astype(np.float32)
    d, m = scales.astype(np.float32), minima.astype(np.float32)
    if (m == -8 * d).all():  # Q4_0's, multiples of `d`: the search below takes long.
        whole = np.where(d[..., None] == 0, 0, grid - 8)
        return whole.astype(np.int8), scales
    most = np.float32(MOST)
    with np.errstate(all="ignore"):  # NaN and infinity make errors that win nowhere.
        exact = d[..., None] * grid + m[..., None]
        # A grid of 16 points reaches 15 k further than its first.
        k = np.arange(1, 2 * MOST // 15 + 1, dtype=np.float32).reshape(-1, 1, 1)
        steps, first = d / k, np.rint(m * k / d)
        halves = steps.astype(np.float16).astype(np.float32)
        errors = np.abs(first * steps - m) + most * np.abs(halves - steps)
        is_inside = (np.abs(first) <= most) & (np.abs(first + 15 * k) <= most)
        errors = np.where(is_inside, errors, np.inf)
        best = errors.argmin(axis=0)
        chosen = lambda x: np.take_along_axis(x, best[None], axis=0)[0]
        whole = chosen(first)[..., None] + (best + 1)[..., None] * grid
        integers, plain = quantise(exact.reshape(len(exact), -1))
        # Rounding errs by 0.29 of a step, the root of 1 / 12.
        is_grid = chosen(errors) < plain.astype(np.float32) * np.float32(0.29)
        integers[is_grid] = whole[is_grid]
        return integers, np.where(is_grid, chosen(halves).astype(np.float16), plain)


QUANTISE = {"q8_0": quantise, "q4_1": quantise_to_four}
"""Functions that round to the blocks of a form."""


def of_parts(parts: Sequence[Any], shape: tuple[int, int], of: str) -> Blocks:
    """Returns blocks of their values, scales and, of four bits, minima."""
    values, scales, *rest = parts
    minima = rest[0] if rest else None
    return Blocks(values=values, scales=scales, minima=minima, shape=shape, of=of)


def of_matrix(w: jax.Array, *, form: str = "q8_0") -> Blocks:
    """Rounds a matrix `[N, K]`, for rows of its dtype. Outside jit only."""
    made = QUANTISE[form](np.asarray(w).astype(np.float32))
    parts = [jnp.asarray(part) for part in made]
    return of_parts(parts, (w.shape[0], w.shape[1]), str(w.dtype))


def num_blocks(K: int) -> int:
    """Returns the blocks of a row of `K` values."""
    return -(-K // BLOCK)


def integers(w: Blocks) -> jax.Array:
    """Returns the integers of all blocks, `[N, B, 32]`."""
    if w.minima is None:
        return w.values
    return jnp.concatenate([w.values & 15, w.values >> 4], axis=-1)


def matrix(w: Blocks) -> jax.Array:
    """Returns the values `[N, K]`, rounded to the matrix's dtype."""
    values = integers(w).astype(jnp.float32) * w.scales.astype(jnp.float32)[..., None]
    if w.minima is not None:
        values += w.minima.astype(jnp.float32)[..., None]
    flat = values.reshape(w.shape[0], -1)[:, : w.shape[1]]
    return flat.astype(w.dtype)


def take_rows(w: Blocks, index: jax.Array) -> jax.Array:
    """Returns rows `index [...]` of the matrix, `[..., K]`."""
    flat = index.reshape(-1)
    taken = jax.tree.map(lambda part: part[flat], w)
    return matrix(taken.replace(shape=(flat.size, w.shape[1]))).reshape(
        *index.shape, w.shape[1]
    )


def quantise_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds rows `x [..., K]` to blocks, as they are multiplied.

    Returns:
      The integers as float32 `[..., B, 32]`, and scales float32 `[..., B]`: NaN where a
      block has a value that is not finite.
    """
    K = x.shape[-1]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, num_blocks(K) * BLOCK - K)]
    x = jnp.pad(x.astype(jnp.float32), padding).reshape(*x.shape[:-1], -1, BLOCK)
    most = jnp.abs(x).max(axis=-1, initial=0.0)
    inverse = jnp.where(most > LEAST, MOST / most, 0.0)
    scales = jnp.where(jnp.isfinite(most), most / MOST, jnp.nan)
    return jnp.round(x * inverse[..., None]), scales


def product(x: jax.Array, w: Blocks) -> jax.Array:
    """Returns `x w^T` in float32, for `x [..., K]`."""
    if w.values.shape[1] == 1:
        # A block of zeros more: XLA inlines a loop of one turn, and then fuses the
        # product there with whatever sum comes next.
        pad = lambda x: jnp.pad(x, ((0, 0), (0, 1)) + ((0, 0),) * (x.ndim - 2))
        x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, 2 * BLOCK - x.shape[-1]),))
        w = jax.tree.map(pad, w)
    values, scales = quantise_rows(x)
    whole = integers(w)

    def add(b: jax.Array, sums: jax.Array) -> jax.Array:
        """Adds a block's products, whose sum float32 holds exactly in any order."""
        block = jnp.einsum(
            "...i,ni->...n",
            values[..., b, :],
            whole[:, b].astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        of_weights = w.scales[:, b].astype(jnp.float32)
        sums += block * jnp.einsum("...,n->...n", scales[..., b], of_weights)
        if w.minima is None:
            return sums
        totals = scales[..., b] * values[..., b, :].sum(axis=-1)
        minima = w.minima[:, b].astype(jnp.float32)
        return sums + jnp.einsum("...,n->...n", totals, minima)

    sums = jnp.zeros((*x.shape[:-1], w.shape[0]), jnp.float32)
    return jax.lax.fori_loop(0, values.shape[-2], add, sums)


@jax.jit
def pack(w: Blocks) -> panels.Panels:
    """Copies blocks to panels, see `panels.h`."""
    (N, K), size, (_, count, width) = w.shape, panels.PANEL, w.values.shape
    outputs, pairs = -(-N // size) * size, -(-count // 2)
    missing = (0, outputs - N), (0, 2 * pairs - count)
    values = jnp.pad(w.values, (*missing, (0, 0)))
    if w.minima is None:
        values = jax.lax.bitcast_convert_type(values, jnp.uint8) ^ OFFSET
    values = values.reshape(-1, size, 2 * pairs, width // 4, 4).transpose(0, 2, 3, 1, 4)
    lines = [values.reshape(-1, pairs, width // 2, 4 * size)]
    for numbers in jax.tree.leaves((w.scales, w.minima)):
        halves = jax.lax.bitcast_convert_type(numbers, jnp.uint16)
        halves = jnp.pad(halves, missing).reshape(-1, size, 2 * pairs)
        line = jax.lax.bitcast_convert_type(halves.transpose(0, 2, 1), jnp.uint8)
        lines.append(line.reshape(-1, pairs, 1, 4 * size))
    return panels.Panels(data=jnp.concatenate(lines, axis=2), shape=(N, K), of=w.of)


@jax.jit
def unpack(w: panels.Panels) -> Blocks:
    """Copies panels to the blocks that they were made of, bit for bit."""
    (N, K), size, (_, pairs, num_lines, _) = w.shape, panels.PANEL, w.data.shape
    is_four = num_lines < BLOCK // 2
    width = 16 if is_four else BLOCK
    lines, rest = jnp.split(w.data, [width // 2], axis=2)
    values = lines.reshape(-1, 2 * pairs, width // 4, size, 4)
    values = values.transpose(0, 3, 1, 2, 4).reshape(-1, 2 * pairs, width)
    if not is_four:
        values = jax.lax.bitcast_convert_type(values ^ OFFSET, jnp.int8)
    cut = lambda x: x[:N, : num_blocks(K)]

    def numbers(line: int) -> jax.Array:
        """Returns the scales, or the minima."""
        halves = rest[:, :, line].reshape(-1, 2 * pairs, size, 2)
        halves = jax.lax.bitcast_convert_type(halves, jnp.float16)
        return cut(halves.transpose(0, 2, 1).reshape(-1, 2 * pairs))

    parts = [cut(values), *map(numbers, range(rest.shape[2]))]
    return of_parts(parts, (N, K), w.of or "bfloat16")
