"""A recorder: a target that keeps what each of its rows saw, one entry a position.

It stands in the place of the target it wraps, in the same loops, for plain decoding
and for rounds. A position that is rolled back is overwritten when another round runs
it, so that after a run every committed position holds what the pass that committed it
saw. Knows logits and positions; neither pages nor models.
"""

import dataclasses
from typing import TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, UInt32

from spec_jax import autoregressive, protocols, rounds
from spec_jax.typing import typed


NONE = -1
"""Where no token was drafted, and in windows past their last token."""

_State = TypeVar("_State", autoregressive.DecodeState, rounds.RoundState)


@flax.struct.dataclass(kw_only=True)
class Recording:
    """What the rows at each position saw, and the cache of the target that ran them.

    Entry `p` is of the row that was fed at position `p` and so decides the token of
    `p + 1`; entries of positions that were never run are zero, or `NONE`.
    """

    cache: protocols.Cache  # the wrapped target's
    fed: jax.Array  # [max_len] int32, the token fed at the position
    row: jax.Array  # [max_len] int32, which row of its window it was; 0 is pending
    chosen: jax.Array  # [max_len] int32, the token that the row chose
    log_prob: jax.Array  # [max_len] float32, natural, of the token that it chose
    logits_hash: jax.Array  # [max_len, 2] uint32, `hash_bits` of all its logits
    top_ids: jax.Array  # [max_len, top] int32, in descending order of logits
    top_logits: jax.Array  # [max_len, top] float32
    lowest: jax.Array  # [max_len] float32, the lowest of all its logits
    # By other keys than the row's position:
    drafted: jax.Array  # [max_len] int32, proposed for this position, kept or not
    windows: jax.Array  # [max_len, window] int32, by the position of the pending token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorder:
    """A `protocols.Target` that runs `target` and records every live row of it.

    What is recorded is computed from the logits after the target is done with them,
    one row at a time in a loop of its own: its bits do not depend on how many rows
    there are, and no bit of the target's depends on it.

    Attributes:
      target: any target; hashable, as all targets are.
      window: the most rows of a call: gamma_max + 1, for plain decoding too.
      top: how many of the highest logits to keep.
    """

    target: protocols.Target
    window: int
    top: int = 5

    def __post_init__(self):
        for name in ("window", "top"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def attach(self, state: _State) -> _State:
        """The state with an empty recording around its cache: for the loops."""
        (max_len,) = state.tokens.shape

        def full(value, *shape: int, dtype=jnp.int32) -> jax.Array:
            return jnp.full((max_len, *shape), value, dtype)

        return state.replace(
            cache=Recording(
                cache=state.cache,
                fed=full(NONE),
                row=full(NONE),
                chosen=full(NONE),
                log_prob=full(0, dtype=jnp.float32),
                logits_hash=full(0, 2, dtype=jnp.uint32),
                top_ids=full(NONE, self.top),
                top_logits=full(0, self.top, dtype=jnp.float32),
                lowest=full(0, dtype=jnp.float32),
                drafted=full(NONE),
                windows=full(NONE, self.window),
            )
        )

    def detach(self, state: _State) -> tuple[_State, Recording]:
        """Undoes `attach`: the state with the target's own cache, and the recording."""
        return state.replace(cache=state.cache.cache), state.cache

    def forward(
        self,
        params: protocols.Params,
        cache: Recording,
        *,
        tokens: Int[Array, " window"],
        start: Int[Array, ""],
        num_live: Int[Array, ""],
    ) -> tuple[Recording, Float[Array, "R V"]]:
        """As the target's `forward`; records its live rows at positions from `start`.

        Where the cache has no room nothing is recorded.

        Raises:
          ValueError: more tokens than `window`.
        """
        if tokens.shape[0] > self.window:
            raise ValueError(
                f"{tokens.shape[0]} rows do not fit a recorder of window={self.window}"
            )
        inner, logits = self.target.forward(
            params, cache.cache, tokens=tokens, start=start, num_live=num_live
        )
        chosen = self.target.choose(logits, num_live)
        recording = cache.replace(cache=inner)
        num_live = jnp.where(self.target.is_starved(inner), 0, num_live)
        return self._record(recording, logits, chosen, tokens, start, num_live), logits

    def choose(
        self, logits: Float[Array, "R V"], num_live: Int[Array, ""]
    ) -> Int[Array, " R"]:
        """As the target's."""
        return self.target.choose(logits, num_live)

    def truncate(self, cache: Recording, new_len: Int[Array, ""]) -> Recording:
        """As the target's; what was recorded stays until it is overwritten."""
        return cache.replace(cache=self.target.truncate(cache.cache, new_len))

    def is_starved(self, cache: Recording) -> Bool[Array, ""]:
        """As the target's."""
        return self.target.is_starved(cache.cache)

    def _record(self, recording, logits, chosen, tokens, start, num_live):
        """Writes the entries of one call."""
        # The barrier hides that plain decoding has one row: a loop that is known to
        # run once is dissolved into its surroundings, and fused with them.
        logits, chosen, num_live = jax.lax.optimization_barrier(
            (logits, chosen, num_live)
        )
        # One more than the window: the last row decides a token that none was
        # drafted for.
        drafts = jnp.pad(
            tokens, (0, self.window + 1 - tokens.shape[0]), constant_values=NONE
        )
        drafts = jnp.where(
            jnp.arange(self.window + 1, dtype=jnp.int32) < num_live, drafts, NONE
        )

        def record_row(i, recording):
            """Writes the entries of row `i` at its position."""
            at = start + i
            row = jax.lax.optimization_barrier(logits[i])
            top_logits, top_ids = jax.lax.top_k(row, self.top)
            return recording.replace(
                fed=recording.fed.at[at].set(drafts[i]),
                row=recording.row.at[at].set(i),
                chosen=recording.chosen.at[at].set(chosen[i]),
                log_prob=recording.log_prob.at[at].set(
                    jax.nn.log_softmax(row)[chosen[i]]
                ),
                logits_hash=recording.logits_hash.at[at].set(hash_bits(row)),
                top_ids=recording.top_ids.at[at].set(top_ids),
                top_logits=recording.top_logits.at[at].set(top_logits),
                lowest=recording.lowest.at[at].set(jnp.min(row)),
                drafted=recording.drafted.at[at + 1].set(drafts[i + 1], mode="drop"),
            )

        # Not a scatter of the whole slab: the cost follows the live rows, and dead
        # ones write nowhere.
        books = recording.replace(cache=None)
        books = jax.lax.fori_loop(0, num_live, record_row, books)
        at = jnp.where(num_live > 0, start, books.windows.shape[0])
        windows = books.windows.at[at].set(drafts[: self.window], mode="drop")
        return books.replace(cache=recording.cache, windows=windows)


_SEEDS = (0x9E3779B9, 0x85EBCA6B)


@typed
def hash_bits(x: Float32[Array, " V"]) -> UInt32[Array, "2"]:
    """Two 32-bit hashes of all bits of a float32 vector, NaN included.

    One differing element always gives other hashes; several, or another order, give
    the same ones in one of 2**64 cases. The sums are of integers: no order of
    summation changes them.

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
    """MurmurHash3's 32-bit finalizer; of NumPy or JAX arrays of uint32."""
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
