"""A small model of the same family drafts, one token after the other.

Leviathan et al. (2023), https://arxiv.org/abs/2211.17192, with a draft cache that
persists over rounds. For committed tokens `x[0, n)` and draft K/V of `[0, m)`:

    propose   rows m .. n-1 (catch-up: one or two in steady state), then each drafted
              token but the last; afterwards the draft K/V covers [0, n+g-1)
    commit    the draft K/V is cut to [0, min(m', n'-1))
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax import rounds
from spec_jax.model import params as params_lib, row_model
from spec_jax.paging import cache as paged


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel:
    """Greedy drafts of a `RowModel`. The memory is the draft's own `PagedKV`.

    The draft's bits need not be row-invariant: they decide what is proposed, never
    what is committed. Two rows a slab are therefore enough.
    """

    model: row_model.RowModel
    gamma_max: int

    def propose(
        self,
        params: params_lib.Params,
        memory: paged.PagedKV,
        *,
        tokens: Int[Array, " max_len"],
        length: Int[Array, ""],
        gamma: Int[Array, ""],
    ) -> tuple[paged.PagedKV, rounds.Proposal]:
        """Drafts `gamma` tokens; fewer only where the draft cache has no room."""
        slab = self.model.slab
        # Drafts are written behind the committed tokens, so that catching up and
        # drafting are one and the same step.
        text = jnp.pad(tokens, (0, slab + self.gamma_max))
        goal = length + gamma

        def keep_going(carry):
            kv, _, known = carry
            return (known < goal) & ~self.model.is_starved(kv)

        def step(carry):
            """Catches up by at most a slab of rows; at the end of the text, drafts."""
            kv, text, known = carry
            start = kv.length[row_model.SLOT]
            num_live = jnp.minimum(known - start, slab)
            kv, logits = self.model.forward(
                params,
                kv,
                tokens=jax.lax.dynamic_slice_in_dim(text, start, slab),
                start=start,
                num_live=num_live,
            )
            token = self.model.choose(logits, num_live)[num_live - 1]
            caught_up = (start + num_live == known) & ~self.model.is_starved(kv)
            at = jnp.where(caught_up, known, text.shape[0])
            return (
                kv,
                text.at[at].set(token, mode="drop"),
                known + caught_up.astype(jnp.int32),
            )

        memory, text, known = jax.lax.while_loop(
            keep_going, step, (memory, text, length)
        )
        return memory, rounds.Proposal(
            tokens=jax.lax.dynamic_slice_in_dim(text, length, self.gamma_max),
            num_drafted=known - length,
        )

    def commit(
        self, params: params_lib.Params, memory: paged.PagedKV, length: Int[Array, ""]
    ) -> paged.PagedKV:
        """Forgets drafts that were not committed."""
        held = memory.length[row_model.SLOT]
        return self.model.truncate(memory, jnp.minimum(held, length - 1))
