"""The attention of a layer on the row path: norm, rotate, write, attend.

From the fused projection of a slab of rows: queries and keys are normed per head and
rotated by their positions; keys and values of the active rows are written to their
pages; each active row attends to positions `0 .. positions[r]` of its slot, its own
included. One op, because all of it belongs to one key/value head and no other.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.native import calls
from spec_jax.ops import dispatch, page_write, paged_attention, rms_norm, rope
from spec_jax.typing import typed


@typed
def row_attention(
    heads: Float[Array, "R qkv"],
    q_norm: Float[Array, " H"] | None,
    k_norm: Float[Array, " H"] | None,
    pages: tuple[Float[Array, "P C K H"], Float[Array, "P C K H"], Int[Array, "S M"]],
    rows: Any,
    angles: tuple[Float[Array, "R half"], Float[Array, "R half"]],
    *,
    eps: float,
    scale: float,
    impl: str,
    block: int | None = None,
    by_head: bool = False,
) -> tuple[
    Float[Array, "R attention"],
    Float[Array, "P C K H"],
    Float[Array, "P C K H"],
]:
    """Attends the active rows; padding rows are unspecified and write nowhere.

    Args:
      heads: queries, keys and values of each row, `(N + 2K) * H`.
      q_norm, k_norm: weights of RMSNorms with `eps`; None: heads are not normed.
      pages: of keys and of values; and the page table.
      rows: a `model.decoder.Rows`, whose tokens are not read. The last entry of a
        branch, see `paged_attention`, is the place where the row itself is written.
      angles: cosines and sines, in the dtype of `heads` (`rope.angles`).
      block: rows come in runs of so many, at following positions of one slot, and each
        sees its whole run: the positions to the run's last, not to its own.
      by_head: whether "xla" computes each key/value head for itself, so that no bit
        depends on how many there are: for a mesh. Others always do.

    Returns:
      The attended heads `[R, N * H]` and the pages with the active rows written.
    """
    k_pages, v_pages, page_table = pages
    positions, branch = rows.positions, rows.branch
    places = positions if branch is None else branch[:, -1]
    if block is not None:
        positions, branch = _whole_runs(positions, block)
    where: dict[str, Any] = {
        "page_table": page_table,
        "slots": rows.slots,
        "positions": positions,
        "num_active": rows.num_active,
    }
    inputs = heads, q_norm, k_norm, k_pages, v_pages, *angles
    sees = where | {"branch": branch, "firsts": rows.firsts, "scale": scale}
    if impl == "native":
        return calls.attend(*inputs, **sees, eps=eps)
    if block is not None:
        sees["branch"] = None  # All keys of a run lie at their positions.
    if impl in dispatch.PALLAS:
        sees["places"] = None if block is None else places
        kernel = dispatch.kernel("row_attention", impl, "attend")
        return kernel(*inputs, **sees, eps=eps)
    K, H = k_pages.shape[2:]
    split = heads.reshape(heads.shape[0], -1, H)
    q, k, v = jnp.split(split, (split.shape[1] - 2 * K, split.shape[1] - K), axis=1)
    turn = functools.partial(_turned, angles=angles, eps=eps)
    if by_head:
        turn = functools.partial(_each_turned, turn, K)
    q, k = turn(q, q_norm), turn(k, k_norm)
    at = where | {"positions": places}
    k_pages = page_write.page_write(k_pages, k, **at)
    v_pages = page_write.page_write(v_pages, v, **at)
    out = paged_attention.paged_attention(q, k_pages, v_pages, by_head=by_head, **sees)
    return out.reshape(out.shape[0], -1), k_pages, v_pages


def _each_turned(turn, parts, x, norm):
    """Turns heads as `turn` does, in so many parts, each by itself."""
    R, heads, H = x.shape
    split = x.reshape(R, parts, -1, H).transpose(1, 0, 2, 3)
    done = paged_attention.each_head(
        lambda part: turn(part[0], norm)[None], split, out=split
    )
    return done.transpose(1, 0, 2, 3).reshape(R, heads, H)


def _turned(x, norm, *, angles, eps):
    """Norms and rotates heads `[R, heads, H]`."""
    normed = x if norm is None else rms_norm.rms_norm(x, norm, eps=eps)
    return rope.rotate(normed, *angles)


def _whole_runs(
    positions: Int[Array, " R"], block: int
) -> tuple[Int[Array, " R"], Int[Array, "R {block}"]]:
    """Returns the last position that each row sees, and branches of its run's places.

    A softmax does not depend on the order of its keys: a row's own comes last, where
    native kernels look for the place to write it to.
    """
    own = jnp.arange(positions.shape[0], dtype=jnp.int32) % block
    first = (positions - own)[:, None]
    columns = jnp.arange(1, block + 1, dtype=jnp.int32)
    branch = first + (own[:, None] + columns[None]) % block
    return first[:, 0] + block - 1, branch
