"""A drafter as the contract kit looks at it: called by hand, or watched in rounds."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafters import each
from spec_jax.engine import protocols
from spec_jax.testing import bench as bench_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneSlot:
    """A drafter on one sequence of a bench, without the axis of slots.

    One that is written for a sequence is called as it is: a lifted memory is a copy,
    which would hide its faults.
    """

    drafter: protocols.Drafter
    params: Any
    bench: bench_lib.Bench

    @property
    def _slots(self) -> protocols.SlotDrafter | None:
        return _own_slots(self.drafter)

    def table(self, text: Sequence[int]) -> np.ndarray | None:
        """Returns the features of a text that the drafter reads; None: it reads none.
        The last token has none, as it is still pending."""
        taps = protocols.taps_of(self.drafter)
        return np.asarray(self.bench.features(text[:-1], taps)) if taps else None

    def buffer(self, text: Sequence[int], *, behind: Sequence[int] = (0,)) -> jax.Array:
        """Returns a text's tokens, and `behind` again and again after them."""
        size = self.bench.capacity + 1 - len(text)
        rest = np.resize(np.array(behind, np.int32), size)
        return jnp.asarray(np.concatenate([np.array(text, np.int32), rest]))

    def init(self) -> protocols.Memory:
        """Returns an empty memory."""
        return (self._slots or self.drafter).init(**self.bench.sizes)

    def begin(self, text: Sequence[int], table: Any = None) -> protocols.Memory:
        """Returns the memory after a text, whose features are the first of `table`."""
        slots, memory = self._slots, self.init()
        table = self.table(text) if table is None else table
        extra = {} if table is None else {"features": jnp.asarray(table)}
        if slots is None:
            return self.drafter.prefill(self.params, memory, list(text), **extra)
        return slots.prefill(self.params, memory, list(text), slot=0, **extra)

    def propose(self, params, memory, tokens, length, gamma):
        """Drafts after one text, by whichever form the drafter has."""
        return _propose(self.drafter, params, memory, tokens, length, gamma)

    def after(self, memory, text, *, gamma=None, behind=(0,)):
        """Proposes after `text`, all that there is room for or `gamma` tokens; a copy
        of the memory is donated."""
        gamma = self.drafter.gamma_max if gamma is None else gamma
        return _jitted(
            self.drafter,
            self.params,
            jax.tree.map(jnp.array, memory),
            self.buffer(text, behind=behind),
            jnp.int32(len(text)),
            jnp.int32(min(gamma, self.bench.capacity - len(text))),
        )

    def commit(self, params, memory, length, extra) -> protocols.Memory:
        """Commits up to a length; `extra` are the inputs that `committed` makes."""
        slots = self._slots
        if slots is None:
            return self.drafter.commit(params, memory, length, **extra)
        asked, extra = jnp.ones((1,), bool), jax.tree.map(lambda x: x[None], extra)
        return slots.commit(params, memory, length[None], asked=asked, **extra)

    def committed(self, table, start: int = 0, end: int = 0, rest=0) -> dict[str, Any]:
        """Returns `commit`'s inputs beside the length: for a drafter that reads the
        target, the features of `[start, end)` in `table`, and `rest` after them."""
        if table is None:
            return {}
        most = 1 + protocols.depth_max(self.drafter)
        handed = np.full((most, *table.shape[1:]), rest, table.dtype)
        handed[: end - start] = table[start:end]
        return {"features": jnp.asarray(handed)}

    def taught(self, memory, other) -> protocols.Memory:
        """Returns a memory with what another one learnt of rounds."""
        return protocols.complete(self._slots or self.drafter).taught(memory, other)


def _own_slots(drafter) -> protocols.SlotDrafter | None:
    """Returns a drafter's own form for one slot; None if it is written for one text."""
    slots = each.lift(drafter, 1)
    return None if isinstance(slots, each.Each) else slots


def _propose(drafter, params, memory, tokens, length, gamma):
    """Drafts after one text, see `OneSlot.propose`."""
    slots = _own_slots(drafter)
    if slots is None:
        draws = protocols.complete(drafter).reads_sampling
        extra = {"sampling": None} if draws else {}
        return drafter.propose(
            params, memory, tokens=tokens, length=length, gamma=gamma, **extra
        )
    asked = {"tokens": tokens[None], "length": length[None], "gamma": gamma[None]}
    memory, proposal = slots.propose(params, memory, **asked, sampling=None)
    return memory, jax.tree.map(lambda leaf: leaf[0], proposal)


_jitted = jax.jit(_propose, static_argnames="drafter", donate_argnames="memory")


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
