"""Profiles for schedules: times that `profile_steps.py` measured, as a run reads them.

A profile is for one number of slots, with rows spread over them as evenly as possible,
after contexts of one length. It has the time that drafting adds to a round separately.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.lib import files
from spec_jax.gamma import schedule


KIND = "step_profile"
CALIBRATION = "confidences"
"""The kind of the rows that `profile_steps.py --calibrate` writes."""

SAME = ("target", "weights", "draft", "dtype", "impl", "native_isa", "drafter")
SAME += ("devices",)
"""Fields in which a profile must equal the run: other times would mean nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """Times and scalings of confidences from a file, for one run."""

    step_s: np.ndarray  # [rows + 1], seconds of a step by its rows
    draft_s: float  # seconds that drafting adds to a round of all slots
    # [gamma], of confidences; None: the file has no calibration
    temperatures: np.ndarray | None = None
    shifts: np.ndarray | None = None

    def round_s(self, num_slots: int, gamma: int) -> np.ndarray:
        """Returns seconds of a round in which each slot verifies 0 to `gamma` drafts;
        in the first no slot drafts."""
        drafts = np.arange(gamma + 1)
        return self.step_s[num_slots * (drafts + 1)] + self.draft_s * (drafts > 0)


def read(
    path: pathlib.Path,
    described: Mapping[str, Any],
    *,
    num_slots: int,
    gamma: int,
    context: int,
    temperature: float,
) -> Profile:
    """Returns the profile of `num_slots` slots with the fewest drafts that suffice and,
    among equals, with the nearest context.

    It includes the scaling of confidences, where the file has rows of these, too.

    Args:
      path: JSON lines of `profile_steps.py`.
      described: values of the run by the keys `SAME`, and `drafter_sha256`, which
        calibrations alone have. A profile must lack a key that it lacks.

    Raises:
      ValueError: no such profile, or one that cannot be used.
    """
    rows = files.read_rows(path, hint="; profile_steps.py writes one")
    wanted = {key: described.get(key) for key in SAME}
    of_run = [row for row in rows if all(row.get(k) == v for k, v in wanted.items())]
    profiles = [row for row in of_run if row.get("kind") == KIND]
    fits = [r for r in profiles if r["num_slots"] == num_slots and r["gamma"] >= gamma]
    if not fits:
        there = [{key: row.get(key) for key in (*SAME, "num_slots", "gamma")}
                 for row in rows if row.get("kind") == KIND]  # fmt: skip
        raise ValueError(
            f"{path}: no profile of {wanted} with {num_slots} slots and gamma {gamma} "
            f"or more, but of {there or 'nothing'}: measure it by profile_steps.py "
            f"--batch {num_slots} --gamma {gamma}"
        )
    # Drafting more tokens than are asked for takes longer.
    row = min(fits, key=lambda row: (row["gamma"], abs(row["context"] - context)))
    try:
        step_s = schedule.times([row["step_s"][0], *row["step_s"]])
    except ValueError as error:
        raise ValueError(f"{path}: no times of steps ({error})") from None
    found = Profile(step_s=step_s, draft_s=float(row["draft_s"]))
    fitted = [row for row in of_run if row.get("kind") == CALIBRATION]
    if not fitted:
        return found
    ours = described.get("drafter_sha256")
    if any(row.get("drafter_sha256", ours) != ours for row in fitted):
        raise ValueError(
            f"{path}: confidences are calibrated of a {described.get('drafter')} with "
            "other weights: profile_steps.py --calibrate fits them"
        )
    for row in fitted:
        is_same = np.float32(row["temperature"]) == np.float32(temperature)
        if is_same and len(row["temperatures"]) >= gamma:
            names = ("temperatures", "shifts")
            scaling = {name: np.float32(row[name][:gamma]) for name in names}
            return dataclasses.replace(found, **scaling)
    there = [(row["temperature"], len(row["temperatures"])) for row in fitted]
    raise ValueError(
        f"{path}: confidences are calibrated at (temperature, drafts) {there}, and not "
        f"at temperature {temperature:g} of {gamma} drafts: profile_steps.py "
        f"--calibrate {temperature:g} fits them"
    )
