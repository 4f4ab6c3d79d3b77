"""Policies of gamma: the protocol, the constant one, and probing for adaptive ones.

Modules of this folder know what rounds drafted, kept and cost, and nothing of tokens or
models. A policy's state is a pytree of small arrays that the loop carries; `choose` and
`update` are arithmetic on it, so that gamma stays data: nothing is traced again, and no
host is asked. A choice depends on committed rounds alone, never on a draft that is
still to be verified; so it does not change the distribution of sampled output either.
(`schedule` looks at drafts, and says why it may.)

Where drafting does not pay a policy is off: it chooses gamma 0, plain decoding, which
measures nothing. `Probing` says when one draft is tried all the same.
"""

import dataclasses
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spec_jax import pytree


State = Any


class GammaPolicy(Protocol):
    """Chooses gamma, by functions of a state that the loop carries.

    Hashable: it is a static argument, and equal policies share an executable. The
    state is a pytree of arrays of fixed shapes and dtypes, no two of which share a
    buffer. Each policy makes its first state by its own `init`, on the host, from
    arguments of its own: a gamma, none, measured times. A state may be handed on from
    one text to the next.

    A class that does not inherit is a policy too; a property it leaves out is False.
    """

    @pytree.optional
    def reads_ranks(self) -> bool:
        """Whether it is for trees too: its gamma is a number of nodes, and `update` has
        one keyword more, `kept [gamma_max] bool`: which nodes were on the path kept."""
        return False

    @pytree.optional
    def schedules(self) -> bool:
        """Whether it decides after drafting, too: see `schedule`."""
        return False

    @pytree.optional
    def settles(self) -> bool:
        """Whether its `settle` is told of each round of all slots: see `settles`."""
        return False

    @pytree.optional
    def keeps_state(self) -> bool:
        """Whether it keeps its state in a slot when another request begins there, but
        for what its `renew` changes, if it has one; else it begins with its first
        state."""
        return False

    @pytree.optional
    def gamma_max(self) -> int:
        """The largest gamma that is ever chosen."""
        ...

    def choose(self, state: State) -> Int[Array, ""]:
        """Returns the tokens to draft in the next round, `0 .. gamma_max`, int32."""
        ...

    def update(
        self,
        state: State,
        *,
        gamma: Int[Array, ""],
        num_drafted: Int[Array, ""],
        num_accepted: Int[Array, ""],
    ) -> State:
        """Learns from a round.

        Args:
          gamma: tokens that the drafter was asked for: what was chosen, or less near
            the end of the text. A round with gamma 0 counts as no evidence. For a round
            that the cache had no room for, all three must be 0.
          num_drafted: in `0 .. gamma`.
          num_accepted: in `0 .. num_drafted`, before stop tokens cut.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed(GammaPolicy):
    """Chooses always the same gamma, which is data in the state."""

    gamma_max: int

    def init(self, gamma: int) -> jax.Array:
        """Returns the state, `[] int32`.

        Raises:
          ValueError: gamma outside `0 .. gamma_max`.
        """
        if not 0 <= gamma <= self.gamma_max:
            raise ValueError(f"{gamma=} is outside [0, {self.gamma_max}]")
        return jnp.int32(gamma)

    def choose(self, state: jax.Array) -> jax.Array:
        """Returns the gamma of the state."""
        return state

    def update(self, state: jax.Array, **_: jax.Array) -> jax.Array:
        """Returns the state, unchanged."""
        return state


def reads_ranks(policy: Any) -> bool:
    """Returns whether a policy is for trees too."""
    return getattr(policy, "reads_ranks", False)


def schedules(policy: Any) -> bool:
    """Returns whether a policy decides how many of the drafts are verified."""
    return getattr(policy, "schedules", False)


def settles(policy: Any) -> bool:
    """Returns whether a policy's `settle` is told what the round of all slots brought.

    It is called before `update`, with the states of all slots, leaves `[B, ..]`, and
    returns them. It is told of the slots that the round committed to: `asked [B]`, the
    tokens that each was to draft, 0 for other slots; `num_active`, how many slots these
    are; `num_verified`, their drafts together; `num_accepted`, how many were kept.
    """
    return getattr(policy, "settles", False)


def keeps_state(policy: Any) -> bool:
    """Returns whether a policy's state goes on with a slot's next request."""
    return getattr(policy, "keeps_state", False)


def renewed(policy: Any, state: State) -> State:
    """Returns the kept state of ONE slot as its next text begins with it."""
    renew = getattr(policy, "renew", None)
    return state if renew is None else renew(state)


class ProbeState(pytree.Node):
    """When a policy that is off tries again."""

    wait: jax.Array  # [] int32, rounds with gamma 0 before the next probe
    interval: jax.Array  # [] int32, rounds from the last probe to the next
    every: jax.Array  # [] int32, the shortest interval
    longest: jax.Array  # [] int32, the longest one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probing:
    """Tries one draft now and then, while a policy is off.

    The first probe is the `every`-th round. One that is rejected doubles the interval,
    up to `longest`; one that is kept sets it back to `every`.

    Its cost: a rejected probe commits one token, as a round with gamma 0 does, and
    takes `round_s[1] - round_s[0]` longer. There is at most one in `every` rounds, so a
    text on which nothing is ever kept becomes slower than with gamma 0 by at most

        (round_s[1] - round_s[0]) / (every * round_s[0]),

    and in the long run by that with `longest` in place of `every`. With the defaults
    that is below 2 %, and 0.25 % in the long run: where times are known both intervals
    are as much longer as that takes; else it holds wherever the first draft makes a
    round longer by at most 0.32 of itself. Two costs are added: the rounds before a
    policy is off; and, at each probe, the tokens that the drafter sat out and takes in.
    Over all probes these are the whole text, so that rarer probes do not lower their
    share of its time (`num_caught_up` in `tests/simulation.py`).

    Its gain: a text that becomes easy is probed within `longest` rounds, and a
    probe that is kept is followed at once.

    Attributes:
      every, longest: intervals, in rounds, at least.
      empty_is_free: whether a round costs nothing if it was asked for drafts and
        got none, as with drafters that look up. It is no evidence then, and no probe;
        otherwise it counts as one rejected draft.
      bound: share of the time of gamma 0 that probes may take, where times are known.

    Raises:
      ValueError: unless `1 <= every <= longest < 2**31`, or a bound outside (0, 1].
    """

    every: int = 16
    longest: int = 128
    empty_is_free: bool = False
    bound: float = 0.02

    def __post_init__(self):
        if not 1 <= self.every <= self.longest < 2**31:
            raise ValueError(
                f"every={self.every} and longest={self.longest} are not "
                "1 <= every <= longest < 2**31: give intervals in rounds, in that order"
            )
        if not 0 < self.bound <= 1:
            raise ValueError(f"bound={self.bound} of probing must lie in (0, 1]")

    def init(self, *, added: float = 0.0) -> ProbeState:
        """Puts the first probe `every` rounds away, or more.

        Args:
          added: the share by which a first draft makes a round longer, if known.
        """
        most, scale = 2**31 - 1, self.longest / self.every
        every = min(max(self.every, math.ceil(min(added / self.bound, most))), most)
        longest = max(self.longest, min(int(every * scale), most))
        return ProbeState(
            wait=jnp.int32(every - 1),
            interval=jnp.int32(every),
            every=jnp.int32(every),
            longest=jnp.int32(longest),
        )

    def count_verified(
        self, gamma: Int[Array, ""], num_drafted: Int[Array, ""]
    ) -> Int[Array, ""]:
        """Returns how many drafts a round is evidence of, 0 for no evidence."""
        is_silent = (gamma > 0) & (num_drafted == 0)
        silent = jnp.int32(0 if self.empty_is_free else 1)
        return jnp.where(is_silent, silent, num_drafted)

    def update(
        self,
        state: ProbeState,
        *,
        is_off: Bool[Array, ""],
        num_verified: Int[Array, ""],
        num_accepted: Int[Array, ""],
    ) -> ProbeState:
        """Counts a round of a policy that was on or off before it."""
        probed = is_off & (num_verified > 0)
        kept = probed & (num_accepted > 0)
        # The interval is at most the longest, and no sum overflows on the way.
        longer = state.interval + jnp.minimum(
            state.interval, state.longest - state.interval
        )
        interval = jnp.where(probed, longer, state.interval)
        interval = jnp.where(kept, state.every, interval)
        waited = jnp.maximum(state.wait - 1, 0)
        wait = jnp.where(is_off & ~probed, waited, interval - 1)
        # A policy that stays off after a kept probe probes again at once.
        return state.replace(wait=jnp.where(kept, 0, wait), interval=interval)


def or_probe(gamma: jax.Array, probe: ProbeState) -> jax.Array:
    """Returns the gamma of a policy; where it is off, 1 if a probe is due."""
    is_due = (probe.wait == 0).astype(jnp.int32)
    return jnp.where(gamma == 0, is_due, gamma)
