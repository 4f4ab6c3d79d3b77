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
    prompt_files,
    prompt_runs,
)
from spec_jax.microscope import faults, record as record_lib, scene as scene_lib
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
      layers: those to look at.
    """

    name: str
    config: config_lib.Qwen3Config
    params: params_lib.Params
    scene: scene_lib.Scene
    sides: tuple[parity_inputs.Side, parity_inputs.Side]
    layers: tuple[int, ...]
    fault: faults.Fault | None

    def params_of(self, side: parity_inputs.Side) -> params_lib.Params:
        """The weights in a side's dtype."""
        if side.dtype == self.config.dtype:
            return self.params
        return params_lib.cast(self.params, side.dtype)

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
    sides = _sides(args, mismatch, config)
    if fault is not None:
        path = sides[1].record_path(config)
        faults.check(
            fault,
            config,
            is_fused=fault.operation in path.fused,
            num_rows=path.rows_of_a_call(_window_len(args, mismatch)),
        )
        if fault.layer is not None and fault.layer not in layers:
            raise ValueError(
                f"--layers {args.layers} leaves out the layer of --inject {args.inject}"
            )
    model = sides[0].record_path(config).model
    shared = {
        "page_size": sides[0].page_size,
        "by_rows": None if args.prefill is None else args.prefill == "rows",
    }
    if mismatch is not None:
        name, text = args.mismatch, mismatch.text
    else:
        name, prompt = _prompt(args, folder, model, params)
        text = parity_inputs.text_of_prompt(
            model,
            params,
            prompt,
            cache_length=args.cache_length,
            drafts=_drafts(args),
            wrong_draft=args.wrong_draft,
            **shared,
        )
    return Question(
        name=name,
        config=config,
        params=params,
        scene=parity_inputs.scene_of(text, model, params, **shared),
        sides=sides,
        layers=layers,
        fault=fault,
    )


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
        scene=bundle.scene,
        sides=bundle.sides,
        layers=bundle.layers,
        fault=bundle.fault,
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
) -> tuple[parity_inputs.Side, parity_inputs.Side]:
    """What flags say, then what a mismatch says, then the defaults."""

    def stated(name: str, default):
        return default if mismatch is None else getattr(mismatch, name)

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
        path=args.verify_path or stated("verify_path", "paged-decode"),
        impl=second_impl,
        dtype=args.verify_dtype or first.dtype,
        slab=args.verify_slab or own_slab,
        page_size=args.verify_page_size or first.page_size,
    )
    return first, second
