"""Suffix lookup when its score passes a threshold, otherwise a model that drafts.

This is the hybrid of SuffixDecoding (Oliaro et al., 2024,
https://arxiv.org/abs/2411.04975): a round takes the draft of `suffix` if its score, the
tokens expected to be kept, is high enough, and pays for the draft model only if not.
A head that reads the target (`eagle3`, `block`) can stand in the draft model's place.
With a tree, a round has the path that was looked up or the tree of the other drafter.

The score alone is a poor judge: a token that followed the last one once, anywhere, has
a score of 1. Beside a drafter that is itself often right, matches must be long, too
(`MATCH_MIN`, for `SuffixDecoding.match_min`).
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from spec_jax import pytree
from spec_jax.drafters import (
    choice,
    draft_model,
    slots as slots_lib,
    suffix,
    tree_shapes,
)
from spec_jax.engine import processing as processing_lib, protocols
from spec_jax.rules import rule as rule_lib


MATCH_MIN = 4
"""Tokens of the shortest match that is taken before a draft model is asked.

On texts that SmolLM2 wrote greedily and its EAGLE-3 head was not trained on (189, of
the target's own prompts), lookup by matches of 1, 2, 3, 4 and 5 tokens that were seen
once keeps 0.26, 0.84, 1.43, 2.05 and 2.32 of four drafts, and the head keeps 1.34,
1.57, 1.79, 1.93 and 2.00 there.
"""


class HybridParams(pytree.Node):
    """The parameters of both."""

    draft: Any
    corpus: suffix.Corpus


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hybrid(protocols.Drafter):
    """Drafts by suffix statistics or by a draft model. The memory is the latter's.

    The draft model does not see the rounds that it sits out. Its cache stays behind,
    and its next proposal begins by catching up, a slab of rows at a time.

    Attributes:
      threshold: the score from which on the draft model is not asked.

    Raises:
      ValueError: a suffix drafter of trees, or one whose paths are not as long as the
        draft model's may be, or a threshold of 0 or less, which would never ask the
        draft model.
    """

    suffix: suffix.SuffixDecoding
    draft: draft_model.DraftModel
    threshold: float = 1.0

    def __post_init__(self):
        if protocols.is_tree(self.suffix):
            raise ValueError(
                f"the suffix drafter has tree={self.suffix.tree}, and a hybrid looks "
                "up a path: give it none, and the tree to the hybrid, by `for_tree`"
            )
        most = protocols.depth_max(self.draft)
        if self.suffix.gamma_max != most:
            raise ValueError(
                f"the suffix drafter has gamma_max={self.suffix.gamma_max} and paths "
                f"of the draft model have up to {most} drafts: give both the same"
            )
        if not self.threshold > 0:
            raise ValueError(
                f"threshold={self.threshold} must be above 0, the score of no draft"
            )

    gamma_max = protocols.passed_on("gamma_max", of="draft")
    depth_max = protocols.passed_on("depth_max", of="draft")
    vocab_size = protocols.passed_on("vocab_size", of="draft")
    taps = protocols.passed_on("taps", of="draft")
    feature_size = protocols.passed_on("feature_size", of="draft")
    max_positions = protocols.passed_on("max_positions", of="draft")

    def for_rule(self, rule: rule_lib.Rule) -> "Hybrid":
        """Returns the hybrid with the draft model for that rule of acceptance.

        Raises:
          NotImplementedError: trees, under a rule that takes siblings that are drawn
            with replacement.
        """
        super().for_rule(rule)
        return dataclasses.replace(self, draft=self.draft.for_rule(rule))

    def for_tree(self, tree: tree_shapes.AnyTree) -> "Hybrid":
        """Returns the hybrid whose draft model drafts such trees."""
        draft = self.draft.for_tree(tree)
        paths = dataclasses.replace(self.suffix, gamma_max=protocols.depth_max(draft))
        return dataclasses.replace(self, draft=draft, suffix=paths)

    def for_schedule(self) -> "Hybrid":
        """Returns the hybrid that says what chance each of its drafts has.

        A lookup's chance is the share of the places found that go on so: a
        continuation that was seen once is certain. It is a function of the committed
        text, as the draft is. `profile_steps.py --calibrate` fits both kinds
        together.
        """
        return dataclasses.replace(self, draft=self.draft.for_schedule())

    def for_slots(self, num_slots: int) -> "SlotHybrid":
        """Returns the hybrid for `num_slots` sequences."""
        return SlotHybrid(drafter=self, num_slots=num_slots)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotHybrid(slots_lib.OfSlots):
    """A `Hybrid` for `num_slots` sequences. The memory is the draft model's."""

    drafter: Hybrid
    reads_processing: ClassVar[bool] = True

    @property
    def _draft(self) -> Any:
        return self.drafter.draft.for_slots(self.num_slots)

    @property
    def shares_prompts(self) -> bool:
        """Whether the draft model shares prompts."""
        return self._draft.shares_prompts

    def init(self, **sizes: Any) -> protocols.Memory:
        """Allocates the draft model's empty cache."""
        return self._draft.init(**sizes)

    def prefill(self, params, memory, prompt, *, slot, **handed):
        """Takes the prompt into the draft model's cache. Donates `memory`."""
        return self._draft.prefill(params.draft, memory, prompt, slot=slot, **handed)

    def propose(
        self, params, memory, *, tokens, length, gamma, sampling, processing=None
    ):
        """Drafts by one of the two drafters in each slot."""

        def look_up(tokens, length, gamma):
            return self.drafter.suffix.look_up(
                params.corpus, tokens=tokens, length=length, gamma=gamma
            )

        # Not `vmap`, which would search the text of slots that ask for nothing.
        found = jax.lax.map(lambda slot: look_up(*slot), (tokens, length, gamma))
        is_sure = found.score >= self.drafter.threshold
        proposal = found.proposal
        if processing is not None:
            proposal = processing_lib.cut(processing, proposal)
        if protocols.is_tree(self):
            proposal = _as_tree(proposal, self.gamma_max)
        # A slot that asks the draft model for nothing does not start its loop: this is
        # the branch, without a `cond` that would hand the cache through both sides.
        memory, drafted = self._draft.propose(
            params.draft,
            memory,
            tokens=tokens,
            length=length,
            gamma=jnp.where(is_sure, 0, gamma),
            sampling=sampling,
            processing=processing,
        )
        chosen = jnp.where(is_sure, 0, 1)
        return memory, choice.merged([proposal, drafted], chosen, gamma)

    def commit(self, params, memory, length, *, asked, **features):
        """Commits in the draft model, or in the head in its place."""
        return self._draft.commit(params.draft, memory, length, asked=asked, **features)


def _as_tree(path: protocols.Proposal, num_nodes: int) -> protocols.Proposal:
    """Returns the paths of all slots as trees with room for `num_nodes` drafts."""
    room = (0, num_nodes - path.tokens.shape[1])
    tokens = jnp.pad(path.tokens, ((0, 0), room))
    parents = jnp.broadcast_to(jnp.arange(num_nodes, dtype=jnp.int32), tokens.shape)
    return path.replace(tokens=tokens, parents=parents, survival=None)
