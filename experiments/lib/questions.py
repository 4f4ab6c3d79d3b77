"""A question for the microscope: the model, the scenes, and the two ways to run them.

Made of the flags of `experiments/parity.py`: from a prompt, or from a mismatch.
"""

import argparse
import dataclasses
import pathlib

from experiments.lib import mismatches, prompt_files, prompts as prompts_lib, superseded
from experiments.lib.microscope import (
    faults,
    record as record_lib,
    scene as scene_lib,
    texts,
    trees,
)
from spec_jax import loading
from spec_jax.model import (
    config as config_lib,
    fingerprint,
    load,
    params as params_lib,
    row_model,
    tokenizer as tokenizer_lib,
)
from spec_jax.ops import dispatch, skinny_gemm


GAMMA, PAGE_SIZE = 4, 16

DECODE, ROWS = "decode", "paged-decode"
"""Autoregressive decoding of the window, one active row at a time, which is the oracle;
and what the engine runs, the window's rows in one slab."""

PATHS = (DECODE, ROWS, *superseded.LIBRARY)
"""Ways to run a window by name, as on the command line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A model, two ways to run it, and the scenes they start from.

    Attributes:
      name: of the prompt, or of the line that the scene comes from.
      params: of the model, in the dtype of the first path.
      scenes: what each path starts from: the same text and window, and the same keys
        and values before it unless the second path wrote its own.
      fault: planted in the second run.
      mismatch: the line that the window comes from, if it does.
      tokenizer: of the model; None where its folder has none.
    """

    name: str
    params: params_lib.Params
    scenes: tuple[scene_lib.Scene, scene_lib.Scene]
    paths: tuple[record_lib.Path, record_lib.Path]
    fault: faults.Fault | None
    mismatch: mismatches.Mismatch | None
    tokenizer: tokenizer_lib.Tokenizer | None

    @property
    def history(self) -> str:
        """Returns "decode" or "own": the windows that wrote the second scene's K/V."""
        return "decode" if self.scenes[0] is self.scenes[1] else "own"

    def params_of(self, path: record_lib.Path) -> params_lib.Params:
        """Returns the weights in a path's dtype."""
        return _cast(self.params, self.paths[0].dtype, path.dtype)

    @property
    def weights_sha256(self) -> tuple[str, ...]:
        """Fingerprints of the weights in the dtype of each path."""
        return tuple(fingerprint.of_params(self.params_of(path)) for path in self.paths)


def path_of(name: str, model: row_model.RowModel, **how) -> record_lib.Path:
    """Returns the path of that name; `how` has the other fields of `record.Path`."""
    if name not in PATHS:
        raise ValueError(f"path={name!r} is not one of {', '.join(PATHS)}")
    is_library = name in superseded.LIBRARY
    return record_lib.Path(
        name=name,
        model=model,
        one_by_one=name == DECODE,
        target=superseded.target(name, model) if is_library else None,
        **how,
    )


def from_flags(args: argparse.Namespace) -> Question:
    """Returns the question of a prompt or of a mismatch."""
    line = None if args.mismatch is None else mismatches.read(args.mismatch)
    fault = None if args.inject is None else faults.parse(args.inject)
    folder = args.target or loading.EMBEDDED_TARGET
    config, params = _load(folder, args, line)
    first, second = _paths(args, line, config)
    if fault is not None:
        is_tree = args.tree is not None
        faults.check(fault, num_layers=config.num_layers, is_tree=is_tree)
    sizes = {"page_size": first.page_size}
    if line is None:
        name, prompt = _prompt(args, folder, first.model, params)
        drafts = _window_len(args, line) - 1
        text = texts.of_prompt(first.model, params, prompt, drafts=drafts, **sizes)
    else:
        name, text = args.mismatch, line.text
        sizes["by_rows"] = line.prefill == "rows"
    scene = own = texts.decoded(text, first.model, params, **sizes)
    if line is not None and second.target is not None:
        # Rows write what decoding writes; windows of the library do not.
        cast = _cast(params, first.dtype, second.dtype)
        by_rows = line.prefill == "rows"
        own = texts.own(text, second, cast, starts=line.starts, by_rows=by_rows)
    has_words = (pathlib.Path(folder) / "tokenizer.json").exists()
    return Question(
        name=name,
        params=params,
        scenes=(scene, own),
        paths=(first, second),
        fault=fault,
        mismatch=line,
        tokenizer=tokenizer_lib.load(folder) if has_words else None,
    )


def _cast(params: params_lib.Params, dtype: str, wanted: str) -> params_lib.Params:
    return params if dtype == wanted else params_lib.cast(params, wanted)


def _load(folder, args, line: mismatches.Mismatch | None):
    """Returns the model in the first path's dtype, checked against the mismatch's."""
    if line is None:
        return load.load(folder, dtype=args.dtype)
    config, params = load.load(folder, dtype=line.dtype)
    found = fingerprint.of_params(params)
    if found != line.weights_sha256:
        raise ValueError(
            f"{args.mismatch} is of another model than {folder}: the sha256 of its "
            f"weights begins with {line.weights_sha256[:12]}, that of these with "
            f"{found[:12]}; name its folder with --target"
        )
    dtype = args.dtype or line.dtype
    return dataclasses.replace(config, dtype=dtype), _cast(params, line.dtype, dtype)


def _window_len(args, line: mismatches.Mismatch | None) -> int:
    if line is not None:
        return len(line.window)
    if args.gamma is None and args.tree is not None:
        return len(trees.columns(args.tree))
    return 1 + (GAMMA if args.gamma is None else args.gamma)


def _prompt(args, folder, model: row_model.RowModel, params) -> tuple[str, list[int]]:
    """Returns the name and the tokens of the prompt."""
    named = args.prompts or "1"
    *_, prompt = prompt_files.parse(named, default_file=prompt_files.BUNDLED)
    alone = loading.LanguageModel(
        target=model,
        params=params,
        drafter=None,
        drafter_params=None,
        tokenizer=prompts_lib.with_options(args, tokenizer_lib.load(folder)),
    )
    (tokens,) = prompts_lib.encode(alone, [prompt], raw=args.raw)
    return prompt.id, tokens


def _paths(
    args: argparse.Namespace,
    line: mismatches.Mismatch | None,
    config: config_lib.Qwen3Config,
) -> tuple[record_lib.Path, record_lib.Path]:
    """Returns what flags say, then what a mismatch says, then the defaults."""

    def stated(name: str, default):
        return default if line is None else getattr(line, name)

    def path(name, *, impl, dtype, slab, tree=None):
        config_of = dataclasses.replace(config, dtype=dtype)
        return path_of(
            name,
            row_model.RowModel(config=config_of, impl=impl, slab=slab),
            page_size=stated("page_size", PAGE_SIZE),
            window_rows=None if name == DECODE else stated("window_rows", None),
            tree=tree,
        )

    rows = max(_window_len(args, line), skinny_gemm.MIN_ROWS)
    impl = dispatch.resolve(args.impl or stated("impl", "auto"))
    slab = args.slab or stated("slab", row_model.slab_for(impl, rows))
    verify_impl = dispatch.resolve(args.verify_impl or impl)
    return (
        path(args.reference_path or DECODE, impl=impl, dtype=config.dtype, slab=slab),
        path(
            args.verify_path or stated("verify_path", ROWS),
            impl=verify_impl,
            dtype=args.verify_dtype or config.dtype,
            slab=args.verify_slab or row_model.slab_for(verify_impl, slab),
            tree=args.tree,
        ),
    )
