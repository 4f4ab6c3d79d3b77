"""Models as GGUF files: the library's reader, whose oracle is transformers, reads the
same back."""

import dataclasses

import numpy as np
import pytest

from experiments.lib import gguf_files
from spec_jax import loading, testing
from spec_jax.model import gguf_tokenizer, load, tokenizer


pytest.importorskip("gguf")

TEXT = "def first(x):\n    return 'caf\u00e9', [x for x in range(10)]\n\n\n# \u2192"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_folder_is_read_back(tmp_path, dtype):
    """Fails if a bit, a size, a token or a merge is another."""
    folder, path = loading.EMBEDDED_DRAFT, tmp_path / "model.gguf"
    config, params = load.load(folder, dtype=dtype)
    words = tokenizer.load(folder)
    gguf_files.write(path, config, params, words)
    found, weights = load.load(path)
    eps = float(np.float32(config.rms_norm_eps))
    assert found == dataclasses.replace(config, rms_norm_eps=eps)
    assert found.dtype == dtype
    testing.assert_same_bits(weights, params)
    read = tokenizer.load(path)
    assert read.encode(TEXT) == words.encode(TEXT)
    assert read.stop_ids == words.stop_ids
    # Negative control: one weight is another.
    with pytest.raises(AssertionError):
        testing.assert_same_bits(weights.embed, params.embed.at[3, 4].multiply(2.0))


def of_qwen(pattern=gguf_tokenizer.PATTERNS["qwen2"], **changes):
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    split |= {"invert": False} | changes
    last = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    steps = {"type": "Sequence", "pretokenizers": [split, last]}
    return {"normalizer": {"type": "NFC"}, "pre_tokenizer": steps}


def with_digits(*others) -> dict:
    digits = {"type": "Digits", "individual_digits": True}
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, *others]}}


def test_pre_tokenizers():
    assert gguf_files.pre_tokenizer(of_qwen(), "x") == "qwen2"
    plain = {"pre_tokenizer": {"type": "ByteLevel", "use_regex": True}}
    assert gguf_files.pre_tokenizer(plain, "x") == "gpt-2"
    assert (
        gguf_files.pre_tokenizer(with_digits(plain["pre_tokenizer"]), "x") == "smollm"
    )


@pytest.mark.parametrize(
    "raw",
    [
        of_qwen(pattern=r"\w+"),
        of_qwen() | {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}},
        with_digits(),
        with_digits(*of_qwen()["pre_tokenizer"]["pretokenizers"]),
    ],
)
def test_other_pre_tokenizers_are_refused(raw):
    """Fails if a text would be cut into other words there than here."""
    with pytest.raises(ValueError, match="x: a pre-tokenizer that is not known"):
        gguf_files.pre_tokenizer(raw, "x")
