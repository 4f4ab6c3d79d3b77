"""A recorder: a target that records the inputs and logits of its rows, by position.

It takes the place of the target that it wraps, in the same loops, for autoregressive
decoding and for rounds of any number of slots. A position that is rolled back is
overwritten when another round runs it, so that after a run the entry of every committed
position is that of the pass that committed it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, UInt32

from spec_jax import pytree
from spec_jax.engine import baseline, protocols, rows, target as target_lib
from spec_jax.model import row_model
from spec_jax.typing import typed


NONE = -1
"""The entry where no row was run."""


class Recording(pytree.Node):
    """Decisions of the row at each position, and the cache of the target that ran it.

    Entry `[b, p]` describes the row of slot `b` that was fed the token of position `p`
    and so decides that of `p + 1`; where none was run it is 0 or `NONE`. A tree's rows
    are recorded by their places, and those of its accepted path are moved to their
    positions, as their K/V are; `row` is then the depth.
    """

    cache: protocols.Cache  # the wrapped target's
    row: jax.Array  # [B, max_len] int32, its column in its window; 0 is pending
    log_prob: jax.Array  # [B, max_len] float32, natural, of the token of highest logit
    logits_hash: jax.Array  # [B, max_len, 2] uint32, `hash_bits` of all its logits
    constant: jax.Array  # [B, max_len] bool, whether all its logits are equal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorder(target_lib.Target):
    """A target that runs `target` and records every active row of it.

    The recorded values are computed from the target's final logits, one row at a time
    in a loop of its own: their bits do not depend on the number of rows, and no bit of
    the target's depends on them.

    Attributes:
      target: any target; a `row_model.RowModel` becomes a target of one slot.
    """

    target: Any

    def __post_init__(self) -> None:
        if isinstance(self.target, row_model.RowModel):
            object.__setattr__(self, "target", rows.of(self.target, 1))

    num_slots = target_lib.passed_on("num_slots", of="target")
    max_rows = target_lib.passed_on("max_rows", of="target")
    config = target_lib.passed_on("config", of="target")
    choose = target_lib.passed_on("choose", of="target")
    draw = target_lib.passed_on("draw", of="target")
    sums = target_lib.passed_on("sums", of="target")

    def attach(self, state: Any) -> Any:
        """Returns the state with an empty recording around its cache, for the loops.

        Args:
          state: a `state.State`, or a `baseline.DecodeState`, which has one slot.
        """
        alone = isinstance(state, baseline.DecodeState)
        tokens = state.tokens[None] if alone else state.slots.tokens

        def full(value, *shape: int, dtype=jnp.int32) -> jax.Array:
            return jnp.full((*tokens.shape, *shape), value, dtype)

        return state.replace(
            cache=Recording(
                cache=state.cache,
                row=full(NONE),
                log_prob=full(0, dtype=jnp.float32),
                logits_hash=full(0, 2, dtype=jnp.uint32),
                constant=full(0, dtype=bool),
            )
        )

    def detach(self, state: Any) -> tuple[Any, Recording]:
        """Returns the state with the target's own cache, and the recording."""
        return state.replace(cache=state.cache.cache), state.cache

    def verify(
        self,
        params: protocols.Params,
        cache: Recording,
        window: protocols.Window,
        **taps: tuple[int, ...],
    ) -> tuple[Recording, protocols.Verified]:
        """Verifies as the target does, and records all rows that were run."""
        inner, verified = self.target.verify(params, cache.cache, window, **taps)
        chosen = self.target.choose(verified.logits, verified.num_active)
        recording = self._record(cache.replace(cache=inner), window, verified, chosen)
        return recording, verified

    def keep_path(
        self,
        cache: Recording,
        path: Int[Array, "B D"],
        num_kept: Int[Array, " B"],
        *,
        start: Int[Array, " B"],
    ) -> Recording:
        """Moves the entries of the path's rows, as the target moves their K/V."""
        inner = self.target.keep_path(cache.cache, path, num_kept, start=start)
        steps = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
        slots = jnp.arange(path.shape[0], dtype=jnp.int32)[:, None]
        source = start[:, None] + path
        target = start[:, None] + steps + 1
        # Steps past the kept path get an index past the end, and are dropped.
        target = jnp.where(steps < num_kept[:, None], target, cache.row.shape[1])

        def moved(entries):
            return entries.at[slots, target].set(entries[slots, source], mode="drop")

        names = ("log_prob", "logits_hash", "constant")
        by_row = {name: moved(getattr(cache, name)) for name in names}
        # As in a chain: a row's distance from its window's start is its depth.
        depth = jnp.broadcast_to(steps + 1, target.shape)
        by_row["row"] = cache.row.at[slots, target].set(depth, mode="drop")
        return cache.replace(cache=inner, **by_row)

    def truncate(
        self, cache: Recording, new_len: Int[Array, " B"], *, asked: Bool[Array, " B"]
    ) -> Recording:
        """Truncates the target's cache; recorded entries stay until overwritten."""
        inner = self.target.truncate(cache.cache, new_len, asked=asked)
        return cache.replace(cache=inner)

    def out_of_pages(self, cache: Recording) -> Bool[Array, " B"]:
        """Returns which slots found no page, by the target."""
        return self.target.out_of_pages(cache.cache)

    def _record(self, recording, window, verified, chosen):
        """Writes the entries of one call."""
        # The barrier hides that decoding has one row: XLA would inline a loop that runs
        # once, and fuse it with the code around it.
        verified, chosen = jax.lax.optimization_barrier((verified, chosen))
        columns = jnp.arange(window.tokens.shape[1], dtype=jnp.int32)
        columns = jnp.broadcast_to(columns, verified.at.shape)
        none = jnp.zeros((verified.logits.shape[0],), jnp.int32)
        column_of = none.at[verified.at].set(columns, mode="drop")

        def record_row(i, recording):
            """Writes the entries of row `i` at its slot and position."""
            slot, column = verified.slots[i], column_of[i]
            at = slot, window.start[slot] + column
            row = jax.lax.optimization_barrier(verified.logits[i])
            return recording.replace(
                row=recording.row.at[at].set(column),
                log_prob=recording.log_prob.at[at].set(
                    jax.nn.log_softmax(row)[chosen[i]]
                ),
                logits_hash=recording.logits_hash.at[at].set(hash_bits(row)),
                constant=recording.constant.at[at].set(jnp.max(row) == jnp.min(row)),
            )

        # A loop, not a scatter of the whole slab: only rows that were run cost time;
        # padding rows write nothing.
        entries = recording.replace(cache=None)
        entries = jax.lax.fori_loop(0, verified.num_active, record_row, entries)
        return entries.replace(cache=recording.cache)


_SEEDS = (0x9E3779B9, 0x85EBCA6B)


@typed
def hash_bits(x: Float32[Array, " V"]) -> UInt32[Array, "2"]:
    """Returns two 32-bit hashes of all bits of a float32 vector, NaN included.

    Vectors that differ in one element always have different hashes; those with more
    differences have equal ones in one of 2**64 cases. The sums are of integers: no
    order of summation changes them.

    Each element is mixed with its index by the finalizer of MurmurHash3 (Appleby,
    https://github.com/aappleby/smhasher), a bijection.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    index = np.arange(bits.shape[0], dtype=np.uint32)
    sums = [
        jnp.sum(_mix(bits ^ _mix(index + np.uint32(seed))), dtype=jnp.uint32)
        for seed in _SEEDS
    ]
    return jnp.stack(sums)


def _mix(h):
    """Mixes NumPy or JAX arrays of uint32 by MurmurHash3's 32-bit finalizer."""
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
