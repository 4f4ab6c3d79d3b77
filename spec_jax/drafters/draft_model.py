"""A small model of the same family drafts, one token after the other.

Leviathan et al. (2023), https://arxiv.org/abs/2211.17192. For committed tokens
`x[0, n)` and draft K/V of `[0, m)`:

    propose   rows m .. n-1 (catch-up), then each drafted token but the last;
              afterwards the draft K/V covers [0, n+g-1)
    commit    the draft K/V is cut to [0, min(m', n'-1)), or to nothing

Drafts are the tokens of highest probability, or are drawn: with the very noise of the
target's own draws, so that both mostly draw the same token where their distributions
are close; or with noise of their own, as the rules that throw coins need it.

What is kept over a commit is caught up in one or two rows; what is dropped costs the
whole text in every round.
"""

import dataclasses
from typing import Literal, get_args

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax import rounds, sampling
from spec_jax.model import params as params_lib, prompt as prompt_lib, row_model
from spec_jax.paging import cache as paged


DraftCache = Literal["persistent", "round"]
"""Whether a draft's K/V lives on after its round, or is built again in each."""

DRAFT_CACHES: tuple[str, ...] = get_args(DraftCache)

Draws = Literal["highest", "sample-path", "independent"]
"""Which token is drafted: the most probable, or one drawn with the noise of the
target's draw for that position, or with noise of the round's own."""

DRAWS: tuple[str, ...] = get_args(Draws)


@flax.struct.dataclass(kw_only=True)
class SampledParams:
    """The weights, and how drafts are drawn: the parameters of drafters that draw."""

    weights: params_lib.Params
    settings: sampling.SamplingSettings


DraftParams = params_lib.Params | SampledParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel:
    """Drafts of a `RowModel`. The memory is the draft's own cache.

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
      draws: unless it is "highest", the parameters are `SampledParams`. "independent"
        proposals say which distributions they were drawn from.

    Raises:
      ValueError: an unknown kind of draft cache, or of draws.
    """

    model: row_model.RowModel
    gamma_max: int
    draft_cache: DraftCache = "persistent"
    draws: Draws = "highest"

    def __post_init__(self):
        if self.draws not in DRAWS:
            raise ValueError(f"draws={self.draws!r} is not one of {', '.join(DRAWS)}")
        if self.draft_cache not in DRAFT_CACHES:
            raise ValueError(
                f"draft_cache={self.draft_cache!r} is not one of "
                f"{', '.join(DRAFT_CACHES)}"
            )

    @property
    def vocab_size(self) -> int:
        """Entries of the draft's vocabulary, which must be the target's."""
        return self.model.config.vocab_size

    def init(self, *, capacity: int, page_size: int) -> paged.PagedKV:
        """An empty cache of the draft's; raises as `RowModel.new_cache`."""
        return self.model.new_cache(capacity=capacity, page_size=page_size)

    def prefill(
        self, params: DraftParams, memory: paged.PagedKV, prompt: list[int]
    ) -> paged.PagedKV:
        """The K/V of the prompt but for its last token. Donates `memory`."""
        weights = self._weights(params)
        return prompt_lib.prefill(self.model, weights, memory, prompt[:-1])

    def propose(
        self,
        params: DraftParams,
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
            kv, _, known, _ = carry
            return (known < goal) & ~self.model.is_starved(kv)

        def step(carry):
            """Catches up by at most a slab of rows; at the end of the text, drafts."""
            kv, text, known, probs = carry
            start = kv.length[row_model.SLOT]
            num_live = jnp.minimum(known - start, slab)
            kv, logits = self.model.forward(
                self._weights(params),
                kv,
                tokens=jax.lax.dynamic_slice_in_dim(text, start, slab),
                start=start,
                num_live=num_live,
            )
            caught_up = (start + num_live == known) & ~self.model.is_starved(kv)
            token = self._draw(params, logits, num_live, length, known - length)
            if probs is not None:
                row = sampling.distribution(logits[num_live - 1], params.settings)
                at = jnp.where(caught_up, known - length, self.gamma_max)
                probs = probs.at[at].set(row, mode="drop")
            at = jnp.where(caught_up, known, text.shape[0])
            return (
                kv,
                text.at[at].set(token, mode="drop"),
                known + caught_up.astype(jnp.int32),
                probs,
            )

        probs = None
        if self.draws == "independent":
            probs = jnp.zeros((self.gamma_max, self.vocab_size), jnp.float32)
        memory, text, known, probs = jax.lax.while_loop(
            keep_going, step, (memory, text, length, probs)
        )
        return memory, rounds.Proposal(
            tokens=jax.lax.dynamic_slice_in_dim(text, length, self.gamma_max),
            num_drafted=known - length,
            probs=probs,
        )

    def _weights(self, params: DraftParams) -> params_lib.Params:
        return params if self.draws == "highest" else params.weights

    def _draw(self, params, logits, num_live, length, offset) -> jax.Array:
        """The token that follows the last live row: draft `offset` of the round."""
        last = num_live - 1
        if self.draws == "highest":
            return self.model.choose(logits, num_live)[last]
        if self.draws == "sample-path":
            return sampling.sample(logits[last], params.settings, length + offset)
        return sampling.sample(
            logits[last],
            params.settings,
            length,
            stream=sampling.Stream.DRAFT,
            offset=offset,
        )

    def commit(
        self, params: DraftParams, memory: paged.PagedKV, length: Int[Array, ""]
    ) -> paged.PagedKV:
        """Forgets drafts that were not committed, or everything."""
        kept = jnp.minimum(memory.length[row_model.SLOT], length - 1)
        if self.draft_cache == "round":
            kept = jnp.zeros_like(kept)
        return self.model.truncate(memory, kept)
