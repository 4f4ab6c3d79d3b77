"""Qwen3 models as GGUF files, which llama.cpp reads: config, tokenizer, weights.

Weights keep their bits: matrices in the model's own dtype, norms widened to float32,
the only one that llama.cpp takes for them. The package `gguf` is an extra, imported
when it is needed.
"""

import importlib.util
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from spec_jax.model import (
    config as config_lib,
    families,
    gguf_tokenizer,
    load as load_lib,
    params as params_lib,
    tokenizer as tokenizer_lib,
)


INSTALL = "pip install -e '.[llama]'"

ARCHITECTURE = "qwen3"

PRE_TOKENIZERS = {gguf_tokenizer.PATTERNS[name]: name for name in ("gpt-2", "qwen2")}
"""llama.cpp's name of the way to cut a text into words: by the pattern in a
`tokenizer.json`, or GPT-2's, which `ByteLevel` has in itself."""


def check_installed() -> None:
    """Raises `ValueError` if the package is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"gguf not installed; {INSTALL} brings it")


def write(
    path: pathlib.Path,
    config: config_lib.ModelConfig,
    params: params_lib.Params,
    tokenizer: tokenizer_lib.Tokenizer | None,
) -> None:
    """Writes a model; one tensor is held at a time.

    Args:
      tokenizer: None of random weights, which know no text.

    Raises:
      ValueError: a family, a RoPE or a tokenizer that is not written, or no package.
      OSError: the file cannot be written.
    """
    check_installed()
    if not isinstance(config, config_lib.Qwen3Config) or config.scaling is not None:
        raise ValueError(
            f"{path.name}: only Qwen3 without scaled RoPE is written as GGUF"
        )
    import gguf

    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    try:
        _add_config(writer, config)
        if tokenizer is None:
            writer.add_tokenizer_model("no_vocab")
        else:
            _add_tokenizer(writer, tokenizer, config.vocab_size)
        _write_weights(writer, config, params)
    finally:
        writer.close()


def _add_config(writer: Any, config: config_lib.Qwen3Config) -> None:
    """Sizes and constants."""
    import gguf

    is_bf16 = config.dtype == "bfloat16"
    kinds = gguf.LlamaFileType
    writer.add_file_type(kinds.MOSTLY_BF16 if is_bf16 else kinds.ALL_F32)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)


def _write_weights(
    writer: Any, config: config_lib.Qwen3Config, params: params_lib.Params
) -> None:
    """Everything to the file, the weights last."""
    import gguf

    map_name = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_layers)
    tensors = load_lib.pending(params, families.of(config).tensors(config))
    dtype = {"bfloat16": "BF16", "float32": "F32"}[config.dtype]
    for tensor in tensors:
        is_norm = len(tensor.shape) == 1
        kind = gguf.GGMLQuantizationType["F32" if is_norm else dtype]
        itemsize = 4 if is_norm else tensor.dtype.itemsize
        writer.add_tensor_info(
            map_name.get_name(tensor.name, try_suffixes=(".weight",)),
            tensor.shape,
            np.dtype(np.float32),  # not looked at: `raw_dtype` says what it is
            itemsize * int(np.prod(tensor.shape)),
            raw_dtype=kind,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        array = np.ascontiguousarray(tensor.fetch())
        writer.write_tensor_data(
            array.astype(np.float32) if array.ndim == 1 else array.view(np.uint8)
        )


def _add_tokenizer(
    writer: Any, tokenizer: tokenizer_lib.Tokenizer, vocab_size: int
) -> None:
    """Tokens, their kinds, the merges in their order, stop tokens."""
    import gguf

    # A tokenizer from a GGUF file has no `tokenizer.json`, and its path is that file.
    raw = json.loads(tokenizer.backend.to_str())
    model = raw.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ValueError(f"{tokenizer.path}: no byte-level BPE, which GGUF is to have")
    if not tokenizer.stop_ids:
        raise ValueError(f"{tokenizer.path.parent}: names no stop token")
    kinds = gguf.TokenType
    # Rows of the embedding that have no token, as in Qwen3, get a name of their own.
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [kinds.UNUSED] * vocab_size
    for token, number in model["vocab"].items():
        tokens[number], types[number] = token, kinds.NORMAL
    for added in raw.get("added_tokens", ()):
        tokens[added["id"]] = added["content"]
        is_special = added.get("special")
        types[added["id"]] = kinds.CONTROL if is_special else kinds.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer(raw, tokenizer.path))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    # Pairs in newer files; no byte-level token has a space in it.
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    writer.add_token_merges(merges)
    # The first stop token is the end of a text; llama.cpp takes one more.
    first, *others = tokenizer.stop_ids
    writer.add_eos_token_id(first)
    if others:
        writer.add_eot_token_id(others[0])
    writer.add_add_bos_token(False)


def pre_tokenizer_of(tokenizer: tokenizer_lib.Tokenizer) -> str:
    """llama.cpp's name of a tokenizer's pre-tokenizer; raises as `pre_tokenizer`."""
    return pre_tokenizer(json.loads(tokenizer.backend.to_str()), tokenizer.path)


def pre_tokenizer(raw: Mapping[str, Any], path: pathlib.Path) -> str:
    """llama.cpp's name of the pre-tokenizer of a `tokenizer.json`.

    Raises:
      ValueError: one that llama.cpp has, perhaps, but that is not known here.
    """
    steps = raw.get("pre_tokenizer") or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    has_digits = steps[0].get("type") == "Digits" and steps[0].get("individual_digits")
    *splits, last = (steps[1:] if has_digits else steps) or [{}]
    is_known = last.get("type") == "ByteLevel" and not last.get("add_prefix_space")
    is_known &= bool(last.get("use_regex", True)) != bool(splits) and len(splits) <= 1
    pattern = None
    for split in splits:
        pattern = (split.get("pattern") or {}).get("Regex")
        is_known &= split.get("type") == "Split" and not split.get("invert")
        is_known &= split.get("behavior") == "Isolated"
    # NFC changes no text that is in this form already.
    normalizer = (raw.get("normalizer") or {}).get("type", "NFC")
    is_known &= pattern in PRE_TOKENIZERS and not (has_digits and splits)
    if not is_known or normalizer != "NFC":
        raise ValueError(
            f"{path}: a pre-tokenizer that is not known as GGUF: "
            f"{', '.join(PRE_TOKENIZERS.values())}"
        )
    return "smollm" if has_digits else PRE_TOKENIZERS[pattern]
