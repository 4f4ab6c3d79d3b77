"""Traces: what autoregressive decoding wrote for each prompt, in a file.

JSON lines. The first, the header, says what was run (`Header`, and the provenance of
the numbers); each other line is one prompt (`PromptTrace`). `record` writes such a
file, and takes up one that was interrupted; `read` checks and reads one.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.lib import (
    fan_out,
    files,
    flags,
    prompt_files,
    prompts as prompts_lib,
    records,
    runs,
    terminal,
)
from spec_jax import loading
from spec_jax.model import fingerprint, load, row_model, tokenizer
from spec_jax.ops import dispatch
from spec_jax.rules import sampling


FORMAT = 2
"""Version of the file; files of another are refused."""

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
"""Fields of the header that say how the target drew, as `sampling.make_settings`."""

EMBEDDED = "embedded"
"""The name of the target that comes with the package."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """Everything that decides the tokens of the traces."""

    target: str  # the folder, or "embedded"
    fingerprint: str  # of the target's weights in `dtype` (`fingerprint.of_params`)
    vocabulary: str  # fingerprint of the tokenizer
    vocab_size: int  # of the target's config
    dtype: str
    impl: str  # a resolved implementation
    native_isa: str | None  # instruction set of native kernels
    slab: int  # rows of every call, which bounds the gammas that live rounds can have
    prefill: str  # "rows" or "batched"
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    seed: int
    stop_ids: tuple[int, ...]  # at which live rounds end; the traces go on after them
    gen_tokens: int  # of every trace
    page_size: int  # positions per page of live caches
    prompt_source: str  # what `--prompts` said
    raw: bool  # what `--raw` said
    chat_option: str  # what `--chat-option` said, as JSON
    num_prompts: int  # lines that follow

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

    @property
    def settings(self) -> sampling.SamplingSettings | None:
        """How the target drew; None is greedy."""
        made = sampling.make_settings(
            **{name: getattr(self, name) for name in SAMPLING}
        )
        return None if self.temperature == 0 else made


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptTrace:
    """One prompt, and what decoding wrote after it, past stop tokens."""

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


def load_target(
    folder: pathlib.Path | None, *, dtype: str | None, impl: str, gamma_max: int
) -> loading.LanguageModel:
    """Returns the target, without a drafter, for windows of `gamma_max`."""
    folder, impl = folder or loading.EMBEDDED_TARGET, dispatch.resolve(impl)
    slab = row_model.slab_for(impl, gamma_max + 1)
    words = tokenizer.load(folder)
    config, params = load.load(folder, dtype=dtype, impl=impl)
    return loading.LanguageModel(
        target=row_model.RowModel(config=config, impl=impl, slab=slab),
        params=params,
        drafter=None,
        drafter_params=None,
        tokenizer=words,
    )


def facts(lm: loading.LanguageModel) -> dict[str, Any]:
    """Returns the fields of a header that the target decides."""
    return {
        "fingerprint": fingerprint.of_params(lm.params),
        "vocabulary": lm.tokenizer.fingerprint,
        "vocab_size": lm.target.config.vocab_size,
        "native_isa": dispatch.instruction_set(lm.target.impl),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """What decodes the prompts of a recording, by their numbers."""

    header: Header
    lm: loading.LanguageModel
    prepared: prompts_lib.Prepared
    settings: runs.Settings

    def __call__(self, number: int) -> Iterator[PromptTrace]:
        """Yields the trace of a prompt."""
        prompt, ids = self.prepared.prompts[number], self.prepared.ids[number]
        yield PromptTrace(
            id=prompt.id,
            category=prompt.category,
            prompt_ids=ids,
            generated_ids=runs.write(self.lm, self.settings, ids),
        )


def prepare(args: argparse.Namespace) -> Recording:
    """Loads the target and reads the prompts; raises as `record`."""
    gamma_max, settings = max(args.gamma), flags.sampling_settings(args)
    named = prompt_files.parse(args.prompts, default_file=prompt_files.BUNDLED)
    lm = load_target(args.target, dtype=args.dtype, impl=args.impl, gamma_max=gamma_max)
    words = prompts_lib.with_options(args, lm.tokenizer)
    lm = dataclasses.replace(lm, tokenizer=words)
    sizes = {"gen_tokens": args.gen_tokens, "page_size": args.page_size}
    prepared = prompts_lib.prepare(lm, named, raw=args.raw, sampling=settings, **sizes)
    header = Header(
        target=str(args.target or EMBEDDED),
        dtype=lm.target.config.dtype,
        impl=lm.target.impl,
        slab=lm.target.slab,
        prefill="rows" if lm.target.prefills_by_rows else "batched",
        stop_ids=tuple(lm.stop_ids),
        prompt_source=args.prompts,
        raw=args.raw,
        chat_option=json.dumps(args.chat_option, sort_keys=True),
        num_prompts=len(prepared.prompts),
        **facts(lm),
        **sizes,
        **{name: getattr(args, name) for name in SAMPLING},
    )
    run = runs.Settings(
        gamma=gamma_max,
        capacity=prepared.capacity,
        # Live rounds verify drafts after a stop token, too, before it cuts.
        stop_ids=(),
        prefill_by_rows=lm.target.prefills_by_rows,
        sampling=settings,
        **sizes,
    )
    return Recording(header=header, lm=lm, prepared=prepared, settings=run)


def prepare_like(args: argparse.Namespace, header: Header) -> Recording:
    """As `prepare`, in another process.

    Raises:
      ValueError: what it would record is not what the header says.
    """
    recording = prepare(args)
    changes = header.changes(dataclasses.asdict(recording.header))
    if changes:
        raise ValueError(
            f"a worker would record something else ({'; '.join(changes)}); have all "
            "files alike"
        )
    return recording


def record(args: argparse.Namespace) -> tuple[Header, int]:
    """Decodes the prompts that `args.record` does not hold yet, and writes traces.

    Returns:
      The header, and how many prompts the file held before.

    Raises:
      ValueError: input that cannot be used, or a file that holds something else.
      FloatingPointError: as `runs.write`; the prompts before are in the file.
    """
    recording = prepare(args)
    header, path = recording.header, args.record
    fan = fan_out.of(args, prepare_like, args, header)
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(records.open_rows(path, allow_dirty=args.allow_dirty))
        here = records.provenance()
        about = header.to_row() | {"git_commit": here["git_commit"]}
        known = records.resume_behind(out, about, ("trace",), **here)
        ids = recording.prepared.ids[: len(known)]
        if [row["prompt_ids"] for row in known] != ids:
            raise ValueError(f"{path}: has traces of other prompts: name another")
        missing = range(len(known), header.num_prompts)
        advance = stack.enter_context(terminal.counted("prompts", total=len(missing)))
        for traces in fan_out.in_order(fan(recording, missing), missing):
            out.write_all(one.to_row() for one in traces)
            advance()
    return header, len(known)


def read(path: pathlib.Path) -> tuple[Header, list[PromptTrace]]:
    """Reads and checks a file of traces.

    Raises:
      ValueError: a file that cannot be read, is empty, damaged, of another format or
        of something else; one line says where, and how to mend it.
    """
    again = "write traces with replay.py --record"
    rows = files.read_rows(path, hint=f"; {again}")
    if not rows:
        raise ValueError(f"{path}: is empty; {again}")
    (number, first), *others = rows.items()
    kind, form = first.get("kind"), first.get("format")
    if (kind, form) != ("traces", FORMAT):
        raise ValueError(
            f"{path}: has no header of traces of format {FORMAT}, but {kind!r} of "
            f"format {form!r}; {again}"
        )
    header = files.checked(first, Header, f"{path}, line {number}")
    traces = []
    for number, row in others:
        where = f"{path}, line {number}"
        if row.get("kind") != "trace":
            raise ValueError(f"{where}: is no trace; remove the line, or record again")
        trace = files.checked(row, PromptTrace, where)
        count = len(trace.generated_ids)
        if count != header.gen_tokens:
            raise ValueError(
                f"{where}: has {count} generated tokens, and the header says "
                f"{header.gen_tokens}; record again"
            )
        traces.append(trace)
    lacking = header.num_prompts - len(traces)
    if lacking:
        raise ValueError(
            f"{path}: has traces of {len(traces)} prompts, and its header says "
            f"{header.num_prompts}; run replay.py --record again, which takes up an "
            "interrupted file"
        )
    return header, traces


def _shown(value: Any) -> str:
    """The value on one short line: of fingerprints the beginning is enough."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:12]}..."
