"""Recording: plain decoding of every prompt, once, into a file of traces.

A recording that was interrupted is taken up where it stopped.
"""

import dataclasses
import pathlib

from experiments.support import (
    model_pair,
    paired_runs,
    prompt_files,
    prompt_runs,
    records,
    terminal,
    traces,
)
from spec_jax import sampling as sampling_lib
from spec_jax.model import fingerprint, load, row_model, tokenizer
from spec_jax.ops import dispatch


EMBEDDED = "embedded"
"""The name of the target that comes with the package."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to record.

    Attributes:
      target: Hugging Face folder; the embedded target if None.
      dtype: that of the target's config if None.
      gamma_max: the largest gamma that live rounds will have: it sets the slab.
      settings: how the target draws, by the names of `traces.Header`.
    """

    target: pathlib.Path | None
    dtype: str | None
    impl: str
    gamma_max: int
    prompts: str
    raw: bool
    gen_tokens: int
    page_size: int
    settings: dict[str, float | int | None]


def load_target(request: Request) -> model_pair.ModelPair:
    """The target alone, a pair without a drafter.

    Raises:
      ValueError: a folder that cannot be used, or a slab that is too high.
      NotImplementedError: an implementation that cannot run here.
    """
    folder = request.target or model_pair.EMBEDDED_TARGET
    impl = dispatch.resolve(request.impl)
    slab = row_model.slab_for(impl, request.gamma_max + 1)
    words = tokenizer.load(folder)
    config, params = load.load(folder, dtype=request.dtype, impl=impl)
    target = row_model.RowModel(config=config, impl=impl, slab=slab)
    return model_pair.ModelPair(
        target=target,
        verifier=target,
        drafter=None,
        params=(params, None),
        tokenizer=words,
    )


def describe(
    request: Request, pair: model_pair.ModelPair, *, num_prompts: int
) -> traces.Header:
    """The header of what the request records."""
    config = pair.target.config
    return traces.Header(
        target=str(request.target or EMBEDDED),
        fingerprint=fingerprint.of_params(pair.params[0]),
        vocabulary=pair.tokenizer.fingerprint,
        vocab_size=config.vocab_size,
        dtype=config.dtype,
        impl=pair.target.impl,
        native_isa=dispatch.instruction_set(pair.target.impl),
        slab=pair.target.slab,
        prefill="rows" if pair.target.prefills_by_rows else "batched",
        stop_ids=tuple(pair.tokenizer.stop_ids),
        gen_tokens=request.gen_tokens,
        page_size=request.page_size,
        prompt_source=request.prompts,
        raw=request.raw,
        num_prompts=num_prompts,
        **request.settings,
    )


def record(request: Request, path: pathlib.Path) -> tuple[traces.Header, int]:
    """Writes the traces of all prompts that the file does not hold yet.

    Returns:
      The header, and how many prompts the file held before.

    Raises:
      ValueError: input that cannot be used, or a file that holds something else.
      NotImplementedError: an implementation that cannot run here.
      MemoryError: out of memory, or of pages.
    """
    sampling = sampling_lib.make_settings(**request.settings)
    prompts = prompt_files.parse(request.prompts, default_file=prompt_files.BUNDLED)
    pair = load_target(request)
    greedy = not request.settings["temperature"]
    prepared = prompt_runs.prepare(
        pair,
        prompts,
        raw=request.raw,
        gen_tokens=request.gen_tokens,
        page_size=request.page_size,
        sampling=None if greedy else sampling,
    )
    prompts, ids = prepared.prompts, prepared.ids
    settings = paired_runs.Settings(
        gamma=request.gamma_max,
        gen_tokens=request.gen_tokens,
        capacity=prepared.capacity,
        page_size=request.page_size,
        # Live rounds judge drafts behind a stop token, too, before it cuts.
        stop_ids=(),
        prefill_by_rows=pair.target.prefills_by_rows,
        sampling=None if greedy else sampling,
    )
    header = describe(request, pair, num_prompts=len(prompts))
    known = _taken_up(path, header, prompts, ids)
    with records.JsonLines(path) as out, terminal.progress() as progress:
        out.write(header.to_row() | records.provenance())
        task = progress.add_task("prompts", total=len(prompts), completed=len(known))
        for trace in known:
            out.write(trace.to_row())
        todo = list(zip(prompts, ids, strict=True))[len(known) :]
        for prompt, prompt_ids in todo:
            trace = traces.PromptTrace(
                id=prompt.id,
                category=prompt.category,
                prompt_ids=prompt_ids,
                generated_ids=paired_runs.run_plain(pair, settings, prompt_ids).tokens,
            )
            out.write(trace.to_row())
            progress.advance(task)
    return header, len(known)


def _taken_up(path, header, prompts, ids) -> list[traces.PromptTrace]:
    """The traces that an interrupted recording of the same left behind.

    Raises:
      ValueError: a file of something else.
    """
    if not path.is_file() or not path.stat().st_size:
        return []
    theirs, known = traces.read(path, is_complete=False)
    changes = theirs.changes(dataclasses.asdict(header))
    named = [(prompt.id, ids_) for prompt, ids_ in zip(prompts, ids, strict=True)]
    if not changes and [(k.id, k.prompt_ids) for k in known] != named[: len(known)]:
        changes = ["prompts of another file"]
    if changes:
        raise ValueError(
            f"{path}: holds traces of another recording ({'; '.join(changes)}); name "
            "another file, or remove this one"
        )
    return known
