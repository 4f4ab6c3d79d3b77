"""Costs of rounds: the times that a policy weighs drafts against."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundCosts:
    """Seconds of rounds by drafts, of one target, drafter, machine and number of slots.

    Attributes:
      round_s: seconds of a round in which every slot verifies 0, 1, 2 .. drafts (nodes,
        of trees), drafting included. A time below an earlier one is noise, and
        `rising_s` replaces it by the earlier one.
      catch_up_s: seconds that each token the drafter sat out adds to its next proposal.

    Raises:
      ValueError: fewer than two times, or a time that is not finite and above 0.
    """

    round_s: tuple[float, ...]
    catch_up_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.round_s) < 2:
            raise ValueError(
                f"round_s={self.round_s}: give the times of rounds with 0, 1, 2 .. "
                "drafts"
            )
        if not all(0 < seconds < math.inf for seconds in self.round_s):
            raise ValueError(f"round_s={self.round_s} must be finite and above 0")
        if not 0 <= self.catch_up_s < math.inf:
            raise ValueError(f"catch_up_s={self.catch_up_s} must be finite and not < 0")

    @property
    def gamma_max(self) -> int:
        """The most drafts that have a time."""
        return len(self.round_s) - 1

    def upto(self, gamma_max: int) -> "RoundCosts":
        """Returns the costs of at most so many drafts.

        Raises:
          ValueError: fewer have a time.
        """
        if gamma_max > self.gamma_max:
            raise ValueError(
                f"round_s has times of 0 .. {self.gamma_max} drafts, and up to "
                f"{gamma_max} are drafted: give as many times"
            )
        return dataclasses.replace(self, round_s=self.round_s[: gamma_max + 1])

    def rising_s(self) -> np.ndarray:
        """Returns `round_s` without falls, `[gamma_max + 1]` float64."""
        return np.maximum.accumulate(np.asarray(self.round_s, np.float64))


def highest(costs: Sequence[RoundCosts]) -> RoundCosts:
    """Returns the longest times of several costs, for each number of drafts."""
    times = zip(*(one.round_s for one in costs), strict=True)
    return RoundCosts(
        round_s=tuple(map(max, times)),
        catch_up_s=max(one.catch_up_s for one in costs),
    )
