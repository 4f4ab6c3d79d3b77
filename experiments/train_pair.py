"""How was the embedded pair trained? Trains a target and a draft on the stdlib.

Stages, in this order, each resumable after a kill with the same loss curve:

    target    about 10 M parameters, on text
    draft     about 1 M parameters, on the same text
    distill   the draft again, towards the target's distributions
    rollouts  the target continues pieces of the text, half of them greedily
    align     the draft again, towards the target's distributions on its own text
    export    bf16 weights, tokenizer and model card, as Hugging Face folders

Everything but the export goes to `--work`. The tokenizer, a byte-level BPE of 4096
entries, is trained by the first stage that runs. With `--base`, a published pair stands
for the stages before: its models are trained further, and its draft is aligned to
texts of its target.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start("train")  # Before the imports, which take seconds.

import argparse
import dataclasses
import filecmp
import functools
import json
import pathlib
import shutil
from collections.abc import Sequence

import jax
import numpy as np
import tokenizers

from experiments.lib import fan_out, files
from experiments.pair import corpus, export, quality, rollouts
from spec_jax.model import (
    config as config_lib,
    load as load_lib,
    params as params_lib,
)
from spec_jax.training import batches, loop, losses, targets
from spec_jax.typing import IMPLS


DONE = 0

WINDOW = 512
HELD_OUT_WINDOWS = 32
ROLLOUT_PREFIX, ROLLOUT_LENGTH, ROLLOUT_BATCH = 48, 177, 46

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
DRAFT = dataclasses.replace(
    TARGET,
    hidden_size=128,
    intermediate_size=384,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One training run: which model, in which folder of `--work`, for how long."""

    config: config_lib.Qwen3Config
    folder: str
    steps: int
    seed: int
    batch_size: int = 16
    learning_rate: float = 0.02

    @property
    def model(self) -> str:
        """The model that it trains, as its folder is named in the assets."""
        return "target" if self.config is TARGET else "draft"

    def recipe(self, steps: int | None, seed: int) -> loop.Recipe:
        """The recipe; both arguments come from the flags."""
        return loop.Recipe(
            steps=steps or self.steps,
            seed=self.seed + seed,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            adam_learning_rate=0.15 * self.learning_rate,
        )

    def init(self, seed: int) -> params_lib.Params:
        """Random parameters."""
        return params_lib.init(jax.random.key(self.seed + seed), self.config)


STAGES = {
    "target": Stage(config=TARGET, folder="target", steps=4000, seed=0),
    "draft": Stage(config=DRAFT, folder="draft", steps=1250, seed=1),
    "distill": Stage(config=DRAFT, folder="distilled", steps=1250, seed=2),
    "align": Stage(
        config=DRAFT,
        folder="aligned",
        steps=1250,
        seed=3,
        batch_size=ROLLOUT_BATCH,
        learning_rate=0.01,
    ),
}


def prepare(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray, dict]:
    """Returns windows of both splits, and what the model card says about the corpus.

    Trains the tokenizer where neither `--work` nor `--base` has one, and keeps the
    windows in `--work`, so that a run resumed under another Python sees the same text.
    """
    work = args.work
    kept = work / "corpus.npz"
    if args.base and (path := work / "tokenizer.json").exists():
        own = args.base / "target" / "tokenizer.json"
        if not filecmp.cmp(own, path, shallow=False):
            raise ValueError(
                f"{path}: not the tokenizer of --base; give another --work"
            )
    if kept.exists():
        with np.load(kept) as saved:
            description = json.loads(str(saved["description"]))
            return saved["train"], saved["held_out"], description
    texts = corpus.read()
    path = work / "tokenizer.json"
    work.mkdir(parents=True, exist_ok=True)
    if args.base:
        shutil.copy(args.base / "target" / "tokenizer.json", path)
    elif not path.exists():
        whole = work / "tokenizer_whole.json"
        corpus.train_tokenizer(texts.train).save(str(whole))
        whole.replace(path)
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    train = corpus.windows(corpus.encode(tokenizer, texts.train), WINDOW)
    held_out = corpus.windows(corpus.encode(tokenizer, texts.held_out), WINDOW)
    # Evenly spaced, so that many files are heard.
    chosen = np.linspace(0, len(held_out) - 1, HELD_OUT_WINDOWS).astype(int)
    held_out = held_out[chosen]
    description = texts.description | {
        "train_tokens": int(train[:, 1:].size),
        "held_out_tokens": int(held_out[:, 1:].size),
    }
    whole = work / "corpus_whole.npz"
    np.savez(whole, train=train, held_out=held_out, description=json.dumps(description))
    whole.replace(kept)  # Which is never half a file.
    return train, held_out, description


def _in_bfloat16(config: config_lib.Qwen3Config) -> config_lib.Qwen3Config:
    """What a training step computes in; the parameters that it updates are float32."""
    return dataclasses.replace(config, dtype="bfloat16")


def restore(args: argparse.Namespace, name: str) -> tuple[params_lib.Params, int]:
    """The parameters of a stage's newest checkpoint, and its step.

    Those of `--base`, and step 0, where the stage has no folder in `--work`.
    """
    stage = STAGES[name]
    folder = args.work / stage.folder
    if args.base and not folder.exists():
        return _published(args, stage), 0
    return loop.restore(stage.recipe(None, args.seed), stage.init(args.seed), folder)


def _published(args: argparse.Namespace, stage: Stage) -> params_lib.Params:
    """The parameters of a stage's model in `--base`."""
    return load_lib.load(args.base / stage.model, dtype=stage.config.dtype)[1]


def train(args: argparse.Namespace) -> float:
    """Runs one training stage; returns its last held-out loss, nats per token."""
    stage = STAGES[args.stage]
    windows, held_out, description = prepare(args)
    print(f"{description['corpus']}: {description['train_tokens']:,} training tokens")
    init, teacher = stage.init(args.seed), None
    loss = functools.partial(losses.text_loss, _in_bfloat16(stage.config))
    if args.base and args.stage in ("target", "draft"):
        init = _published(args, stage)
    if args.stage in ("distill", "align"):
        before = {"distill": "draft", "align": "distill"}[args.stage]
        init, _ = restore(args, before)
        loss = functools.partial(losses.distillation_loss, _in_bfloat16(DRAFT))
        target, _ = restore(args, "target")
        teacher = jax.numpy.array(target.embed, copy=True)  # Which is its head.
        if args.stage == "distill":
            windows, held_out = (_taught(x, target) for x in (windows, held_out))
        else:
            windows, held_out = _own_texts(args.work, target)
    folder = args.work / stage.folder
    loop.run(
        args.stage,
        stage.recipe(args.steps, args.seed),
        init,
        loss,
        windows,
        held_out,
        folder,
        teacher=teacher,
    )
    return loop.last_held_out(folder)["held_out_loss"]


def _taught(tokens: np.ndarray, target: params_lib.Params) -> targets.Online:
    """Returns texts with what the target says of each position."""
    config = _in_bfloat16(TARGET)
    return targets.Online(
        texts=targets.Texts(tokens=tokens, mask=np.ones(tokens.shape, bool)),
        params=params_lib.cast(target, config.dtype),
        config=config,
        taps=(),
    )


def _own_texts(
    work: pathlib.Path, target: params_lib.Params
) -> tuple[targets.Part, targets.Part]:
    """Returns the target's own texts, and the held-out ones, which are the last.

    They are seen many times, and the target's part of a step takes twice as long as
    the draft's: what it says of them is kept in `taught`.
    """
    path = work / "rollouts.npy"
    if not path.exists():
        raise ValueError(f"{path}: no such file; run the stage rollouts first")
    online = _taught(np.load(path), target)
    store = targets.store_of(work / "taught", online.params, online.config, online.taps)
    targets.write(store, online)
    data = targets.Cached(store, online)
    count = 4 * ROLLOUT_BATCH
    first = len(data) - count
    return (
        targets.Part(data=data, first=0, count=first),
        targets.Part(data=data, first=first, count=count),
    )


def writer_of(args: argparse.Namespace) -> rollouts.Writer:
    """Returns what continues pieces of the text: the target's checkpoint."""
    windows, _, _ = prepare(args)
    params, _ = restore(args, "target")
    random = np.random.default_rng(args.seed)
    chosen = windows[random.choice(len(windows), args.rollouts)]
    starts = random.integers(0, WINDOW - ROLLOUT_PREFIX, args.rollouts)
    columns = starts[:, None] + np.arange(ROLLOUT_PREFIX)
    # Every second one is drawn.
    numbers = np.arange(args.rollouts)
    return rollouts.Writer(
        params=params_lib.cast(params, "bfloat16"),
        config=dataclasses.replace(TARGET, dtype="bfloat16"),
        prompts=np.take_along_axis(chosen, columns, axis=1),
        length=ROLLOUT_LENGTH,
        impl=args.impl,
        seeds=np.where(numbers % 2, args.seed * args.rollouts + numbers, -1),
    )


def roll_out(args: argparse.Namespace) -> None:
    """Writes `rollouts.npy [--rollouts, ROLLOUT_LENGTH]` of the target in bfloat16.

    A killed run goes on from `texts_DIGEST.jsonl`, of these weights.
    """
    writer = writer_of(args)
    texts = rollouts.write(writer, args.work, fan=fan_out.of(args, writer_of, args))
    tokens, _ = rollouts.padded(writer, texts)
    whole = args.work / "rollouts_whole.npy"
    np.save(whole, tokens)
    whole.replace(args.work / "rollouts.npy")  # Which is never half a file.


def export_pair(args: argparse.Namespace) -> None:
    """Writes the newest checkpoints to `--assets`, with a model card."""
    _, held_out, description = prepare(args)
    models = []
    draft_stages = ("draft", "distill", "align")
    for name, stage_names in (("target", ("target",)), ("draft", draft_stages)):
        stage = STAGES[stage_names[-1]]
        params, step = restore(args, stage_names[-1])
        loss = jax.jit(functools.partial(losses.text_loss, stage.config))
        models.append(
            export.Model(
                name=name,
                config=stage.config,
                params=params,
                held_out_loss=loop.held_out_loss(loss, params, held_out, batch_size=8),
                stages=_tokens_seen(args, name, stage_names, step),
            )
        )
    export.write(args.assets, args.work / "tokenizer.json", models)
    folders = {"this pair": args.assets} | dict(args.before)
    texts = {
        name: quality.measure(folder, impl=args.impl)
        for name, folder in folders.items()
    }
    stored = {
        name: _stored_loss(args, held_out, pair) for name, pair in folders.items()
    }
    (args.assets / "README.md").write_text(
        export.card(models, description, texts, stored, args.note), encoding="utf-8"
    )


def _stored_loss(
    args: argparse.Namespace, held_out: batches.Data, pair: pathlib.Path
) -> float | None:
    """Returns the held-out loss of a pair's target; None of another tokenizer's."""
    own, other = args.work / "tokenizer.json", pair / "target" / "tokenizer.json"
    if own.read_bytes() != other.read_bytes():
        return None
    config, params = load_lib.load(pair / "target", dtype="float32")
    loss = jax.jit(functools.partial(losses.text_loss, config))
    return loop.held_out_loss(loss, params, held_out, batch_size=8)


def _tokens_seen(
    args: argparse.Namespace, model: str, stages: Sequence[str], step: int | None = None
) -> dict[str, int]:
    """Tokens that a model saw by stage, with those of `--base`.

    Args:
      step: of the last stage's checkpoint; None: all that its log has.
    """
    seen = export.tokens_seen(args.base / "README.md", model) if args.base else {}
    for stage in stages:
        folder = args.work / STAGES[stage].folder
        if not args.base or folder.exists():
            first = step if stage == stages[-1] else None
            seen[stage] = seen.get(stage, 0) + loop.tokens_seen(folder, first)
    return seen


def _named_folder(text: str) -> tuple[str, pathlib.Path]:
    """Splits `NAME=FOLDER`."""
    name, _, folder = text.partition("=")
    return name, pathlib.Path(folder)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    parser.add_argument(
        "--stage", choices=(*STAGES, "rollouts", "export"), required=True
    )
    cli.add(
        parser,
        """
        --work FOLDER=pair  checkpoints, logs and tokenizer
        --steps N  optimiser steps of 8192 tokens (default: by stage)
        --seed SEED=0  of weights, batches and rollouts
        --rollouts N=12288  how many pieces of the text the target continues
        --impl IMPL=auto  kernels of the rollouts
        --base FOLDER  a published pair to go on from, in the place of stages that
          have no folder in --work
        --assets FOLDER=spec_jax/assets  where the export goes
        """,
        FOLDER=pathlib.Path,
        SEED=int,
        IMPL=IMPLS,
    )
    parser.add_argument(
        "--before",
        type=_named_folder,
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="assets whose texts the model card states too",
    )
    parser.add_argument(
        "--note", action="append", default=[], help="a sentence for the model card"
    )
    fan_out.add_flags(parser.add_argument_group("rollouts on a cluster"))
    args = parser.parse_args(argv)
    fan_out.check_stage(parser, args, "rollouts")
    return args


def run(args: argparse.Namespace) -> int:
    """Runs one stage; returns the exit status."""
    if args.stage == "export":
        read = {f"--before {name}": folder for name, folder in args.before}
        files.check_apart("--assets", args.assets, {"--base": args.base} | read)
    files.check_folder(args.assets if args.stage == "export" else args.work)
    if args.stage == "export":
        export_pair(args)
    elif args.stage == "rollouts":
        roll_out(args)
    else:
        print(f"held-out loss {train(args):.4f} nats per token")
    return DONE


main = cli.script(
    "train_pair.py",
    parse_args,
    run,
    kept=lambda args: f"the same command goes on from the checkpoints in {args.work}",
)

if __name__ == "__main__":
    cli.end(main)
