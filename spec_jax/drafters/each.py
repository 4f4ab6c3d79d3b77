"""A drafter that is written for one sequence, lifted over slots.

Every drafter enters the engine through `lift`. One that shares work between slots, such
as a draft model whose rows go through one forward, brings `for_slots`; any other is
mapped over the slots, each with a memory of its own.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import pytree
from spec_jax.drafters import slots as slots_lib
from spec_jax.engine import protocols, state as states
from spec_jax.gamma import policy as policy_lib
from spec_jax.paging import cache as paged
from spec_jax.rules import rule as rule_lib
from spec_jax.typing import check_whole


def lift(
    drafter: protocols.Drafter | Any,
    num_slots: int,
    *,
    rule: rule_lib.Rule | str = "coupled",
    gamma_policy: policy_lib.GammaPolicy | None = None,
) -> protocols.SlotDrafter:
    """Returns the drafter for `num_slots` sequences.

    Args:
      rule: of acceptance, see `Drafter.for_rule`.
      gamma_policy: of the rounds; for a schedule see `Drafter.for_schedule`.

    Raises:
      ValueError: a drafter that drafts nothing.
      NotImplementedError: a setting that the rule or the form for slots rules out.
    """
    check_whole(gamma_max=drafter.gamma_max)
    rule = rule_lib.of(rule)
    drafter = protocols.complete(protocols.complete(drafter).for_rule(rule))
    if policy_lib.schedules(gamma_policy):
        drafter = protocols.complete(drafter.for_schedule())
    slots = drafter.for_slots(num_slots)
    return Each(drafter=drafter, num_slots=num_slots) if slots is None else slots


class EachMemory(pytree.Node):
    """The memories of all slots, and one as `init` made it, for `prefill`."""

    fresh: Any
    slots: Any  # leaves [B, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Each(slots_lib.OfSlots):
    """Maps a drafter over slots. One slot costs what the drafter alone costs."""

    drafter: protocols.Drafter

    def init(
        self, *, capacity: int, page_size: int, num_pages: int | None = None
    ) -> EachMemory:
        """Allocates one memory for each slot, and one more.

        Raises:
          NotImplementedError: a paged memory, mapped over several slots.
        """
        del num_pages
        fresh = self.drafter.init(capacity=capacity, page_size=page_size)
        parts = jax.tree.leaves(fresh, is_leaf=_is_cache)
        if self.num_slots > 1 and any(map(_is_cache, parts)):
            raise NotImplementedError(
                f"{protocols.name_of(self)} keeps a paged cache, and mapping it "
                f"over {self.num_slots} slots would make a pool for each: give it "
                "`for_slots(num_slots)`, as drafters.draft_model has it"
            )
        return EachMemory(fresh=fresh, slots=_stacked(fresh, self.num_slots))

    def prefill(self, params, memory, prompt, *, slot, **features):
        """Takes a prompt into a fresh memory, and puts that into the slot."""
        # A copy: the drafter may donate what it is given.
        fresh = jax.tree.map(jnp.copy, memory.fresh)
        one = self.drafter.prefill(params, fresh, prompt, **features)
        return memory.replace(slots=_put(memory.slots, one, np.int32(slot)))

    def propose(self, params, memory, *, tokens, length, gamma, sampling):
        """Returns what the drafter proposes for each sequence."""
        draws = protocols.complete(self.drafter).reads_sampling

        def one(memory, tokens, length, gamma, sampling):
            extra = {"sampling": sampling} if draws else {}
            return self.drafter.propose(
                params, memory, tokens=tokens, length=length, gamma=gamma, **extra
            )

        slots, proposal = states.map_slots(
            one, memory.slots, tokens, length, gamma, sampling
        )
        return memory.replace(slots=slots), proposal

    def commit(self, params, memory, length, *, asked, **features):
        """Commits in the slots that are asked; the others stay as they are."""

        def one(memory, length, asked, features):
            committed = self.drafter.commit(params, memory, length, **features)
            return jax.tree.map(
                lambda new, old: jnp.where(asked, new, old), committed, memory
            )

        slots = states.map_slots(one, memory.slots, length, asked, features)
        return memory.replace(slots=slots)


def _is_cache(part: Any) -> bool:
    return isinstance(part, paged.PagedKV)


@functools.partial(jax.jit, static_argnames=("num_slots",))
def _stacked(one, num_slots):
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * num_slots), one)


@functools.partial(jax.jit, donate_argnums=(0,))
def _put(stacked, one, slot):
    return jax.tree.map(lambda all_, x: all_.at[slot].set(x), stacked, one)
