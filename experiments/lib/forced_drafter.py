"""A drafter whose acceptance is *forced*: it overwrites real drafts by a known text.

Models of random weights accept nothing. So that rounds can be timed at the acceptance
of trained models, every proposal of the real drafter is computed and then overwritten:
with the target's own tokens for as many drafts as the round is to keep, and with wrong
ones elsewhere. In a fixed tree first children are right, and their siblings are wrong.
Such a run measures the cost of rounds at a given acceptance, never an acceptance.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from spec_jax import pytree
from spec_jax.drafters import each, slots as slots_lib
from spec_jax.engine import protocols
from spec_jax.rules import rule as rule_lib


class ForcedParams(pytree.Node):
    """The `draft_params` of a request to the forced drafter."""

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
class ForcedDrafter:
    """Runs `inner`, and proposes what `ForcedParams` say; its parameters are `inner`'s.

    The K/V that the real draft keeps is that of its own tokens, not of the forced
    ones: lengths and costs are those of a real run, values are not. All other
    attributes of a `protocols.Drafter` are those of `inner`.
    """

    inner: protocols.Drafter
    vocab_size: int

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("inner", "drafter", "num_slots"):
            raise AttributeError(name)
        return getattr(protocols.complete(self.inner), name)

    @functools.cached_property
    def right(self) -> np.ndarray:
        """The depth of each draft that can be right, `[gamma_max]`; siblings have 0."""
        if self.tree is None:
            return np.arange(1, self.gamma_max + 1, dtype=np.int32)
        depths = [0 if any(path) else len(path) for path in self.tree.paths]
        return np.array(depths, np.int32)

    def for_rule(self, rule: rule_lib.Rule) -> "ForcedDrafter":
        """Returns the drafter with an `inner` that draws as the rule needs.

        Raises:
          ValueError: a rule that needs the distribution that drafts were drawn from.
        """
        if not rule.is_exact:
            raise ValueError(
                f"{rule=} asks what drafts were drawn from, and forced ones were not: "
                "take the rule 'coupled'"
            )
        inner = protocols.complete(self.inner).for_rule(rule)
        return dataclasses.replace(self, inner=inner)

    def for_schedule(self) -> "ForcedDrafter":
        """Returns the drafter with an `inner` that also gives survivals of drafts."""
        inner = protocols.complete(self.inner).for_schedule()
        return dataclasses.replace(self, inner=inner)

    def for_slots(self, num_slots: int) -> "SlotForced":
        """Returns the drafter for `num_slots` sequences."""
        return SlotForced(drafter=self, num_slots=num_slots)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotForced(slots_lib.OfSlots):
    """A `ForcedDrafter` for several sequences."""

    drafter: ForcedDrafter

    @property
    def inner(self) -> protocols.SlotDrafter:
        """The real drafter, for the same sequences."""
        return each.lift(self.drafter.inner, self.num_slots)

    def init(self, *, capacity: int, page_size: int, **more: Any) -> ForcedMemory:
        """Allocates the real drafter's memory, and empty traces."""
        sizes = {"capacity": capacity, "page_size": page_size, **more}
        shape = self.num_slots, -(-capacity // page_size) * page_size + 1
        trace, kept = (jnp.zeros(shape, jnp.int32) for _ in range(2))
        return ForcedMemory(inner=self.inner.init(**sizes), trace=trace, kept=kept)

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
            inner=self.inner.prefill(params.draft, memory.inner, prompt, **where),
            trace=memory.trace.at[slot, :size].set(params.trace),
            kept=memory.kept.at[slot, :size].set(params.kept),
        )

    def propose(self, params, memory, *, tokens, length, gamma, sampling):
        """Proposes as many tokens as `inner` does, of which `kept` are right.

        The tokens of `inner` are not used, but their K/V stay in the memory, so that
        all of the draft is computed.
        """
        asked = {"tokens": tokens, "length": length, "gamma": gamma}
        inner, found = self.inner.propose(
            params, memory.inner, **asked, sampling=sampling
        )
        depth = jnp.asarray(self.drafter.right)

        def forced(trace, kept, length):
            token = trace.at[length + depth - 1].get(mode="clip")
            is_right = (depth > 0) & (depth <= kept.at[length].get(mode="clip"))
            return jnp.where(is_right, token, (token + 1) % self.vocab_size)

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
            inner=self.inner.commit(params, memory.inner, length, **kept)
        )
