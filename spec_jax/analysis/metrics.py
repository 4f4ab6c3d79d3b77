"""Computes the one dictionary of numbers from the counters of speculative runs.

Functions here take whole numbers; models, drafters and where numbers are shown have no
part in them.

Every token comes from a round: the prompt's prefill commits nothing, and a round
commits its accepted draft tokens and one token of the target's own. So the counters
satisfy identities, and `summarise` refuses to report numbers that break them.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any


_GRAM = 4  # tokens in each run that `repetition` counts

Metrics = dict[str, int | float | bool | list[int] | list[float | None] | None]
"""Names and values; every value is plain JSON, and `None` if nothing was measured.

Division by zero (nothing proposed, no tokens) gives `None`, never NaN.
"""


class IdentityError(AssertionError):
    """Counters that contradict each other: a fault of the program, not of its input.

    Attributes:
      identity: the identity that fails, as `identities` spells it.
    """

    def __init__(self, identity: str, numbers: str):
        super().__init__(f"identity `{identity}` fails: {numbers}")
        self.identity = identity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
    """Counts of one speculative run, or of several.

    Attributes:
      tokens: tokens generated after the prompt, cut after the first stop token, after
        the token that completes a stop text, and at the token limit.
      rounds: windows drafted, verified and committed; one target forward each.
      proposed: drafted tokens sent to verification.
      accepted: drafted tokens kept, before the cut.
      cut: tokens that a round committed and that a stop token, a stop text or the
        token limit then cut off.
      accepted_hist: entry `a` counts the rounds that kept `a` drafted tokens,
        before the cut; one entry more than the next two have.
      proposed_at: entry `i` counts the rounds that drafted a token at position `i`
        and kept all before it; `gamma_max` entries, for trees `depth_max`.
      accepted_at: entry `i` counts those of `proposed_at[i]` that kept it too. A
        tree's positions are depths in all three.
      kept_by_rank: entry `i` counts the rounds that kept the `i`-th of their drafts, of
        a tree the `i`-th node; empty if that was not counted.
      nonfinite: those of `tokens` that were chosen from logits that are not finite.
    """

    tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    cut: int = 0
    accepted_hist: tuple[int, ...] = (0,)
    proposed_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    kept_by_rank: tuple[int, ...] = ()
    nonfinite: int = 0

    @property
    def target_steps(self) -> int:
        """All forwards of the target, prefill not counted."""
        return self.rounds

    def __add__(self, other: "Counters") -> "Counters":
        """Adds both; positions that one of them lacks count as zero."""
        both = {
            name: _add(own, getattr(other, name)) for name, own in vars(self).items()
        }
        return Counters(**both)


def of_slot(slot: Any, *, num_tokens: int) -> Counters:
    """Returns the counters of ONE slot's state (`engine.state.Slots`).

    Args:
      num_tokens: the generated ones, as in `Counters.tokens`.
    """

    def counts(name: str) -> tuple[int, ...]:
        return tuple(int(count) for count in getattr(slot, name))

    return Counters(
        tokens=num_tokens,
        rounds=int(slot.num_rounds),
        proposed=int(slot.num_proposed),
        accepted=int(slot.num_accepted),
        cut=int(slot.num_cut),
        accepted_hist=counts("accepted_hist"),
        proposed_at=counts("proposed_at"),
        accepted_at=counts("accepted_at"),
        kept_by_rank=counts("kept_by_rank"),
        nonfinite=int(slot.num_nonfinite),
    )


def repetition(tokens: Sequence[int]) -> float:
    """Measures how far a text repeats itself: the share of repeated 4-grams.

    A text has `len(tokens) - 3` runs of four consecutive tokens, overlapping ones
    included; the share is that of runs that equal an earlier one: one minus distinct
    runs over runs. Texts of fewer than 5 tokens, which have no second run, give 0.0.

    Args:
      tokens: generated tokens of one text, without its prompt.
    """
    runs = list(zip(*(tokens[i:] for i in range(_GRAM)), strict=False))
    return (len(runs) - len(set(runs))) / len(runs) if runs else 0.0


def total(counters: Iterable[Counters]) -> Counters:
    """Sums the counters of prompts; without any, all counters are zero."""
    return sum(counters, start=Counters())


def identities(counters: Counters) -> None:
    """Checks that the counters agree with each other.

    Raises:
      IdentityError: naming the first identity that fails, with its numbers.
    """
    c = counters
    sizes = [len(c.accepted_hist) - 1, len(c.proposed_at), len(c.accepted_at)]
    require("len(hist) - 1 == len(proposed_at) == len(accepted_at)", sizes)
    scalars = [c.tokens, c.rounds, c.proposed, c.accepted, c.cut, c.nonfinite]
    by_place = *c.accepted_hist, *c.proposed_at, *c.accepted_at, *c.kept_by_rank
    smallest = min(*scalars, *by_place)
    require("0 <= every counter", [0, smallest], ordered=True)

    require(
        "accepted + rounds == tokens + cut", [c.accepted + c.rounds, c.tokens + c.cut]
    )
    require("sum(hist) == rounds", [sum(c.accepted_hist), c.rounds])
    kept = sum(i * n for i, n in enumerate(c.accepted_hist))
    require("sum(i * hist[i]) == accepted", [kept, c.accepted])
    require("sum(accepted_at) == accepted", [sum(c.accepted_at), c.accepted])
    if c.kept_by_rank:
        require("sum(kept_by_rank) == accepted", [sum(c.kept_by_rank), c.accepted])
    reached = sum(c.proposed_at)
    numbers = [c.accepted, reached, c.proposed]
    require("accepted <= sum(proposed_at) <= proposed", numbers, ordered=True)

    require("nonfinite <= tokens", [c.nonfinite, c.tokens], ordered=True)

    # A position is reached only where the one before it was kept.
    reachable = (c.rounds, *c.accepted_at)
    for i, (reached, kept) in enumerate(zip(c.proposed_at, c.accepted_at, strict=True)):
        at = f" at i={i}"
        require("accepted_at[i] <= proposed_at[i]", [kept, reached], at, ordered=True)
        longer = sum(c.accepted_hist[i + 1 :])
        require("accepted_at[i] == sum(hist[i+1:])", [kept, longer], at)
        numbers = [reached, reachable[i]]
        require("proposed_at[i] <= accepted_at[i-1]", numbers, at, ordered=True)


def summarise(counters: Counters) -> Metrics:
    """Returns the numbers of a run, after checking every identity.

    Raises:
      IdentityError: counters that contradict each other.
    """
    identities(counters)
    c = counters
    return {
        "tokens": c.tokens,
        "rounds": c.rounds,
        "target_steps": c.target_steps,
        "verify_steps": c.rounds,
        "proposed": c.proposed,
        "accepted": c.accepted,
        "acceptance_rate": ratio(c.accepted, c.proposed),
        "conditional_acceptance": [
            ratio(kept, reached)
            for kept, reached in zip(c.accepted_at, c.proposed_at, strict=True)
        ],
        "mean_accepted_length": ratio(c.accepted + c.rounds, c.rounds),
        "cut": c.cut,
        "tokens_per_target_step": ratio(c.tokens, c.target_steps),
        "accepted_hist": list(c.accepted_hist),
        "rows_per_round": ratio(c.proposed + c.rounds, c.rounds),
        "kept_by_rank": list(c.kept_by_rank),
        "nonfinite_logits": c.nonfinite,
    }


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Divides; returns `None` where no quotient exists."""
    if numerator is None or not denominator:
        return None
    return numerator / denominator


def require(
    identity: str, numbers: Sequence[int], where: str = "", *, ordered: bool = False
) -> None:
    """Raises `IdentityError` unless all are equal or, if `ordered`, none falls."""
    holds = all(a <= b if ordered else a == b for a, b in itertools.pairwise(numbers))
    if not holds:
        raise IdentityError(identity, " against ".join(map(str, numbers)) + where)


def _add(a: Any, b: Any) -> Any:
    """Adds numbers, or counts by position; the shorter are continued with zeros."""
    if isinstance(a, int):
        return a + b
    return tuple(x + y for x, y in itertools.zip_longest(a, b, fillvalue=0))
