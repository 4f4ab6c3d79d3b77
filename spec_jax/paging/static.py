"""StaticKV: each slot's keys and values in one contiguous stretch, allocated once.

A `PagedKV` in which slot `s` owns the pages `[s * M, (s + 1) * M)` for good, in that
order: a pool `[S * M, C, K, H]` read as `[S, T, K, H]`, `T = M * C`, is a plain cache
by slot and position. Whatever reads or writes pages finds these by their table as any
others. The operations are those of `allocator`; they move no page, and so truncation
moves a length and nothing else.

The price is memory for `T` positions of every slot, used or not.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from spec_jax.paging import cache
from spec_jax.typing import typed


class StaticKV(cache.PagedKV):
    """Pages that never change hands: no page is free, each slot owns `M` of them.

    A closed slot keeps its pages too. For a slot of length `n` the interval `[0, n)`
    holds valid keys and values, `[n, T)` bytes that mean nothing.
    """

    pages_change_hands: ClassVar[bool] = False


def init(
    *,
    num_layers: int,
    num_slots: int,
    page_size: int,
    pages_per_slot: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
) -> StaticKV:
    """An empty cache of `pages_per_slot * page_size` positions a slot, none registered.

    Raises:
      ValueError: a size below one.
    """
    num_pages = num_slots * pages_per_slot
    empty = cache.init(
        num_layers=num_layers,
        num_slots=num_slots,
        num_pages=num_pages,
        page_size=page_size,
        pages_per_slot=pages_per_slot,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    return StaticKV(
        k=empty.k,
        v=empty.v,
        page_table=jnp.arange(num_pages, dtype=jnp.int32).reshape(num_slots, -1),
        num_owned=jnp.full((num_slots,), pages_per_slot, jnp.int32),
        length=empty.length,
        registered=empty.registered,
        free_pages=jnp.full((num_pages,), num_pages, jnp.int32),
        num_free=jnp.int32(0),
        out_of_pages=empty.out_of_pages,
        refused=empty.refused,
    )


@typed
def contiguous(
    kv: StaticKV, layer: int
) -> tuple[Float[Array, "S T K H"], Float[Array, "S T K H"]]:
    """One layer's keys and values by slot and position: the pools, seen otherwise."""

    def by_position(pool: jax.Array) -> jax.Array:
        return pool.reshape(kv.num_slots, kv.slot_capacity, *pool.shape[2:])

    return by_position(kv.k[layer]), by_position(kv.v[layer])


def to_tuples(kv: StaticKV, slot: int) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """A slot's `(key, value)` of each layer as Hugging Face keeps them: `[1, K, T, H]`.

    `T` is the slot's length. `transformers.DynamicCache` takes them, each array
    through `torch.from_dlpack`. Outside jit only.

    Raises:
      ValueError: a slot that does not exist, or is not registered.
    """
    _check_open(kv, slot)
    length = int(kv.length[slot])

    def of_layer(layer: int) -> tuple[jax.Array, jax.Array]:
        keys, values = (
            x[slot, :length].swapaxes(0, 1)[None] for x in contiguous(kv, layer)
        )
        return keys, values

    return tuple(of_layer(layer) for layer in range(len(kv.k)))


def from_tuples(kv: StaticKV, slot: int, tuples: Sequence[tuple[Any, Any]]) -> StaticKV:
    """`kv` with the slot's content replaced by Hugging Face's `(key, value)` tuples.

    Afterwards the slot holds `[0, T)`. Bits are copied, never converted. Outside jit
    only.

    Args:
      slot: registered; what it held is forgotten.
      tuples: of each layer key and value, `[1, K, T, H]` in the cache's dtype: JAX or
        NumPy arrays, or whatever speaks DLPack, such as torch tensors.

    Raises:
      ValueError: a slot that is not registered, or tuples that do not fit the cache.
    """
    _check_open(kv, slot)
    if len(tuples) != len(kv.k):
        raise ValueError(
            f"{len(tuples)} layers of keys and values for a cache of {len(kv.k)}"
        )
    for layer, pair in enumerate(tuples):
        if len(pair) != 2:
            raise ValueError(
                f"layer {layer} has {len(pair)} entries, not a key and a value"
            )
    dtype = kv.k[0].dtype.name
    keys, values = (
        [
            _as_array(pair[entry], f"layer {layer}'s {name}", dtype=dtype)
            for layer, pair in enumerate(tuples)
        ]
        for entry, name in enumerate(("keys", "values"))
    )
    length = _check_fit(kv, {"keys": keys, "values": values})

    def put(pool: jax.Array, x: jax.Array) -> jax.Array:
        by_position = pool.reshape(kv.num_slots, kv.slot_capacity, *pool.shape[2:])
        rows = x.swapaxes(1, 2)  # [1, T, K, H]
        written = jax.lax.dynamic_update_slice(by_position, rows, (slot, 0, 0, 0))
        return written.reshape(pool.shape)

    return kv.replace(
        k=tuple(map(put, kv.k, keys)),
        v=tuple(map(put, kv.v, values)),
        length=kv.length.at[slot].set(length),
    )


def check_integrity(kv: StaticKV) -> None:
    """Raises `ValueError` unless every slot owns its own stretch of pages, in order.

    Outside jit only; a debug aid and the invariant of the tests.
    """
    own = np.arange(kv.num_pages).reshape(kv.num_slots, -1)
    moved = np.flatnonzero((np.asarray(kv.page_table) != own).any(axis=1))
    if moved.size:
        raise ValueError(f"slots {moved.tolist()} do not own their own pages in order")
    cache.check_integrity(kv)


def _check_open(kv: StaticKV, slot: int) -> None:
    if not 0 <= slot < kv.num_slots:
        raise ValueError(f"slot {slot} is outside [0, {kv.num_slots})")
    if not bool(kv.registered[slot]):
        raise ValueError(f"slot {slot} is not registered")


def _as_array(x: Any, what: str, *, dtype: str) -> jax.Array:
    # By name, and before JAX sees it: that would make float64 float32 without a word.
    given = str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch.")
    if given != dtype:
        raise ValueError(f"{what} are {given}: hand over arrays of {dtype}")
    if isinstance(x, jax.Array | np.ndarray):
        return jnp.asarray(x)
    try:
        return jnp.from_dlpack(x)
    except (
        jax.errors.JaxRuntimeError,
        AttributeError,
        BufferError,
        TypeError,
    ) as error:
        raise ValueError(
            f"{what} cannot be read ({error}): hand over a JAX or NumPy array, or a "
            "contiguous and detached tensor"
        ) from error


def _check_fit(kv: StaticKV, layers: dict[str, list[jax.Array]]) -> int:
    """The number of positions that all arrays hold, if they fit a slot of `kv`."""
    K, H = kv.k[0].shape[2:]
    shapes = {x.shape for arrays in layers.values() for x in arrays}
    length = min((shape[2] for shape in shapes if len(shape) == 4), default=0)
    for name, arrays in layers.items():
        for layer, x in enumerate(arrays):
            if x.shape != (1, K, length, H):
                raise ValueError(
                    f"layer {layer}'s {name} have shape {list(x.shape)}, but the cache "
                    f"takes [1, {K}, T, {H}], with the same T (here {length}) for all"
                )
    if length > kv.slot_capacity:
        raise ValueError(
            f"{length} positions do not fit a slot of {kv.slot_capacity}: allow a "
            "larger capacity"
        )
    return length
