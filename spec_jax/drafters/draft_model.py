"""A small model of the same family drafts, one token after the other.

Leviathan et al. (2023), https://arxiv.org/abs/2211.17192. For committed tokens
`x[0, n)` and draft K/V of `[0, m)`:

    propose   rows m .. n-1 (catch-up), then each drafted token but the last;
              afterwards the draft K/V covers [0, n+g-1)
    commit    the draft K/V is cut to [0, min(m', n'-1)), or to nothing

Drafts are the tokens of highest probability, or are drawn: with the very noise of the
target's own draws, so that both mostly draw the same token where their distributions
are close; or with noise of their own, as the rules that draw uniforms need it.

What is kept over a commit is caught up in one or two rows; what is dropped costs the
whole text in every round. Rounds that ask for nothing are caught up in the next one
that asks for something.
"""

import dataclasses
from typing import Literal, get_args

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax import protocols, sampling
from spec_jax.gamma import confidence
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


def goal_of(
    kv: paged.PagedKV, length: Int[Array, "*slots"], gamma: Int[Array, "*slots"]
) -> Int[Array, "*slots"]:
    """The length of the text after drafting, as far as a slot of the cache can go.

    The last draft needs no room, as it has no K/V yet. A text that no slot holds is
    not caught up on either: it would fail in every round.
    """
    return jnp.maximum(length, jnp.minimum(length + gamma, kv.slot_capacity + 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel:
    """Drafts of a `RowModel`. The memory is the draft's own cache.

    The draft's bits need not be row-invariant: they decide what is proposed, never
    what is committed. Two rows a slab are therefore enough while the cache persists.

    Attributes:
      draft_cache: "persistent" keeps the K/V of committed tokens; "round" drops it at
        every commit, so that every round but the first, which finds the prefill,
        begins with catching up on the whole text. The target's tokens are the same.
        The drafts are too where all of the draft's K/V comes from rows whose bits do
        not depend on the slab; otherwise they may differ once the prompt's K/V is no
        longer that of the prefill.
      catch_up_rows: height of the slab that takes in what is left behind by more than
        `model.slab` rows, without logits; 0 leaves all of it to `model.slab`. Worth
        its rows where cost follows the live ones: `NATIVE_PREFILL_SLAB` with native
        kernels.
      min_confidence: a draft ends before the first token whose distribution has no
        probability as high as this, see `gamma.confidence`; 0 never ends one.
      draws: unless it is "highest", the parameters are `SampledParams`. "independent"
        proposals say which distributions they were drawn from.

    Raises:
      ValueError: an unknown kind of draft cache, or of draws, a negative height, or a
        confidence outside `[0, 1]`.
    """

    model: row_model.RowModel
    gamma_max: int
    draft_cache: DraftCache = "persistent"
    draws: Draws = "highest"
    catch_up_rows: int = 0
    min_confidence: float = 0.0

    def __post_init__(self):
        if self.draws not in DRAWS:
            raise ValueError(f"draws={self.draws!r} is not one of {', '.join(DRAWS)}")
        if self.draft_cache not in DRAFT_CACHES:
            raise ValueError(
                f"draft_cache={self.draft_cache!r} is not one of "
                f"{', '.join(DRAFT_CACHES)}"
            )
        if self.catch_up_rows < 0:
            raise ValueError(f"catch_up_rows={self.catch_up_rows} must not be negative")
        if not 0 <= self.min_confidence <= 1:
            raise ValueError(
                f"min_confidence={self.min_confidence} is no probability: give 0, "
                "which never ends a draft, to 1"
            )

    @property
    def vocab_size(self) -> int:
        """Entries of the draft's vocabulary, which must be the target's."""
        return self.model.config.vocab_size

    def for_slots(self, num_slots: int):
        """Returns the draft model for `num_slots` sequences, `SlotDraftModel`."""
        from spec_jax.drafters import draft_model_slots

        return draft_model_slots.SlotDraftModel(drafter=self, num_slots=num_slots)

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
    ) -> tuple[paged.PagedKV, protocols.Proposal]:
        """Drafts `gamma` tokens; fewer where the draft cache has no room, or where
        the draft is not confident. None where the cache cannot hold the text."""
        slab = self.model.slab
        # What an earlier round found says nothing of this one.
        memory = memory.replace(out_of_pages=jnp.zeros_like(memory.out_of_pages))
        goal = goal_of(memory, length, gamma)
        # Drafts are written behind the committed tokens, so that catching up and
        # drafting are one and the same step.
        text = jnp.pad(tokens, (0, max(slab, self.catch_up_rows) + self.gamma_max))
        memory = self._catch_up(params, memory, text, length, asked=goal > length)

        def keep_going(carry):
            kv, _, known, _, is_confident = carry
            return (known < goal) & is_confident & ~self.model.is_starved(kv)

        def step(carry):
            """Catches up by at most a slab of rows; at the end of the text, drafts."""
            kv, text, known, probs, _ = carry
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
            last = logits[num_live - 1]
            is_confident = jnp.bool_(True)
            if self.min_confidence:
                threshold = jnp.float32(self.min_confidence)
                is_confident = ~caught_up | confidence.confident(
                    last, threshold=threshold
                )
            drafts = caught_up & is_confident
            token = self._draw(params, logits, num_live, length, known - length)
            if probs is not None:
                row = sampling.distribution(last, params.settings)
                at = jnp.where(drafts, known - length, self.gamma_max)
                probs = probs.at[at].set(row, mode="drop")
            at = jnp.where(drafts, known, text.shape[0])
            return (
                kv,
                text.at[at].set(token, mode="drop"),
                known + drafts.astype(jnp.int32),
                probs,
                is_confident,
            )

        probs = None
        if self.draws == "independent":
            probs = jnp.zeros((self.gamma_max, self.vocab_size), jnp.float32)
        memory, text, known, probs, _ = jax.lax.while_loop(
            keep_going, step, (memory, text, length, probs, jnp.bool_(True))
        )
        return memory, protocols.Proposal(
            tokens=jax.lax.dynamic_slice_in_dim(text, length, self.gamma_max),
            num_drafted=known - length,
            probs=probs,
        )

    def _catch_up(self, params, memory, text, length, *, asked) -> paged.PagedKV:
        """Takes in what is left behind by more than a slab of rows, but not all: the
        last of the text's rows is the one that drafts."""
        if not self.catch_up_rows:
            return memory
        model = dataclasses.replace(self.model, slab=self.catch_up_rows)

        def is_behind(kv):
            missing = length - kv.length[row_model.SLOT]
            return asked & (missing > self.model.slab) & ~model.is_starved(kv)

        def step(kv):
            start = kv.length[row_model.SLOT]
            # Nobody looks at the logits: they are not computed.
            kv, _ = model.forward(
                self._weights(params),
                kv,
                tokens=jax.lax.dynamic_slice_in_dim(text, start, model.slab),
                start=start,
                num_live=jnp.minimum(length - 1 - start, model.slab),
            )
            return kv

        return jax.lax.while_loop(is_behind, step, memory)

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
