"""Drafters that look each slot's drafts up, in its text or in its trace."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spec_jax import protocols
from spec_jax.batch import drafter as drafter_lib
from spec_jax.drafters import oracle


@dataclasses.dataclass(frozen=True, kw_only=True)
class EachSlot:
    """A drafter without memory, which looks up in each text by itself."""

    drafter: protocols.Drafter
    num_slots: int

    @property
    def gamma_max(self) -> int:
        """The most tokens of a proposal."""
        return self.drafter.gamma_max

    @property
    def vocab_size(self) -> int:
        """Entries of the drafter's vocabulary. No attribute where it has none."""
        return self.drafter.vocab_size

    def init(
        self, *, capacity: int, page_size: int, num_pages: int | None = None
    ) -> tuple[()]:
        """Nothing.

        Raises:
          NotImplementedError: the drafter has a memory.
        """
        del num_pages
        memory = self.drafter.init(capacity=capacity, page_size=page_size)
        if jax.tree.leaves(memory):
            raise NotImplementedError(
                f"{type(self.drafter).__name__} has a memory, which EachSlot would "
                "not keep apart by slot: write a BatchDrafter"
            )
        return ()

    def prefill(
        self,
        params: protocols.Params,
        memory: tuple[()],
        prompt: list[int],
        *,
        slot: int,
    ) -> tuple[()]:
        """Nothing: the prompt is in the text."""
        del params, prompt, slot
        return memory

    def propose(
        self,
        params: protocols.Params,
        memory: tuple[()],
        *,
        tokens: Int[Array, "B max_len"],
        length: Int[Array, " B"],
        gamma: Int[Array, " B"],
        settings: drafter_lib.Settings,
    ) -> tuple[tuple[()], protocols.Proposal]:
        """What the drafter proposes for each text."""
        del settings

        def one(tokens, length, gamma):
            return self.drafter.propose(
                params, (), tokens=tokens, length=length, gamma=gamma
            )[1]

        return memory, jax.vmap(one)(tokens, length, gamma)

    def commit(
        self,
        params: protocols.Params,
        memory: tuple[()],
        length: Int[Array, " B"],
        *,
        asked: Bool[Array, " B"],
    ) -> tuple[()]:
        """Nothing."""
        del params, length, asked
        return memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class OracleBatch:
    """An oracle, whose traces are the memory: `prefill` takes one as its `params`."""

    drafter: oracle.Oracle
    num_slots: int

    @property
    def gamma_max(self) -> int:
        """The most tokens of a proposal."""
        return self.drafter.gamma_max

    @property
    def vocab_size(self) -> int:
        """Entries of the target's vocabulary."""
        return self.drafter.vocab_size

    def init(
        self, *, capacity: int, page_size: int, num_pages: int | None = None
    ) -> oracle.Trace:
        """Traces `[B, capacity + 1]` that know nothing yet, in pages or not."""
        del num_pages
        size = -(-capacity // page_size) * page_size + 1
        empty = oracle.make_trace([0] * size)
        return jax.tree.map(lambda x: jnp.stack([x] * self.num_slots), empty)

    def prefill(
        self,
        params: oracle.Trace,
        memory: oracle.Trace,
        prompt: list[int],
        *,
        slot: int,
    ) -> oracle.Trace:
        """Takes in the slot's trace, of the size of the text.

        Raises:
          ValueError: no trace, or one of another size.
        """
        del prompt
        size = memory.tokens.shape[1]
        if not isinstance(params, oracle.Trace):
            raise ValueError(
                "an oracle takes the trace of each request: give it as `draft_params`"
            )
        if params.tokens.shape != (size,) or params.is_right.shape != (size,):
            raise ValueError(
                f"a trace of {params.tokens.shape[0]} tokens and "
                f"{params.is_right.shape[0]} marks for a text of {size}: pad it"
            )
        return _put(memory, params, jnp.int32(slot))

    def propose(
        self,
        params: protocols.Params,
        memory: oracle.Trace,
        *,
        tokens: Int[Array, "B max_len"],
        length: Int[Array, " B"],
        gamma: Int[Array, " B"],
        settings: drafter_lib.Settings,
    ) -> tuple[oracle.Trace, protocols.Proposal]:
        """Drafts from each slot's trace."""
        del params, settings

        def one(trace, tokens, length, gamma):
            return self.drafter.propose(
                trace, (), tokens=tokens, length=length, gamma=gamma
            )[1]

        return memory, jax.vmap(one)(memory, tokens, length, gamma)

    def commit(
        self,
        params: protocols.Params,
        memory: oracle.Trace,
        length: Int[Array, " B"],
        *,
        asked: Bool[Array, " B"],
    ) -> oracle.Trace:
        """Nothing."""
        del params, length, asked
        return memory


@functools.partial(jax.jit, donate_argnums=(0,))
def _put(stacked, one, slot):
    return jax.tree.map(lambda all_, x: all_.at[slot].set(x), stacked, one)
