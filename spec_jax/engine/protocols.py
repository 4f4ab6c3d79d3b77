"""The protocol of a drafter, and the data that it exchanges with a target (`target`).

The engine runs `B` sequences at once, each in a slot; one sequence is a batch of one.
A `target.Target` and a `SlotDrafter` know all slots. A `Drafter` is written for one
sequence, and `drafters.each.lift` makes a `SlotDrafter` of it.
"""

import dataclasses
import inspect
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax import pytree
from spec_jax.rules import rule as rule_lib, sampling


MAX_TREE_ROWS = 256
"""Columns of a window of a tree: the root and 255 drafts, in tiles."""

Params = Any
Memory = Any
Cache = Any
Sampling = sampling.SamplingSettings | None
"""Settings with leaves `[B]`, one a slot; None: every slot is greedy, and the program
cannot draw."""


class Proposal(pytree.Node):
    """Drafted tokens, a chain or a tree; the first `num_drafted` are real."""

    tokens: jax.Array  # [gamma_max] int32
    num_drafted: jax.Array  # [] int32
    # [gamma_max] int32, the column of each draft's parent: 0 is the pending token, and
    # `i + 1` draft `i`, so draft `i` has one in `0 .. i`. None: a chain.
    parents: jax.Array | None = None
    # [gamma_max, V] float32: row `c` is the distribution, filters included, that the
    # token after column `c` was drawn from; in a tree column `c`'s children were drawn
    # from it, one after the other and none twice. A tree's shape must not depend on the
    # tokens drawn. None: no token was drawn at random, and a tree may have any shape.
    # Rule "coupled" needs no `probs`.
    probs: jax.Array | None = None
    # [gamma_max] float32: the chance that draft `i` of a chain is kept with all before
    # it, from what was known before its own token was drawn. For schedules alone.
    survival: jax.Array | None = None


class Window(pytree.Node):
    """Tokens of each slot that the target is to verify in a round.

    Column 0 is the pending token, column `i + 1` is draft `i`. The K/V of column `c` is
    stored at place `start + c`; of a chain that is its position, too.

    A tree can be run level by level: `tokens` are then those of the columns from
    `first` on, and `parents` are of all columns.
    """

    tokens: jax.Array  # [B, R] int32
    start: jax.Array  # [B] int32, position and place of column 0
    num_active: jax.Array  # [B] int32, leading ones to run; 0: the slot sits out
    # [B, C] int32, the column of each column's parent, below its own; column 0 has 0.
    parents: jax.Array | None = None  # None: a chain
    first: jax.Array | None = None  # [] int32, column of `tokens[:, 0]`; None: 0
    depth_max: int | None = pytree.static(default=None)  # of a tree


class Verified(pytree.Node):
    """The target's outputs for a window: the rows of all slots, packed.

    The first `num_active` rows are active, those of one slot together and in order; the
    others are padding.
    """

    logits: jax.Array  # [P, V] float32
    slots: jax.Array  # [P] int32
    positions: jax.Array  # [P] int32, of the token that was fed: its depth decides
    num_active: jax.Array  # [] int32
    at: jax.Array  # [B, R] int32, the row of each column; P where it was not run
    features: jax.Array | None = None  # [P, taps, D]; None where none were asked for

    def by_column(self, rows: jax.Array, *, fill: Any) -> jax.Array:
        """Returns `rows [P, ..]` by column, `[B, R, ..]`; `fill` where none was run."""
        num_slots, width = self.at.shape
        if num_slots == 1:  # The rows are its columns: no gather.
            is_run = (self.at < rows.shape[0]).reshape(
                1, width, *(1,) * (rows.ndim - 1)
            )
            return jnp.where(is_run, rows[None, :width], fill)
        return rows.at[self.at].get(mode="fill", fill_value=fill)


def is_tree(drafter: Any) -> bool:
    """Returns whether a drafter proposes trees."""
    return complete(drafter).depth_max is not None


def depth_max(drafter: Any) -> int:
    """Returns the most drafts on one path of a drafter's proposals."""
    most = complete(drafter).depth_max
    return drafter.gamma_max if most is None else most


def taps_of(drafter: Any) -> tuple[int, ...]:
    """Returns which of the target's features a drafter reads; () for none."""
    return tuple(complete(drafter).taps)


def name_of(drafter: Any) -> str:
    """Returns the name of a drafter's class; of one for slots, that of its drafter."""
    while hasattr(drafter, "drafter"):
        drafter = drafter.drafter
    return type(drafter).__name__


def survival_of(drafter: Any, proposal: Proposal) -> Float[Array, "B W"]:
    """Returns the survival of the drafts of all slots, float32.

    Raises:
      ValueError: the drafter gives none, or not a chance for each draft.
    """
    name, survival = name_of(drafter), proposal.survival
    if survival is None:
        raise ValueError(
            f"{name} gives no `Proposal.survival`, the chances that its drafts are "
            "kept: take a drafter that does, such as 'draft-model', or no schedule"
        )
    if survival.shape != proposal.tokens.shape:
        raise ValueError(
            f"{name} gives survival of shape {list(survival.shape)} for drafts of "
            f"shape {list(proposal.tokens.shape)}: give a chance for each draft"
        )
    return survival.astype(jnp.float32)


class Drafter:
    """Proposes continuations, by functions of a memory that the loop carries.

    Written for ONE sequence; `drafters.each.lift` maps it over slots. Hashable: it is a
    static argument, and equal drafters share an executable. The memory is a pytree of
    arrays, no two of which share a buffer, of shapes and dtypes that never change;
    everything that changes is in it. `init` and `prefill` run on the host, `propose`
    and `commit` are traced into the loop and call nothing outside of it. Under the rule
    "coupled" no proposal can make the output wrong: a bad one only costs time. That
    holds for one that breaks its promises, too: rounds bound the number of drafts, and
    no rule keeps a draft outside the vocabulary. All other rules trust what `Proposal`
    says of `probs`: that drafts were drawn from them, and that no shape of a tree
    depends on the tokens drawn.
    `testing.check_drafter` checks what is promised here.

    `gamma_max` and `propose`, or `for_slots`, are required. The rest has defaults: no
    memory but the text, chains, no features. A class that does not inherit is a drafter
    too if it has `gamma_max` and the four functions: see `complete`.
    """

    @pytree.optional
    def gamma_max(self) -> int:
        """The most tokens of a proposal."""
        raise AttributeError("gamma_max")

    @pytree.optional
    def vocab_size(self) -> int | None:
        """Entries of the drafter's vocabulary, which must be the target's; None: it
        repeats tokens that it was shown, and fits any."""
        return None

    @pytree.optional
    def tree(self) -> Any:
        """The tree that is proposed, see `drafters.tree_shapes`; None: chains, or trees
        of which `depth_max` alone is known."""
        return None

    @pytree.optional
    def depth_max(self) -> int | None:
        """The most drafts on a path of a tree; None: it proposes chains."""
        return None if self.tree is None else self.tree.depth_max

    @pytree.optional
    def max_positions(self) -> int | None:
        """Positions that the drafter's model was trained for; None: no such bound."""
        return None

    @pytree.optional
    def taps(self) -> tuple[int, ...]:
        """The target's features that the drafter reads; () for none.

        Features are residual streams, un-normed, by Hugging Face's `hidden_states`
        index: 0 is the embedding, `k` the output of layer `k - 1`; unlike those of
        Hugging Face the last layer's is not normed. With taps, `prefill` and `commit`
        have a keyword `features`: see `SlotDrafter`, there without the axis of slots.
        """
        return ()

    @pytree.optional
    def feature_size(self) -> int | None:
        """The width of a feature; None: the drafter takes any."""
        return None

    @pytree.optional
    def reads_sampling(self) -> bool:
        """Whether `propose` has a keyword `sampling`: the settings of the target's
        draws, or None where it is greedy."""
        return False

    @pytree.optional
    def reads_processing(self) -> bool:
        """Whether `propose` of slots has a keyword `processing`: the processor of the
        target's logits, by which drafts are drawn too. In any case drafts are cut
        before the first token that it forbids."""
        return False

    @pytree.optional
    def shares_prompts(self) -> bool:
        """Whether a slot can begin with what another took in of the same prompt: `init`
        of slots has a keyword `shares`, and `prefill` of them one `begun`, a
        `held.Begun`. Otherwise every slot takes in its own."""
        return False

    def for_rule(self, rule: rule_lib.Rule) -> Any:
        """Returns the drafter that draws as a rule of acceptance requires.

        Raises:
          NotImplementedError: trees, under a rule that takes other siblings.
        """
        if rule.replaces and is_tree(self):
            raise NotImplementedError(
                f"trees of {name_of(self)} under rule={rule!r}, which takes siblings "
                "that are drawn with replacement: use the rule 'block'"
            )
        return self

    def for_schedule(self) -> Any:
        """Returns the drafter that gives the survival of its drafts, if it can."""
        return self

    def for_tree(self, tree: Any) -> Any:
        """Returns the drafter of such trees.

        Raises:
          ValueError: it drafts chains alone.
        """
        raise ValueError(
            f"{name_of(self)} drafts chains alone: leave the tree {tree} out, or take "
            "a drafter that has `for_tree`, such as 'draft-model'"
        )

    def for_slots(self, num_slots: int) -> Any:
        """Returns a `SlotDrafter`, which shares work between slots; None: the four
        functions are mapped over them."""
        del num_slots

    def taught(self, memory: Memory, other: Memory) -> Memory:
        """Returns a memory with what another one has learnt of rounds that are done:
        the memory itself, of a drafter that learns nothing."""
        del other
        return memory

    def init(self, *, capacity: int, page_size: int) -> Memory:
        """Allocates the empty memory of a text, outside of whatever is timed.

        Args:
          capacity: positions that the target's cache holds; a text has one token more
            at most.
          page_size: positions per page, for a memory that has pages.
        """
        del capacity, page_size
        return ()

    def prefill(self, params: Params, memory: Memory, prompt: list[int]) -> Memory:
        """Takes in the prompt, whose last token is pending: part of what is timed.

        The memory is as `init` made it, and donated. The prompt is not empty.
        """
        del params, prompt
        return memory

    def propose(
        self,
        params: Params,
        memory: Memory,
        *,
        tokens: Int[Array, " max_len"],
        length: Int[Array, ""],
        gamma: Int[Array, ""],
    ) -> tuple[Memory, Proposal]:
        """Drafts at most `gamma` tokens to follow `tokens[:length]`.

        Tokens after `length` mean nothing. `gamma` may be 0, and never asks for more
        than the target's capacity, less `length`.
        """
        raise NotImplementedError(f"{name_of(self)} has no `propose`")

    def commit(self, params: Params, memory: Memory, length: Int[Array, ""]) -> Memory:
        """Keeps `tokens[:length]`, which are committed, and nothing after them.

        At most the accepted prefix of the last proposal is among them.
        """
        del params, length
        return memory


@dataclasses.dataclass(frozen=True)
class _Completed(Drafter):
    """A drafter whose class is no `Drafter`, with the defaults for what it lacks."""

    drafter: Any

    def __getattribute__(self, name: str) -> Any:
        drafter = object.__getattribute__(self, "drafter")
        if name == "drafter" or name.startswith("__") or not hasattr(drafter, name):
            return object.__getattribute__(self, name)
        return getattr(drafter, name)

    @property
    def reads_sampling(self) -> bool:
        """Whether `propose` has such a keyword."""
        propose = inspect.signature(self.drafter.propose)
        return "sampling" in propose.parameters


def has_own(drafter: Any, name: str) -> bool:
    """Returns whether a drafter has such an attribute that is not `Drafter`'s own."""
    own, base = getattr(type(drafter), name, None), getattr(Drafter, name, None)
    return hasattr(drafter, name) and (base is None or own is not base)


def complete(drafter: Any) -> Any:
    """Returns a drafter, of one sequence or of slots, that has all of `Drafter`: itself
    where it is one, else with the defaults for what its class leaves out."""
    return drafter if isinstance(drafter, Drafter) else _Completed(drafter)


def passed_on(name: str, *, of: str) -> Any:
    """Returns a property of a drafter that another one has: its field `of`."""
    return property(
        lambda drafter: getattr(complete(getattr(drafter, of)), name),
        doc=vars(Drafter)[name].__doc__,
    )


class SlotDrafter(Protocol):
    """A drafter of all slots, by functions of a memory that is carried.

    Hashable: it is a static argument. It has what `Drafter` says of vocabulary, depth
    and features; `drafters.slots.OfSlots` takes that of the drafter that it is made of.
    Arrays and the proposal's fields have a leading axis of slots. A slot that is asked
    for nothing, gamma 0, costs nothing where that is possible.
    """

    @property
    def gamma_max(self) -> int:
        """The most tokens of a proposal."""
        ...

    @property
    def num_slots(self) -> int:
        """The sequences that run at once."""
        ...

    def init(
        self, *, capacity: int, page_size: int, num_pages: int | None = None
    ) -> Memory:
        """Allocates as `Drafter.init`, with `num_pages` of all slots together, for a
        memory that has pages; None: enough for all."""
        ...

    def prefill(
        self, params: Params, memory: Memory, prompt: list[int], *, slot: int
    ) -> Memory:
        """Takes a prompt into a slot that is empty or was released. Donates `memory`.

        A drafter with `taps` has one more keyword, `features [T, taps, D]`, of the
        prompt without its last token, which was not run yet. The rest is padding.
        """
        ...

    def propose(
        self,
        params: Params,
        memory: Memory,
        *,
        tokens: Int[Array, "B max_len"],
        length: Int[Array, " B"],
        gamma: Int[Array, " B"],
        sampling: Sampling,
    ) -> tuple[Memory, Proposal]:
        """Drafts as `Drafter.propose`. A drafter that draws with the target's settings,
        `sampling`, and the same noise is kept more often."""
        ...

    def commit(
        self,
        params: Params,
        memory: Memory,
        length: Int[Array, " B"],
        *,
        asked: Bool[Array, " B"],
    ) -> Memory:
        """Keeps `length[b]` tokens in the slots asked; 1 releases a slot.

        A drafter with `taps` has one more keyword, `features`: None where a slot is
        released, otherwise `[B, A, taps, D]`, with `A` one more than the drafts on a
        path. The first `k` of a slot that commits `k` tokens after `x[0, n)` are those
        of positions `n - 1 .. n + k - 2`, in order: bit for bit what decoding computes
        there. The others are zero.
        """
        ...
