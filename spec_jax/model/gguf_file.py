"""Reads a GGUF file, llama.cpp's single file of a model, like a Hugging Face folder.

`document` makes the JSON files of such a folder from the metadata, and `find` gives the
tensors by Hugging Face's names; so all that reads folders reads these files. The extra
package `gguf` parses them and unpacks quantised blocks; it is imported where it is
needed.

A failure is a `CheckpointError` that names the file; a missing package, a `ValueError`.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from spec_jax.model import checkpoint_files as files, families, gguf_tokenizer


SUFFIX = ".gguf"
INSTALL = "pip install 'spec_jax[gguf]'"

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""The architectures that are read: llama.cpp's names are those of the families."""

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
"""The kinds of tensors that are read, by GGML's names."""

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


@dataclasses.dataclass(frozen=True, eq=False)
class Header:
    """The metadata of a file, and its tensors as they are stored."""

    path: pathlib.Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, files.Entry]


def is_file(path: pathlib.Path) -> bool:
    """Returns whether `path` is a file with the suffix of GGUF."""
    return path.suffix.lower() == SUFFIX and os.path.isfile(path)


def header(path: pathlib.Path) -> Header:
    """Returns a file's header, parsed anew if the file's time or size has changed."""
    try:
        status = path.stat()
        return _parse(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise files.CheckpointError(f"{path}: {error.strerror}") from None


# Errors of the library, and of NumPy below it, for files that are not whole.
_BROKEN = (ArithmeticError, LookupError, MemoryError, RecursionError, ValueError)


@functools.lru_cache(maxsize=2)
def _parse(path: pathlib.Path, *_: int) -> Header:
    """Reads the header of a file."""
    base: Any = _package().GGUFReader

    class Reader(base):
        """The library's, whose own `_get` stops silently where the file ends, and
        takes five times as long for each token."""

        def _get(self, offset, dtype, count=1, override_order=None):
            return np.frombuffer(self.data, dtype, int(count), offset)

    try:
        read = Reader(path)
        fields = {name: field.contents() for name, field in read.fields.items()}
        tensors = {}
        for one in read.tensors:
            stored = path, one.data.dtype, "r", one.data_offset, one.data.shape
            tensors[one.name] = files.Entry(
                name=one.name,
                path=path,
                kind=one.tensor_type.name,
                shape=tuple(one.shape[::-1].tolist()),
                dtype=one.data.dtype,
                mapped=functools.partial(np.memmap, *stored),
            )
    except _BROKEN as error:
        reason = " ".join(str(error).split())  # It may hold the name of a tensor.
        raise files.CheckpointError(
            f"{path}: not a whole GGUF file ({reason}); {files.AGAIN}"
        ) from None
    for name, tensor in tensors.items():
        if tensor.kind not in KINDS:
            raise files.CheckpointError(
                f"{path}: {name} is {tensor.kind}, and {', '.join(KINDS)} are read; "
                "take a file of another quantisation"
            )
    return Header(path, fields, tensors)


def document(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object at `path`, whose parent is a GGUF file.

    Raises:
      FileNotFoundError: no JSON file of this name is made of the metadata.
      CheckpointError: the file cannot be read, or is of a model that is not supported.
    """
    documents = _documents(header(path.parent))
    if path.name not in documents:
        raise FileNotFoundError(path)
    return documents[path.name]


@functools.lru_cache(maxsize=2)
def _documents(header: Header) -> dict[str, dict[str, Any]]:
    """Returns the contents of all JSON files, by name."""
    config = _config(header)
    words = gguf_tokenizer.documents(header.path, header.fields, config["vocab_size"])
    return {"config.json": config, **words}


def find(path: pathlib.Path) -> dict[str, files.Entry]:
    """Returns the tensors of a file by Hugging Face's names. Reads no values.

    Raises:
      CheckpointError: as `document`.
    """
    found = header(path)
    config = _documents(found)["config.json"]
    is_llama = found.fields["general.architecture"] == "llama"
    names = _names(found, config)
    entries = {}
    for name, tensor in found.tensors.items():
        if name == _FREQUENCIES:  # It is in the config.
            continue
        stem, *suffix = name.rpartition(".")
        renamed = "".join([names.get(stem, stem), *suffix])
        is_turned = is_llama and name.endswith((".attn_q.weight", ".attn_k.weight"))
        rows = config["head_dim"] if is_turned else 1
        entries[renamed] = _entry(dataclasses.replace(tensor, name=renamed), rows)
    return entries


def _names(header: Header, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns Hugging Face's names of modules by those of llama.cpp."""
    gguf = _package()
    number = gguf.MODEL_ARCH[config["model_type"].upper()]
    blocks = {name.split(".")[1] for name in header.tensors if name[:4] == "blk."}
    table = gguf.get_tensor_name_map(number, len(blocks))
    patterns = " ".join(families.named(config).names.values()).split()
    numbered = ((one, at) for one in patterns for at in range(max(1, len(blocks))))
    ours = {pattern.format(at).removesuffix(".bias") for pattern, at in numbered}
    return {table.get_name(name): name for name in ours}


def _entry(tensor: files.Entry, rows: int) -> files.Entry:
    """Returns the entry of a tensor's values.

    Args:
      rows: of a head, where the pairs that RoPE turns are side by side, as llama.cpp
        has Llama's; otherwise 1.
    """
    shape, kind = tensor.shape, tensor.kind
    is_packed = kind not in files.DTYPES
    if (rows > 1 or is_packed) and len(shape) != 2 or rows > 1 and shape[0] % rows:
        raise files.CheckpointError(
            f"{tensor.path}: {tensor.name} is {kind} of shape {list(shape)}: give "
            f"matrices whose rows are a multiple of {rows}"
        )

    def mapped() -> np.ndarray:
        raw = tensor.mapped()
        if rows > 1:  # [heads, pairs, first and second] -> [heads, halves, pairs]
            raw = raw.reshape(-1, rows // 2, 2, raw.shape[-1]).swapaxes(1, 2)
        return raw if is_packed else raw.view(files.DTYPES[kind])

    values = dataclasses.replace(
        tensor,
        dtype=files.DTYPES.get(kind, np.dtype(np.float32)),
        mapped=mapped,
        unpack=functools.partial(_unpack, kind=kind) if is_packed else None,
    )
    if kind not in _BLOCKS:
        return values
    form, view = _BLOCKS[kind]
    blocks = shape[0], shape[1] // 32
    stored = dataclasses.replace(
        values, shape=blocks, dtype=files.STORED[form], unpack=view
    )
    return dataclasses.replace(values, stored=stored)


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


def _unpack(raw: np.ndarray, *, kind: str) -> np.ndarray:
    """Returns the float32 values of rows of blocks."""
    gguf = _package()
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])


def _package() -> Any:
    """Imports and returns the package `gguf`; raises `ValueError` if it is missing."""
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise ValueError(
            f"gguf is not installed, which reads llama.cpp's files; {INSTALL}"
        ) from None
    return gguf


def _config(header: Header) -> dict[str, Any]:
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
    header: Header, own: Mapping[str, Any], head_dim: int
) -> dict[str, Any] | None:
    """Returns the `rope_scaling` of the metadata, or of Llama 3.1's factors."""
    if _FREQUENCIES in header.tensors:
        return _llama3(header, head_dim, own.get("rope.freq_base", 10_000.0))
    found = {there: own[key] for key, there in _SCALING.items() if key in own}
    return None if found.get("rope_type", "none") == "none" else found


def _llama3(header: Header, head_dim: int, theta: float) -> dict[str, Any]:
    """Returns the scaling whose factors a tensor holds, with Llama 3.1's bounds.

    Raises:
      CheckpointError: other factors.
    """
    tensor = header.tensors[_FREQUENCIES]
    if tensor.kind == "F32" and tensor.shape == (head_dim // 2,):
        held = tensor.mapped()
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
