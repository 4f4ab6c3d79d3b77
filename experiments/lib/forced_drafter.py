"""A drafter whose acceptance is *forced*: it knows the text, and the real draft runs.

Random weights accept nothing. So that rounds can be timed at the acceptance of trained
models, every proposal of the real drafter is paid for and then overwritten: with the
target's own next token where a mask says so, and with a wrong one elsewhere. What such
a run shows is the cost of rounds at an acceptance, never an acceptance.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from spec_jax import loading, pytree
from spec_jax.drafters import draft_slots, each, oracle
from spec_jax.engine import protocols


class ForcedParams(pytree.Node):
    """What the forced drafter takes from a request, as its `draft_params`."""

    draft: Any  # parameters of the real drafter
    trace: jax.Array  # [size] int32, the text that autoregressive decoding writes
    kept: jax.Array  # [size] bool, where a draft is to be right


class ForcedMemory(pytree.Node):
    """The real drafter's memory, and what is known of each slot's request."""

    inner: protocols.Memory
    trace: jax.Array  # [B, max_len] int32
    kept: jax.Array  # [B, max_len] bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForcedDrafter:
    """Runs `inner`, and proposes what `ForcedParams` say; its parameters are `inner`'s.

    The K/V that the real draft keeps is that of its own tokens, not of the forced
    ones: lengths and costs are those of a real run, values are not.
    """

    inner: protocols.Drafter
    vocab_size: int

    @property
    def gamma_max(self) -> int:
        """The most tokens of a proposal."""
        return self.inner.gamma_max

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's features that the real drafter reads."""
        return protocols.taps_of(self.inner)

    @property
    def feature_size(self) -> int:
        """The width of a feature. No attribute where the real drafter takes any."""
        return self.inner.feature_size  # type: ignore[attr-defined]

    def for_rule(self, rule: str) -> "ForcedDrafter":
        """Returns the drafter whose real one draws as that rule of acceptance has it.

        Raises:
          ValueError: a rule by which drafts that nobody drew cannot be judged.
        """
        if rule != "coupled":
            raise ValueError(
                f"{rule=} asks what drafts were drawn from, and forced ones were not: "
                "take the rule 'coupled'"
            )
        return self._of_inner("for_rule", rule)

    def for_schedule(self) -> "ForcedDrafter":
        """Returns the drafter that also says how sure the real one is of its drafts."""
        return self._of_inner("for_schedule")

    def _of_inner(self, name: str, *args: Any) -> "ForcedDrafter":
        """Returns the drafter with that method of the real one called, if it is one."""
        make = getattr(self.inner, name, None)
        return self if make is None else dataclasses.replace(self, inner=make(*args))

    def for_slots(self, num_slots: int) -> "SlotForced":
        """Returns the drafter for `num_slots` sequences."""
        return SlotForced(drafter=self, num_slots=num_slots)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotForced(draft_slots.OfSlots):
    """A `ForcedDrafter` for several sequences."""

    drafter: ForcedDrafter

    @property
    def inner(self) -> protocols.SlotDrafter:
        """The real drafter."""
        return each.lift(self.drafter.inner, self.num_slots)

    def init(
        self, *, capacity: int, page_size: int, num_pages: int | None = None
    ) -> ForcedMemory:
        """Allocates the real drafter's memory, and empty traces."""
        shape = (self.num_slots, -(-capacity // page_size) * page_size + 1)
        return ForcedMemory(
            inner=self.inner.init(
                capacity=capacity, page_size=page_size, num_pages=num_pages
            ),
            trace=jnp.zeros(shape, jnp.int32),
            kept=jnp.zeros(shape, bool),
        )

    def prefill(
        self,
        params: ForcedParams,
        memory: ForcedMemory,
        prompt: list[int],
        *,
        slot: int,
        **features: Array,
    ) -> ForcedMemory:
        """Takes in the prompt, and what is known of the request. Donates `memory`."""
        size = params.trace.shape[0]
        return memory.replace(
            inner=self.inner.prefill(
                params.draft, memory.inner, prompt, slot=slot, **features
            ),
            trace=memory.trace.at[slot, :size].set(params.trace),
            kept=memory.kept.at[slot, :size].set(params.kept),
        )

    def propose(
        self,
        params: protocols.Params,
        memory: ForcedMemory,
        *,
        tokens: Int[Array, "B max_len"],
        length: Int[Array, " B"],
        gamma: Int[Array, " B"],
        sampling: protocols.Sampling,
    ) -> tuple[ForcedMemory, protocols.Proposal]:
        """As many tokens as `inner` proposes, right where `kept` is true."""
        inner, proposal = self.inner.propose(
            params,
            memory.inner,
            tokens=tokens,
            length=length,
            gamma=gamma,
            sampling=sampling,
        )

        # What was drafted is not used, but its K/V stay in the memory: all of the draft
        # is computed.
        def forced(trace, kept, length):
            positions = length + jnp.arange(self.gamma_max, dtype=jnp.int32)
            return oracle.drafts_at(trace, kept, positions, vocab_size=self.vocab_size)

        forced_tokens = jax.vmap(forced)(memory.trace, memory.kept, length)
        return memory.replace(inner=inner), proposal.replace(tokens=forced_tokens)

    def commit(
        self,
        params: protocols.Params,
        memory: ForcedMemory,
        length: Int[Array, " B"],
        *,
        asked: Bool[Array, " B"],
        **features: Array,
    ) -> ForcedMemory:
        """Commits to the real drafter's memory."""
        inner = self.inner.commit(params, memory.inner, length, asked=asked, **features)
        return memory.replace(inner=inner)


def adversarial(lm: loading.LanguageModel) -> loading.LanguageModel:
    """Returns the model with its drafter at work, and each of its drafts wrong.

    Requests bring `never_kept` of their texts.
    """
    drafter = ForcedDrafter(inner=lm.drafter, vocab_size=lm.target.config.vocab_size)
    return dataclasses.replace(lm, drafter=drafter)


def never_kept(
    draft: Any, text: Sequence[int], *, size: int | None = None
) -> ForcedParams:
    """What a request brings whose drafts are to be wrong, each of them.

    Args:
      draft: parameters of the real drafter.
      text: the prompt, and what autoregressive decoding writes behind it.
      size: of the arrays, at least as long as the text.
    """
    trace = np.zeros(size or len(text), np.int32)
    trace[: len(text)] = text
    return ForcedParams(
        draft=draft, trace=jnp.asarray(trace), kept=jnp.zeros(trace.shape, bool)
    )


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
