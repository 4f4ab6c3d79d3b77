"""State of the rounds: of each slot, and shared by all slots."""

import enum
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spec_jax import pytree
from spec_jax.engine import protocols
from spec_jax.gamma import policy as policy_lib
from spec_jax.rules import sampling as sampling_lib


NO_STOP = -1
"""Fills a slot's `stop_ids`: it equals no token."""


class Origin(enum.IntEnum):
    """Where a token of the sequence came from."""

    PROMPT = 0
    ACCEPTED = 1  # drafted, and kept by the target
    CORRECTION = 2  # the target's own token, in place of a rejected draft
    BONUS = 3  # the target's own token, after every draft was kept


class Status(enum.IntEnum):
    """Whether a slot generates and, if not, why it ended."""

    RUNNING = 0
    EMPTY = 1  # it has had no sequence yet
    STOP = 2  # ended with a stop token
    LENGTH = 3  # ended after as many tokens as were asked for
    CAPACITY = 4  # ended because its slot of the cache is full
    OUT_OF_PAGES = 5  # ended because the pool had no page left


class Slots(pytree.Node):
    """One sequence a slot: every leaf has a leading axis of `B` slots."""

    #
    # Evolving state
    #
    tokens: jax.Array  # [B, max_len] int32, committed tokens, then zeros
    length: jax.Array  # [B] int32, number of committed tokens, n
    status: jax.Array  # [B] int32, `Status`
    policy: policy_lib.State  # what a gamma policy has counted; None without one
    #
    # Request
    #
    limit: jax.Array  # [B] int32, the length at which generation ends
    capped: jax.Array  # [B] bool, the limit is the cache's, below what was asked for
    gamma: jax.Array  # [B] int32, tokens drafted a round, at most
    stop_ids: jax.Array  # [B, num_stop] int32, `NO_STOP` where there are fewer
    # How the target draws; None: greedy, in a program that cannot draw.
    sampling: sampling_lib.SamplingSettings | None
    #
    # Reported statistics
    #
    origins: jax.Array  # [B, max_len] int8, `Origin` of each token
    num_rounds: jax.Array  # [B] int32
    num_proposed: jax.Array  # [B] int32
    num_accepted: jax.Array  # [B] int32
    num_cut: jax.Array  # [B] int32, kept drafts and own tokens cut past a stop or end
    # By depth; a chain of gamma drafts has gamma depths:
    accepted_hist: jax.Array  # [B, depth_max + 1] int32, rounds by accepted drafts
    proposed_at: jax.Array  # [B, depth_max] int32, rounds that reached depth i
    accepted_at: jax.Array  # [B, depth_max] int32, rounds that kept a draft there
    kept_by_rank: jax.Array  # [B, gamma_max] int32, rounds that kept draft i
    # [B] int32, committed tokens chosen from logits that hold NaN or +inf, or are all
    # -inf: such tokens mean nothing.
    num_nonfinite: jax.Array

    @property
    def running(self) -> Bool[Array, " B"]:
        """The slots that generate, `[B]` bool."""
        return self.status == int(Status.RUNNING)


class State(pytree.Node):
    """Everything that `generate` carries."""

    slots: Slots
    cache: protocols.Cache  # the target's, of all slots
    memory: protocols.Memory  # the drafter's, of all slots
    processing: Any = None  # a `processing.Processing` of all slots; None: no processor

    @property
    def num_slots(self) -> int:
        """Sequences at once, `B`."""
        return self.slots.length.shape[0]

    @property
    def tokens(self) -> Int[Array, "B max_len"]:
        """Committed tokens of each slot, its prompt first, then padding."""
        return self.slots.tokens

    @property
    def length(self) -> Int[Array, " B"]:
        """How many tokens each slot has committed, its prompt included."""
        return self.slots.length

    @property
    def done(self) -> Bool[Array, " B"]:
        """The slots that do not generate, `[B]` bool."""
        return ~self.slots.running


@functools.partial(
    jax.jit,
    static_argnames=("num_slots", "max_len", "num_stop", "gamma_max", "depth_max"),
)
def empty_slots(
    *,
    num_slots: int,
    max_len: int,
    num_stop: int,
    gamma_max: int,
    depth_max: int,
    sampling: sampling_lib.SamplingSettings | None,
    policy: policy_lib.State,
) -> Slots:
    """Returns `num_slots` slots without a sequence, in arrays of their own."""
    zeros = lambda *shape: jnp.zeros((num_slots, *shape), jnp.int32)
    stacked = lambda leaf: jnp.stack([leaf] * num_slots)
    return Slots(
        tokens=zeros(max_len),
        length=zeros() + 1,
        status=zeros() + int(Status.EMPTY),
        policy=jax.tree.map(stacked, policy),
        limit=zeros(),
        capped=zeros().astype(bool),
        gamma=zeros(),
        stop_ids=zeros(num_stop) + NO_STOP,
        sampling=jax.tree.map(stacked, sampling),
        origins=zeros(max_len).astype(jnp.int8),
        num_rounds=zeros(),
        num_proposed=zeros(),
        num_accepted=zeros(),
        num_cut=zeros(),
        accepted_hist=zeros(depth_max + 1),
        proposed_at=zeros(depth_max),
        accepted_at=zeros(depth_max),
        kept_by_rank=zeros(gamma_max),
        num_nonfinite=zeros(),
    )


def map_slots(function: Callable, *arguments: Any) -> Any:
    """Maps a function of one sequence over the leading axis of all its arguments.

    Where there is one slot the function runs without the axis: a `cond` stays a `cond`,
    and an index stays a slice instead of becoming a gather.
    """
    (num_slots,) = {leaf.shape[0] for leaf in jax.tree.leaves(arguments)}
    if num_slots > 1:
        return jax.vmap(function)(*arguments)
    squeezed = jax.tree.map(lambda leaf: leaf[0], arguments)
    return jax.tree.map(lambda leaf: leaf[None], function(*squeezed))
