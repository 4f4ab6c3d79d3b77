"""What the microscope is pointed at: a text, a window of it, and two ways to run it.

The text and its window are those of a prompt, or of a line that
`spec_round.py --dump-verify-mismatches` or `exactness.py` wrote, which is read here.
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from experiments.lib import files
from experiments.support import paired_runs
from spec_jax.debug.microscope import record as record_lib
from spec_jax.model import config as config_lib, row_model
from spec_jax.typing import IMPLS


_NEW_KEYS = {
    "start": int,
    "starts": list,
    "window_rows": int,
    "acceptance": str,
    "prefill": str,
}
"""What earlier versions did not write."""

_KEYS = {
    "prompt_ids": list,
    "tokens": list,
    "window": list,
    "position": int,
    "verify_argmax": int,
    "decode_argmax": int,
    "verify_path": str,
    "impl": str,
    "dtype": str,
    "slab": int,
    "page_size": int,
    "weights_sha256": str,
}
"""What a mismatch line must have, and of which type; `_NEW_KEYS` too."""


PREFILLS = ("batched", "rows")
"""How a prompt enters the cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """Tokens before the window, and the window.

    Attributes:
      prompt_len: of the text's first tokens, that are prefilled; the others were
        decoded. The last one of the prompt is never prefilled.
      prefix: the tokens of positions `[0, start)`.
      window: the pending token, then the drafted ones.
    """

    prompt_len: int
    prefix: tuple[int, ...]
    window: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A mismatch line: the text, and how it was run.

    Attributes:
      starts: positions of the pending tokens of all windows up to this one.
      window_rows: the height of the array that each of them came in.
      position: of the row that differs.
      verify_argmax, decode_argmax: what verification and decoding chose there.
      acceptance: what decided tokens, of `paired_runs.ACCEPTANCES`.
      prefill: of `PREFILLS`.
    """

    text: Text
    starts: tuple[int, ...]
    window_rows: int
    position: int
    verify_argmax: int
    decode_argmax: int
    acceptance: str
    prefill: str
    verify_path: str
    impl: str
    dtype: str
    slab: int
    page_size: int
    weights_sha256: str


def read_mismatch(spec: str) -> Mismatch:
    """Reads `FILE[:LINE]`, lines counted from 1; the first mismatch without a line.

    Raises:
      ValueError: no such file or line, or a line that is no mismatch.
    """
    path, number = _split_line(spec)
    try:
        lines = files.read(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: cannot be read ({reason})") from None
    if not 1 <= number <= len(lines):
        raise ValueError(
            f"{path}: there is no line {number}, the file has {len(lines)}"
        )
    where = f"{path}, line {number}"
    try:
        row = json.loads(lines[number - 1])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(row, dict) or row.get("kind") != "mismatch":
        kind = row.get("kind") if isinstance(row, dict) else type(row).__name__
        raise ValueError(
            f"{where}: a line of kind {kind!r}, not 'mismatch'; spec_round.py writes "
            "them with --dump-verify-mismatches, and exactness.py with --out"
        )
    return _mismatch_of(row, where)


def _split_line(spec: str) -> tuple[pathlib.Path, int]:
    path, colon, number = spec.rpartition(":")
    if (
        colon
        and number.isascii()
        and number.isdigit()
        and not pathlib.Path(spec).is_file()
    ):
        return pathlib.Path(path), int(number)
    return pathlib.Path(spec), 1


def _mismatch_of(row: Mapping[str, Any], where: str) -> Mismatch:
    _check_types(row, _KEYS, where)
    missing = [key for key in _NEW_KEYS if key not in row]
    if missing:
        raise ValueError(
            f"{where}: a line without {', '.join(missing)}, of an earlier version: "
            "write it again with spec_round.py --dump-verify-mismatches or exactness.py"
        )
    _check_types(row, _NEW_KEYS, where)
    choices = {"acceptance": paired_runs.ACCEPTANCES, "prefill": PREFILLS}
    for key, allowed in choices.items():
        if row[key] not in allowed:
            raise ValueError(
                f"{where}: {key}={row[key]!r} is not one of {', '.join(allowed)}"
            )
    _check_windows(row, where)
    settings = {
        field.name: row[field.name]
        for field in dataclasses.fields(Mismatch)
        if field.name not in ("text", "starts")
    }
    prompt = row["prompt_ids"]
    text = Text(
        prompt_len=len(prompt),
        prefix=tuple([*prompt, *row["tokens"]][: row["start"]]),
        window=tuple(row["window"]),
    )
    return Mismatch(text=text, starts=tuple(row["starts"]), **settings)


def _check_types(row: Mapping[str, Any], types: Mapping[str, type], where: str) -> None:
    """Raises `ValueError` unless the line has these keys; lists are of integers."""
    for key, kind in types.items():
        value = row.get(key)
        if type(value) is not kind:
            raise ValueError(f"{where}: {key}={value!r} is not of type {kind.__name__}")
        if kind is list and not all(type(entry) is int for entry in value):
            raise ValueError(f"{where}: {key} holds something that is no integer")


def _check_windows(row: Mapping[str, Any], where: str) -> None:
    """Raises `ValueError` unless windows tile the text from the prompt's last token."""
    prompt, window, starts = row["prompt_ids"], row["window"], row["starts"]
    start, rows = row["start"], row["window_rows"]
    if not prompt or not window:
        raise ValueError(f"{where}: an empty prompt or an empty window")
    # The prompt's last token is pending in the first window.
    first, known = len(prompt) - 1, len(prompt) + len(row["tokens"])
    if start != known and (start, known) != (first, len(prompt)):
        raise ValueError(
            f"{where}: {start=} is not where a window can begin: the text before it, "
            f"prompt_ids and tokens, ends at position {known}"
        )
    if starts != sorted(set(starts)):
        raise ValueError(f"{where}: {starts=} do not increase")
    if not starts or (starts[0], starts[-1]) != (first, start):
        raise ValueError(
            f"{where}: {starts=} do not go from {first}, the position of the prompt's "
            f"last token, to {start=}"
        )
    tallest = max([len(window), *(b - a for a, b in itertools.pairwise(starts))])
    if tallest > rows:
        raise ValueError(
            f"{where}: window_rows={rows}, but a window has {tallest} tokens"
        )
    if not start <= row["position"] < start + len(window):
        raise ValueError(
            f"{where}: no row at position {row['position']} is in the window of "
            f"{len(window)} tokens from position {start}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two ways to run the window.

    Attributes:
      window_rows: see `record.Path`.

    Raises:
      ValueError: a path, an implementation or a dtype that does not exist, or a size
        below one.
    """

    path: str
    impl: str
    dtype: str
    slab: int
    page_size: int
    window_rows: int | None = None

    def __post_init__(self):
        choices = {
            "path": record_lib.PATHS,
            "impl": IMPLS,
            "dtype": config_lib.DTYPES,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}"
                )
        for name in ("slab", "page_size", "window_rows"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name}={size} must be at least 1")

    def record_path(self, config: config_lib.Qwen3Config) -> record_lib.Path:
        """The path on a model of this side's dtype; `impl` must be resolved."""
        model = row_model.RowModel(
            config=dataclasses.replace(config, dtype=self.dtype),
            impl=self.impl,
            slab=self.slab,
        )
        return record_lib.Path(
            name=self.path,
            model=model,
            page_size=self.page_size,
            window_rows=self.window_rows,
        )
