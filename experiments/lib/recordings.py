"""Recording: decoding of every prompt, once, into a file of traces.

A recording that was interrupted is taken up where it stopped.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from experiments.lib import (
    prompt_files,
    prompts as prompts_lib,
    records,
    runs,
    terminal,
    traces,
)
from spec_jax import loading
from spec_jax.model import fingerprint, load, row_model, tokenizer
from spec_jax.ops import dispatch
from spec_jax.rules import sampling


EMBEDDED = "embedded"
"""The name of the target that comes with the package."""


def load_target(
    folder: pathlib.Path | None, *, dtype: str | None, impl: str, gamma_max: int
) -> loading.LanguageModel:
    """Returns the target alone, a model without a drafter, for windows of `gamma_max`.

    Raises:
      ValueError: a folder that cannot be used, or a slab that is too high.
      NotImplementedError: an implementation that cannot run here.
    """
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


def sampling_of(header: traces.Header) -> sampling.SamplingSettings | None:
    """Returns how the target drew; None is greedy.

    Raises:
      ValueError: a value outside its range.
    """
    settings = sampling.make_settings(
        **{name: getattr(header, name) for name in traces.SAMPLING}
    )
    return None if header.temperature == 0 else settings


def record(
    path: pathlib.Path,
    *,
    target: pathlib.Path | None,
    dtype: str | None,
    impl: str,
    gamma_max: int,
    prompts: str,
    raw: bool,
    gen_tokens: int,
    page_size: int,
    settings: Mapping[str, float | int | None],
) -> tuple[traces.Header, int]:
    """Decodes the prompts that the file does not hold yet, and writes their traces.

    Args:
      gamma_max: the largest gamma that live rounds will have: it sets the slab.
      settings: how the target draws, by the names of `traces.Header`.

    Returns:
      The header, and how many prompts the file held before.

    Raises:
      ValueError: input that cannot be used, or a file that holds something else.
      NotImplementedError: an implementation that cannot run here.
      MemoryError: out of memory, or of pages.
    """
    drawn = sampling.make_settings(**settings) if settings["temperature"] else None
    named = prompt_files.parse(prompts, default_file=prompt_files.BUNDLED)
    lm = load_target(target, dtype=dtype, impl=impl, gamma_max=gamma_max)
    sizes = {"gen_tokens": gen_tokens, "page_size": page_size}
    prepared = prompts_lib.prepare(lm, named, raw=raw, sampling=drawn, **sizes)
    header = traces.Header(
        target=str(target or EMBEDDED),
        dtype=lm.target.config.dtype,
        impl=lm.target.impl,
        slab=lm.target.slab,
        prefill="rows" if lm.target.prefills_by_rows else "batched",
        stop_ids=tuple(lm.stop_ids),
        prompt_source=prompts,
        raw=raw,
        num_prompts=len(prepared.prompts),
        **facts(lm),
        **sizes,
        **settings,
    )
    run = runs.Settings(
        gamma=gamma_max,
        capacity=prepared.capacity,
        # Live rounds judge drafts after a stop token, too, before it cuts.
        stop_ids=(),
        prefill_by_rows=lm.target.prefills_by_rows,
        sampling=drawn,
        **sizes,
    )
    known = _taken_up(path, header, prepared)
    with records.JsonLines(path) as out, terminal.progress() as progress:
        out.write(header.to_row() | records.provenance())
        total = header.num_prompts
        task = progress.add_task("prompts", total=total, completed=len(known))
        for one in known:
            out.write(one.to_row())
        for number in range(len(known), total):
            prompt, ids = prepared.prompts[number], prepared.ids[number]
            one = traces.PromptTrace(
                id=prompt.id,
                category=prompt.category,
                prompt_ids=ids,
                generated_ids=runs.run_plain(lm, run, ids).tokens,
            )
            out.write(one.to_row())
            progress.advance(task)
    return header, len(known)


def _taken_up(path, header, prepared) -> list[traces.PromptTrace]:
    """Returns the traces that an interrupted recording of the same left behind.

    Raises:
      ValueError: a file of something else.
    """
    if not path.is_file() or not path.stat().st_size:
        return []
    theirs, known = traces.read(path, is_complete=False)
    changes = theirs.changes(dataclasses.asdict(header))
    pairs = zip(prepared.prompts, prepared.ids, strict=True)
    named = [(prompt.id, ids) for prompt, ids in pairs]
    if not changes and [(k.id, k.prompt_ids) for k in known] != named[: len(known)]:
        changes = ["prompts of another file"]
    if changes:
        raise ValueError(
            f"{path}: holds traces of another recording ({'; '.join(changes)}); name "
            "another file, or remove this one"
        )
    return known
