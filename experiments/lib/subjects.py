"""Subjects: the models that are measured, on both sides.

Two model folders; or presets, random weights in the shape of released models. A step
of random weights costs what a step of trained ones costs; what they generate means
nothing.
"""

import argparse
import dataclasses
import pathlib

import jax
import psutil

from experiments.lib import cli, hf, noise
from spec_jax import loading
from spec_jax.drafters import draft_model, registry
from spec_jax.model import (
    block_params,
    config as config_lib,
    eagle3_params,
    gguf_file,
    hub,
    params as params_lib,
    row_model,
)
from spec_jax.ops import dispatch, weights


EMBEDDED = "embedded"

_SMALL = config_lib.Qwen3Config(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
_LARGE = {"hidden_size": 4096, "intermediate_size": 12288, "num_layers": 36}
_LARGE |= {"num_heads": 32, "tie_word_embeddings": False}

_TENTH = {"hidden_size": 320, "intermediate_size": 896, "num_layers": 6}
_TENTH |= {"num_heads": 8, "num_kv_heads": 4}

PRESETS = {
    "qwen3-0.6b": _SMALL,
    "qwen3-1.7b": dataclasses.replace(_SMALL, hidden_size=2048, intermediate_size=6144),
    "qwen3-8b": dataclasses.replace(_SMALL, **_LARGE),
    "draft-60m": dataclasses.replace(_SMALL, **_TENTH),
}
"""Configs by the name of their preset: of released models, and of a draft that has a
tenth of the smallest one's parameters and its vocabulary."""

_GIB = 2**30


def read_config(shapes: str, *, dtype: str | None) -> config_lib.Qwen3Config:
    """The config that a preset, `EMBEDDED` or a folder names, in its dtype or another.

    Raises:
      ValueError: neither a known name nor a folder with a usable `config.json`.
    """
    if shapes in PRESETS:
        config = PRESETS[shapes]
        return dataclasses.replace(config, dtype=dtype or config.dtype)
    folder = hub.locate(shapes)
    if shapes == EMBEDDED:
        folder = loading.EMBEDDED_TARGET
    elif not folder.is_dir() and not gguf_file.is_file(folder):
        known = ", ".join([EMBEDDED, *sorted(PRESETS)])
        raise ValueError(f"--shapes {shapes}: not one of {known}, and no folder either")
    return config_lib.read(folder / "config.json", dtype=dtype)


def step_bytes(
    params: params_lib.Params | eagle3_params.Eagle3Params | block_params.BlockParams,
) -> int:
    """Bytes of weights that one step reads; of a block drafter, a pass over its block.

    An embedding that is not tied to the head is left out: a step reads a row of it.
    """
    if isinstance(params, eagle3_params.Eagle3Params):
        return params_lib.num_bytes(params.replace(embed=None, hot=None))
    if isinstance(params, block_params.BlockParams):
        markov = params.markov and params.markov.replace(embed=None)
        return params_lib.num_bytes(params.replace(embed=None, hot=None, markov=markov))
    return params_lib.num_bytes((params.layers, params.final_norm, params.head))


def check_device(device: str) -> str:
    """The platform that jax runs on, where it is the one that is asked for.

    Args:
      device: "auto", "cpu" or "gpu".

    Raises:
      ValueError: another platform, and how to get the one.
    """
    platform, kind = dispatch.backend(), jax.devices()[0].device_kind
    if device == "gpu" and platform != "gpu":
        raise ValueError(
            f"--device gpu: no GPU, JAX finds {kind} only; install the extra cuda12 or "
            "cuda13, and leave JAX_PLATFORMS unset"
        )
    if device == "cpu" and platform != "cpu":
        raise ValueError(f"--device cpu: JAX runs on {kind}; set JAX_PLATFORMS=cpu")
    return platform


def add_presets(group: argparse._ActionsContainer) -> None:
    """`--preset` and `--draft-preset`, for `load` and `check_presets`."""
    for name, what in (("--preset", "target"), ("--draft-preset", "draft")):
        words = f"a {what} of random weights in that shape, mostly a released model's"
        cli.add(group, f"{name} NAME  {words}", NAME=sorted(PRESETS))


def check_presets(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with a usage error where presets and folders do not go together."""
    if args.preset and args.target:
        parser.error("--preset brings its own weights: leave out --target and --draft")
    if args.draft_preset and not args.preset:
        parser.error("--draft-preset goes with --preset, which names the target")


def load(
    args: argparse.Namespace,
    *,
    gamma_max: int,
    slab: int,
    dtype: str | None,
    as_shapes: bool = False,
) -> loading.LanguageModel:
    """The models that `flags.add_models` and `add_presets` name."""
    sizes = {"gamma_max": gamma_max, "slab": slab, "dtype": dtype, "impl": args.impl}
    if args.preset:
        names = (args.preset, args.draft_preset)
        return preset_lm(*names, as_shapes=as_shapes, **sizes)
    is_head = args.draft is not None and registry.is_head(args.draft)
    drafter = registry.kind_of(args.draft) if is_head else "draft-model"
    return loading.load(args.target, draft=args.draft, drafter=drafter, **sizes)


def folders(args: argparse.Namespace) -> tuple[pathlib.Path, pathlib.Path]:
    """The folders of target and draft."""
    return (
        args.target or loading.EMBEDDED_TARGET,
        args.draft or loading.EMBEDDED_DRAFT,
    )


def names(args: argparse.Namespace) -> dict[str, str | None]:
    """What rows call the models."""
    if args.preset:
        return {"target": args.preset, "draft": args.draft_preset}
    return {
        "target": str(args.target or EMBEDDED),
        "draft": str(args.draft or EMBEDDED),
    }


def preset_lm(
    name: str,
    draft: str | None,
    *,
    gamma_max: int,
    slab: int,
    dtype: str | None,
    impl: str,
    as_shapes: bool = False,
) -> loading.LanguageModel:
    """Random weights, without a tokenizer; `drafter` is None if `draft` is.

    Args:
      as_shapes: no weights, but their shapes, for an `impl` that need not run here.
    """
    configs = [read_config(preset, dtype=dtype) for preset in (name, draft) if preset]
    impl = impl if as_shapes else dispatch.resolve(impl)
    slabs = [row_model.slab_for(impl, n) for n in (slab, loading.DRAFT_SLAB)]
    models = [
        row_model.RowModel(config=config, impl=impl, slab=slab)
        for config, slab in zip(configs, slabs, strict=False)
    ]
    shapes = [params_lib.shapes(config) for config in configs]
    params = shapes
    if not as_shapes:
        # Ours, and as many bytes to measure the bandwidth with; noise is drawn in
        # float32, and a few arrays of its size are alive meanwhile.
        largest = max(leaf.size for leaf in jax.tree.leaves(shapes))
        required = 2 * params_lib.num_bytes(shapes) + 4 * 4 * largest
        check_fits(f"random weights in {configs[0].dtype}", required)
        params = [
            params_lib.prepare(noise.weights(c, seed=i + 1), impl)
            for i, c in enumerate(configs)
        ]
    drafter = None
    if draft:
        drafter = draft_model.DraftModel(
            model=models[1],
            gamma_max=gamma_max,
            catch_up_rows=row_model.NATIVE_PREFILL_SLAB if impl == "native" else 0,
        )
    return loading.LanguageModel(
        target=models[0],
        params=params[0],
        drafter=drafter,
        drafter_params=params[1] if draft else None,
        tokenizer=None,
    )


def preset_hf(lm: loading.LanguageModel) -> hf.Baseline:
    """The same weights in Hugging Face's hands; arrays are not copied."""

    def described(model, params):
        matrices = params_lib.map_matrices(weights.matrix, params)
        return config_lib.to_dict(model.config), matrices

    draft = None
    if lm.drafter is not None:
        draft = described(lm.drafter.model, lm.drafter_params)
    target = described(lm.target, lm.params)
    return hf.from_arrays(target, draft, backend=jax.default_backend())


def free_bytes() -> int:
    """Memory that is left where JAX's arrays go."""
    stats = None
    if jax.default_backend() == "gpu":
        stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return psutil.virtual_memory().available


def check_fits(what: str, required: int) -> None:
    """Raises `MemoryError`, with both numbers, where that is more than is free."""
    free = free_bytes()
    if required > free:
        raise MemoryError(
            f"{what} need {required / _GIB:.2f} GiB of memory, but "
            f"{free / _GIB:.2f} GiB are free"
        )
