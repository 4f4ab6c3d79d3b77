"""Suffix statistics where they are sure of themselves, otherwise a draft model.

As the hybrid of SuffixDecoding (Oliaro et al., 2024,
https://arxiv.org/abs/2411.04975): a round takes the draft of `suffix` if its score, the
tokens expected to be kept, is high enough, and pays for the draft model only if not.
"""

import dataclasses

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax import protocols
from spec_jax.drafters import draft_model, suffix
from spec_jax.paging import cache as paged


@flax.struct.dataclass(kw_only=True)
class HybridParams:
    """The parameters of both."""

    draft: draft_model.DraftParams
    corpus: suffix.Corpus


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hybrid:
    """Drafts by suffix statistics or by a draft model. The memory is the latter's.

    The draft model does not see the rounds that it sits out. Its cache stays behind,
    and its next proposal begins by catching up, a slab of rows at a time.

    Attributes:
      threshold: the score from which on the draft model is not asked.

    Raises:
      ValueError: drafters of different `gamma_max`, or a threshold of 0 or less, which
        would never ask the draft model.
    """

    suffix: suffix.SuffixDecoding
    draft: draft_model.DraftModel
    threshold: float = 1.0

    def __post_init__(self):
        if self.suffix.gamma_max != self.draft.gamma_max:
            raise ValueError(
                f"the suffix drafter has gamma_max={self.suffix.gamma_max} and the "
                f"draft model gamma_max={self.draft.gamma_max}: give both the same"
            )
        if not self.threshold > 0:
            raise ValueError(
                f"threshold={self.threshold} must be above 0, the score of no draft"
            )

    @property
    def gamma_max(self) -> int:
        """The most tokens of a proposal, of either drafter."""
        return self.draft.gamma_max

    @property
    def vocab_size(self) -> int:
        """Entries of the draft model's vocabulary."""
        return self.draft.vocab_size

    def for_slots(self, num_slots: int):
        """Returns the hybrid for `num_slots` sequences, `SlotHybrid`."""
        from spec_jax.drafters import hybrid_slots

        return hybrid_slots.SlotHybrid(drafter=self, num_slots=num_slots)

    def init(self, *, capacity: int, page_size: int) -> paged.PagedKV:
        """The draft model's empty cache."""
        return self.draft.init(capacity=capacity, page_size=page_size)

    def prefill(
        self, params: HybridParams, memory: paged.PagedKV, prompt: list[int]
    ) -> paged.PagedKV:
        """The draft model's prefill. Donates `memory`."""
        return self.draft.prefill(params.draft, memory, prompt)

    def propose(
        self,
        params: HybridParams,
        memory: paged.PagedKV,
        *,
        tokens: Int[Array, " max_len"],
        length: Int[Array, ""],
        gamma: Int[Array, ""],
    ) -> tuple[paged.PagedKV, protocols.Proposal]:
        """Drafts what one of the two drafts."""
        found = self.suffix.look_up(
            params.corpus, tokens=tokens, length=length, gamma=gamma
        )
        is_sure = found.score >= self.threshold
        # Asked for nothing, the draft model's loop does not start: this is the branch,
        # without a `cond` that would hand the cache through both of its sides.
        memory, drafted = self.draft.propose(
            params.draft,
            memory,
            tokens=tokens,
            length=length,
            gamma=jnp.where(is_sure, 0, gamma),
        )
        return memory, protocols.Proposal(
            tokens=jnp.where(is_sure, found.proposal.tokens, drafted.tokens),
            num_drafted=jnp.where(
                is_sure, found.proposal.num_drafted, drafted.num_drafted
            ),
        )

    def commit(
        self, params: HybridParams, memory: paged.PagedKV, length: Int[Array, ""]
    ) -> paged.PagedKV:
        """Forgets the draft model's drafts that were not committed."""
        return self.draft.commit(params.draft, memory, length)
