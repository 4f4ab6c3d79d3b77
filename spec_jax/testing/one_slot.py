"""A drafter as the contract kit looks at it: called by hand, or watched in rounds."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.drafters import each
from spec_jax.engine import protocols


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneSlot:
    """A drafter on one sequence, without the axis of slots: what the clauses look at.

    One that is written for a sequence is called as it is: a lifted memory is a copy,
    which would hide its faults.
    """

    drafter: protocols.Drafter

    @property
    def _slots(self) -> protocols.SlotDrafter | None:
        slots = each.lift(self.drafter, 1)
        return None if isinstance(slots, each.Each) else slots

    def init(self, bench) -> protocols.Memory:
        return (self._slots or self.drafter).init(**bench.sizes)

    def begin(self, params, bench, text) -> protocols.Memory:
        taps = protocols.taps_of(self.drafter)
        extra = {"features": bench.features(text[:-1], taps)} if taps else {}
        return self.prefill(params, bench, text, extra)

    def prefill(self, params, bench, text, extra) -> protocols.Memory:
        slots, memory = self._slots, self.init(bench)
        if slots is None:
            return self.drafter.prefill(params, memory, list(text), **extra)
        return slots.prefill(params, memory, list(text), slot=0, **extra)

    def propose(self, params, memory, tokens, length, gamma):
        """Drafts after one text, by whichever form the drafter has."""
        slots = self._slots
        if slots is None:
            draws = protocols.complete(self.drafter).reads_sampling
            extra = {"sampling": None} if draws else {}
            return self.drafter.propose(
                params, memory, tokens=tokens, length=length, gamma=gamma, **extra
            )
        memory, proposal = slots.propose(
            params,
            memory,
            tokens=tokens[None],
            length=length[None],
            gamma=gamma[None],
            sampling=None,
        )
        return memory, jax.tree.map(lambda leaf: leaf[0], proposal)

    def commit(self, params, memory, length, extra) -> protocols.Memory:
        slots = self._slots
        if slots is None:
            return self.drafter.commit(params, memory, length, **extra)
        asked, extra = jnp.ones((1,), bool), jax.tree.map(lambda x: x[None], extra)
        return slots.commit(params, memory, length[None], asked=asked, **extra)

    def taught(self, memory, other) -> protocols.Memory:
        return protocols.complete(self._slots or self.drafter).taught(memory, other)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched:
    """The drafter for slots, and a note in `traces` for each time it is traced."""

    inner: protocols.SlotDrafter
    traces: list = dataclasses.field(compare=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def propose(self, params, memory, **arguments):
        self.traces.append(tuple(arguments))
        return self.inner.propose(params, memory, **arguments)
