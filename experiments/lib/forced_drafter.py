"""A drafter whose acceptance is *forced*: it overwrites real drafts by a known text.

Models of random weights accept nothing. So that rounds can be timed at the acceptance
of trained models, every proposal of the real drafter is computed and then overwritten:
with the target's own tokens for as many drafts as the round is to keep, and with wrong
ones elsewhere. In a fixed tree first children are right, and their siblings are wrong.
Such a run measures the cost of rounds at a given acceptance, never an acceptance.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax import pytree
from spec_jax.drafters import each, slots as slots_lib
from spec_jax.engine import protocols


class ForcedParams(pytree.Node):
    """The `draft_params` of a request to a forced drafter."""

    draft: Any  # parameters of the real drafter
    trace: jax.Array  # [size] int32, the text that autoregressive decoding writes
    # [size] int32, how many drafts a round that begins at this length keeps
    kept: jax.Array


class ForcedMemory(pytree.Node):
    """The real drafter's memory, and the arrays of `ForcedParams` of each slot."""

    inner: protocols.Memory
    trace: jax.Array  # [B, max_len] int32
    kept: jax.Array  # [B, max_len] int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forced(slots_lib.OfSlots):
    """Runs a drafter for slots, and proposes what `ForcedParams` say.

    The K/V that the real draft keeps is that of its own tokens, not of the forced
    ones: lengths and costs are those of a real run, values are not.
    """

    vocabulary: int  # tokens of the target
    right: tuple[int, ...]  # depth of each draft that can be right; siblings have 0

    def init(self, *, capacity: int, page_size: int, **more: Any) -> ForcedMemory:
        """Allocates the real drafter's memory, and empty traces."""
        sizes = {"capacity": capacity, "page_size": page_size, **more}
        shape = self.num_slots, -(-capacity // page_size) * page_size + 1
        trace, kept = (jnp.zeros(shape, jnp.int32) for _ in range(2))
        return ForcedMemory(inner=self.drafter.init(**sizes), trace=trace, kept=kept)

    def prefill(
        self,
        params: ForcedParams,
        memory: ForcedMemory,
        prompt: list[int],
        *,
        slot: int,
        **features: Array,
    ) -> ForcedMemory:
        """Takes in the prompt, and the request's `ForcedParams`. Donates `memory`."""
        where, size = {"slot": slot, **features}, params.trace.shape[0]
        return memory.replace(
            inner=self.drafter.prefill(params.draft, memory.inner, prompt, **where),
            trace=memory.trace.at[slot, :size].set(params.trace),
            kept=memory.kept.at[slot, :size].set(params.kept),
        )

    def propose(self, params, memory, *, tokens, length, gamma, sampling):
        """Proposes as many tokens as the drafter does, of which `kept` are right.

        Its own tokens are not used, but their K/V stay in the memory, so that all of
        the draft is computed.
        """
        asked = {"tokens": tokens, "length": length, "gamma": gamma}
        inner, found = self.drafter.propose(
            params, memory.inner, **asked, sampling=sampling
        )
        depth = jnp.asarray(self.right, jnp.int32)

        def forced(trace, kept, length):
            token = trace.at[length + depth - 1].get(mode="clip")
            is_right = (depth > 0) & (depth <= kept.at[length].get(mode="clip"))
            return jnp.where(is_right, token, (token + 1) % self.vocabulary)

        tokens = jax.vmap(forced)(memory.trace, memory.kept, length)
        return memory.replace(inner=inner), found.replace(tokens=tokens)

    def commit(
        self,
        params: protocols.Params,
        memory: ForcedMemory,
        length: Int[Array, " B"],
        **kept: Array,
    ) -> ForcedMemory:
        """Commits to the real drafter's memory."""
        return memory.replace(
            inner=self.drafter.commit(params, memory.inner, length, **kept)
        )


def lift(
    drafter: protocols.Drafter, num_slots: int, *, vocabulary: int, **how: Any
) -> Forced:
    """Returns a drafter for `num_slots` sequences, forced; takes and raises as
    `each.lift`."""
    tree, right = protocols.complete(drafter).tree, range(1, drafter.gamma_max + 1)
    if tree is not None:
        right = [0 if any(path) else len(path) for path in tree.paths]
    return Forced(
        drafter=each.lift(drafter, num_slots, **how),
        num_slots=num_slots,
        vocabulary=vocabulary,
        right=tuple(right),
    )
