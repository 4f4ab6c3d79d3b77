"""Subjects: the models and prompts that latencies are measured on, on both sides.

A pair of model folders; or a preset, random weights in the shape of a released model.
A step of random weights costs what a step of trained ones costs; what they generate
means nothing.
"""

import dataclasses
import pathlib

import jax
import numpy as np
import psutil

from experiments.support import hf_baseline, model_pair, prompt_files
from spec_jax.model import (
    config as config_lib,
    load,
    params as params_lib,
    row_model,
)
from spec_jax.ops import dispatch


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
      pair: without drafter and tokenizer, if it is a preset.
      prompts: token ids by the prompt's id.
      hf: the same weights in Hugging Face's hands, if they are to be compared.
    """

    pair: model_pair.ModelPair
    prompts: dict[str, list[int]]
    hf: hf_baseline.Baseline | None


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
    hf = None
    if use_hf:
        stated = pair.target.config.dtype
        hf = hf_baseline.load(target, draft, dtype=stated, gamma=gamma_max)
    return Subject(
        pair=pair,
        prompts={prompt.id: pair.tokenizer.encode(prompt.text) for prompt in prompts},
        hf=hf,
    )


def from_preset(
    name: str,
    folder: pathlib.Path,
    *,
    slab: int,
    dtype: str | None,
    impl: str,
    use_hf: bool,
) -> Subject:
    """Random weights and a random prompt; no drafter.

    Args:
      folder: an empty one, through which Hugging Face gets the weights.

    Raises:
      MemoryError: the weights do not fit; nothing has been created.
      ValueError: a slab with more rows than `impl` has.
      NotImplementedError: an implementation that cannot run here.
    """
    config = PRESETS[name]
    config = dataclasses.replace(config, dtype=dtype or config.dtype)
    impl = dispatch.resolve(impl)
    slab = row_model.slab_for(impl, slab)
    target = row_model.RowModel(config=config, impl=impl, slab=slab)
    _check_memory(config, copies=3 if use_hf else 2)
    params = params_lib.init(jax.random.key(0), config)
    hf = None
    if use_hf:
        load.save(folder, config, params)
        hf = hf_baseline.load(folder, None, dtype=config.dtype, gamma=1)
    params = params_lib.prepare(params, impl)
    rng = np.random.default_rng(0)
    prompt = rng.integers(config.vocab_size, size=PRESET_PROMPT_TOKENS).tolist()
    return Subject(
        pair=model_pair.ModelPair(
            target=target,
            verifier=None,
            drafter=None,
            params=(params, None),
            tokenizer=None,
        ),
        prompts={"random": prompt},
        hf=hf,
    )


def _check_memory(config: config_lib.Qwen3Config, *, copies: int) -> None:
    """Refuses weights that do not fit, with both numbers.

    Args:
      copies: ours, Hugging Face's, and as many bytes to measure the bandwidth with.
    """
    shapes = params_lib.shapes(config)
    # Noise is drawn in float32, and a few arrays of its size are alive meanwhile.
    largest = max(leaf.size for leaf in jax.tree.leaves(shapes))
    required = copies * params_lib.num_bytes(shapes) + 4 * 4 * largest
    free = psutil.virtual_memory().available
    if required > free:
        raise MemoryError(
            f"random weights in {config.dtype} need {required / _GIB:.2f} GiB of "
            f"memory, but {free / _GIB:.2f} GiB are free"
        )
