"""The microscope: the first operation in which two runs of a window differ.

A `Path` is a way to run a window of tokens after the K/V of a text. `record` runs it
and keeps every value that the forward pass gives its hook (`model.observe`), a row for
each token; `compare` finds where two records differ, and by how much. A kernel that
fuses operations gives its result alone, under the name of its last operation. Distances
are in units in the last place (ULPs): how many numbers of the dtype lie between two
values.

Two paths are superseded designs, windows without the row contract, which no other code
runs: XLA compiles a product for its height, and takes another path for one row than for
five.

    flash           the library's products, and one softmax over all positions, as a
                    batched prefill has it
    library-rows    the library's products, and the attention of rows
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from spec_jax import compilation, testing
from spec_jax.engine import checks
from spec_jax.model import (
    decoder,
    observe as observe_lib,
    params as params_lib,
    row_model,
    sequence,
)
from spec_jax.ops import paged_attention, swiglu, weights
from spec_jax.paging import allocator, cache


DECODE, ROWS = "decode", "paged-decode"
"""Autoregressive decoding of the window, one active row at a time, which is the oracle;
and the engine's own path, the window's rows in one slab."""

FLASH, _ = SUPERSEDED = ("flash", "library-rows")

PATHS = (DECODE, ROWS, *SUPERSEDED)
"""Ways to run a window by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Path:
    """A way of `PATHS` to run a window, static and hashable.

    Raises:
      NotImplementedError: a model of another family than Qwen3.
    """

    name: str
    model: row_model.RowModel  # has config, implementation and slab

    def __post_init__(self):
        if self.model.config.model_type != "qwen3":
            raise NotImplementedError(
                f"the microscope knows the operations of qwen3 models, and this is a "
                f"{self.model.config.model_type} model"
            )

    def weights(self, params: params_lib.Params) -> params_lib.Params:
        """Returns the weights as the path reads them, in the dtype of its model."""
        params = params_lib.cast(params, self.model.config.dtype)
        if self.name in SUPERSEDED:
            return params
        return params_lib.prepare(params, self.model.impl)


Key = tuple[int | None, str]
"""The layer of an operation, None outside of the layers, and its name."""


def _keep(layer: int | None, operation: str, value: jax.Array) -> jax.Array:
    """Returns a value as it is recorded; tests plant a fault here."""
    del layer, operation
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """Values of a window's rows, and how much recording them changed.

    Attributes:
      values: by `Key`, `[rows, width]`, in the order of computation.
      moved: elements of the logits and of the written K/V that differ from those of
        the same run unrecorded. If it is not 0, the record is of another program than
        the one that really runs.
    """

    values: dict[Key, np.ndarray]
    moved: int


def record(path: Path, params: params_lib.Params, *where: Any) -> Record:
    """Runs a window, and again with every value recorded; takes and raises as `run`."""
    real_kv, logits, _ = run(path, params, *where)
    seen_kv, _, values = run(path, params, *where, change=_keep)
    pools = zip((*real_kv.k, *real_kv.v), (*seen_kv.k, *seen_kv.v), strict=True)
    moved = _count(values[None, "logits"], logits)
    moved += sum(_count(np.asarray(one), np.asarray(other)) for one, other in pools)
    return Record(values=values, moved=moved)


def run(
    path: Path,
    params: params_lib.Params,
    kv: cache.PagedKV,
    window: tuple[int, ...],
    start: int,
    *,
    change: observe_lib.Observe | None = None,
) -> tuple[cache.PagedKV, np.ndarray, dict[Key, np.ndarray]]:
    """Runs a window; returns the cache after it, logits `[rows, V]`, and all values.

    Args:
      params: as `Path.weights` returns them.
      kv: cache of a text, of which the positions `[0, start)` are kept.
      change: sees every value, and returns what takes its place; None: no value is
        recorded.

    Raises:
      ValueError: a window that does not fit the slab.
    """
    if len(window) > path.model.slab:
        raise ValueError(
            f"a window of {len(window)} rows does not fit a slab of {path.model.slab}"
        )
    rows, found = 1 if path.name == DECODE else len(window), []
    for first in range(0, len(window), rows):
        tokens = jnp.asarray(window[first : first + rows], jnp.int32)
        at = jnp.int32(start + first)
        kv, logits, values = _call(path, params, kv, tokens, at, change)
        found.append({"": logits[:rows]} | {k: x[:rows] for k, x in values.items()})
    checks.check_refused(kv)
    values = {k: np.concatenate([one[k] for one in found]) for k in found[0]}
    return kv, values.pop(""), values


@functools.partial(compilation.jit, static_argnames=("path", "change"))
def _call(
    path: Path,
    params: params_lib.Params,
    kv: cache.PagedKV,
    tokens: Int[Array, " R"],
    start: Int[Array, ""],
    change: observe_lib.Observe | None,
):
    """Runs rows after `[0, start)`; values are `[R, width]`, then rows of padding."""
    (R,), slot = tokens.shape, row_model.SLOT
    # Ordered, because jax sorts a plain dictionary by its keys.
    values: dict[Key, jax.Array] = collections.OrderedDict()
    kv = allocator.truncate_each(kv, start[None], asked=jnp.array([True]))

    def see(layer: int | None, operation: str, value: jax.Array) -> jax.Array:
        if change is None:
            return value
        flat = change(layer, operation, value.reshape(value.shape[0], -1))
        # A barrier, so that nothing is fused with the recording.
        values[layer, operation] = jax.lax.optimization_barrier(flat)
        return flat.reshape(value.shape)

    kv = allocator.reserve(kv, slot, start + R)
    if path.name in SUPERSEDED:
        kv, logits = _run_superseded(path, params, kv, tokens, start, see)
    else:
        height = path.model.slab
        rows = decoder.Rows(
            tokens=jnp.pad(tokens, (0, height - R)),
            slots=jnp.full((height,), slot, jnp.int32),
            positions=start + jnp.arange(height, dtype=jnp.int32),
            num_active=jnp.int32(R),
        )
        hook = None if change is None else see
        kv, outputs = path.model.forward_rows(params, rows, kv, observe=hook)
        logits = outputs.logits
    return allocator.extend(kv, slot, start + R), logits, values


def _run_superseded(path, params, kv, tokens, start, observe):
    """Runs rows by the library, writes their K/V, and calls `observe` as rows do."""
    config = path.model.config
    norm = functools.partial(sequence.norm, eps=config.rms_norm_eps)
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    (R,) = tokens.shape
    positions = start + jnp.arange(R, dtype=jnp.int32)
    where = {
        "slots": jnp.full((R,), row_model.SLOT, jnp.int32),
        "positions": positions,
        "num_active": jnp.int32(R),
    }
    x = observe(None, "embed", weights.take_rows(params.embed, tokens))
    for number, layer in enumerate(params.layers):
        see = functools.partial(observe, number)
        heads = sequence.matmul(norm(x, layer.input_norm), layer.qkv)
        heads = jnp.split(heads.reshape(R, N + 2 * K, H), (N, N + K), axis=1)
        q, k, v = (see(n, part) for n, part in zip("qkv", heads, strict=True))
        q = sequence.turned(q, layer.q_norm, config, positions)
        k = see("k_cache", sequence.turned(k, layer.k_norm, config, positions))
        kv = cache.write(kv, number, k=k, v=see("v_cache", v), **where)
        if path.name == FLASH:
            attended = _attend_at_once(q, kv, number, positions)
        else:
            attended = paged_attention.paged_attention(
                *(q, kv.k[number], kv.v[number]),
                page_table=kv.page_table,
                scale=H**-0.5,
                **where,
            )
        attended = see("attention", attended.reshape(R, -1))
        x += sequence.matmul(attended, layer.attention_out)
        x = see("attention_residual", x)
        gates = sequence.matmul(norm(x, layer.mlp_norm), layer.gate_up)
        hidden = see("swiglu", swiglu.swiglu(gates))
        x = see("mlp_residual", x + sequence.matmul(hidden, layer.down))
    logits = sequence.weight_product(norm(x, params.final_norm), params.head)
    return kv, observe(None, "logits", logits)


def _attend_at_once(q, kv, number, positions):
    """Attends by one softmax over the whole capacity, as prefill does in its bucket.

    Scores and softmax are float32; probabilities are cast before the second product.
    """
    (R, N, H), T = q.shape, kv.slot_capacity
    # Positions that were never written may hold NaN, and 0 * NaN is NaN.
    is_written = (jnp.arange(T) <= positions[-1])[:, None, None]
    keys, values = (
        jnp.where(is_written, pool[kv.page_table[row_model.SLOT]].reshape(T, -1, H), 0)
        for pool in (kv.k[number], kv.v[number])
    )
    K = keys.shape[1]
    scores = sequence.einsum("rkgh,tkh->kgrt", q.reshape(R, K, N // K, H), keys)
    visible = jnp.arange(T)[None, :] <= positions[:, None]
    scores = jnp.where(jnp.broadcast_to(visible, scores.shape), scores, -jnp.inf)
    probs = jax.nn.softmax(scores * H**-0.5, axis=-1).astype(values.dtype)
    return jnp.einsum("kgrt,tkh->rkgh", probs, values).reshape(R, N, H)


def _count(one: np.ndarray, other: np.ndarray) -> int:
    return int((testing.bits(one) != testing.bits(other)).sum())


Cell = dict[str, int | float | None]
"""How two arrays differ: in `differing` of `elements`, where the sign of a zero is a
difference; `max_ulp`, the largest distance, 0 between zeros; and `relative`, the
norm of the difference over that of the first, None where that is not finite."""


def compare(one: Record, other: Record, start: int) -> dict[str, Any]:
    """Returns how two records of the window at `start` differ, as `plot.py` draws it.

    Cells compare the operations that both have; `first` is the first operation that
    differs, with the position and the cell of its first row that does: all inputs of
    this operation are the same in both records.
    """
    pairs = {
        k: (x, other.values[k]) for k, x in one.values.items() if k in other.values
    }
    cells = {key: cell_of(*pair) for key, pair in pairs.items()}
    inner = [key for key in cells if key[0] is not None]
    layers, operations = (
        list(dict.fromkeys(names)) for names in zip(*inner, strict=True)
    )
    found = next((key for key, cell in cells.items() if cell["differing"]), None)
    first = None
    if found is not None:
        rows = [cell_of(a[None], b[None]) for a, b in zip(*pairs[found], strict=True)]
        row = next(n for n, cell in enumerate(rows) if cell["differing"])
        first = {"layer": found[0], "operation": found[1], "position": start + row}
        first |= rows[row]
    return {
        "equal": first is None,
        "first": first,
        "num_values": sum(cell["elements"] for cell in cells.values()),
        "operations": operations,
        "layers": layers,
        "cells": [[cells[layer, name] for name in operations] for layer in layers],
        "outside": {name: cells[n, name] for n, name in cells if n is None},
    }


def first_of(row: Mapping[str, Any]) -> str:
    """Returns the first difference of a parity in words."""
    first = row.get("first")
    if first is None:
        return "none"
    layer = "" if first["layer"] is None else f"layer {first['layer']}, "
    return f"{layer}{first['operation']}, position {first['position']}"


def cell_of(one: np.ndarray, other: np.ndarray) -> Cell:
    """Compares two arrays of one shape and dtype."""
    return {
        "differing": _count(one, other),
        "elements": one.size,
        "max_ulp": int(ulps(one, other).max(initial=0)),
        "relative": _relative(one, other),
    }


def ulps(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Counts the floats between elements of one dtype, int64; both zeros are equal."""
    return np.abs(_ordinal(one) - _ordinal(other))


def _ordinal(x: np.ndarray) -> np.ndarray:
    """Maps floats to integers in the same order, with neighbours one apart."""
    raw = testing.bits(x).astype(np.int64)
    sign = np.int64(1) << (8 * x.dtype.itemsize - 1)
    return np.where(raw & sign, sign - raw, raw)


def _relative(one: np.ndarray, other: np.ndarray) -> float | None:
    """Returns the distance of `other` from `one` over the size of `one`, in float64."""
    ours, theirs = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):  # Infinity minus infinity.
        gap, size = np.linalg.norm(ours - theirs), np.linalg.norm(ours)
    is_number = np.isfinite(gap) and np.isfinite(size) and size > 0
    return float(gap / size) if is_number else None
