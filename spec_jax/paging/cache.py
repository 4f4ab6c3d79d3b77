"""PagedKV: keys and values in pages, as a pytree of plain arrays.

Functions here know pages, slots and positions; they know neither models nor
speculation. `allocator` changes which slot owns a page; functions here store bytes.
For a slot of length `n` the interval `[0, n)` holds valid keys and values,
`[n, num_owned * C)` is owned and holds bytes that mean nothing.

In a static cache slot `s` owns the pages `[s * M, (s + 1) * M)` for good, in order: a
pool `[S * M, C, K, H]` read as `[S, T, K, H]`, `T = M * C`, is a cache by slot and
position. Code that reads or writes pages finds these by the page table, as any others;
`allocator` moves none, and truncation moves a length and nothing else. The price is
memory for `T` positions of every slot, used or not. A ring has memory for the last
positions alone: its table repeats `kept` pages, so that a position overwrites the one
that lies `kept` pages before it, which must not be read from then on.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax import pytree
from spec_jax.ops import bits, page_write
from spec_jax.typing import check_whole, typed


class PagedKV(pytree.Node):
    """Pages of all layers, and the page table: each slot's pages and its length.

    One array a layer, not one stacked array: XLA on CPU copies a stacked cache once
    per layer and token. Entries of `page_table` past `num_owned`, and of `free_pages`
    past `num_free`, hold `P`: a positive page number that does not exist, so that
    scatters aimed there are dropped.
    """

    #
    # Bytes
    #
    k: tuple[jax.Array, ...]  # per layer [P, C, K, H]
    v: tuple[jax.Array, ...]  # per layer [P, C, K, H]
    #
    # Page table
    #
    page_table: jax.Array  # [S, M] int32
    num_owned: jax.Array  # [S] int32, pages owned by each slot
    length: jax.Array  # [S] int32, valid positions of each slot
    free_pages: jax.Array  # [P] int32, a stack
    num_free: jax.Array  # [] int32
    counts: jax.Array | None = None  # [P] int32, owners of each page, if they may share
    #
    # Failures inside jit are data
    #
    out_of_pages: jax.Array  # [S] bool, a reservation found no page
    refused: jax.Array  # [S] bool, an operation was invalid and changed nothing

    # Whether `allocator` moves pages between slots and the free stack: not if static.
    has_shared_pool: bool = pytree.static(default=True)

    @property
    def num_slots(self) -> int:
        return self.page_table.shape[0]

    @property
    def num_pages(self) -> int:
        return self.free_pages.shape[0]

    @property
    def page_size(self) -> int:
        return self.k[0].shape[1]

    @property
    def slot_capacity(self) -> int:
        """Positions that one slot can hold: page-table width times page size."""
        return self.page_table.shape[1] * self.page_size


def init(
    *,
    num_layers: int,
    num_slots: int,
    page_size: int,
    pages_per_slot: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    num_pages: int | None = None,
    shares: bool = False,
    kept: int | None = None,
) -> PagedKV:
    """Makes an empty cache, in which each slot has its first page.

    Args:
      num_pages: of all slots together; None: a static cache, whose slots have all
        their pages.
      shares: whether a pool counts the owners of pages, as `allocator.share` requires.
      kept: pages that a slot of a ring owns; None: `pages_per_slot`, and no ring.

    Raises:
      ValueError: a size below one, fewer pages than slots, or a page table wider than
        the pool.
    """
    is_static = num_pages is None
    kept = pages_per_slot if kept is None else min(kept, pages_per_slot)
    if num_pages is None:
        num_pages = num_slots * kept
    check_whole(
        num_layers=num_layers,
        num_slots=num_slots,
        page_size=page_size,
        pages_per_slot=pages_per_slot,
        num_pages=num_pages,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    if num_pages < num_slots:
        raise ValueError(
            f"{num_pages=} is fewer than {num_slots=}, and every slot has a page"
        )
    if kept > num_pages:
        raise ValueError(f"{pages_per_slot=} exceeds {num_pages=}")
    # Not `jnp.empty`: it is uninitialised from jax 0.11 on.
    shape = (num_pages, page_size, num_kv_heads, head_dim)
    # The top of the stack is its end: pages are handed out from 0 upwards.
    stack = jnp.arange(num_pages - 1, -1, -1, dtype=jnp.int32)
    owners = (stack[::-1] < num_slots).astype(jnp.int32)
    table = jnp.full((num_slots, pages_per_slot), num_pages, jnp.int32)
    kv = PagedKV(
        k=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        v=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        page_table=table.at[:, 0].set(jnp.arange(num_slots, dtype=jnp.int32)),
        num_owned=jnp.ones((num_slots,), jnp.int32),
        length=jnp.zeros((num_slots,), jnp.int32),
        free_pages=jnp.where(stack < num_slots, num_pages, stack),
        num_free=jnp.int32(num_pages - num_slots),
        counts=owners if shares else None,
        out_of_pages=jnp.zeros((num_slots,), bool),
        refused=jnp.zeros((num_slots,), bool),
        has_shared_pool=not is_static,
    )
    if not is_static:
        return kv
    firsts = kept * jnp.arange(num_slots, dtype=jnp.int32)[:, None]
    return kv.replace(
        page_table=firsts + jnp.arange(pages_per_slot, dtype=jnp.int32)[None] % kept,
        num_owned=jnp.full((num_slots,), pages_per_slot, jnp.int32),
        free_pages=jnp.full((num_pages,), num_pages, jnp.int32),
        num_free=jnp.int32(0),
    )


@typed
def write(
    kv: PagedKV,
    layer: int,
    *,
    slots: Int[Array, " R"],
    positions: Int[Array, " R"],
    num_active: Int[Array, ""],
    k: Float[Array, "R K H"],
    v: Float[Array, "R K H"],
) -> PagedKV:
    """Stores one layer's keys and values of the active rows at their positions.

    Padding rows, and positions on pages that their slot does not own, write nowhere.
    Lengths do not change: see `allocator.extend`.
    """
    where = {
        "page_table": kv.page_table,
        "slots": slots,
        "positions": positions,
        "num_active": num_active,
    }
    return replace_layer(
        kv,
        layer,
        k=page_write.page_write(kv.k[layer], k, **where),
        v=page_write.page_write(kv.v[layer], v, **where),
    )


def copy_page(kv: PagedKV, source: jax.Array, target: jax.Array) -> PagedKV:
    """Copies all K/V of one page to another, in all layers; drops them at page `P`."""

    def copied(pool: jax.Array) -> jax.Array:
        elements = bits.to_bits(pool)
        read = elements.at[source].get(mode="fill", fill_value=0)
        # As in `page_move`: a GPU would read in the kernel that writes.
        read = jax.lax.optimization_barrier(read)
        return bits.from_bits(elements.at[target].set(read, mode="drop"), pool.dtype)

    return kv.replace(k=tuple(map(copied, kv.k)), v=tuple(map(copied, kv.v)))


def replace_layer(kv: PagedKV, layer: int, *, k: jax.Array, v: jax.Array) -> PagedKV:
    """Returns the cache with other pages for one layer."""

    def put(pools: tuple, pool: jax.Array) -> tuple:
        return (*pools[:layer], pool, *pools[layer + 1 :])

    return kv.replace(k=put(kv.k, k), v=put(kv.v, v))
