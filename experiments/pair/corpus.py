"""The corpus of the embedded pair: the Python standard library's own source.

It is present on every machine, so training needs no download. Files are split into
training and held-out by a hash of their path, so that the split does not move when
files come or go.
"""

import dataclasses
import hashlib
import pathlib
import sys
import sysconfig

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers


END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096
HELD_OUT_PERCENT = 2
TEST_FILES_KEPT = 3
"""Held-out text has one in this many of the library's test files: they are two
thirds of the source and much alike. Training text has all the others."""

# Tables of data that happen to be spelled in Python.
_TABLES = ("encodings", "pydoc_data", "site-packages", "__pycache__", "data")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts of the two splits, and what identifies them."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    sha256: str

    @property
    def description(self) -> dict:
        """What the model card says about the corpus."""
        return {
            "corpus": f"standard library of Python {sys.version.split()[0]}",
            "corpus_sha256": self.sha256,
            "train_files": len(self.train),
            "held_out_files": len(self.held_out),
            "train_bytes": sum(len(text.encode()) for text in self.train),
        }


def _bucket(name: str, size: int) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % size


def read() -> Corpus:
    """Reads the standard library of the running interpreter."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    train, held_out, digest = [], [], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        parts = pathlib.PurePosixPath(name).parts
        if any(part in _TABLES for part in parts):
            continue
        held = _bucket(name, 100) < HELD_OUT_PERCENT
        is_test = any(part.startswith("test") for part in parts)
        if held and is_test and _bucket("test:" + name, TEST_FILES_KEPT):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # A few test files are written in other encodings on purpose.
        digest.update(name.encode() + b"\0" + text.encode())
        (held_out if held else train).append(text)
    return Corpus(
        train=tuple(train), held_out=tuple(held_out), sha256=digest.hexdigest()
    )


def train_tokenizer(texts: tuple[str, ...]) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of `VOCAB_SIZE` entries; end of text has id 0."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, texts: tuple[str, ...]) -> np.ndarray:
    """All texts as one stream of ids, each followed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces = [
        np.array([*encoding.ids, end], np.uint16)
        for encoding in tokenizer.encode_batch(list(texts))
    ]
    return np.concatenate(pieces)


def windows(stream: np.ndarray, length: int) -> np.ndarray:
    """The stream cut into `[num_windows, length + 1]`; each overlaps the next by one.

    The extra token is the label of the window's last position.
    """
    num_windows = (len(stream) - 1) // length
    starts = np.arange(num_windows)[:, None] * length
    return stream[starts + np.arange(length + 1)].astype(np.int32)
