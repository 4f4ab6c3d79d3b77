"""A question for the microscope: the model, the scenes, and the two ways to run them.

Made of the flags of `experiments/parity.py`: from a prompt, or from a mismatch.
"""

import argparse
import dataclasses
import pathlib

from experiments.lib import mismatches, prompt_files, prompts as prompts_lib, scenes
from spec_jax import loading
from spec_jax.debug.microscope import faults, scene as scene_lib, trees
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is run.

    Attributes:
      config, params: of the model, in the dtype of the first side.
    """

    name: str  # of the prompt, or of the line that the scene comes from
    config: config_lib.Qwen3Config
    params: params_lib.Params
    # What each side starts from: the same text and window, and the same keys and values
    # before it unless the second side has a history of its own
    scenes: tuple[scene_lib.Scene, scene_lib.Scene]
    history: str  # of `scenes.HISTORIES`
    sides: tuple[scenes.Side, scenes.Side]
    layers: tuple[int, ...]  # those to look at
    fault: faults.Fault | None
    # The line that the window comes from, if it does
    mismatch: mismatches.Mismatch | None
    # Of the model; None where its folder has none
    tokenizer: tokenizer_lib.Tokenizer | None

    def params_of(self, side: scenes.Side) -> params_lib.Params:
        """Returns the weights in a side's dtype."""
        return _cast(self.params, self.config, side.dtype)

    @property
    def weights_sha256(self) -> tuple[str, str]:
        """Fingerprints of the weights in the dtype of each side."""
        first, second = self.sides
        ours = fingerprint.of_params(self.params)
        if second.dtype == first.dtype:
            return ours, ours
        return ours, fingerprint.of_params(self.params_of(second))


def from_flags(args: argparse.Namespace) -> Question:
    """Returns the question of a prompt or of a mismatch."""
    line = None if args.mismatch is None else mismatches.read(args.mismatch)
    fault = None if args.inject is None else faults.parse(args.inject)
    folder = args.target or loading.EMBEDDED_TARGET
    config, params = _load(folder, args, line)
    layers, history = _layers(args.layers, config.num_layers), _history(args, line)
    sides = _sides(args, line, config, history)
    first, second = (side.record_path(config) for side in sides)
    if fault is not None:
        faults.check(
            fault,
            config,
            is_fused=fault.operation in second.fused,
            num_rows=second.rows_of_a_call(_window_len(args, line)),
            depth=None if args.tree is None else len(trees.columns(args.tree)) - 1,
        )
        if fault.layer is not None and fault.layer not in layers:
            raise ValueError(
                f"--layers {args.layers} leaves out the layer of --inject {args.inject}"
            )
    prefill = args.prefill or (None if line is None else line.prefill)
    sizes = {"by_rows": None if prefill is None else prefill == "rows"}
    if line is not None:
        name, text = args.mismatch, line.text
    else:
        name, prompt = _prompt(args, folder, first.model, params)
        text = scenes.text_of_prompt(
            first.model,
            params,
            prompt,
            cache_length=args.cache_length,
            drafts=_drafts(args),
            page_size=first.page_size,
            **sizes,
        )
    scene = own = scenes.decoded(
        text, first.model, params, page_size=first.page_size, **sizes
    )
    if history == "own":
        starts = None if line is None else line.starts
        cast = _cast(params, config, sides[1].dtype)
        own = scenes.own(text, second, cast, starts=starts, **sizes)
    return Question(
        name=name,
        config=config,
        params=params,
        scenes=(scene, own),
        history=history,
        sides=sides,
        layers=layers,
        fault=fault,
        mismatch=line,
        tokenizer=_tokenizer(folder),
    )


def _tokenizer(folder: pathlib.Path) -> tokenizer_lib.Tokenizer | None:
    """Returns what gives tokens a text; a question of token ids can do without."""
    has_one = (pathlib.Path(folder) / "tokenizer.json").exists()
    return tokenizer_lib.load(folder) if has_one else None


def _cast(params, config, dtype: str) -> params_lib.Params:
    return params if dtype == config.dtype else params_lib.cast(params, dtype)


def _history(args, line: mismatches.Mismatch | None) -> str:
    """Returns who wrote the second run's prefix: what the flag says, or who did.

    Rows write what decoding writes.
    """
    if args.history is not None:
        return args.history
    if line is None:
        return "decode"
    is_rows = (args.verify_path or line.verify_path) in scenes.OF_ROWS
    return "decode" if is_rows else "own"


def _load(folder, args, line: mismatches.Mismatch | None):
    """Returns the model in the first side's dtype, checked against the mismatch's."""
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
    if args.dtype not in (None, line.dtype):
        params = params_lib.cast(params, args.dtype)
        config = dataclasses.replace(config, dtype=args.dtype)
    return config, params


def _drafts(args: argparse.Namespace) -> int:
    if args.gamma is None and args.tree is not None:
        return len(trees.columns(args.tree)) - 1
    return GAMMA if args.gamma is None else args.gamma


def _window_len(args, line: mismatches.Mismatch | None) -> int:
    if line is not None:
        return len(line.text.window)
    return 1 + _drafts(args)


def _prompt(args, folder, model: row_model.RowModel, params) -> tuple[str, list[int]]:
    """Returns the name and the tokens of the prompt."""
    if args.prompt is not None:
        prompt = prompt_files.Prompt(id="--prompt", text=args.prompt, category=None)
    else:
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


def _layers(text: str | None, num_layers: int) -> tuple[int, ...]:
    """Reads `0,3,5-7`."""
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


def _sides(args, line, config, history: str) -> tuple[scenes.Side, scenes.Side]:
    """Returns what flags say, then what a mismatch says, then the defaults."""

    def stated(name: str, default):
        return default if line is None else getattr(line, name)

    if args.tree is not None and history == "own":
        raise ValueError(
            "--tree with --history own: windows of a history are chains; leave out "
            "--history, as rows of trees write what decoding writes"
        )

    def window_rows(path: str, slab: int) -> int | None:
        # With `history` the window is one more of those that tile the text.
        tiles = slab if history == "own" else None
        return None if path in scenes.ONE_BY_ONE else stated("window_rows", tiles)

    impl = dispatch.resolve(args.impl or stated("impl", "auto"))
    rows = max(_window_len(args, line), skinny_gemm.MIN_ROWS)
    first = scenes.Side(
        path=args.reference_path or scenes.DECODE,
        impl=impl,
        dtype=config.dtype,
        slab=args.slab or stated("slab", row_model.slab_for(impl, rows)),
        page_size=args.page_size or stated("page_size", PAGE_SIZE),
    )
    second_impl = dispatch.resolve(args.verify_impl or impl)
    own_slab = row_model.slab_for(second_impl, first.slab)
    second = scenes.Side(
        path=args.verify_path or stated("verify_path", scenes.ROWS),
        impl=second_impl,
        dtype=args.verify_dtype or first.dtype,
        slab=args.verify_slab or own_slab,
        page_size=args.verify_page_size or first.page_size,
        tree=args.tree,
    )
    return tuple(
        dataclasses.replace(side, window_rows=window_rows(side.path, side.slab))
        for side in (first, second)
    )
