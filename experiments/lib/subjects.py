"""Subjects: the models and prompts that are measured, on both sides.

Two model folders; or presets, random weights in the shape of released models. A step
of random weights costs what a step of trained ones costs; what they generate means
nothing.
"""

import dataclasses
import pathlib

import jax
import numpy as np
import psutil

from experiments.lib import hf, noise
from experiments.support import model_pair, prompt_files
from spec_jax.drafters import draft_model
from spec_jax.model import config as config_lib, params as params_lib, row_model
from spec_jax.ops import dispatch


EMBEDDED = "embedded"
PRESET_PROMPT_TOKENS = 32

PRESETS = {
    "qwen3-0.6b": config_lib.Qwen3Config(
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
    ),
    "qwen3-8b": config_lib.Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=False,
        dtype="bfloat16",
    ),
}
"""Configs of released models by the name of their preset."""

_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured.

    Attributes:
      pair: without tokenizer, if it is a preset; without drafter, if that has none.
      prompts: token ids by the prompt's id.
      hf: the same weights in Hugging Face's hands, if they are to be compared.
    """

    pair: model_pair.ModelPair
    prompts: dict[str, list[int]]
    hf: hf.Baseline | None


def read_config(shapes: str, *, dtype: str | None) -> config_lib.Qwen3Config:
    """The config that a preset, `EMBEDDED` or a folder names, in its dtype or another.

    Raises:
      ValueError: neither a known name nor a folder with a usable `config.json`.
    """
    if shapes in PRESETS:
        config = PRESETS[shapes]
        return dataclasses.replace(config, dtype=dtype or config.dtype)
    folder = pathlib.Path(shapes)
    if shapes == EMBEDDED:
        folder = model_pair.EMBEDDED_TARGET
    elif not folder.is_dir():
        known = ", ".join([EMBEDDED, *sorted(PRESETS)])
        raise ValueError(f"--shapes {shapes}: not one of {known}, and no folder either")
    return config_lib.read(folder / "config.json", dtype=dtype)


def step_bytes(params: params_lib.Params) -> int:
    """Bytes of weights that one step reads.

    An embedding that is not tied to the head is left out: a step reads a row of it.
    """
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


def from_folders(
    target: pathlib.Path | None,
    draft: pathlib.Path | None,
    *,
    prompt_source: str,
    gamma_max: int,
    slab: int,
    dtype: str | None,
    impl: str,
    use_hf: bool,
) -> Subject:
    """Two model folders (None: the embedded pair), prompts without a chat template.

    Raises:
      ValueError: folders or prompts that cannot be used.
      NotImplementedError: an implementation that cannot run here.
    """
    prompts = prompt_files.parse(prompt_source, default_file=prompt_files.BUNDLED)
    target = target or model_pair.EMBEDDED_TARGET
    draft = draft or model_pair.EMBEDDED_DRAFT
    pair = model_pair.load_pair(
        target, draft, gamma_max=gamma_max, slab=slab, dtype=dtype, impl=impl
    )
    baseline = None
    if use_hf:
        stated, backend = pair.target.config.dtype, jax.default_backend()
        baseline = hf.load(target, draft, dtype=stated, backend=backend)
    return Subject(
        pair=pair,
        prompts={prompt.id: pair.tokenizer.encode(prompt.text) for prompt in prompts},
        hf=baseline,
    )


def from_presets(
    name: str,
    draft: str | None,
    *,
    gamma_max: int,
    slab: int,
    dtype: str | None,
    impl: str,
    use_hf: bool,
    as_shapes: bool = False,
) -> Subject:
    """Random weights and a random prompt; a drafter if `draft` names a preset.

    Args:
      as_shapes: no weights, but their shapes, for an `impl` that need not run here.

    Raises:
      MemoryError: the weights do not fit; nothing has been created.
      ValueError: a slab with more rows than `impl` has.
      NotImplementedError: an implementation that cannot run here.
    """
    configs = [
        dataclasses.replace(PRESETS[preset], dtype=dtype or PRESETS[preset].dtype)
        for preset in (name, draft)
        if preset
    ]
    impl = impl if as_shapes else dispatch.resolve(impl)
    slabs = [row_model.slab_for(impl, rows) for rows in (slab, model_pair.DRAFT_SLAB)]
    target, *drafts = (
        row_model.RowModel(config=config, impl=impl, slab=slab)
        for config, slab in zip(configs, slabs, strict=False)
    )
    if as_shapes:
        params = [params_lib.shapes(config) for config in configs]
    else:
        # Ours, and as many bytes to measure the bandwidth with.
        _check_memory(configs, copies=2)
        params = [noise.weights(c, seed=i + 1) for i, c in enumerate(configs)]
    baseline = None
    if use_hf:
        models = [
            (config_lib.to_dict(config), each)
            for config, each in zip(configs, params, strict=True)
        ]
        baseline = hf.from_arrays(
            models[0],
            models[1] if draft else None,
            backend=jax.default_backend(),
        )
    drafter = None
    if drafts:
        drafter = draft_model.DraftModel(model=drafts[0], gamma_max=gamma_max)
    rng = np.random.default_rng(0)
    prompt = rng.integers(configs[0].vocab_size, size=PRESET_PROMPT_TOKENS).tolist()
    return Subject(
        pair=model_pair.ModelPair(
            target=target,
            verifier=target if drafts else None,
            drafter=drafter,
            params=(params[0], params[1] if drafts else None),
            tokenizer=None,
        ),
        prompts={"random": prompt},
        hf=baseline,
    )


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


def _check_memory(configs: list[config_lib.Qwen3Config], *, copies: int) -> None:
    """Refuses weights that do not fit, with both numbers."""
    shapes = [params_lib.shapes(config) for config in configs]
    # Noise is drawn in float32, and a few arrays of its size are alive meanwhile.
    largest = max(leaf.size for leaf in jax.tree.leaves(shapes))
    required = copies * params_lib.num_bytes(shapes) + 4 * 4 * largest
    check_fits(f"random weights in {configs[0].dtype}", required)
