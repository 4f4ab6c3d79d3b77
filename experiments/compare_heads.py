"""How well do heads draft? Trains heads of one size on the same texts, and compares.

The texts are those of one `train_drafter.py --stage rollouts`, in `--texts`, with the
features of `--taps` that `--stage cache` wrote. Every head sees at least `--tokens`
tokens of them, reads the same hidden states, drafts from the same tokens and has about
as many weights as the others. It is trained and exported in `--work`/NAME, as
`train_drafter.py` does both, and run by `sweep.py`: in chains, in trees of `--tree`,
and after prompts of `--context` tokens. The same command goes on where it was
interrupted. Words after `--` are flags of `train_drafter.py`, for all heads:

    compare_heads.py --target smollm2 --texts drafter --out rows.jsonl -- --batch 8

Exit status: 0 all matched, 2 not all matched, 1 the input was unusable.
"""

import argparse
import pathlib
from collections.abc import Mapping
from typing import Any

from safetensors import numpy as safetensors

from experiments import sweep, train_drafter
from experiments.heads import families, jobs
from experiments.lib import cli, files, flags, records, tables
from spec_jax.drafters import registry
from spec_jax.training import batches, loop


_BLOCK = "--dialect speculators --block 4 --layers 1"
HEADS: Mapping[str, str] = {
    "eagle3": "--family eagle3 --mlp 384 --ttt-steps 4 --first-alone 300",
    "peagle": "--family peagle --mlp 384 --ttt-steps 4 --layers 1",
    "dflash": f"--family dflash {_BLOCK} --mlp 1984",
    "dflash2": f"--family dflash2 {_BLOCK} --mlp 1024 --rank 32",
    # In the published layout rows see no later one where layers slide alone: past every
    # text here.
    "jetspec": f"--family dflash --causal --window 8192 {_BLOCK} --mlp 1984",
    "dspark": f"--family dspark {_BLOCK} --mlp 1024 --rank 32",
    "dspark-gated": f"--family dspark --head gated {_BLOCK} --mlp 1024 --rank 32",
    "dspark-rnn": f"--family dspark --head rnn {_BLOCK} --mlp 1024 --rank 32",
}
"""The flags of `train_drafter.py` that make each head."""

GAMMA = 4
"""Tokens that every head drafts in a chain."""


FLAGS = f"""
    trees prompts=50 gen-tokens
    --target DIR=smollm2  the model that all heads draft for
    --heads NAME,...={",".join(HEADS)}  that are trained and compared
    --texts FOLDER=drafter  has the rollouts and their cache
    --work FOLDER=heads  gets a folder for each head
    --tokens N=3000000  that each head sees, at least
    --draft-vocab N=4096  tokens that a head can draft
    --taps K,K,..=2,15,27  hidden states that all heads read
    --context TOKENS,...=128,512,2048  lengths of prompts
    training FLAG*  after --: flags of train_drafter.py, for all heads
    [out] of training, and those of sweep.py, for each head
    """


def check(parser: cli.Parser, args: argparse.Namespace) -> None:
    """Refuses a lack of `--out`."""
    if args.out is None:
        parser.error("--out is required: it gets the rows of all heads")


parse_args = flags.parser(
    __doc__,
    FLAGS,
    kinds={
        **{"K,K,..": str, "FOLDER": pathlib.Path, "DIR": str, "FLAG": str},
        "NAME,...": cli.names(cli.one_of(HEADS)),
    },
    defaults={"tree": (flags.NO_TREE, "4x4:7", "4x4:15", "4x4:31")},
    check=check,
)


def training_of(
    args: argparse.Namespace, head: str, stage: str, *more: str
) -> argparse.Namespace:
    """Returns the flags of a stage of `train_drafter.py` for a head."""
    work = args.work / head
    told = _words(
        stage=stage,
        target=args.target,
        texts=args.texts,
        work=work,
        out=work / "head",
        targets="cache",
        taps=args.taps,
        draft_vocab=args.draft_vocab,
    )
    return train_drafter.parse_args(
        [*HEADS[head].split(), *args.training, *told, *more]
    )


def _words(**flags: Any) -> list[str]:
    """Returns flags as on a command line."""
    return [str(x) for name in flags for x in (cli.flag_of(name), flags[name])]


def steps_for(args: argparse.Namespace, tokens: int) -> int:
    """Returns the fewest training steps that see at least `tokens` tokens.

    Args:
      args: flags of `train_drafter.py`.
    """
    texts = jobs.texts_of(args)
    count = len(texts) - jobs.num_held_out(args, texts)
    counted, seen, step = texts.mask[:count].sum(axis=1), 0, 0
    while seen < tokens:
        rows = batches.rows_of_step(
            texts.columns[:count],
            size=args.batch,
            step=step,
            seed=args.seed,
            unit=args.part,
            is_counted="anchors" in families.FAMILIES[args.family].flags,
        )
        seen, step = seen + int(counted[rows].sum()), step + 1
    return step


def train(args: argparse.Namespace, head: str) -> dict[str, Any]:
    """Trains a head, or resumes that, and exports it; returns its row of results."""
    trained = training_of(args, head, "train")
    steps = str(steps_for(trained, args.tokens))
    trained = training_of(args, head, "train", "--steps", steps)
    trained.work.mkdir(parents=True, exist_ok=True)
    found = jobs.train(trained)
    train_drafter.run(training_of(args, head, "export", "--steps", steps))
    weights = safetensors.load_file(trained.out / "model.safetensors")
    # Not trained: the target's embedding, and the output projection of blocks.
    copies = {"d2t", "t2d", "embed_tokens.weight"}
    copies |= set() if "eagle" in trained.family else {"lm_head.weight"}
    return {
        "kind": "head",
        "head": head,
        "parameters": sum(x.size for name, x in weights.items() if name not in copies),
        "steps": found["step"] + 1,
        "tokens_seen": loop.tokens_seen(trained.work),
        **{name: x for name, x in found.items() if name.startswith("held_out")},
    }


def evaluate(args: argparse.Namespace, head: str) -> tuple[bool, list[dict[str, Any]]]:
    """Runs a head on the prompts; returns whether all is well, and rows of `sweep.py`.

    It drafts chains alone after prompts of `--context` tokens.
    """
    trained = training_of(args, head, "export")
    told = _words(
        target=args.target,
        drafter=registry.kind_of(trained.out),
        draft=trained.out,
        gamma=GAMMA,
        prompts=args.prompts,
        gen_tokens=args.gen_tokens,
    )
    told += ["--allow-dirty"] * args.allow_dirty
    is_well, rows = True, []
    for name, axis in (("trees", "tree"), ("contexts", "context")):
        out = args.work / head / f"{name}.jsonl"
        cells = _words(out=out, **{axis: ",".join(map(str, getattr(args, axis)))})
        is_well &= sweep.run(sweep.parse_args([*told, *cells]))
        rows += [row | {"head": head} for row in files.read_rows(out)]
    return is_well, rows


COLUMNS = {
    "head": "",
    "weights": ("parameters", ","),
    "tokens seen": ("tokens_seen", ","),
    "held-out loss": ("held_out_loss", ".3f"),
    "accepted length there": ("held_out_accepted_length", ".3f"),
}
"""The columns of the table, for `tables.print_rows`."""


def run(args: argparse.Namespace, out: records.JsonLines) -> bool:
    """Trains and evaluates all heads, or what is left; returns whether all is well."""
    for head in args.heads:  # Checks all flags before hours of training.
        told = training_of(args, head, "train")
        families.check_flags(told)
        families.plan(told, families.target_config(told))
    trained = [train(args, head) | records.provenance() for head in args.heads]
    evaluated = [evaluate(args, head) for head in args.heads]
    out.write_all([*trained, *(row for _, rows in evaluated for row in rows)])
    tables.print_rows(trained, COLUMNS)
    return all(is_well for is_well, _ in evaluated)


KEPT = "the same command goes on from what is in {work}"
main = records.script("compare_heads.py", parse_args, run, kept=KEPT)
