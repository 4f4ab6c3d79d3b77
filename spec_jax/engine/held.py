"""Prompts that slots hold, noted on the host, so that requests can begin with them.

A slot keeps the K/V of its prompt while it generates, and after it ended until it takes
another request. Where requests that begin alike follow each other in the queue, the
later one finds its beginning in the slot of the earlier one.
"""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Begun:
    """Where a request's prompt begins: positions `[0, length)` of a slot."""

    source: int
    length: int
    is_whole: bool  # the source's prompt has no other tokens before its last
    features: Any = None  # of the source's prompt, for a drafter that reads them


@dataclasses.dataclass(kw_only=True)
class Held:
    """The prompt of each slot, without the last token, which has no K/V yet.

    Attributes:
      by_rows: whether prompts are prefilled by rows, whose bits do not depend on where
        a prefill began; otherwise equal prompts alone have K/V of equal bits.
    """

    by_rows: bool
    prompts: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    features: dict[int, Any] = dataclasses.field(default_factory=dict)
    shared: dict[int, int] = dataclasses.field(default_factory=dict)

    def beginning(self, prompt: list[int], slot: int) -> Begun | None:
        """Returns the longest beginning that a slot holds, of a prompt for `slot`.

        Prefers, of equally long ones, another slot's: to keep a part of its own
        prompt, the slot might have to cut a page that others hold.
        """
        wanted = np.asarray(prompt[:-1], np.int32)
        lengths = {n: self._alike(wanted, held) for n, held in self.prompts.items()}
        best = max(lengths, key=lambda n: (lengths[n], n != slot), default=slot)
        if not lengths.get(best):
            return None
        length = lengths[best]
        return Begun(
            source=best,
            length=length,
            is_whole=length == len(wanted) == len(self.prompts[best]),
            features=self.features.get(best),
        )

    def put(self, slot: int, prompt: list[int], *, features: Any, shared: int) -> None:
        """Notes the prompt that a slot took in; a slot held `shared` tokens of it."""
        self.prompts[slot] = np.asarray(prompt[:-1], np.int32)
        self.features[slot], self.shared[slot] = features, shared

    def _alike(self, wanted: np.ndarray, held: np.ndarray) -> int:
        """Returns how many of the first tokens have K/V of equal bits."""
        if not self.by_rows:
            return len(wanted) if np.array_equal(wanted, held) else 0
        most = min(len(wanted), len(held))
        differ = np.flatnonzero(wanted[:most] != held[:most])
        return int(differ[0]) if differ.size else most
