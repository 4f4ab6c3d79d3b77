"""Traces: what plain decoding wrote for each prompt, in a file, with what decided it.

JSON lines. The first, the header, says what was run (`Header`, and the provenance of
the numbers); each other line is one prompt (`PromptTrace`). Knows files and numbers;
runs nothing.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.lib import files
from spec_jax.rules import sampling


FORMAT = 1
"""Version of the file; files of another are refused."""

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
"""Fields of the header that say how the target drew, as `sampling.make_settings`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """Everything that decides the tokens of the traces.

    Attributes:
      target: the folder, or "embedded".
      fingerprint: of the target's weights in `dtype` (`fingerprint.of_params`).
      vocabulary: fingerprint of the tokenizer.
      vocab_size: of the target's config.
      impl: a resolved implementation.
      native_isa: instruction set of native kernels.
      slab: rows of every call, which bounds the gammas that live rounds can have.
      prefill: "rows" or "batched".
      stop_ids: at which live rounds end; the traces go on behind them.
      gen_tokens: of every trace.
      page_size: positions per page of live caches.
      prompt_source, raw: what `--prompts` and `--raw` said.
      num_prompts: lines that follow.
    """

    target: str
    fingerprint: str
    vocabulary: str
    vocab_size: int
    dtype: str
    impl: str
    native_isa: str | None
    slab: int
    prefill: str
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    seed: int
    stop_ids: tuple[int, ...]
    gen_tokens: int
    page_size: int
    prompt_source: str
    raw: bool
    num_prompts: int

    def to_row(self) -> dict[str, Any]:
        """The first line, without provenance."""
        return {"kind": "traces", "format": FORMAT, **dataclasses.asdict(self)}

    def changes(self, others: Mapping[str, Any]) -> list[str]:
        """What `others`, some fields by name, say otherwise: one text each."""
        return [
            f"{name} {_shown(getattr(self, name))} and {_shown(value)}"
            for name, value in others.items()
            if getattr(self, name) != value
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptTrace:
    """One prompt, and what plain decoding wrote behind it, past stop tokens."""

    id: str
    category: str | None
    prompt_ids: list[int]
    generated_ids: list[int]

    @property
    def text(self) -> list[int]:
        """Prompt and output."""
        return [*self.prompt_ids, *self.generated_ids]

    def until_stop(self, stop_ids: Sequence[int]) -> list[int]:
        """The output up to its first stop token, which is kept: that of decoding."""
        for i, token in enumerate(self.generated_ids):
            if token in stop_ids:
                return self.generated_ids[: i + 1]
        return self.generated_ids

    def to_row(self) -> dict[str, Any]:
        """The line."""
        return {"kind": "trace", **dataclasses.asdict(self)}


_LEAST = {"slab": 2, "gen_tokens": 1, "page_size": 1, "num_prompts": 1}
"""Of fields that count something."""


def read(
    path: pathlib.Path, *, is_complete: bool = True
) -> tuple[Header, list[PromptTrace]]:
    """Reads and checks a file of traces.

    Args:
      is_complete: refuse a file that lacks prompts, as an interrupted recording does.

    Raises:
      ValueError: a file that cannot be read, is empty, damaged, of another format or
        of something else; one line says where, and how to mend it.
    """
    rows = _rows(path)
    if not rows:
        raise ValueError(f"{path}: is empty; write traces with replay.py --record")
    header = _header(path, rows[0])
    traces = [
        _prompt_trace(f"{path}, line {number}", row, header)
        for number, row in enumerate(rows[1:], start=2)
    ]
    if len(traces) > header.num_prompts or (
        is_complete and len(traces) < header.num_prompts
    ):
        raise ValueError(
            f"{path}: has traces of {len(traces)} prompts, and its header says "
            f"{header.num_prompts}; run replay.py --record again, which takes up an "
            "interrupted file"
        )
    return header, traces


def _rows(path: pathlib.Path) -> list[Any]:
    try:
        lines = files.read(path).splitlines()
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); write traces with "
            "replay.py --record"
        ) from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number}: no JSON ({error}); remove the damaged line "
                "and run replay.py --record again"
            ) from None
    return rows


def _header(path: pathlib.Path, row: Any) -> Header:
    if not isinstance(row, Mapping) or row.get("kind") != "traces":
        raise ValueError(
            f"{path}: does not begin with a header of traces; name a file that "
            "replay.py --record wrote"
        )
    if row.get("format") != FORMAT:
        raise ValueError(
            f"{path}: traces of format {row.get('format')!r}, and this is {FORMAT}; "
            "record them again"
        )
    fields = {
        field.name: _checked(f"{path}, line 1", row, field.name, field.type)
        for field in dataclasses.fields(Header)
    }
    for name, least in _LEAST.items():
        if fields[name] < least:
            raise ValueError(
                f"{path}, line 1: {name}={fields[name]} must be at least {least}; "
                "record again"
            )
    try:
        sampling.make_settings(**{name: fields[name] for name in SAMPLING})
    except ValueError as error:
        raise ValueError(f"{path}, line 1: {error}; record again") from None
    return Header(**fields | {"stop_ids": tuple(fields["stop_ids"])})


def _prompt_trace(where: str, row: Any, header: Header) -> PromptTrace:
    if not isinstance(row, Mapping) or row.get("kind") != "trace":
        raise ValueError(f"{where}: is no trace; remove the line, or record again")
    trace = PromptTrace(
        **{
            field.name: _checked(where, row, field.name, field.type)
            for field in dataclasses.fields(PromptTrace)
        }
    )
    if not trace.prompt_ids:
        raise ValueError(f"{where}: the prompt is empty; record again")
    if len(trace.generated_ids) != header.gen_tokens:
        raise ValueError(
            f"{where}: has {len(trace.generated_ids)} generated tokens, and the header "
            f"says {header.gen_tokens}; record again"
        )
    worst = max(trace.text) if min(trace.text) >= 0 else min(trace.text)
    if not 0 <= worst < header.vocab_size:
        raise ValueError(
            f"{where}: has token {worst}, outside the vocabulary [0, "
            f"{header.vocab_size}); record again"
        )
    return trace


_IS_A = {
    str: lambda value: isinstance(value, str),
    str | None: lambda value: value is None or isinstance(value, str),
    bool: lambda value: isinstance(value, bool),
    int: lambda value: type(value) is int,
    int | None: lambda value: value is None or type(value) is int,
    float: lambda value: type(value) in (int, float),
    list[int]: lambda value: _is_list_of_ints(value),
    tuple[int, ...]: lambda value: _is_list_of_ints(value),
}
"""Whether a JSON value is one of a field's type."""


def _is_list_of_ints(value: Any) -> bool:
    return isinstance(value, list) and all(type(entry) is int for entry in value)


def _checked(where: str, row: Mapping[str, Any], name: str, kind: Any) -> Any:
    if name not in row:
        raise ValueError(f"{where}: lacks {name!r}; record again")
    if not _IS_A[kind](row[name]):
        named = getattr(kind, "__name__", kind)
        raise ValueError(
            f"{where}: {name}={_shown(row[name])} is no {named}; record again"
        )
    return row[name]


def _shown(value: Any) -> str:
    """The value on one short line: of fingerprints the beginning is enough."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:12]}..."
