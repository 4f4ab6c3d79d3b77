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


def expected_seconds(curve: theory.CostCurve, num_forwards: Sequence[int]) -> float:
    """Returns the seconds of rounds of which `num_forwards[n]` had `n` active rows.

    Raises:
      ValueError: a window that is higher than the table of costs.
    """
    windows = np.trim_zeros(np.asarray(num_forwards)[1:], "b")
    if not windows.size:
        return 0.0
    return float(windows @ curve.round_s(windows.size - 1))


def read(path: pathlib.Path, drafters: Sequence[str]) -> dict[str, theory.CostCurve]:
    """Reads the curve of each drafter."""
    try:
        text = files.read(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    try:
        try:
            table = json.loads(text)
        except json.JSONDecodeError:
            table = _of_steps([json.loads(line) for line in text.splitlines()])
        return {name: _curve(table, name) for name in drafters}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{path}: no table of costs ({reason}); give the rows of latency.py --out, "
            'or {"plain_s": ..., "verify_s": {"1": ..., "2": ...}, "draft_s": ...}'
        ) from None


def _curve(table: Mapping[str, Any], drafter: str) -> theory.CostCurve:
    """Returns the curve of a drafter; raises whatever is the matter."""
    draft_s = table["draft_s"]
    if isinstance(draft_s, Mapping):
        kind = registry.kind_of(drafter) if registry.is_folder(drafter) else drafter
        draft_s = draft_s.get(kind, 0.0)
    windows = sorted((int(rows), s) for rows, s in table["verify_s"].items())
    rows, verify_s = zip(*windows, strict=True)
    return theory.CostCurve(
        plain_s=table["plain_s"],
        rows=rows,
        verify_s=verify_s,
        draft_s=draft_s,
        overhead_s=table.get("overhead_s", 0.0),
    )


def _of_steps(rows: Sequence[Any]) -> dict[str, Any]:
    """Makes a table of the rows of `latency.py`."""
    steps = [row for row in rows if row["kind"] == "step"]
    seconds = {row["step"]: row["ms"] / 1e3 for row in steps}
    if len(seconds) < len(steps):
        raise ValueError("the rows of several runs")
    windows = {
        row["num_active"]: seconds[row["step"]]
        for row in steps
        if row["step"] in ("1 active row", f"{row['num_active']} active rows")
    }
    return {
        "plain_s": seconds["plain step"],
        "verify_s": windows,
        "draft_s": dict.fromkeys(WITH_DRAFT_STEPS, seconds["draft step"]),
    }
