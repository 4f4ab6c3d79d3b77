"""Copies keys and values to other places of their slots, in all layers."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax.native import calls
from spec_jax.ops import bits, page_write
from spec_jax.typing import typed


@typed
def page_move(
    pools: tuple[Float[Array, "P C K H"], ...],
    *,
    page_table: Int[Array, "S M"],
    slots: Int[Array, " Q"],
    sources: Int[Array, " Q"],
    targets: Int[Array, " Q"],
    moves: Bool[Array, " Q"],
    impl: str,
) -> tuple[Float[Array, "P C K H"], ...]:
    """Copies some places of slots to others, in every pool.

    All are read before any is written, and nothing is computed with the elements: NaN
    keeps its payload. A source that no page holds reads as 0; a target that no page
    holds is not written. Targets of one slot are distinct.

    Args:
      moves: which of the copies are made; the others read and write nothing.
    """
    if impl == "native":
        return calls.move(
            pools,
            page_table=page_table,
            slots=slots,
            sources=sources,
            targets=targets,
            moves=moves,
        )
    num_pages, page_size = pools[0].shape[:2]
    page, offset = page_write.locate(page_table, page_size, slots, sources)
    to_page, to_offset = page_write.locate(page_table, page_size, slots, targets)
    # Positive and out of range, and so dropped.
    to_page = jnp.where(moves & (sources != targets), to_page, num_pages)

    def moved(pool: jax.Array) -> jax.Array:
        elements = bits.to_bits(pool)
        read = elements.at[page, offset].get(mode="fill", fill_value=0)
        # A GPU would read in the kernel that writes, and copy the pool for it.
        read = jax.lax.optimization_barrier(read)
        elements = elements.at[to_page, to_offset].set(read, mode="drop")
        return bits.from_bits(elements, pool.dtype)

    return tuple(map(moved, pools))
