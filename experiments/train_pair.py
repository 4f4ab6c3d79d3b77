"""How was the embedded pair trained? Trains a target and a draft on the stdlib.

Stages, each resumable after a kill with the same loss curve:

    tokenizer   byte-level BPE, 4096 entries
    target      about 10 M parameters, on text
    draft       about 1 M parameters, on the same text, then distilled from the target

Everything goes to `--work`; `python experiments/export_pair.py` turns the newest
checkpoints into Hugging Face folders.
"""

import argparse
import functools
import pathlib
import sys

import jax
import numpy as np
import tokenizers

from experiments.pair import corpus, training
from spec_jax.model import config as config_lib, params as params_lib


WINDOW = 512
HELD_OUT_WINDOWS = 32

TARGET = config_lib.Qwen3Config(
    vocab_size=corpus.VOCAB_SIZE,
    hidden_size=320,
    intermediate_size=896,
    num_layers=8,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=8192,
    rope_theta=10_000.0,
    tie_word_embeddings=True,
    dtype="float32",
)
DRAFT = config_lib.Qwen3Config(
    vocab_size=corpus.VOCAB_SIZE,
    hidden_size=128,
    intermediate_size=384,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    max_position_embeddings=8192,
    rope_theta=10_000.0,
    tie_word_embeddings=True,
    dtype="float32",
)


def prepare(work: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Tokenizer and windows of both splits; reuses what `work` holds."""
    texts = corpus.read()
    path = work / "tokenizer.json"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        corpus.train_tokenizer(texts.train).save(str(path))
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    train = corpus.windows(corpus.encode(tokenizer, texts.train), WINDOW)
    held_out = corpus.windows(corpus.encode(tokenizer, texts.held_out), WINDOW)
    # Evenly spaced, so that many files are heard.
    chosen = np.linspace(0, len(held_out) - 1, HELD_OUT_WINDOWS).astype(int)
    print(f"{train[:, 1:].size:,} training tokens, {held_out[:, 1:].size:,} held out")
    return train, held_out[chosen]


def train_target(work, steps, train, held_out, seed) -> params_lib.Params:
    """The target, on text."""
    return training.run(
        "target",
        training.Recipe(steps=steps, seed=seed),
        params_lib.init(jax.random.key(seed), TARGET),
        functools.partial(training.text_loss, TARGET),
        train,
        held_out,
        work / "target",
    )


def train_draft(work, steps, train, held_out, seed) -> params_lib.Params:
    """The draft, on text."""
    return training.run(
        "draft",
        training.Recipe(steps=steps, seed=seed + 1),
        params_lib.init(jax.random.key(seed + 1), DRAFT),
        functools.partial(training.text_loss, DRAFT),
        train,
        held_out,
        work / "draft",
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("pair"))
    parser.add_argument("--stage", choices=("target", "draft"), default="target")
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    train, held_out = prepare(args.work)
    stage = {"target": train_target, "draft": train_draft}[args.stage]
    stage(args.work, args.steps, train, held_out, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
