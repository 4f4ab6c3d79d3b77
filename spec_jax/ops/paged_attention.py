"""Attention of a slab of rows over the pages of their slots.

    out[r, n] = sum_t softmax_t(scale * q[r, n] . k[t, n // G]) v[t, n // G]
                over the positions t = 0 .. positions[r] of the row's slot

Trees have rows of one position that see different keys: a row's `branch` says where in
the slot the keys of its last positions are stored.

A row's result depends, bit for bit, on its query, its position and the keys and
values it may see, for a fixed number of rows: not on where those are stored. Keys go in
blocks of `KEY_BLOCK` absolute positions, walked in order; a block that a row may not
see leaves that row's running sums untouched (by selection, not by adding zero). The
number of blocks that are walked follows the longest active row, not the capacity, and
each slot is walked for itself, so that a sequence's bits do not depend on its
neighbours.
"""

import functools

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
    branch: Int[Array, "R A"] | None = None,
    firsts: Int[Array, " R"] | None = None,
    by_head: bool = False,
) -> Float[Array, "R N H"]:
    """Attends each active row to positions `firsts[r] .. positions[r]` of its slot.

    Online softmax (Milakov and Gimelshein 2018), float32 throughout. The blocks of keys
    that all rows of a slot find at their own positions are walked for all of them; the
    blocks after these for each branch apart.

    Padding rows return unspecified values. Bytes of unowned pages, and of owned pages
    past the slot's longest active row, are never used, NaN included.

    Args:
      branch: places of the row's last `A` keys (`tree.layout`); None: every key is
        stored at its own position.
      firsts: the first position that each row sees, not past its own; None: 0.
      by_head: see `row_attention`.
    """
    accumulate = _accumulate_each if by_head else _accumulate
    R, N, H = q.shape
    K = k_pages.shape[2]
    G = N // K
    # All rows meet a block in one product per key/value head: [K, R * G, H].
    queries = q.astype(jnp.float32) * scale
    queries = queries.reshape(R, K, G, H).transpose(1, 0, 2, 3).reshape(K, R * G, H)
    live = jnp.arange(R, dtype=jnp.int32) < num_active

    def walk(carry, mine, slot, length, blocks, place=lambda position: position):
        """Adds blocks of a slot's keys, below `length`, to the rows that are marked."""

        def walk_block(block, carry):
            offsets = jnp.arange(KEY_BLOCK, dtype=jnp.int32)
            key_positions = block * KEY_BLOCK + offsets
            is_key, places = key_positions < length, place(key_positions)
            keys, values = (
                _read(pages, page_table[slot], places, is_key)
                for pages in (k_pages, v_pages)
            )
            visible = mine[:, None] & _seen(key_positions, positions, firsts)
            return accumulate(carry, queries, keys, values, visible)

        first, end = blocks
        first = jnp.maximum(first, _hidden_blocks(mine, firsts))
        return jax.lax.fori_loop(first, end, walk_block, carry)

    def walk_slot(slot, carry):
        """Adds the keys of one slot that all its rows find at their positions."""
        mine = live & (slots == slot)
        slot_len = jnp.max(jnp.where(mine, positions + 1, 0))
        end = _num_blocks(slot_len)
        if branch is not None:
            end = jnp.minimum(end, _shared_blocks(mine, positions, branch))
        return walk(carry, mine, slot, slot_len, (0, end))

    def walk_branch(leader, carry):
        """Adds the other keys of one branch, for all rows that lie on it."""
        mine = live & (leaders == leader)
        length = jnp.where(jnp.any(mine), positions[leader] + 1, 0)
        of_slot = live & (slots == slots[leader])
        blocks = _shared_blocks(of_slot, positions, branch), _num_blocks(length)
        place = functools.partial(_places, branch, positions, leader)
        return walk(carry, mine, slots[leader], length, blocks, place)

    carry = (
        jnp.full((K, R * G), -jnp.inf, jnp.float32),  # running maximum
        jnp.zeros((K, R * G), jnp.float32),  # running sum of exponentials
        jnp.zeros((K, R * G, H), jnp.float32),  # running weighted values
    )
    if page_table.shape[0] == 1:
        carry = walk_slot(0, carry)
    else:
        carry = jax.lax.fori_loop(0, page_table.shape[0], walk_slot, carry)
    if branch is not None:
        leaders = _leaders(branch, slots, positions, live)
        carry = jax.lax.fori_loop(0, R, walk_branch, carry)
    _, total, weighted = carry
    out = (weighted / total[..., None]).reshape(K, R, G, H)
    return out.transpose(1, 0, 2, 3).reshape(R, N, H).astype(q.dtype)


def _seen(key_positions, positions, firsts):
    """Returns which keys each row sees, `[R, KEY_BLOCK] bool`."""
    seen = key_positions[None, :] <= positions[:, None]
    return seen if firsts is None else seen & (key_positions[None] >= firsts[:, None])


def _hidden_blocks(mine, firsts):
    """Returns the leading blocks of keys of which no marked row sees any."""
    if firsts is None:
        return 0
    most = jnp.iinfo(jnp.int32).max
    return jnp.maximum(jnp.min(jnp.where(mine, firsts, most)), 0) // KEY_BLOCK


def _num_blocks(length):
    """Returns the blocks that cover `length` keys."""
    return (length + KEY_BLOCK - 1) // KEY_BLOCK


def _shared_blocks(mine, positions, branch):
    """Returns the leading blocks of keys that all marked rows find at their positions.

    They end before the first position that a branch of theirs reaches.
    """
    firsts = jnp.maximum(positions + 1 - branch.shape[1], 0)
    most = jnp.iinfo(jnp.int32).max
    return jnp.min(jnp.where(mine, firsts, most)) // KEY_BLOCK


def _leaders(branch, slots, positions, live):
    """Returns for each row the last row on whose branch it lies, `[R] int32`."""
    R, A = branch.shape
    # Row `r` is the `above`-th ancestor of row `s`, if their places agree.
    above = positions[None, :] - positions[:, None]
    at = jnp.clip(A - 1 - above, 0, A - 1)
    places = branch[jnp.arange(R, dtype=jnp.int32)[None, :], at]
    on_branch = (above >= 0) & (above < A) & (places == branch[:, -1:])
    on_branch &= (slots[:, None] == slots[None, :]) & live[:, None] & live[None, :]
    rows = jnp.arange(R, dtype=jnp.int32)
    return jnp.max(jnp.where(on_branch, rows[None, :], -1), axis=1)


def _places(branch, positions, row, key_positions):
    """Returns where the keys that ONE row sees are stored."""
    A = branch.shape[1]
    at = key_positions - (positions[row] + 1 - A)
    inside = branch[row].at[jnp.clip(at, 0, A - 1)].get(mode="clip")
    return jnp.where((at >= 0) & (at < A), inside, key_positions)


def _read(pages, table, places, is_key):
    """Reads float32 keys or values `[K, KEY_BLOCK, H]` at places of a slot, or 0."""
    num_pages, C = pages.shape[:2]
    page_ids = table.at[places // C].get(
        mode="fill", fill_value=num_pages, wrap_negative_indices=False
    )
    page_ids = jnp.where(is_key, page_ids, num_pages)
    read = bits.to_bits(pages).at[page_ids, places % C].get(mode="fill", fill_value=0)
    return bits.from_bits(read, pages.dtype).astype(jnp.float32).transpose(1, 0, 2)


def _accumulate(carry, queries, keys, values, visible):
    """Adds one block to the running softmax; rows that see nothing keep their sums."""
    maximum, total, weighted = carry
    group = queries.shape[1] // visible.shape[0]
    seen = jnp.repeat(visible, group, axis=0)  # [R * G, KEY_BLOCK]
    # A row has probability 0 for a key it may not see, but 0 * NaN is NaN: replace
    # non-finite values by 0, then set rows that may see them to NaN.
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


def _accumulate_each(carry, queries, keys, values, visible):
    """Does as `_accumulate`, each key/value head for itself."""
    one = functools.partial(_accumulate, visible=visible)
    return each_head(one, carry, queries, keys, values, out=carry)


def each_head(function, *of_heads, out):
    """Applies a function to one key/value head after the other, of arrays `[K, ..]`.

    A loop's body has one shape; how XLA compiles several heads side by side depends on
    their number. The arrays are padded by one head that is not run: XLA would remove a
    slice that takes the whole array.

    Args:
      of_heads: arguments, pytrees of arrays; the function gets their slices `[1, ..]`.
      out: arrays of the results' shapes, which the results overwrite.
    """
    # Always 0, which XLA cannot know: else it would unroll a loop of one head.
    some = jax.tree.leaves(of_heads)[-1].reshape(-1)[0].astype(jnp.float32)
    some = jax.lax.bitcast_convert_type(some, jnp.uint32) >> 1
    zero = jnp.minimum(some.astype(jnp.int32), 0)
    count = jax.tree.leaves(out)[0].shape[0]
    widen = lambda x: jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1))
    of_heads = jax.lax.optimization_barrier(jax.tree.map(widen, of_heads))

    def step(head, out):
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, head, 1)
        one = jax.lax.optimization_barrier(jax.tree.map(cut, of_heads))
        made = jax.lax.optimization_barrier(function(*one))
        put = lambda all_, x: jax.lax.dynamic_update_slice_in_dim(all_, x, head, 0)
        return jax.tree.map(put, out, made)

    out = jax.lax.fori_loop(zero, count, step, jax.tree.map(widen, out))
    return jax.tree.map(lambda x: x[:count], out)
