"""How often drafts are kept: live rounds, one at a time -> shares by position."""

import dataclasses
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from experiments.support import model_pair, paired_runs
from spec_jax import session
from spec_jax.analysis import metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """One round.

    Attributes:
      asked: tokens that the drafter was asked for: gamma, or less near the end.
      drafted: tokens that it proposed; lookups often find fewer, or none.
      accepted: those that were kept.
    """

    asked: int
    drafted: int
    accepted: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What windows show of a drafter, by the position in the draft.

    Attributes:
      kept: chance that a draft is there and kept, given that those before it were: a
        window that ended before it counts as if it had been rejected. None where no
        window reached the position.
      drafted: share of the windows that had a draft at the position.
      windows: rounds that were looked at.
      repetition: of the texts that they wrote, see `metrics.repetition`.
    """

    kept: tuple[float | None, ...]
    drafted: tuple[float, ...]
    windows: int
    repetition: float | None = None

    @property
    def known(self) -> tuple[float, ...]:
        """`kept` up to the first position that no window reached."""
        end = self.kept.index(None) if None in self.kept else len(self.kept)
        return self.kept[:end]


def record(
    pair: model_pair.ModelPair, settings: paired_runs.Settings, prompt: list[int]
) -> tuple[list[Window], metrics.TextCounts]:
    """Runs one prompt with `settings.gamma`: its rounds, and the text's counts.

    Raises:
      ValueError: a prompt that cannot be used.
      MemoryError: out of pages.
    """
    runs = paired_runs.Rounds(pair, settings, prompt)
    state, one, windows = runs.begin(), jnp.int32(1), []
    proposed = accepted = 0
    while not bool(state.done):
        left = int(state.limit) - int(state.length)
        state = runs.generate(state, max_rounds=one)
        session.check_state(state)
        now = int(state.num_proposed), int(state.num_accepted)
        windows.append(
            Window(
                asked=min(settings.gamma, left - 1),
                drafted=now[0] - proposed,
                accepted=now[1] - accepted,
            )
        )
        proposed, accepted = now
    text = np.asarray(state.tokens)[len(prompt) : int(state.length)].tolist()
    counts = metrics.TextCounts(
        tokens=len(text),
        repetition=metrics.repetition(text),
        proposed=proposed,
        accepted=accepted,
    )
    return windows, counts


def measure(
    windows: Iterable[Window], *, gamma_max: int, repetition: float | None = None
) -> Acceptance:
    """The shares. Windows near the end of a text count where they asked for a draft.

    After a position at which nothing was ever kept, the chance is 0: what it is
    multiplied with is.

    Raises:
      ValueError: no window that asked for `gamma_max` drafts.
    """
    table = np.array([(w.asked, w.drafted, w.accepted) for w in windows]).reshape(-1, 3)
    asked, drafted, accepted = table.T
    if not (asked == gamma_max).any():
        raise ValueError(
            f"none of {len(table)} rounds had room for {gamma_max} drafts: generate "
            "more tokens"
        )
    kept: list[float | None] = []
    for i in range(gamma_max):
        reached = (accepted >= i) & (asked > i)
        if kept and kept[-1] == 0:
            kept.append(0.0)
        elif reached.any():
            kept.append(float((accepted[reached] > i).mean()))
        else:
            kept.append(None)
    shares = [float((drafted[asked > i] > i).mean()) for i in range(gamma_max)]
    return Acceptance(
        kept=tuple(kept),
        drafted=tuple(shares),
        windows=len(table),
        repetition=repetition,
    )
