"""Mismatches: verified positions at which decoding chooses another token.

A run only counts them. `find` runs a prompt again, round by round, with the logits of
every window kept, and replays its committed text through decoding with a recorder: one
line a mismatch, which `experiments/parity.py` takes up by `read`.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import exact_cells, files, runs, superseded
from spec_jax import compilation, loading
from spec_jax.debug import recorder
from spec_jax.engine import (
    baseline,
    checks,
    round as round_lib,
    scheduler as scheduler_lib,
)
from spec_jax.model import fingerprint


TOP = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """Tokens before a window, and the window."""

    # Of the text's first tokens, that are prefilled; the others were decoded. The last
    # one of the prompt is never prefilled.
    prompt_len: int
    prefix: tuple[int, ...]  # the tokens of positions `[0, start)`
    window: tuple[int, ...]  # the pending token, then the drafted ones


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
    def text(self) -> Text:
        """The tokens before the window, and the window."""
        return Text(
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
    verify_path: str,
    scheduler: scheduler_lib.Scheduler | None = None,
) -> list[dict[str, Any]]:
    """Returns the mismatches of one prompt, as JSON rows.

    Args:
      name: of the prompt.
      verify_path: of `superseded.PATHS`.
      scheduler: of one slot; None: what `settings` say.

    Returns:
      Rows of `kind` "mismatch". `position` is that of the row whose argmax differs:
      it decides the token after it. `window` is the pending token and the drafts,
      `window_rows` the height of the array they came in, `start` the position of the
      first, `tokens` what was generated before it, and `starts` the positions of all
      windows up to this one: with verification that is not by rows, the K/V before it
      is theirs. `margin_ulp` is how far the verify argmax lies above decoding's, in
      the logits of verification; `decode_margin_ulp` the other way round in those of
      decoding, None where they are not both among its highest. Both in units of the
      last place of the models' dtype, at the higher logit.
    """
    scheduler = scheduler or runs.make_scheduler(lm, settings)
    request = runs.make_request(lm, settings, prompt)
    path = superseded.target(verify_path, lm.target)
    text, seen = _windows(scheduler, path, request)
    decoded = _decoded(lm, settings, text, len(prompt))
    by_rows = settings.prefill_by_rows
    if by_rows is None:
        by_rows = lm.target.prefills_by_rows
    description = {
        "verify_path": verify_path,
        "impl": lm.target.impl,
        "dtype": lm.target.config.dtype,
        "slab": lm.target.slab,
        "page_size": settings.page_size,
        "prefill": "rows" if by_rows else "batched",
        "weights_sha256": fingerprint.of_params(lm.params),
    }
    starts = sorted({entry["start"] for entry in seen})
    rows = []
    for entry in seen:
        start, row, window = entry["start"], entry["row"], entry["window"]
        position, following = start + row, window[row + 1 : row + 2]
        if entry["chosen"] == int(decoded.chosen[0, position]):
            continue
        rows.append(
            {
                "kind": "mismatch",
                "id": name,
                "prompt_ids": prompt,
                "tokens": text[len(prompt) : start],
                "start": start,
                "starts": [other for other in starts if other <= start],
                "window": window,
                "window_rows": entry["window_rows"],
                "position": position,
                # The draft that the row decides on; the last row has none.
                "drafted_token": following[0] if following else None,
                **_compare(lm, entry, decoded, position),
                **description,
            }
        )
    return rows


def _windows(
    scheduler: scheduler_lib.Scheduler, path: Any, request: scheduler_lib.Request
) -> tuple[list[int], list[dict[str, Any]]]:
    """Returns the text of a run, and for each of its committed rows what it saw."""
    speculator, state = scheduler.speculator, scheduler.begin(request)
    seen = []
    while bool(state.slots.running[0]):
        window = _next_window(speculator, state)
        logits, chosen = _verify(path, speculator.params[0], state.cache, window)
        window, logits, chosen = jax.device_get((window, logits, chosen))
        state = round_lib.generate(speculator, state, max_rounds=jnp.int32(1))
        start = int(window.start[0])
        seen += [
            {
                "start": start,
                "row": row,
                "window": window.tokens[0, : window.num_active[0]].tolist(),
                "window_rows": window.tokens.shape[1],
                "logits": logits[row],
                "chosen": int(chosen[row]),
            }
            for row in range(int(state.slots.length[0]) - 1 - start)
        ]
    slots = jax.device_get(state.slots)
    checks.check_refused([state.cache, state.memory])
    checks.check_pages(slots.status, slots.length, state.cache)
    return slots.tokens[0, : slots.length[0]].tolist(), seen


@compilation.jit
def _next_window(speculator, state):
    """Returns the window of the next round; nothing of the round is kept."""
    return round_lib.run_round(speculator, state)[1].window


@functools.partial(compilation.jit, static_argnames=("path",))
def _verify(path, params, cache, window):
    """Returns the logits and the choices of a window's rows; nothing is kept."""
    _, verified = path.verify(params, cache, window)
    return verified.logits, path.choose(verified.logits, verified.num_active)


def _decoded(lm, settings, text: list[int], num_prompt: int) -> recorder.Recording:
    """Returns what decoding sees at each position of a given text."""
    state = runs.begin_plain(lm, settings, text[:num_prompt])
    watched = recorder.Recorder(target=lm.target, window=1, top=TOP)
    tokens = np.array(state.tokens)
    tokens[: len(text)] = text
    recording, _ = baseline.replay(
        watched,
        lm.params,
        watched.attach(state).cache,
        tokens=jnp.asarray(tokens),
        start=jnp.int32(num_prompt),
        stop=jnp.int32(len(text)),
    )
    return jax.device_get(recording.replace(cache=None))


def _compare(lm, entry, decoded, position) -> dict[str, Any]:
    """Returns both choices, both highest logits with their texts, and the margins."""
    dtype, decode = lm.target.config.dtype, lm.tokenizer.decode
    logits, ours = entry["logits"], entry["chosen"]
    theirs = int(decoded.chosen[0, position])
    ids, values = decoded.top_ids[0, position], decoded.top_logits[0, position]
    by_token = dict(zip(ids.tolist(), values.tolist(), strict=True))
    by_token.pop(recorder.NONE, None)  # A vocabulary of fewer than `TOP` tokens.
    highest = np.argsort(-logits, kind="stable")[:TOP].tolist()
    margin = None
    if ours in by_token:
        margin = (by_token[theirs] - by_token[ours]) / ulp(by_token[theirs], dtype)
    return {
        "verify_argmax": ours,
        "decode_argmax": theirs,
        "verify_top5": [[token, float(logits[token])] for token in highest],
        "decode_top5": [list(pair) for pair in by_token.items()],
        "verify_top5_texts": [decode([token]) for token in highest],
        "decode_top5_texts": [decode([token]) for token in by_token],
        "margin_ulp": float(logits[ours] - logits[theirs])
        / ulp(float(logits[ours]), dtype),
        "decode_margin_ulp": margin,
    }


def ulp(value: float, dtype: str) -> float:
    """Returns the distance of neighbouring numbers of `dtype` at a finite `value`."""
    return float(np.spacing(np.abs(np.float64(value)).astype(np.dtype(dtype))))
