"""A small model of the same family drafts, one token after the other.

Leviathan et al. (2023), https://arxiv.org/abs/2211.17192. `draft_slots` runs it.

Drafts are the tokens of highest probability, or are drawn: coupled, with the noise of
the target's own draws, so that both mostly draw the same token where their
distributions are close; or independently, as the rules that draw uniforms need it.
"""

import dataclasses
from typing import Literal, cast, get_args

from spec_jax.drafters import draft_slots, tree_shapes
from spec_jax.engine import protocols
from spec_jax.model import row_model
from spec_jax.rules import rule as rule_lib


Draws = Literal["greedy", "coupled", "independent"]
"""The drafted token: the most probable; one drawn with the noise of the target's draw
for that position, where the target draws; or one with noise of the round's own."""

DRAWS: tuple[str, ...] = get_args(Draws)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel(protocols.Drafter):
    """A draft model; its parameters are the weights of `model`. `for_slots` drafts.

    The draft's bits need not be row-invariant: they decide what is proposed, never
    what is committed. A slab of two rows is therefore enough.

    Attributes:
      catch_up_rows: height of the slab that takes in a text of which more than
        `model.slab` rows are missing, without logits; 0: there is no such slab. It pays
        where cost follows the active rows: `NATIVE_PREFILL_SLAB` with native kernels.
      min_confidence: a draft ends before the first token whose distribution has no
        probability as high as this, see `gamma.confidence`; 0 never ends one.
      draws: one of `DRAWS`. "independent" proposals say which distributions they were
        drawn from.
      tree: the tree that is drafted in place of chains, whose number of nodes is
        `gamma_max`; None: chains.
      gives_survival: whether chains come with `Proposal.survival`: the product of the
        highest probabilities of the distributions up to each draft's.

    Raises:
      ValueError: an unknown kind of draws, a negative height, a confidence outside
        `[0, 1]` or with a tree, a `gamma_max` that is not the tree's nodes, or draws
        that a `Tree` does not take.
    """

    model: row_model.RowModel
    gamma_max: int
    draws: Draws = "coupled"
    catch_up_rows: int = 0
    min_confidence: float = 0.0
    tree: tree_shapes.AnyTree | None = None
    gives_survival: bool = False

    def __post_init__(self) -> None:
        if self.draws not in DRAWS:
            raise ValueError(f"draws={self.draws!r} is not one of {', '.join(DRAWS)}")
        if self.catch_up_rows < 0:
            raise ValueError(f"catch_up_rows={self.catch_up_rows} must not be negative")
        if not 0 <= self.min_confidence <= 1:
            raise ValueError(
                f"min_confidence={self.min_confidence} is no probability: give 0, "
                "which never ends a draft, to 1"
            )
        tree_shapes.check_nodes(self.tree, self.gamma_max)
        if isinstance(self.tree, tree_shapes.Tree) and self.draws == "independent":
            raise ValueError(
                f"draws='independent' of a search {self.tree}: its nodes depend on the "
                "tokens drawn, and have no distribution; draw them 'coupled' or "
                "'greedy', or give a fixed tree such as '4-2-1'"
            )
        is_greedy = isinstance(self.tree, tree_shapes.Tree) and self.tree.greedy
        if is_greedy and self.draws != "greedy":
            raise ValueError(
                f"draws={self.draws!r} of a tree {self.tree}, whose children are never "
                "drawn: give draws='greedy', or make it by `for_tree`"
            )
        if self.tree is not None and self.min_confidence:
            raise ValueError(
                f"min_confidence={self.min_confidence} ends chains: a tree weighs its "
                "nodes against each other, leave it out"
            )

    @property
    def vocab_size(self) -> int:
        """Entries of the draft's vocabulary, which must be the target's."""
        return self.model.config.vocab_size

    @property
    def max_positions(self) -> int:
        """Positions that the model was trained for."""
        return self.model.config.max_position_embeddings

    def for_rule(self, rule: rule_lib.Rule) -> "DraftModel":
        """Returns the draft model whose draws a rule of acceptance keeps most of.

        Rules that draw uniforms need independent draws, and their probabilities.

        Raises:
          NotImplementedError: trees that would bias the rule, or that it does not take.
        """
        if rule.is_exact:
            return self
        is_searched = isinstance(self.tree, tree_shapes.Tree)
        if is_searched and self.draws != "greedy":
            raise NotImplementedError(
                f"trees of a search under rule={rule!r}: which nodes it keeps depends "
                "on the tokens drawn, and that biases what this rule accepts; use the "
                "rule 'coupled', under which every tree is lossless, a tree of a fixed "
                "shape such as '4-2-1', or draws='greedy'"
            )
        if rule.replaces and self.tree is not None:
            return self._with_replacement(rule)
        if self.draws != "coupled":
            return self
        return dataclasses.replace(self, draws="independent")

    def _with_replacement(self, rule: rule_lib.Rule) -> "DraftModel":
        """Returns the draft model whose siblings are drawn with replacement."""
        tree = self.tree
        is_even = isinstance(tree, tree_shapes.FixedTree) and tree.branching
        if self.draws == "greedy" or not is_even:
            raise NotImplementedError(
                f"tree {tree} with draws={self.draws!r} under rule={rule!r}, which "
                "takes siblings that are drawn, as many of each node of a depth: give "
                "a branching such as '4-1-1', or use the rule 'block'"
            )
        replaces = dataclasses.replace(cast(tree_shapes.FixedTree, tree), replaces=True)
        return dataclasses.replace(self, draws="independent", tree=replaces)

    def for_schedule(self) -> "DraftModel":
        """Returns the draft model that says what chance each of its drafts has."""
        return dataclasses.replace(self, gives_survival=True)

    def for_tree(self, tree: tree_shapes.AnyTree) -> "DraftModel":
        """Returns the draft model of such trees, with a slab for the rows of a level.

        It draws "greedy" for a `Tree` that is `greedy`.
        """
        model, draws = self.model, self.draws
        if isinstance(tree, tree_shapes.Tree) and tree.greedy:
            draws = "greedy"
        if model.slab < tree.width and model.impl != "native":
            slab = row_model.slab_for(model.impl, tree.width)
            model = dataclasses.replace(model, slab=slab)
        return dataclasses.replace(
            self, model=model, tree=tree, gamma_max=tree.nodes, draws=draws
        )

    def for_slots(self, num_slots: int) -> draft_slots.SlotDraftModel:
        """Returns the draft model for `num_slots` sequences."""
        return draft_slots.SlotDraftModel(drafter=self, num_slots=num_slots)
