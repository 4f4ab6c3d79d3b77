"""A choice among drafters, made anew in every round: who drafts, and how much.

Each member's drafts are counted by position, as `gamma.goodput` counts them, and a
round goes to the member and the number of drafts of most expected tokens in expected
time; or to no member, where that is best. Counts fade, so that a member that is not
asked gets another chance. Each round follows the leader by what is known:

    lookup   drafts in every round, which is next to free, so every round shows what
             would have been kept of its drafts, up to the round's last token
    others   are asked where they are chosen, and known by these rounds alone

A text begins with what those before it in its slot taught, which is worth some rounds.

The choice depends on committed text and on the counts of rounds that are done: on no
noise of this round, and on no token that is not committed. So what a rule promises for
each member's proposals holds for these.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from spec_jax import pytree
from spec_jax.drafters import each, knowledge, slots as slots_lib, text_tree
from spec_jax.engine import protocols
from spec_jax.gamma import costs as costs_lib
from spec_jax.rules import rule as rule_lib


class ChoiceParams(pytree.Node):
    """The parameters of the members, in order, and what their rounds cost."""

    members: tuple[Any, ...]
    # [M, gamma_max + 1] float32, by a round's drafts; 1 is a round without drafts
    round_s: jax.Array


class ChoiceMemory(pytree.Node):
    """The members' memories, and what is known of them."""

    members: tuple[Any, ...]
    known: knowledge.Knowledge


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice(protocols.Drafter):
    """Drafts by the member that is best for this text, as far as it is known.

    A member that is asked again first takes in the text of rounds that it sat out.

    Attributes:
      members: drafters of chains, lookups (`ngram`, `suffix`) and others.
      prior: the chance of a first draft before anything is known.
      prior_weight: how many rounds that is worth.
      text_weight: how many rounds, at most, the texts before in the slot are worth.
      decay: factor of old counts, per round.

    Raises:
      ValueError: no members or the same one twice, different `gamma_max`, vocabularies
        or features, one that drafts trees, or a number outside of its range.
    """

    members: tuple[Any, ...]
    prior: float = 0.7
    prior_weight: float = 4.0
    text_weight: float = 12.0
    decay: float = 0.98

    def __post_init__(self) -> None:
        if not self.members:
            raise ValueError("a choice among no drafters: give it members")
        names = [protocols.name_of(member) for member in self.members]
        if len(set(self.members)) < len(names):
            raise ValueError(f"members {', '.join(names)}: give none of them twice")
        if any(map(protocols.is_tree, self.members)):
            raise ValueError(
                f"members {', '.join(names)}: a choice drafts chains, and one of them "
                "has a tree: give drafters without"
            )
        for name in ("gamma_max", "vocab_size", "taps", "feature_size"):
            found = self._all(name)
            if len({one for one in found if one}) > 1:
                raise ValueError(
                    f"members {', '.join(names)} have {name} {found}: all must be the "
                    "same, where they have one"
                )
        if not (0 < self.prior < 1 and self.prior_weight > 0 and 0 < self.decay < 1):
            raise ValueError(
                f"prior={self.prior} and decay={self.decay} must lie between 0 and 1, "
                f"prior_weight={self.prior_weight} above 0"
            )
        if not 0 <= self.text_weight < np.inf:
            raise ValueError(f"text_weight={self.text_weight} must be 0 or above")

    def _all(self, name: str) -> list[Any]:
        """Returns what the members have of that name."""
        return [getattr(protocols.complete(member), name) for member in self.members]

    @property
    def gamma_max(self) -> int:
        """The most tokens of a proposal, of any member."""
        return self.members[0].gamma_max

    @property
    def vocab_size(self) -> int | None:
        """Entries of the members' vocabulary; None: they only look up."""
        return next(filter(None, self._all("vocab_size")), None)

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's features that members read; () for none."""
        return next(filter(None, self._all("taps")), ())

    @property
    def feature_size(self) -> int | None:
        """The width of a feature, if a member takes one width alone."""
        return next(filter(None, self._all("feature_size")), None)

    @property
    def max_positions(self) -> int | None:
        """Positions that all members were trained for; None: no such bound."""
        return min(filter(None, self._all("max_positions")), default=None)

    def for_rule(self, rule: rule_lib.Rule) -> "Choice":
        """Returns the choice among members for that rule of acceptance.

        Where tokens depend on the member that drafts, earlier texts count for nothing.
        """
        made = (protocols.complete(m).for_rule(rule) for m in self.members)
        worth = self.text_weight if rule.is_exact else 0.0
        return dataclasses.replace(self, members=tuple(made), text_weight=worth)

    def for_schedule(self) -> "Choice":
        """Returns the choice that says what chance drafts have, if all members do."""
        made = (protocols.complete(m).for_schedule() for m in self.members)
        return dataclasses.replace(self, members=tuple(made))

    def for_slots(self, num_slots: int) -> "SlotChoice":
        """Returns the choice for `num_slots` sequences."""
        return SlotChoice(drafter=self, num_slots=num_slots)


def looks_up(member: Any) -> bool:
    """Returns whether a drafter, or its form for slots, reads only the text: it never
    has to catch up, and may draft in every round."""
    return isinstance(getattr(member, "drafter", member), text_tree.TextDrafter)


def params_of(
    drafter: Choice, members: tuple[Any, ...], *, draft: float = 0.1, row: float = 0.1
) -> ChoiceParams:
    """Returns the parameters of a choice, with costs in rounds without drafts.

    The default ones are near enough for a head; `default_gamma` measures.

    Args:
      members: their parameters.
      draft: cost of a draft that is not looked up.
      row: cost of a row that is verified.
    """
    drafts = np.arange(drafter.gamma_max + 1, dtype=np.float32)
    added = [row + (0.0 if looks_up(m) else draft) for m in drafter.members]
    round_s = 1 + np.array(added, np.float32)[:, None] * drafts
    return ChoiceParams(members=members, round_s=jnp.asarray(round_s))


def with_costs(
    params: ChoiceParams, costs: Sequence[costs_lib.RoundCosts]
) -> ChoiceParams:
    """Returns the parameters with what rounds of each member cost.

    Raises:
      ValueError: not as many costs as members, or of fewer drafts.
    """
    num, size = params.round_s.shape
    if len(costs) != num:
        raise ValueError(f"costs of {len(costs)} members, and the choice has {num}")
    times = np.stack([one.upto(size - 1).rising_s() for one in costs])
    round_s = jnp.asarray(times / times[:, :1], jnp.float32)
    return params.replace(round_s=round_s)


def pinned(params: ChoiceParams, number: int) -> ChoiceParams:
    """Returns the parameters by which one member drafts in every round, and as much as
    it is asked for: to time it."""
    num, size = params.round_s.shape
    round_s = np.full((num, size), np.inf, np.float32)
    round_s[number] = 1 / np.arange(1, size + 1)  # However little was kept.
    return params.replace(round_s=jnp.asarray(round_s))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotChoice(slots_lib.OfSlots):
    """A `Choice` for `num_slots` sequences; each slot has its own counts."""

    drafter: Choice
    reads_processing: ClassVar[bool] = True

    @property
    def slots(self) -> tuple[Any, ...]:
        """The members' forms for slots."""
        return tuple(each.lift(m, self.num_slots) for m in self.drafter.members)

    @property
    def shares_prompts(self) -> bool:
        """Whether all members but lookups share prompts; lookups take in nothing."""
        others = (s for s in self.slots if not looks_up(s))
        return all(protocols.complete(slots).shares_prompts for slots in others)

    def init(self, **sizes: Any) -> ChoiceMemory:
        """Allocates the members' empty memories."""
        members = tuple(slots.init(**_for(slots, sizes)) for slots in self.slots)
        nothing = knowledge.nothing(
            self.num_slots, len(self.drafter.members), self.gamma_max
        )
        return ChoiceMemory(members=members, known=nothing)

    def prefill(self, params, memory, prompt, *, slot, **handed):
        """Takes in a prompt, and keeps what earlier texts taught. Donates `memory`."""
        members = tuple(
            slots.prefill(own, held, prompt, slot=slot, **_for(slots, handed))
            for slots, own, held in self._each(params, memory)
        )
        return ChoiceMemory(members=members, known=self.begun(memory.known, slot))

    def begun(self, known: knowledge.Knowledge, slot: int) -> knowledge.Knowledge:
        """Returns the knowledge when a slot begins another text. Donates `known`."""
        worth = np.float32(self.drafter.text_weight)
        return knowledge.renewed(known, np.int32(slot), worth)

    def propose(
        self, params, memory, *, tokens, length, gamma, sampling, processing=None
    ):
        """Drafts what the chosen member drafts, slot by slot."""
        known = knowledge.learn(memory.known, tokens, length, decay=self.drafter.decay)
        handed = {"tokens": tokens, "length": length, "sampling": sampling}
        members = self._each(params, memory)

        def ask(number, gamma):
            """Has a member draft."""
            slots, own, held = members[number]
            more = dict[str, Any]()
            if processing is not None and protocols.complete(slots).reads_processing:
                more["processing"] = processing
            return slots.propose(own, held, gamma=gamma, **handed, **more)

        is_free = [looks_up(member) for member in self.drafter.members]
        found = [ask(n, gamma) if free else None for n, free in enumerate(is_free)]
        most = [gamma if one is None else one[1].num_drafted for one in found]
        chosen, asked = knowledge.best(
            known,
            params.round_s,
            jnp.stack(most, axis=1),
            prior=self.drafter.prior,
            weight=self.drafter.prior_weight,
        )
        # A member that is asked for nothing costs nothing.
        found = [
            ask(n, jnp.where(chosen == n, asked, 0)) if one is None else one
            for n, one in enumerate(found)
        ]
        held, proposals = zip(*found, strict=True)
        proposal = merged(proposals, chosen, asked)
        counted = (gamma > 0).astype(jnp.int32)
        at = jnp.arange(self.num_slots, dtype=jnp.int32), chosen, proposal.num_drafted
        known = known.replace(
            length=jnp.where(gamma > 0, length, 0),
            tokens=jnp.stack([one.tokens for one in proposals], axis=1),
            num_drafted=jnp.stack([one.num_drafted for one in proposals], axis=1),
            rounds=known.rounds.at[at].add(counted),
        )
        return ChoiceMemory(members=held, known=known), proposal

    def commit(self, params, memory, length, *, asked, **features):
        """Commits in every member, whichever of them drafted."""
        members = tuple(
            slots.commit(own, held, length, asked=asked, **_for(slots, features))
            for slots, own, held in self._each(params, memory)
        )
        return memory.replace(members=members)

    def _each(self, params: ChoiceParams, memory: ChoiceMemory) -> list[Any]:
        """Returns form, parameters and memory of each member."""
        return list(zip(self.slots, params.members, memory.members, strict=True))

    def taught(self, memory: ChoiceMemory, other: ChoiceMemory) -> ChoiceMemory:
        """Returns a memory with what another one learnt of the members."""
        return memory.replace(known=other.known)


def _for(slots: Any, handed: dict[str, Any]) -> dict[str, Any]:
    """Returns the keywords of `handed` that a member takes."""
    shares = protocols.complete(slots).shares_prompts
    reads = {"features": bool(protocols.taps_of(slots))}
    reads |= {"shares": shares, "begun": shares}
    return {name: x for name, x in handed.items() if reads.get(name, True)}


def merged(
    found: Sequence[protocols.Proposal],
    chosen: Int[Array, " B"],
    asked: Int[Array, " B"],
) -> protocols.Proposal:
    """Returns each slot's proposal of the member that was chosen there.

    All are chains or all are trees. Where a member gives distributions, drafts of the
    others count as certain. There is `survival` where all members give it.
    """
    slot = jnp.arange(chosen.shape[0], dtype=jnp.int32)
    pick = lambda leaves: jnp.stack(leaves, axis=1)[slot, chosen]
    survival = [one.survival for one in found if one.survival is not None]
    probs = next((one.probs for one in found if one.probs is not None), None)
    if probs is not None:
        certain = lambda tokens: jax.nn.one_hot(tokens, probs.shape[-1])
        of = lambda one: certain(one.tokens) if one.probs is None else one.probs
        probs = pick([of(one) for one in found])
    parents = [one.parents for one in found if one.parents is not None]
    return protocols.Proposal(
        tokens=pick([one.tokens for one in found]),
        num_drafted=jnp.minimum(pick([one.num_drafted for one in found]), asked),
        parents=pick(parents) if parents else None,
        probs=probs,
        survival=pick(survival) if len(survival) == len(found) else None,
    )
