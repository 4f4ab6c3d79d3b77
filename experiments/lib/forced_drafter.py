"""A drafter whose acceptance is *forced*: it knows the text, and the real draft runs.

Random weights accept nothing. So that rounds can be timed at the acceptance of trained
models, every proposal of the real drafter is paid for and then overwritten: with the
target's own next token where a mask says so, and with a wrong one elsewhere. What such
a run shows is the cost of rounds at an acceptance, never an acceptance.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from spec_jax.drafters import oracle
from spec_jax.engine import protocols


@flax.struct.dataclass(kw_only=True)
class ForcedParams:
    """What the forced drafter knows."""

    draft: Any  # parameters of the real drafter
    trace: jax.Array  # [max_len] int32, the text that plain decoding writes
    kept: jax.Array  # [max_len] bool, where a draft is to be right


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForcedDrafter:
    """Runs `inner`, and proposes what `ForcedParams` say. Its memory is `inner`'s.

    The K/V that the real draft keeps is that of its own tokens, not of the forced
    ones: lengths and costs are those of a real run, values are not.
    """

    inner: protocols.Drafter
    vocab_size: int

    @property
    def gamma_max(self) -> int:
        return self.inner.gamma_max

    def init(self, *, capacity: int, page_size: int) -> protocols.Memory:
        return self.inner.init(capacity=capacity, page_size=page_size)

    def prefill(
        self, params: ForcedParams, memory: protocols.Memory, prompt: list[int]
    ) -> protocols.Memory:
        return self.inner.prefill(params.draft, memory, prompt)

    def propose(
        self,
        params: ForcedParams,
        memory: protocols.Memory,
        *,
        tokens: Int[Array, " max_len"],
        length: Int[Array, ""],
        gamma: Int[Array, ""],
    ) -> tuple[protocols.Memory, protocols.Proposal]:
        """As many tokens as `inner` proposes, right where `kept` is true."""
        memory, proposal = self.inner.propose(
            params.draft, memory, tokens=tokens, length=length, gamma=gamma
        )
        # What was drafted is not used, but its K/V stay in the memory: all of the draft
        # is computed.
        forced = oracle.drafts_at(
            params.trace,
            params.kept,
            length + jnp.arange(self.gamma_max, dtype=jnp.int32),
            vocab_size=self.vocab_size,
        )
        return memory, proposal.replace(tokens=forced)

    def commit(
        self, params: ForcedParams, memory: protocols.Memory, length: Int[Array, ""]
    ) -> protocols.Memory:
        return self.inner.commit(params.draft, memory, length)


def choose_mask(
    rate: float, *, start: int, limit: int, gamma: int, size: int, tries: int = 200
) -> np.ndarray:
    """A mask `[size]` bool whose rounds accept `rate` of what is proposed.

    Each draft is right with one probability, whatever came before, so that accepted
    lengths are as spread as those of a real drafter; the best of many draws is taken.

    Args:
      start, limit: lengths of the text before the first round and after the last.

    Raises:
      ValueError: a rate outside (0, 1).
    """
    if not 0 < rate < 1:
        raise ValueError(f"a forced acceptance of {rate} is not between 0 and 1")
    probability = conditional(rate, gamma)
    best, best_gap = None, np.inf
    for seed in range(tries):
        mask = np.random.default_rng(seed).random(size) < probability
        proposed, accepted = simulate(mask, start=start, limit=limit, gamma=gamma)
        gap = abs(accepted / max(proposed, 1) - rate)
        if gap < best_gap:
            best, best_gap = mask, gap
    return best


def conditional(rate: float, gamma: int) -> float:
    """The `p` with `p + p**2 + .. + p**gamma = rate * gamma`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        reached = sum(middle**i for i in range(1, gamma + 1)) / gamma
        low, high = (middle, high) if reached < rate else (low, middle)
    return low


def simulate(
    mask: np.ndarray, *, start: int, limit: int, gamma: int
) -> tuple[int, int]:
    """Drafts proposed and accepted by the rounds of a generation."""
    length, proposed, accepted = start, 0, 0
    while length < limit:
        drafted = min(gamma, limit - length - 1)
        window = mask[length : length + drafted]
        kept = drafted if window.all() else int(np.argmin(window))
        proposed, accepted = proposed + drafted, accepted + kept
        length += kept + 1
    return proposed, accepted
