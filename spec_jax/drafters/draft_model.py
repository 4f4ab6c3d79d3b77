"""A small model of the same family drafts, one token after the other.

Leviathan et al. (2023), https://arxiv.org/abs/2211.17192. For committed tokens
`x[0, n)` and draft K/V of `[0, m)`:

    propose   rows m .. n-1 (catch-up), then each drafted token but the last;
              afterwards the draft K/V covers [0, n+g-1)
    commit    the draft K/V is cut to [0, min(m', n'-1)), or to nothing

What is kept over a commit is caught up in one or two rows; what is dropped costs the
whole text in every round.
"""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax import rounds
from spec_jax.model import params as params_lib, row_model
from spec_jax.paging import cache as paged


DraftCache = Literal["persistent", "round"]
"""Whether a draft's K/V lives on after its round, or is built again in each."""

DRAFT_CACHES: tuple[str, ...] = get_args(DraftCache)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel:
    """Greedy drafts of a `RowModel`. The memory is the draft's own cache.

    The draft's bits need not be row-invariant: they decide what is proposed, never
    what is committed. Two rows a slab are therefore enough while the cache persists.

    Attributes:
      draft_cache: "persistent" keeps the K/V of committed tokens; "round" drops it at
        every commit, so that every round but the first, which finds the prefill,
        begins with `n / model.slab` forwards of catch-up. There a taller slab is
        worth its rows: `NATIVE_PREFILL_SLAB` with native kernels, whose cost follows
        the live rows alone. The target's tokens are the same. The drafts are too
        where all of the draft's K/V comes from rows whose bits do not depend on the
        slab; otherwise they may differ once the prompt's K/V is no longer that of the
        prefill.

    Raises:
      ValueError: an unknown kind of draft cache.
    """

    model: row_model.RowModel
    gamma_max: int
    draft_cache: DraftCache = "persistent"

    def __post_init__(self):
        if self.draft_cache not in DRAFT_CACHES:
            raise ValueError(
                f"draft_cache={self.draft_cache!r} is not one of "
                f"{', '.join(DRAFT_CACHES)}"
            )

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
        """Forgets drafts that were not committed, or everything."""
        kept = jnp.minimum(memory.length[row_model.SLOT], length - 1)
        if self.draft_cache == "round":
            kept = jnp.zeros_like(kept)
        return self.model.truncate(memory, kept)
