"""What a round asks of a target and of a drafter, and what a drafter proposes."""

from typing import Any, Protocol

import flax.struct
import jax
from jaxtyping import Array, Bool, Float, Int


Params = Any
Memory = Any
Cache = Any


class Target(Protocol):
    """A model whose verification rows equal its decoding rows, bit for bit.

    Hashable: it is a static argument. Everything that changes is in `cache`.
    """

    def forward(
        self,
        params: Params,
        cache: Cache,
        *,
        tokens: Int[Array, " R"],
        start: Int[Array, ""],
        num_live: Int[Array, ""],
    ) -> tuple[Cache, Float[Array, "R V"]]:
        """Runs the first `num_live` tokens at positions from `start`, and keeps their
        K/V. Where the cache has no room, `is_starved` is true afterwards."""
        ...

    def choose(
        self, logits: Float[Array, "R V"], num_live: Int[Array, ""]
    ) -> Int[Array, " R"]:
        """The token of highest logit of each live row, int32."""
        ...

    def truncate(self, cache: Cache, new_len: Int[Array, ""]) -> Cache:
        """Forgets the K/V of positions from `new_len` on."""
        ...

    def is_starved(self, cache: Cache) -> Bool[Array, ""]:
        """Whether the last `forward` found no room, and so meant nothing."""
        ...


@flax.struct.dataclass(kw_only=True)
class Proposal:
    """Drafted tokens; the first `num_drafted` are real."""

    tokens: jax.Array  # [gamma_max] int32
    num_drafted: jax.Array  # [] int32
    # [gamma_max, V] float32: the distribution that each token was drawn from, filters
    # included; None for tokens that were certain. Rule "sample-path" needs none.
    probs: jax.Array | None = None


class Drafter(Protocol):
    """Proposes continuations, by functions of a memory that the loop carries.

    Hashable: it is a static argument, and equal drafters share an executable. The
    memory is a pytree of arrays, no two of which share a buffer, of shapes and dtypes
    that never change; everything that changes is in it. `init` and `prefill` run on
    the host, `propose` and `commit` are traced into the loop and call nothing outside
    of it. No proposal can make the output wrong: a bad one only costs time. That holds
    for one that breaks its promises, too: rounds bound the number of drafts, and no
    rule keeps a draft outside the vocabulary.

    A drafter with a vocabulary of its own says so by an attribute `vocab_size`, which
    `session.check_pair` compares with the target's. `testing.check_drafter` checks
    what is promised here.
    """

    @property
    def gamma_max(self) -> int:
        """The most tokens that it drafts in a round."""
        ...

    def init(self, *, capacity: int, page_size: int) -> Memory:
        """Allocates the empty memory of a text, outside of whatever is timed.

        Args:
          capacity: positions that the target's cache holds; a text has one token more
            at most.
          page_size: positions per page, for a memory that has pages.
        """
        ...

    def prefill(self, params: Params, memory: Memory, prompt: list[int]) -> Memory:
        """Takes in the prompt, whose last token is pending: part of what is timed.

        The memory is as `init` made it, and donated. The prompt is not empty.
        """
        ...

    def propose(
        self,
        params: Params,
        memory: Memory,
        *,
        tokens: Int[Array, " max_len"],
        length: Int[Array, ""],
        gamma: Int[Array, ""],
    ) -> tuple[Memory, Proposal]:
        """Drafts at most `gamma` tokens to follow `tokens[:length]`.

        What stands behind `length` means nothing. `gamma` may be 0, and never asks for
        more than the target's capacity, less `length`.
        """
        ...

    def commit(self, params: Params, memory: Memory, length: Int[Array, ""]) -> Memory:
        """Learns that `tokens[:length]` are committed, and nothing after them.

        Of the last proposal, all that the target kept or less stands there.
        """
        ...
