"""A question for the microscope: the model, the scene, and the two ways to run it.

Made of the flags of `experiments/parity.py`: from a prompt, from a mismatch, or from a
replay bundle.
"""

import argparse
import dataclasses
import pathlib

from experiments.support import (
    model_pair,
    parity_bundle,
    parity_flags,
    parity_inputs,
    parity_scenes,
    prompt_files,
    prompt_runs,
)
from spec_jax.debug.microscope import faults, record as record_lib, scene as scene_lib
from spec_jax.model import (
    config as config_lib,
    fingerprint,
    load,
    params as params_lib,
    row_model,
    tokenizer as tokenizer_lib,
)
from spec_jax.ops import dispatch, skinny_gemm


PAGE_SIZE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is run.

    Attributes:
      name: of the prompt, or of the file that the scene comes from.
      config, params: of the model, in the dtype of the first side.
      scenes: what each side starts from: the same text and window, and the same keys
        and values before it unless the second side has a history of its own.
      history: of `parity_scenes.HISTORIES`.
      layers: those to look at.
      mismatch: the line that the window comes from, if it does.
      tokenizer: of the model; None where its folder has none.
    """

    name: str
    config: config_lib.Qwen3Config
    params: params_lib.Params
    scenes: tuple[scene_lib.Scene, scene_lib.Scene]
    history: str
    sides: tuple[parity_inputs.Side, parity_inputs.Side]
    layers: tuple[int, ...]
    fault: faults.Fault | None
    mismatch: parity_inputs.Mismatch | None
    tokenizer: tokenizer_lib.Tokenizer | None

    def params_of(self, side: parity_inputs.Side) -> params_lib.Params:
        """The weights in a side's dtype."""
        return _cast(self.params, self.config, side)

    @property
    def weights_sha256(self) -> tuple[str, str]:
        """Fingerprints of the weights in the dtype of each side."""
        first, second = self.sides
        ours = fingerprint.of_params(self.params)
        if second.dtype == first.dtype:
            return ours, ours
        return ours, fingerprint.of_params(self.params_of(second))


def from_flags(args: argparse.Namespace) -> Question:
    """The question of a prompt or of a mismatch.

    Raises:
      ValueError: a model, a text or a setting that cannot be used.
    """
    mismatch = None
    if args.mismatch is not None:
        mismatch = parity_inputs.read_mismatch(args.mismatch)
    fault = None if args.inject is None else faults.parse(args.inject)
    folder = args.target or model_pair.EMBEDDED_TARGET
    config, params = _load(folder, args, mismatch)
    layers = _layers(args.layers, config.num_layers)
    history = _history(args, mismatch)
    sides = _sides(args, mismatch, config, history)
    paths = tuple(side.record_path(config) for side in sides)
    if fault is not None:
        _check_fault(fault, args, mismatch, paths[1], layers)
    by_rows = _by_rows(args, mismatch)
    name, text = _text(args, mismatch, folder, paths[0], params)
    model, page_size = paths[0].model, paths[0].page_size
    own = scene = parity_scenes.decoded_scene(
        text, model, params, page_size=page_size, by_rows=by_rows
    )
    if history == "own":
        starts = parity_scenes.tiled(text, rows=sides[1].slab)
        own = parity_scenes.own_scene(
            text,
            paths[1],
            _cast(params, config, sides[1]),
            starts=starts if mismatch is None else mismatch.starts,
            by_rows=by_rows,
        )
    return Question(
        name=name,
        config=config,
        params=params,
        scenes=(scene, own),
        history=history,
        sides=sides,
        layers=layers,
        fault=fault,
        mismatch=mismatch,
        tokenizer=_tokenizer(folder),
    )


def _tokenizer(folder: pathlib.Path) -> tokenizer_lib.Tokenizer | None:
    """What gives tokens a text; a question of token ids can do without."""
    has_one = tokenizer_lib.locate(folder).exists()
    return tokenizer_lib.load(folder) if has_one else None


def _cast(
    params: params_lib.Params, config: config_lib.Qwen3Config, side: parity_inputs.Side
) -> params_lib.Params:
    """The weights of a model in a side's dtype."""
    if side.dtype == config.dtype:
        return params
    return params_lib.cast(params, side.dtype)


def _check_fault(fault, args, mismatch, path, layers) -> None:
    """Raises `ValueError` where the fault cannot be planted, or would not be seen."""
    faults.check(
        fault,
        path.model.config,
        is_fused=fault.operation in path.fused,
        num_rows=path.rows_of_a_call(_window_len(args, mismatch)),
    )
    if fault.layer is not None and fault.layer not in layers:
        raise ValueError(
            f"--layers {args.layers} leaves out the layer of --inject {args.inject}"
        )


def _text(args, mismatch, folder, path, params) -> tuple[str, parity_inputs.Text]:
    """The text with its window, and its name; plain decoding is on `path`'s model."""
    if mismatch is not None:
        return args.mismatch, mismatch.text
    name, prompt = _prompt(args, folder, path.model, params)
    text = parity_scenes.text_of_prompt(
        path.model,
        params,
        prompt,
        cache_length=args.cache_length,
        drafts=_drafts(args),
        wrong_draft=args.wrong_draft,
        page_size=path.page_size,
        by_rows=_by_rows(args, mismatch),
    )
    return name, text


def _by_rows(
    args: argparse.Namespace, mismatch: parity_inputs.Mismatch | None
) -> bool | None:
    """How the prompt enters the caches, see `RowModel.prefill`."""
    prefill = args.prefill
    if prefill is None and mismatch is not None:
        prefill = mismatch.prefill
    return None if prefill is None else prefill == "rows"


def _history(args: argparse.Namespace, mismatch: parity_inputs.Mismatch | None) -> str:
    """Who wrote the second run's prefix: what the flag says, or who did in the run.

    Rows write what decoding writes, and where decoding decided tokens it wrote them.
    """
    if args.history is not None:
        return args.history
    if mismatch is None or mismatch.acceptance == "decode":
        return "decode"
    is_of_rows = _verify_path(args, mismatch) in record_lib.OF_ROWS
    return "decode" if is_of_rows else "own"


def _verify_path(
    args: argparse.Namespace, mismatch: parity_inputs.Mismatch | None
) -> str:
    default = "paged-decode" if mismatch is None else mismatch.verify_path
    return args.verify_path or default


def from_bundle(args: argparse.Namespace, bundle: parity_bundle.Bundle) -> Question:
    """The question that a bundle was written on.

    Raises:
      ValueError: a model that is not the bundle's.
    """
    folder = args.target or model_pair.EMBEDDED_TARGET
    config, params = load.load(folder, dtype=bundle.sides[0].dtype)
    parity_bundle.check_config(bundle, config)
    for side in bundle.sides:
        dispatch.resolve(side.impl)
    question = Question(
        name=str(args.bundle),
        config=config,
        params=params,
        scenes=bundle.scenes,
        history=bundle.history,
        sides=bundle.sides,
        layers=bundle.layers,
        fault=bundle.fault,
        mismatch=None,
        tokenizer=_tokenizer(folder),
    )
    parity_bundle.check_weights(bundle, question.weights_sha256)
    return question


def _load(
    folder: pathlib.Path,
    args: argparse.Namespace,
    mismatch: parity_inputs.Mismatch | None,
) -> tuple[config_lib.Qwen3Config, params_lib.Params]:
    """The model in the first side's dtype, checked against the mismatch's."""
    if mismatch is None:
        return load.load(folder, dtype=args.dtype)
    config, params = load.load(folder, dtype=mismatch.dtype)
    found = fingerprint.of_params(params)
    if found != mismatch.weights_sha256:
        raise ValueError(
            f"{args.mismatch} is of another model than {folder}: the sha256 of its "
            f"weights begins with {mismatch.weights_sha256[:12]}, that of these with "
            f"{found[:12]}; name its folder with --target"
        )
    if args.dtype not in (None, mismatch.dtype):
        config = dataclasses.replace(config, dtype=args.dtype)
        params = params_lib.cast(params, args.dtype)
    return config, params


def _drafts(args: argparse.Namespace) -> tuple[int, ...] | int:
    if args.draft_tokens is not None:
        return args.draft_tokens
    return parity_flags.GAMMA if args.gamma is None else args.gamma


def _window_len(
    args: argparse.Namespace, mismatch: parity_inputs.Mismatch | None
) -> int:
    if mismatch is not None:
        return len(mismatch.text.window)
    drafts = _drafts(args)
    return 1 + (drafts if isinstance(drafts, int) else len(drafts))


def _prompt(
    args: argparse.Namespace,
    folder: pathlib.Path,
    model: row_model.RowModel,
    params: params_lib.Params,
) -> tuple[str, list[int]]:
    """The name and the tokens of the prompt."""
    if args.prompt is not None:
        prompts = [prompt_files.Prompt(id="--prompt", text=args.prompt, category=None)]
    else:
        index = args.index or 0
        spec = args.prompts or str(index + 1)
        prompts = prompt_files.parse(spec, default_file=prompt_files.BUNDLED)
        if not index < len(prompts):
            raise ValueError(
                f"--index {index}: {spec} names {len(prompts)} prompts, 0 to "
                f"{len(prompts) - 1}"
            )
        prompts = prompts[index : index + 1]
    alone = model_pair.ModelPair(
        target=model,
        verifier=None,
        drafter=None,
        params=(params, None),
        tokenizer=tokenizer_lib.load(folder),
    )
    (tokens,) = prompt_runs.encode(alone, prompts, raw=args.raw)
    return prompts[0].id, tokens


def _layers(text: str | None, num_layers: int) -> tuple[int, ...]:
    """Reads `0,3,5-7`.

    Raises:
      ValueError: another form, or a layer that does not exist.
    """
    if text is None:
        return tuple(range(num_layers))
    chosen = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)):
            raise ValueError(f"--layers {text}: {part!r} is no layer, such as 3 or 5-7")
        chosen |= set(range(int(first), int(last if dash else first) + 1))
    missing = sorted(layer for layer in chosen if layer >= num_layers)
    if missing or not chosen:
        raise ValueError(
            f"--layers {text}: there is no layer {', '.join(map(str, missing))}; the "
            f"model has layers 0 to {num_layers - 1}"
        )
    return tuple(sorted(chosen))


def _sides(
    args: argparse.Namespace,
    mismatch: parity_inputs.Mismatch | None,
    config: config_lib.Qwen3Config,
    history: str,
) -> tuple[parity_inputs.Side, parity_inputs.Side]:
    """What flags say, then what a mismatch says, then the defaults."""

    def stated(name: str, default):
        return default if mismatch is None else getattr(mismatch, name)

    def window_rows(path: str, slab: int) -> int | None:
        # With `history` the window is one more of those that tile the text.
        tiles = slab if history == "own" else None
        return None if path in record_lib.ONE_BY_ONE else stated("window_rows", tiles)

    impl = dispatch.resolve(args.impl or stated("impl", "auto"))
    rows = max(_window_len(args, mismatch), skinny_gemm.MIN_ROWS)
    first = parity_inputs.Side(
        path=args.reference_path or record_lib.DECODE,
        impl=impl,
        dtype=config.dtype,
        slab=args.slab or stated("slab", row_model.slab_for(impl, rows)),
        page_size=args.page_size or stated("page_size", PAGE_SIZE),
    )
    second_impl = dispatch.resolve(args.verify_impl or impl)
    own_slab = row_model.slab_for(second_impl, first.slab)
    second = parity_inputs.Side(
        path=_verify_path(args, mismatch),
        impl=second_impl,
        dtype=args.verify_dtype or first.dtype,
        slab=args.verify_slab or own_slab,
        page_size=args.verify_page_size or first.page_size,
    )
    return tuple(
        dataclasses.replace(side, window_rows=window_rows(side.path, side.slab))
        for side in (first, second)
    )
