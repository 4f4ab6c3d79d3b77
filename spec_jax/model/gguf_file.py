"""Reads a GGUF file, llama.cpp's single file of a model, like a Hugging Face folder.

`document` makes the JSON files of such a folder from the metadata, and `find` gives the
tensors by Hugging Face's names; so all that reads folders reads these files. The extra
package `gguf` unpacks quantised blocks; it is imported where it is needed.

A failure is a `CheckpointError` that names the file; a missing package, a `ValueError`.
"""

import functools
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from spec_jax.model import (
    checkpoint_files as files,
    families,
    gguf_header,
    gguf_tokenizer,
)


SUFFIX = ".gguf"
INSTALL = "pip install 'spec_jax[gguf]'"

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""The architectures that are read: llama.cpp's names are those of the families."""

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_FREQUENCIES = "rope_freqs.weight"

# Metadata after the architecture's name, and the keys of `config.json` made of it.
_REQUIRED = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_OPTIONAL = {
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.finetuned",
    "vocab_size",
}
_NOTHING = {"expert_count": 0, "expert_used_count": 0}
"""Metadata that is allowed with this value only."""


def is_file(path: pathlib.Path) -> bool:
    """Returns whether `path` is a file with the suffix of GGUF."""
    return path.suffix.lower() == SUFFIX and os.path.isfile(path)


def document(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object at `path`, whose parent is a GGUF file.

    Raises:
      FileNotFoundError: no JSON file of this name is made of the metadata.
      CheckpointError: the file cannot be read, or is of a model that is not supported.
    """
    documents = _documents(gguf_header.read(path.parent))
    if path.name not in documents:
        raise FileNotFoundError(path)
    return documents[path.name]


@functools.lru_cache(maxsize=2)
def _documents(header: gguf_header.Header) -> dict[str, dict[str, Any]]:
    """Returns the contents of all JSON files, by name."""
    config = _config(header)
    words = gguf_tokenizer.documents(header.path, header.fields, config["vocab_size"])
    return {"config.json": config, **words}


def find(path: pathlib.Path) -> dict[str, files.Entry]:
    """Returns the tensors of a file by Hugging Face's names. Reads no values.

    Raises:
      CheckpointError: as `document`.
    """
    header = gguf_header.read(path)
    head_dim = _documents(header)["config.json"]["head_dim"]
    is_llama = header.fields["general.architecture"] == "llama"
    entries = {}
    for name, tensor in header.tensors.items():
        if name == _FREQUENCIES:  # It is in the config.
            continue
        renamed = _renamed(name)
        is_turned = name.endswith((".attn_q.weight", ".attn_k.weight"))
        rows = head_dim if is_llama and is_turned else 1
        entries[renamed] = _entry(path, renamed, tensor, rows)
    return entries


def _entry(
    path: pathlib.Path, name: str, tensor: gguf_header.Tensor, rows: int
) -> files.Entry:
    """Returns a tensor's entry: where its values are and how to unpack them.

    Args:
      rows: number of rows that are unpacked together: all of a head where the pairs
        that RoPE turns are side by side, as llama.cpp has Llama's; otherwise 1.
    """
    where: dict[str, Any] = {
        "name": name,
        "path": path,
        "shape": tensor.shape,
        "offset": tensor.offset,
        "kind": tensor.kind,
    }
    plain = files.DTYPES.get(tensor.kind)
    if plain is not None and rows == 1:
        return files.Entry(dtype=plain, **where)
    if len(tensor.shape) != 2 or tensor.shape[0] % rows or rows > 1 and rows % 2:
        raise files.CheckpointError(
            f"{path}: {name} is {tensor.kind} of shape {list(tensor.shape)}: give "
            f"matrices whose rows are a multiple of {rows}"
        )
    values, size = tensor.block
    columns = tensor.shape[1]
    row_bytes = columns // values * size
    unpack = functools.partial(
        _unpack, kind=tensor.kind, row_bytes=row_bytes, columns=columns, rows=rows
    )
    stored = None
    if tensor.kind in _BLOCKS:
        form, view = _BLOCKS[tensor.kind]
        turn = functools.partial(_turn, columns=columns // values, rows=rows)
        stored = files.Entry(
            dtype=files.STORED[form],
            unit_values=rows * columns // values,
            unit_bytes=rows * row_bytes,
            unpack=lambda raw: turn(view(raw)),
            **where | {"shape": (tensor.shape[0], columns // values)},
        )
    return files.Entry(
        dtype=np.dtype(np.float32),
        unit_values=rows * columns,
        unit_bytes=rows * row_bytes,
        unpack=unpack,
        stored=stored,
        **where,
    )


def _with_minimum(raw: np.ndarray) -> np.ndarray:
    """Returns blocks of Q4_0, `d * (q - 8)`, as blocks of Q4_1, `d * q + m`; exact if
    `-8 d` is finite."""
    read = raw.view(np.dtype([("scale", "<f2"), ("values", "u1", (16,))]))
    made = np.empty(read.shape, files.STORED["q4_1"])
    made["values"], made["scale"] = read["values"], read["scale"]
    with np.errstate(over="ignore"):
        made["minimum"] = np.float16(-8) * read["scale"]
    return made


# GGUF's kinds that a form of ours holds: the form, and its blocks from the bytes.
_BLOCKS: Mapping[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "Q8_0": ("q8_0", lambda raw: raw.view(files.STORED["q8_0"])),
    "Q4_1": ("q4_1", lambda raw: raw.view(files.STORED["q4_1"])),
    "Q4_0": ("q4_1", _with_minimum),
}


def _renamed(name: str) -> str:
    """Returns Hugging Face's name of a tensor."""
    match = _OF_LAYER.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _NAMES.get(name, name)


def _turn(values: np.ndarray, *, columns: int, rows: int) -> np.ndarray:
    """Returns flat values, heads of `rows` rows turned to Hugging Face's order."""
    if rows > 1:  # [heads, pairs, first and second] -> [heads, halves, pairs]
        values = values.reshape(-1, rows // 2, 2, columns).swapaxes(1, 2)
    return values.reshape(-1)


def _unpack(
    raw: np.ndarray, *, kind: str, row_bytes: int, columns: int, rows: int
) -> np.ndarray:
    """Returns the flat float32 values of whole units of `rows` rows."""
    packed = raw.reshape(-1, row_bytes)
    if kind in files.DTYPES:
        values = packed.view(files.DTYPES[kind]).astype(np.float32)
    else:
        gguf = _package()
        values = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
    return _turn(values, columns=columns, rows=rows)


def _package() -> Any:
    """Imports and returns the package `gguf`; raises `ValueError` if it is missing."""
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise ValueError(
            f"gguf is not installed, which unpacks quantised weights; {INSTALL}"
        ) from None
    return gguf


def _config(header: gguf_header.Header) -> dict[str, Any]:
    """Returns the contents of `config.json` that the metadata states."""
    path, fields = header.path, header.fields
    name = fields.get("general.architecture")
    if name not in ARCHITECTURES:
        raise files.CheckpointError(
            f"{path}: general.architecture={name!r}, and {', '.join(ARCHITECTURES)} "
            "are read; take a model of one of them"
        )
    own = {
        key.removeprefix(f"{name}."): value
        for key, value in fields.items()
        if key.startswith(f"{name}.")
    }
    missing = [key for key in _REQUIRED if key not in own]
    if missing or "token_embd.weight" not in header.tensors:
        what = f"{name}.{missing[0]}" if missing else "tensor token_embd.weight"
        raise files.CheckpointError(f"{path}: has no {what}; {files.AGAIN}")
    for key in own:
        is_known = key in _OPTIONAL or key in _REQUIRED or key in _SCALING
        if not is_known and not (key in _NOTHING and own[key] == _NOTHING[key]):
            raise files.CheckpointError(
                f"{path}: {name}.{key}={str(own[key])[:40]} may change the model, and "
                "is not known here; take a file without it"
            )
    raw = {there: own[key] for key, there in _REQUIRED.items()}
    heads = raw["num_attention_heads"]
    if any(type(raw[key]) is not int or raw[key] < 1 for key in list(raw)[:-1]):
        raise files.CheckpointError(
            f"{path}: a size in {name}.* is no whole number from 1 on; {files.AGAIN}"
        )
    head_dim = own.get("attention.key_length", raw["hidden_size"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise files.CheckpointError(
                f"{path}: {name}.{key}={own[key]} beside heads of {head_dim}: models "
                "with another size there are not supported"
            )
    held = {tensor.kind for tensor in header.tensors.values()}
    return raw | {
        "architectures": [families.MODULES[name][0]],
        "model_type": name,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "head_dim": head_dim,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "rope_theta": own.get("rope.freq_base", 10_000.0),
        "rope_scaling": _scaling(header, own, head_dim),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": "float32" if held == {"F32"} else "bfloat16",
    }


def _scaling(
    header: gguf_header.Header, own: Mapping[str, Any], head_dim: int
) -> dict[str, Any] | None:
    """Returns the `rope_scaling` of the metadata, or of Llama 3.1's factors."""
    if _FREQUENCIES in header.tensors:
        return _llama3(header, head_dim, own.get("rope.freq_base", 10_000.0))
    found = {there: own[key] for key, there in _SCALING.items() if key in own}
    return None if found.get("rope_type", "none") == "none" else found


def _llama3(header: gguf_header.Header, head_dim: int, theta: float) -> dict[str, Any]:
    """Returns the scaling whose factors a tensor holds, with Llama 3.1's bounds.

    Raises:
      CheckpointError: other factors.
    """
    tensor = header.tensors[_FREQUENCIES]
    if tensor.kind == "F32" and tensor.shape == (head_dim // 2,):
        held = np.fromfile(
            header.path, "<f4", count=head_dim // 2, offset=tensor.offset
        )
        factor, low, high, original = float(held.max()), 1.0, 4.0, 8192
        base = theta ** -(np.arange(0, head_dim, 2) / head_dim)
        turns = original * base / (2 * np.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        if np.allclose(held, 1 / ((1 - kept) / factor + kept), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise files.CheckpointError(
        f"{header.path}: {_FREQUENCIES} is not the scaling of Llama 3.1; take a model "
        "with that one, or with none"
    )
