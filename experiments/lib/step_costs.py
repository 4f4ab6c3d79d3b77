"""What steps cost, read from a file: the times that turn replayed counts into speed.

Either the JSON lines that `latency.py --out` writes, or one JSON object:

    {"plain_s": 0.00117,                       a step of autoregressive decoding
     "verify_s": {"1": 0.00107, "5": 0.00191}, a forward by its active rows
     "draft_s": {"draft-model": 0.000126},     a drafted token, by drafter; 0 if not
                                               named; or one number for all
     "overhead_s": 0.0}                        of a round; may be left out

All in seconds. `theory.CostCurve` says what each means. They may be of another machine
than the traces, or of another pair: the speed is then what such acceptance would bring
there. A draft that its confidence ended is charged for the tokens that it has.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.lib import files
from spec_jax.drafters import registry
from spec_jax.gamma import theory


WITH_DRAFT_STEPS = ("draft-model", "hybrid", *registry.NEED_TARGET)
"""Drafters that pay for the draft steps that `latency.py` measures. The hybrid is
charged one for every token, also for those that it looked up; a block drafter an equal
share of its pass, which short drafts do not make shorter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """The contents of a file of costs."""

    plain_s: float
    verify_s: Mapping[int, float]
    # By name of the drafter, 0 of those not named; or one number for all
    draft_s: Mapping[str, float] | float
    overhead_s: float = 0.0

    def curve(self, drafter: str) -> theory.CostCurve:
        """The curve of a drafter.

        Raises:
          ValueError: times that make no curve.
        """
        rows, draft_s = sorted(self.verify_s), self.draft_s
        if isinstance(draft_s, Mapping):
            if registry.is_folder(drafter):
                drafter = registry.kind_of(drafter)
            draft_s = draft_s.get(drafter, 0.0)
        return theory.CostCurve(
            plain_s=self.plain_s,
            rows=tuple(rows),
            verify_s=tuple(self.verify_s[n] for n in rows),
            draft_s=draft_s,
            overhead_s=self.overhead_s,
        )


def expected_seconds(curve: theory.CostCurve, num_forwards: Sequence[int]) -> float:
    """Seconds of rounds with so many active rows each: `num_forwards[n]` had `n`.

    Raises:
      ValueError: a window that is higher than the table of costs.
    """
    windows = np.trim_zeros(np.asarray(num_forwards)[1:], "b")
    if not windows.size:
        return 0.0
    return float(windows @ curve.round_s(windows.size - 1))


def read(path: pathlib.Path, drafters: Sequence[str]) -> dict[str, theory.CostCurve]:
    """The curve of each drafter."""
    try:
        text = files.read(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    try:
        costs = _parse(text)
        return {name: costs.curve(name) for name in drafters}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{path}: no table of costs ({reason}); give the rows of latency.py --out, "
            'or {"plain_s": ..., "verify_s": {"1": ..., "2": ...}, "draft_s": ...}'
        ) from None


def _parse(text: str) -> Costs:
    """Of either kind of file; raises whatever is the matter."""
    try:
        table = json.loads(text)
    except json.JSONDecodeError:
        return _of_steps([json.loads(line) for line in text.splitlines()])
    return Costs(
        draft_s=table["draft_s"],
        plain_s=table["plain_s"],
        verify_s={int(rows): seconds for rows, seconds in table["verify_s"].items()},
        overhead_s=table.get("overhead_s", 0.0),
    )


def _of_steps(rows: Sequence[Any]) -> Costs:
    """Of the rows of `latency.py`."""
    steps = [row for row in rows if row["kind"] == "step"]
    seconds = {row["step"]: row["ms"] / 1e3 for row in steps}
    if len(seconds) < len(steps):
        raise ValueError("the rows of several runs")
    plain_s, draft_s = seconds["plain step"], seconds["draft step"]
    windows = {
        "1 active row" if n == 1 else f"{n} active rows": n
        for n in {row["num_active"] for row in steps} - {None}
    }
    return Costs(
        plain_s=plain_s,
        verify_s={n: seconds[name] for name, n in windows.items() if name in seconds},
        draft_s=dict.fromkeys(WITH_DRAFT_STEPS, draft_s),
    )
