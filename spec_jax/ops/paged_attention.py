"""Attention of a slab of rows over the pages of their slots.

    out[r, n] = sum_t softmax_t(scale * q[r, n] . k[t, n // G]) v[t, n // G]
                over the positions t = 0 .. positions[r] of the row's slot

A row's result depends, bit for bit, on its query, its position and the keys and
values it may see, for a fixed number of rows. Keys go in blocks of `KEY_BLOCK`
absolute positions, walked in order; a block that a row may not see leaves that row's
running sums untouched (by selection: not by adding zero). The number of blocks that
are walked follows the longest active row, not the capacity, and each slot is walked for
itself, so that a sequence's bits do not depend on its neighbours.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.ops import bits
from spec_jax.typing import typed


KEY_BLOCK = 128


@typed
def paged_attention(
    q: Float[Array, "R N H"],
    k_pages: Float[Array, "P C K H"],
    v_pages: Float[Array, "P C K H"],
    *,
    page_table: Int[Array, "S M"],
    slots: Int[Array, " R"],
    positions: Int[Array, " R"],
    num_active: Int[Array, ""],
    scale: float,
    impl: str,
) -> Float[Array, "R N H"]:
    """Attends each active row to positions `0 .. positions[r]` of its slot.

    Padding rows return unspecified values. Bytes of unowned pages, and of owned pages
    past the slot's longest active row, are never used, NaN included.

    Raises:
      ValueError: a page size that neither divides `KEY_BLOCK` nor is a multiple.
    """
    page_size = k_pages.shape[1]
    if KEY_BLOCK % page_size and page_size % KEY_BLOCK:
        raise ValueError(
            f"{page_size=} must divide {KEY_BLOCK}, the key block, or be a multiple"
        )
    if impl == "xla":
        return _xla(
            q,
            k_pages,
            v_pages,
            page_table=page_table,
            slots=slots,
            positions=positions,
            num_active=num_active,
            scale=scale,
        )
    raise NotImplementedError(f"paged_attention has no {impl!r} implementation")


def _xla(q, k_pages, v_pages, *, page_table, slots, positions, num_active, scale):
    """Online softmax (Milakov and Gimelshein 2018), float32 throughout."""
    R, N, H = q.shape
    K = k_pages.shape[2]
    G = N // K
    # All rows meet a block in one product per key/value head: [K, R * G, H].
    queries = q.astype(jnp.float32) * scale
    queries = queries.reshape(R, K, G, H).transpose(1, 0, 2, 3).reshape(K, R * G, H)
    live = jnp.arange(R, dtype=jnp.int32) < num_active

    def walk_slot(slot, carry):
        """Adds the keys of one slot, up to its longest active row."""
        mine = live & (slots == slot)
        slot_len = jnp.max(jnp.where(mine, positions + 1, 0))
        num_blocks = (slot_len + KEY_BLOCK - 1) // KEY_BLOCK

        def walk_block(block, carry):
            start = block * KEY_BLOCK
            keys, values = (
                _read_block(pages, page_table[slot], start)
                for pages in (k_pages, v_pages)
            )
            key_positions = start + jnp.arange(KEY_BLOCK, dtype=jnp.int32)
            # A masked key has probability 0, but 0 * NaN is NaN.
            written = (key_positions < slot_len)[None, :, None]
            values = jnp.where(written, values, 0.0)
            visible = mine[:, None] & (key_positions[None, :] <= positions[:, None])
            return _accumulate(carry, queries, keys, values, visible, G)

        return jax.lax.fori_loop(0, num_blocks, walk_block, carry)

    carry = (
        jnp.full((K, R * G), -jnp.inf, jnp.float32),  # running maximum
        jnp.zeros((K, R * G), jnp.float32),  # running sum of exponentials
        jnp.zeros((K, R * G, H), jnp.float32),  # running weighted values
    )
    if page_table.shape[0] == 1:
        carry = walk_slot(0, carry)
    else:
        carry = jax.lax.fori_loop(0, page_table.shape[0], walk_slot, carry)
    _, total, weighted = carry
    out = (weighted / total[..., None]).reshape(K, R, G, H)
    return out.transpose(1, 0, 2, 3).reshape(R, N, H).astype(q.dtype)


def _read_block(pages, table, start):
    """Float32 keys or values `[K, KEY_BLOCK, H]` at absolute positions from `start`."""
    _, C, K, H = pages.shape
    span = min(C, KEY_BLOCK)  # positions taken from one page
    firsts = start + span * jnp.arange(KEY_BLOCK // span, dtype=jnp.int32)
    page_ids = table.at[firsts // C].get(mode="fill", fill_value=pages.shape[0])
    pool = bits.to_bits(pages)
    if span == C:
        block = pool.at[page_ids].get(mode="fill", fill_value=0)
    else:
        offsets = firsts[0] % C + jnp.arange(span, dtype=jnp.int32)
        block = pool.at[page_ids[0], offsets].get(mode="fill", fill_value=0)
    block = bits.from_bits(block.reshape(KEY_BLOCK, K, H), pages.dtype)
    block = block.astype(jnp.float32)
    return block.transpose(1, 0, 2)


def _accumulate(carry, queries, keys, values, visible, group):
    """One block into the running softmax; rows that see nothing keep their sums."""
    maximum, total, weighted = carry
    seen = jnp.repeat(visible, group, axis=0)  # [R * G, KEY_BLOCK]
    # A row has probability 0 for a key it may not see, but 0 * NaN is NaN: values
    # that are not finite are kept out of the product, and spoil who sees them.
    is_finite = jnp.isfinite(values)
    values = jnp.where(is_finite, values, 0.0)
    spoiled = jax.lax.cond(
        jnp.all(is_finite),
        lambda: jnp.zeros(weighted.shape, bool),
        lambda: (
            jnp.einsum(
                "qt,kth->kqh",
                seen.astype(jnp.float32),
                (~is_finite).astype(jnp.float32),
            )
            > 0
        ),
    )
    scores = jnp.einsum("kqh,kth->kqt", queries, keys)
    scores = jnp.where(seen[None], scores, -jnp.inf)
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1))
    # Where nothing was seen so far the maximum is -inf, and -inf - -inf is NaN.
    shift = jnp.where(new_maximum == -jnp.inf, 0.0, new_maximum)
    rescale = jnp.exp(maximum - shift)
    probs = jnp.exp(scores - shift[..., None])
    new_total = total * rescale + jnp.sum(probs, axis=-1)
    new_weighted = weighted * rescale[..., None] + jnp.einsum(
        "kqt,kth->kqh", probs, values
    )
    new_weighted = jnp.where(spoiled, jnp.nan, new_weighted)
    touched = jnp.any(seen, axis=-1)[None]
    return (
        jnp.where(touched, new_maximum, maximum),
        jnp.where(touched, new_total, total),
        jnp.where(touched[..., None], new_weighted, weighted),
    )


def key_blocks(length: int) -> int:
    """Blocks that a row at position `length - 1` walks: the unit of attention cost."""
    return math.ceil(length / KEY_BLOCK)
