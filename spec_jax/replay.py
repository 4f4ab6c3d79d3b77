"""Replay: the rounds of a text that plain decoding wrote, without the target.

Where a draft stays if it is the target's own token, greedy or drawn with keyed noise
(rule "sample-path"), rounds commit the text of plain decoding, whatever drafts. So that
text alone decides which drafts stay. `TraceTarget` is a `protocols.Target` that reads
its tokens from such a text, a trace: `rounds.generate` on it is the very loop that runs
live, and its counters are the live ones as integers, for any drafter, gamma, policy of
gamma and stop tokens, without one weight of the target.

A trace goes on behind stop tokens: it is written with them ignored. A live round judges
its drafts before a stop token cuts, and counts those that the target would have chosen
behind it.

The rules that draw uniforms commit texts of their own, which no trace foretells.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int

from spec_jax import acceptance, protocols, rounds
from spec_jax.gamma import policy as policy_lib


MAX_VOCAB_SIZE = 2**24
"""Below it float32, which is what "logits" are, holds every whole number."""


@flax.struct.dataclass(kw_only=True)
class Trace:
    """A text of plain decoding: the parameters of `TraceTarget`."""

    tokens: jax.Array  # [size] int32, prompt and output, then PAD
    length: jax.Array  # [] int32, how many of them are the text


@flax.struct.dataclass(kw_only=True)
class TraceCache:
    """What a cache of K/V would decide and count."""

    capacity: jax.Array  # [] int32, positions that it holds
    starved: jax.Array  # [] bool, the last forward found no room, or no text
    num_forwards: jax.Array  # [slab + 1] int32, forwards by their live rows


def make_trace(text: list[int], *, size: int | None = None) -> Trace:
    """The trace of a text: traces of one size share their executables.

    Args:
      text: prompt and output.
      size: of the array; that of the text if None.

    Raises:
      ValueError: no text, one that is longer than `size`, or a token that no
        vocabulary has or float32 does not hold.
    """
    size = len(text) if size is None else size
    if not 0 < len(text) <= size:
        raise ValueError(f"a text of {len(text)} tokens is no trace of 1 .. {size}")
    worst = max(text) if min(text) >= 0 else min(text)
    if not 0 <= worst < MAX_VOCAB_SIZE:
        raise ValueError(f"the text has token {worst}, outside [0, {MAX_VOCAB_SIZE})")
    tokens = np.full((size,), acceptance.PAD, np.int32)
    tokens[: len(text)] = text
    return Trace(tokens=jnp.asarray(tokens), length=jnp.int32(len(text)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceTarget:
    """A `protocols.Target` that reads its own tokens from a `Trace`.

    It draws nothing: the tokens of a trace that was sampled are drawn already, and the
    state's `settings` stay None. A drafter that draws has settings of its own.

    Attributes:
      slab: rows of the highest window.

    Raises:
      ValueError: a slab without a row.
    """

    slab: int

    def __post_init__(self):
        if self.slab < 1:
            raise ValueError(f"slab={self.slab} must be at least 1")

    def new_cache(self, *, capacity: int) -> TraceCache:
        """An empty cache of `capacity` positions.

        Raises:
          ValueError: a capacity below one.
        """
        if capacity < 1:
            raise ValueError(f"{capacity=} must be at least 1")
        return TraceCache(
            capacity=jnp.int32(capacity),
            starved=jnp.zeros((), bool),
            num_forwards=jnp.zeros((self.slab + 1,), jnp.int32),
        )

    def forward(
        self,
        params: Trace,
        cache: TraceCache,
        *,
        tokens: Int[Array, " window"],
        start: Int[Array, ""],
        num_live: Int[Array, ""],
    ) -> tuple[TraceCache, Float32[Array, "window 1"]]:
        """The trace's token after each position, as the only entry of its "logits".

        It is the same whatever the window holds. As long as that is the trace, a row
        says what the target chooses. A row behind a draft that differs says what the
        target chooses after the text, and not after that draft: no verdict reads it,
        for the first draft that differs is the last that is judged.

        Where the cache has no room for the live rows, or the trace no token for one of
        them, `is_starved` is true afterwards, and the rows mean nothing.
        """
        (window,) = tokens.shape
        if window > self.slab:
            raise ValueError(f"{window} rows do not fit a slab of {self.slab}")
        # The row of the last live position gives the token of the next.
        end = start + num_live
        starved = (end > cache.capacity) | (end >= params.length)
        own = params.tokens.at[start + 1 + jnp.arange(window, dtype=jnp.int32)].get(
            mode="fill", fill_value=acceptance.PAD
        )
        forwards = cache.num_forwards.at[num_live].add((~starved).astype(jnp.int32))
        cache = cache.replace(starved=starved, num_forwards=forwards)
        return cache, own[:, None].astype(jnp.float32)

    def choose(
        self, logits: Float32[Array, "window 1"], num_live: Int[Array, ""]
    ) -> Int[Array, " window"]:
        """The token of each row, int32."""
        del num_live
        return logits[:, 0].astype(jnp.int32)

    def truncate(self, cache: TraceCache, new_len: Int[Array, ""]) -> TraceCache:
        """Nothing: positions are told to `forward`, and none is kept."""
        del new_len
        return cache

    def is_starved(self, cache: TraceCache) -> Bool[Array, ""]:
        """Whether the last `forward` found no room, or no text."""
        return cache.starved


def begin(
    target: TraceTarget,
    drafter: protocols.Drafter,
    params: tuple[Trace, protocols.Params],
    cache: TraceCache,
    memory: protocols.Memory,
    prompt: list[int],
    *,
    max_tokens: int,
    policy: policy_lib.State = None,
) -> rounds.RoundState:
    """As `session.begin`, on a trace; the drafter takes in the prompt.

    Generation ends after `max_tokens`, or earlier where the cache is full.

    Args:
      params: the trace, and the drafter's.
      cache: what `TraceTarget.new_cache` made; donated.
      memory: what `drafter.init` allocated; donated.
      policy: the first state of a gamma policy, copied; None where there is none.

    Raises:
      ValueError: a drafter whose windows are too high, a prompt that is empty, does
        not fit or does not begin the trace, no token to generate, or a trace that ends
        too early.
    """
    trace, draft_params = params
    if drafter.gamma_max + 1 > target.slab:
        raise ValueError(
            f"gamma_max={drafter.gamma_max} needs a slab of {drafter.gamma_max + 1} "
            f"rows, the target has {target.slab}"
        )
    if max_tokens < 1:
        raise ValueError(f"{max_tokens=} must be at least 1")
    capacity = int(cache.capacity)
    if not 0 < len(prompt) <= capacity:
        raise ValueError(
            f"prompt has {len(prompt)} tokens: it needs 1 .. {capacity}, which the "
            "cache holds"
        )
    limit = min(len(prompt) + max_tokens, capacity + 1)
    if int(trace.length) < limit:
        raise ValueError(
            f"the trace ends after {int(trace.length)} tokens, prompt included, and "
            f"{max_tokens=} goes on to {limit}: record as many, past stop tokens"
        )
    if np.asarray(trace.tokens)[: len(prompt)].tolist() != list(prompt):
        raise ValueError("the trace does not begin with the prompt: it is another's")
    # The last token of a full sequence has no K/V, so there is one more than fits.
    text = np.zeros((capacity + 1,), np.int32)
    text[: len(prompt)] = prompt
    return rounds.init_state(
        jax.device_put(text),
        length=jnp.int32(len(prompt)),
        limit=jnp.int32(limit),
        capped=jnp.bool_(len(prompt) + max_tokens > limit),
        cache=cache,
        memory=drafter.prefill(draft_params, memory, list(prompt)),
        gamma_max=drafter.gamma_max,
        policy=policy,
    )
