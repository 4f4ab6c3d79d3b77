"""Mismatches: verified positions at which decoding chooses another token.

A run only counts them. `find` runs a prompt again with a recorder, and replays its
committed text through decoding: one line a mismatch, which `experiments/parity.py`
takes up by `read`.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.lib import exact_cells, files, runs
from experiments.lib.microscope import texts
from spec_jax import loading
from spec_jax.debug import evidence, recorder
from spec_jax.engine import checks, round as round_lib
from spec_jax.model import fingerprint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A line of `find`, or of `exactness.py`: the text, and how it was run."""

    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]  # generated before the window
    start: int  # position of the window's first token
    starts: tuple[int, ...]  # of all windows up to this one
    window: tuple[int, ...]  # the pending token, then the drafted ones
    window_rows: int  # the height of the array that each window came in
    position: int  # of the row that differs
    verify_argmax: int  # what verification chose there
    decode_argmax: int  # what decoding chose there
    prefill: str  # of `exact_cells.PREFILLS`
    verify_path: str
    impl: str
    dtype: str
    slab: int
    page_size: int
    weights_sha256: str

    @property
    def text(self) -> texts.Text:
        """The tokens before the window, and the window."""
        return texts.Text(
            prompt_len=len(self.prompt_ids),
            prefix=(*self.prompt_ids, *self.tokens)[: self.start],
            window=self.window,
        )


def read(spec: str) -> Mismatch:
    """Reads `FILE[:LINE]`, lines counted from 1; the first line without a number.

    Raises:
      ValueError: no such file or line, or a line that is no mismatch.
    """
    path, number = _split_line(spec)
    rows = files.read_rows(path)
    if number not in rows:
        raise ValueError(
            f"{path}: there is no row on line {number}, the last is on line "
            f"{max(rows, default=0)}"
        )
    row, where = rows[number], f"{path}, line {number}"
    if row.get("kind") != "mismatch":
        raise ValueError(
            f"{where}: a line of kind {row.get('kind')!r}, not 'mismatch'; "
            "history.py writes them with --dump-verify-mismatches, and exactness.py "
            "with --out"
        )
    made = files.checked(row, Mismatch, where)
    if row["prefill"] not in exact_cells.PREFILLS:
        raise ValueError(
            f"{where}: prefill={row['prefill']!r} is not one of "
            f"{', '.join(exact_cells.PREFILLS)}"
        )
    _check_windows(row, where)
    return made


def _split_line(spec: str) -> tuple[pathlib.Path, int]:
    path, colon, number = spec.rpartition(":")
    is_line = colon and number.isascii() and number.isdigit()
    if is_line and not pathlib.Path(spec).is_file():
        return pathlib.Path(path), int(number)
    return pathlib.Path(spec), 1


def _check_windows(row: Mapping[str, Any], where: str) -> None:
    """Raises `ValueError` unless windows go on from the prompt's last token."""
    starts, start, window = row["starts"], row["start"], row["window"]
    first, known = len(row["prompt_ids"]) - 1, len(row["prompt_ids"] + row["tokens"])
    ends = [starts[0], starts[-1]] if starts else []
    steps = [len(window), *(b - a for a, b in itertools.pairwise(starts))]
    if (
        ends != [first, start]
        or start not in (first, known)
        or not 0 < min(steps) <= max(steps) <= row["window_rows"]
        or not start <= row["position"] < start + len(window)
    ):
        raise ValueError(
            f"{where}: windows that begin at {starts}, and the row of position "
            f"{row['position']}, are not those of a text of {known} tokens: write the "
            "line again"
        )


def find(
    lm: loading.LanguageModel,
    settings: runs.Settings,
    prompt: list[int],
    *,
    name: str,
) -> list[dict[str, Any]]:
    """Returns the mismatches of one prompt, as JSON rows.

    Args:
      settings: with the verifier that is compared.
      name: of the prompt.

    Returns:
      Rows of `kind` "mismatch", see `evidence.window_at`; `verify_path`, which
      `Mismatch` has besides, is for the caller to say.
    """
    scheduler = runs.make_scheduler(lm, settings)
    speculator, window = scheduler.speculator, lm.gamma_max + 1
    watched = recorder.Recorder(target=speculator.target, window=window)
    state = watched.attach(scheduler.begin(runs.make_request(lm, settings, prompt)))
    state = round_lib.generate(
        speculator.replace(target=watched),
        state,
        max_rounds=jnp.int32(settings.gen_tokens),
    )
    cache, slots = state.cache.cache, state.slots
    checks.check_refused([cache, state.memory])
    checks.check_pages(slots.status, slots.length, cache)
    seen = evidence.of_slot(state, num_prompt=len(prompt), slot=0)
    decoded = runs.decode_choices(lm, settings, prompt, seen.tokens)
    by_rows = settings.prefill_by_rows
    if by_rows is None:
        by_rows = lm.target.prefills_by_rows
    description = {
        "id": name,
        "prompt_ids": prompt,
        "impl": lm.target.impl,
        "dtype": lm.target.config.dtype,
        "slab": lm.target.slab,
        "page_size": settings.page_size,
        "prefill": "rows" if by_rows else "batched",
        "weights_sha256": fingerprint.of_params(lm.params),
    }
    return [
        evidence.window_at(seen, number, decode_argmax=decoded[number]) | description
        for number in np.flatnonzero(seen.decisions.highest != decoded).tolist()
    ]
