"""Makes Hugging Face's JSON files of the tokenizer in a GGUF file's metadata.

The tokenizer is byte-level BPE, which llama.cpp calls "gpt2". The name of llama.cpp's
pre-tokenizer says how a text is cut into words.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from spec_jax.model import checkpoint_files as files


_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_CUT = {"type": "Split", "behavior": "Isolated", "invert": False}
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

PATTERNS: Mapping[str, str | None] = {
    "deepseek-r1-qwen": _CONTRACTIONS + r"\p{N}" + _REST,
    "gpt-2": None,
    "llama-bpe": _CONTRACTIONS + r"\p{N}{1,3}" + _REST,
    "qwen2": _CONTRACTIONS + r"\p{N}" + _REST,
    "smollm": None,
}
"""The pattern that cuts a text, by llama.cpp's name; None: GPT-2's, which `ByteLevel`
has built in. "smollm" separates each digit first."""

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}
_STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")


def documents(
    path: pathlib.Path, fields: Mapping[str, Any], num_entries: int
) -> dict[str, dict[str, Any]]:
    """Returns `tokenizer.json` and the files beside it, by name.

    Args:
      path: of the GGUF file, for messages.
      fields: its metadata.
      num_entries: rows of the model's embedding.

    Raises:
      CheckpointError: another kind of tokenizer, or one that contradicts itself.
    """
    own = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in fields.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind, pre = own.get("model"), own.get("pre", "")
    if kind != "gpt2" or pre not in [*PATTERNS]:
        raise files.CheckpointError(
            f"{path}: a tokenizer of kind {kind!r} with pre-tokenizer {pre!r}, and "
            f"'gpt2' with one of {', '.join(PATTERNS)} is read; take another model"
        )
    vocab, types = _vocabulary(path, own, num_entries)
    named = {name: _token(path, own, key) for name, key in _NAMED.items() if key in own}
    stops = [own[key] for key in _STOPS if key in own and _token(path, own, key)]
    bos = None
    # The default is llama.cpp's.
    if own.get("add_bos_token", pre == "llama-bpe") and "bos_token" in named:
        bos = named["bos_token"], own["bos_token_id"]
    settings = dict(named)
    if "tokenizer.chat_template" in fields:
        settings["chat_template"] = fields["tokenizer.chat_template"]
    return {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [
                _added(number, token, types[number])
                for token, number in vocab.items()
                if types[number] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
            ],
            "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
            "pre_tokenizer": _pre_tokenizer(pre),
            "post_processor": None if bos is None else _beginning(*bos),
            "decoder": _GPT2 | {"use_regex": True},
            "model": {
                "type": "BPE",
                "ignore_merges": pre == "llama-bpe",
                "vocab": vocab,
                "merges": own["merges"],
            },
        },
        "tokenizer_config.json": settings,
        "generation_config.json": {"eos_token_id": stops or None},
    }


def _vocabulary(
    path: pathlib.Path, own: Mapping[str, Any], num_entries: int
) -> tuple[dict[str, int], list[int]]:
    """Returns the ids of all tokens but unused ones, and the types of all ids."""
    tokens: list[str] = own.get("tokens", [])
    merges = own.get("merges")
    types = own.get("token_type", [1] * len(tokens) if _are_texts(tokens) else [])
    if not _are_texts(tokens) or not _are_texts(merges) or len(types) != len(tokens):
        raise files.CheckpointError(
            f"{path}: tokenizer.ggml has no tokens, types and merges that fit each "
            f"other; {files.AGAIN}"
        )
    if len(tokens) > num_entries:
        raise files.CheckpointError(
            f"{path}: {len(tokens)} tokens, and the embedding has {num_entries} rows; "
            f"{files.AGAIN}"
        )
    # Unused rows of the embedding have names that are not tokens.
    vocab = {t: i for i, t in enumerate(tokens) if types[i] != _UNUSED}
    if len(vocab) != sum(kind != _UNUSED for kind in types):
        raise files.CheckpointError(f"{path}: has a token twice; {files.AGAIN}")
    return vocab, types


def _are_texts(values: Any) -> bool:
    """Returns whether it is a list of texts. Arrays have one type: one is checked."""
    return isinstance(values, list) and all(isinstance(one, str) for one in values[:1])


def _token(path: pathlib.Path, own: Mapping[str, Any], key: str) -> str:
    """Returns the token whose id is stated at `key`."""
    number = own[key]
    if type(number) is not int or not 0 <= number < len(own["tokens"]):
        raise files.CheckpointError(
            f"{path}: tokenizer.ggml.{key}={number!r} of {len(own['tokens'])} tokens; "
            f"{files.AGAIN}"
        )
    return own["tokens"][number]


def _added(number: int, token: str, kind: int) -> dict[str, Any]:
    """Returns the JSON of a token that is found in a text before the text is cut."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = kind != _USER_DEFINED
    return {"id": number, "content": token, "special": special, **flags}


def _pre_tokenizer(pre: str) -> dict[str, Any]:
    """Returns the JSON of the pre-tokenizer that llama.cpp calls `pre`."""
    pattern, steps = PATTERNS[pre], []
    if pre == "smollm":
        steps.append({"type": "Digits", "individual_digits": True})
    if pattern is not None:
        steps.append(_CUT | {"pattern": {"Regex": pattern}})
    steps.append(_GPT2 | {"use_regex": pattern is None})
    return {"type": "Sequence", "pretokenizers": steps}


def _beginning(token: str, number: int) -> dict[str, Any]:
    """Returns the JSON of a post-processor that puts a token before each text."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": at}} for at, name in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [first, texts[0]],
        "pair": [first, *texts],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
