"""Subjects: the models that are measured, target and draft.

They come from model folders, or from presets: random weights in the shape of released
models. A step of random weights costs as much as a step of trained ones; the text that
they generate means nothing.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import psutil

from experiments.lib import models, noise
from spec_jax import loading
from spec_jax.drafters import block, draft_model, eagle3, tree_shapes
from spec_jax.model import (
    block_params,
    config as config_lib,
    eagle3_params,
    head_params,
    params as params_lib,
    row_model,
)
from spec_jax.native import blocks
from spec_jax.ops import dispatch, weights as weights_lib


_FILE = pathlib.Path(__file__).parents[1] / "presets.json"
PRESETS: dict[str, config_lib.ModelConfig] = {
    name: config_lib.from_dict(raw)
    for name, raw in json.loads(_FILE.read_text()).items()
}
"""Configs by the name of their preset: of released models, of a draft that has a tenth
of the smallest one's parameters and its vocabulary, and of one for rehearsals."""

HEADS = ("dspark", "eagle3", "dflash")
HEAD_DRAFTS = 7
"""Drafts on a path of EAGLE-3, and of all trees: as many as DSpark's block has."""


def head_config(
    kind: str, target: config_lib.Qwen3Config, **changes: Any
) -> eagle3_params.Eagle3Config | block_params.BlockConfig:
    """Returns the config of a published head, at the shapes of a target.

    Heads of Qwen3-8B: DeepSpec's DSpark of five layers and a block of 7, z-lab's DFlash
    with a block of 16, EAGLE-3 with 32,000 draft tokens.

    Args:
      kind: one of `HEADS`.
      changes: values of its fields, and `depth`, its number of layers.
    """
    depth = changes.pop("depth", 1 if kind == "eagle3" else 5)
    layer = dataclasses.replace(target, num_layers=depth, tie_word_embeddings=False)
    if kind == "eagle3":
        made = eagle3_params.Eagle3Config(
            layer=layer,
            draft_vocab_size=min(32_000, target.vocab_size // 2),
            target_hidden_size=target.hidden_size,
            taps=eagle3_params.default_taps(target.num_layers),
        )
        return dataclasses.replace(made, **changes).validate()
    # The layers whose outputs are read are 1 to L - 3, evenly.
    taps = (2 + i * (target.num_layers - 4) // 4 for i in range(5))
    is_dspark = kind == "dspark"
    made = block_params.BlockConfig(
        layer=layer,
        draft_vocab_size=target.vocab_size,
        taps=changes.pop("taps", None) or tuple(taps),
        block_size=7 if is_dspark else 16,
        slots="anchor-first" if is_dspark else "fill-in",
        mask_token_id=min(151_669, target.vocab_size - 1),
        head="vanilla" if is_dspark else "none",
        markov_rank=256 if is_dspark else 0,
        has_confidence=is_dspark,
        confidence_with_markov=is_dspark,
    )
    return dataclasses.replace(made, **changes).validate()


def head_drafter(
    config: eagle3_params.Eagle3Config | block_params.BlockConfig,
    target: row_model.RowModel,
    *,
    tree_rows: int | None = None,
) -> eagle3.Eagle3 | block.BlockDrafter:
    """Returns the drafter of the head of that config, for this target.

    Args:
      tree_rows: rows of its trees, see `comb`; None: it drafts chains, of all drafts of
        a block, or of `HEAD_DRAFTS`.
    """
    is_eagle3 = isinstance(config, eagle3_params.Eagle3Config)
    most = HEAD_DRAFTS if is_eagle3 else config.num_drafts
    kind = eagle3.Eagle3 if is_eagle3 else block.BlockDrafter
    drafter = kind.of_head(config, target, gamma_max=most)
    return drafter.for_tree(comb(tree_rows)) if tree_rows else drafter


def comb(rows: int) -> tree_shapes.FixedTree:
    """Returns a tree of `rows` rows, the root included: a path of `HEAD_DRAFTS` first
    children, then siblings of each of them, in turn."""
    path = [(0,) * depth for depth in range(HEAD_DRAFTS)]
    others = ((*node, rank) for rank in range(1, rows) for node in path)
    nodes = [*path[1:], (0,) * HEAD_DRAFTS, *others][: rows - 1]
    return tree_shapes.FixedTree(paths=tuple(nodes))


MOST_ROWS = 64
"""Most rows of a tree: so many share a read of the weights."""

_GIB = 2**30


def config_of(preset: str, **forms: str | None) -> config_lib.ModelConfig:
    """Returns a preset's config, with a dtype and form of weights in place of its own
    where these are given."""
    given = {name: form for name, form in forms.items() if form is not None}
    return dataclasses.replace(PRESETS[preset], **given)


def step_bytes(
    params: params_lib.Params | eagle3_params.Eagle3Params | block_params.BlockParams,
) -> int:
    """Returns the bytes of weights that a step, or a pass over a block, reads.

    An embedding that is not tied to the head is left out: a step reads a row of it.
    """
    if isinstance(params, eagle3_params.Eagle3Params):
        return params_lib.num_bytes(params.replace(embed=None, hot=None))
    if isinstance(params, block_params.BlockParams):
        markov = params.markov and params.markov.replace(embed=None)
        return params_lib.num_bytes(params.replace(embed=None, hot=None, markov=markov))
    return params_lib.num_bytes((params.layers, params.final_norm, params.head))


def check_device(device: str) -> str:
    """Returns the platform that jax runs on, if it is the one that `--device` names.

    Raises:
      ValueError: another platform; the message says how to get the one asked for.
    """
    platform, kind = dispatch.backend(), jax.devices()[0].device_kind
    if device not in ("auto", platform):
        raise ValueError(
            f"--device {device}: JAX runs on {kind}; a GPU needs the extra cuda12 or "
            "cuda13 and JAX_PLATFORMS unset, a CPU beside one JAX_PLATFORMS=cpu"
        )
    return platform


def load(
    args: argparse.Namespace, *, gamma_max: int, slab: int
) -> loading.LanguageModel:
    """Returns the models that flags name; `drafter` is None where a target is named
    alone. With `--dry-run` presets are shapes, for an `impl` that need not run here:
    Triton's for a GPU, which this machine may lack."""
    device = check_device("auto" if args.dry_run else args.device)
    if args.dry_run and args.impl == "auto" and "gpu" in (device, args.device):
        args.impl = "triton"
    if args.preset:
        return _preset(args, gamma_max=gamma_max, slab=slab)
    is_alone = args.target is not None and args.draft is None
    named = "ngram" if is_alone else loading.default_drafter(args.target, args.draft)
    lm = models.load(args, drafter=named, gamma_max=gamma_max, slab=slab)
    return dataclasses.replace(lm, drafter=None) if is_alone else lm


def names(args: argparse.Namespace) -> dict[str, str | None]:
    """Returns the names in rows of presets; none without them."""
    if not args.preset:
        return {}
    head = args.head
    if head and args.head_tree:
        head = f"{head}, trees of {args.head_tree} rows"
    target = f"{args.preset} {args.weights or ''}".strip()
    return {"target": target, "draft": args.draft_preset or head}


def _preset(
    args: argparse.Namespace, *, gamma_max: int, slab: int
) -> loading.LanguageModel:
    """Returns random weights, without a tokenizer; `drafter` is None without draft and
    head. A head drafts as many tokens as the published ones."""
    head, form, as_shapes = args.head, args.draft_weights or "dense", args.dry_run
    if as_shapes and head and form != "dense":
        raise ValueError(f"--draft-weights {form}: not with --head and --dry-run")
    impl = args.impl if as_shapes else dispatch.resolve(args.impl)
    make = params_lib.prepared_shapes if as_shapes else random_weights

    def model(preset: str, weights: str | None, rows: int):
        config = config_of(preset, dtype=args.dtype, weights=weights)
        size = row_model.slab_for(impl, rows)
        made = row_model.RowModel(config=config, impl=impl, slab=size)
        return made, make(config, impl=impl)

    target, params = model(args.preset, args.weights, slab)
    drafter = draft_params = None
    if head:
        config = head_config(head, target.config)
        drafter = head_drafter(config, target, tree_rows=args.head_tree)
        draft_params = _head_weights(config, params, impl, form, as_shapes)
    elif args.draft_preset:
        own = args.draft_preset, args.draft_weights
        draft, draft_params = model(*own, loading.DRAFT_SLAB)
        catch_up = row_model.NATIVE_PREFILL_SLAB if impl == "native" else 0
        drafter = draft_model.DraftModel(
            model=draft, gamma_max=gamma_max, catch_up_rows=catch_up
        )
    return loading.LanguageModel(
        **{"target": target, "params": params, "tokenizer": None},
        **{"drafter": drafter, "drafter_params": draft_params},
    )


def random_weights(config: config_lib.ModelConfig, *, impl: str) -> params_lib.Params:
    """Returns random weights, seeded by the model's width; those of a few models are
    kept, as long as memory lasts."""
    try:
        return _weights(config, impl=impl)
    except MemoryError:
        _weights.cache_clear()
        return _weights(config, impl=impl)


@functools.lru_cache(maxsize=4)
def _weights(config: config_lib.ModelConfig, *, impl: str) -> params_lib.Params:
    shapes = params_lib.shapes(config)
    _check_noise(shapes, config.dtype)
    made = noise.of_shapes(shapes, seed=config.hidden_size)
    if config.weights == "q8_0":
        one = lambda leaf: _rounded(leaf) if leaf.ndim == 2 else leaf
        made = jax.tree.map(one, made)
    return params_lib.prepare(params_lib.to_bytes(made, config.weights), impl)


@jax.jit
def _rounded(w: jax.Array) -> weights_lib.Blocks:
    """Rounds a matrix of noise on the device; its ties may differ from llama.cpp's."""
    values, scales = blocks.quantise_rows(w)
    return weights_lib.Blocks(
        values=values.astype(jnp.int8),
        scales=scales.astype(jnp.float16),
        shape=w.shape,
        of=str(w.dtype),
    )


def _head_weights(
    config: Any, target: params_lib.Params, impl: str, form: str, as_shapes: bool
):
    """Returns random weights of a head, with the target's embedding and, if it has all
    of its tokens, its output matrix; or their shapes."""
    is_eagle3 = isinstance(config, eagle3_params.Eagle3Config)
    shapes = config.shapes()
    if as_shapes:
        return shapes
    shared = {"embed": target.embed, "hot": None}
    if is_eagle3:
        shared["hot"] = jnp.arange(config.draft_vocab_size, dtype=jnp.int32)
    else:
        shared["lm_head"] = target.head
    own = shapes.replace(**dict.fromkeys(shared))
    _check_noise(own, config.layer.dtype)
    made = head_params.prepare(noise.of_shapes(own, seed=1), impl, form=form)
    return made.replace(**shared)


def _check_noise(shapes: Any, dtype: str) -> None:
    """Raises `MemoryError`, with both numbers, unless weights of these shapes fit twice
    into the memory of JAX's arrays.

    The bandwidth is measured with as many bytes more; noise is drawn in float32, and a
    few arrays of its size are alive meanwhile.
    """
    largest = max(leaf.size for leaf in jax.tree.leaves(shapes))
    required = 2 * params_lib.num_bytes(shapes) + 4 * 4 * largest
    is_gpu = jax.default_backend() == "gpu"
    stats = (is_gpu and jax.devices()[0].memory_stats()) or {}
    free = psutil.virtual_memory().available
    if "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if required > free:
        raise MemoryError(
            f"random weights in {dtype} need {required / _GIB:.2f} GiB of memory, but "
            f"{free / _GIB:.2f} GiB are free"
        )
