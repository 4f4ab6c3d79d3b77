"""How is a drafter that reads its target trained? Trains one of five families, anew or
on: EAGLE-3, P-EAGLE, DFlash, DFlash2, or DSpark with one of its heads.

Stages, in this order, each resumable after a kill with the same results:

    prompts   user turns that a chat model writes itself, where no data set is at hand:
              name them as --prompts of the next stage
    rollouts  the target continues the prompts: what the drafter will meet
    cache     the target's features of these texts, on disk (for --targets cache)
    train     the drafter, towards the target's distributions, several drafts deep
    export    the newest checkpoint, as a folder in a published format, with a card

Everything but the export goes to `--work`. The log there has the held-out agreement of
each draft with the target, and the accepted length of rounds of greedy decoding.
"""

import argparse
import pathlib
from typing import Any

import numpy as np

from experiments.heads import export, families, jobs, own_prompts, rollouts
from experiments.lib import cli, files, flags
from spec_jax.model import block_dialects, block_params, eagle3_files


TARGETS = ("online", "cache")


def write_prompts(args: argparse.Namespace) -> None:
    """Writes `prompts.jsonl`: user turns that the target wrote, no two alike."""
    writer = rollouts.writer_of(args)
    texts = rollouts.write(args, writer)
    kept, dropped = own_prompts.choose(writer.lm.tokenizer, texts, args.avoid)
    path = args.work / "prompts.jsonl"
    own_prompts.save(kept, path)
    told = ", ".join(f"{count} {why}" for why, count in dropped.most_common())
    print(f"{path}: {len(kept)} of {len(texts)} prompts; dropped: {told}")


def roll_out(args: argparse.Namespace) -> None:
    """Writes `texts.npz`: the target's continuations of prompts, greedy and drawn."""
    writer = rollouts.writer_of(args)
    texts = rollouts.write(args, writer)
    tokens, mask = rollouts.padded(writer, texts)
    # The prompts are shuffled, so that the held-out ones are of all kinds. Samples of a
    # prompt stay together: none is trained on while another one is held out.
    prompts = np.random.default_rng(args.seed).permutation(len(tokens) // args.samples)
    order = np.add.outer(prompts * args.samples, np.arange(args.samples)).reshape(-1)
    made = {"tokens": tokens[order], "mask": mask[order], "samples": args.samples}
    made["greedy"] = np.asarray(writer.seeds)[order] < 0
    with files.replacing(jobs.texts_path(args)) as part:
        np.savez(part, **made)


FLAGS = """
    --family FAMILY!  of the drafter
    --stage STAGE!  see above
    [model, and where things go]
        --target FOLDER=spec_jax/assets/target  a model in Hugging Face's layout
        --work FOLDER=drafter  rollouts, cache, checkpoints and log
        --texts FOLDER  has the rollouts and the cache, which many drafters may share
          (default: --work)
        --out FOLDER=drafter/export  where the export goes
        --note TEXT*  a sentence for the drafter's card
        --impl IMPL=auto  kernels of the rollouts
        --seed SEED=0  of weights, batches and drawn rollouts
    [prompts and rollouts] raw
        --write N=1000  prompts that the stage of that name writes; those are kept that
          end, do not repeat themselves and are like no other
        --avoid FILE*  prompts of an evaluation, which none of those may be like
        --prompts FILE=50  texts to continue: a file, or so many of the bundled ones
        --samples N=2  rollouts of each prompt; every second one is drawn
        --prefix N=48  most tokens of a prompt of raw text: its last ones; a chat is not
          cut
        --length N=177  most tokens of a rollout, its prompt included: it ends at a stop
          token
        --targets WHERE=online  the target's features: computed in each step, or read
          from the cache, which the stage of that name writes
    [prompts and rollouts on a cluster] cluster
    [drafter]
        --base FOLDER  a drafter of this family to go on from; its shape stands for the
          flags that would give one, and no calibration of it is kept
        --dialect DIALECT  published format of the export (default: midlayer of eagle3,
          speculators of peagle, z-lab of dflash and dflash2, deepspec of dspark), which
          decides of the training, too, what a block's first row predicts (nothing in
          z-lab's), and norms of queries and keys of eagle3 (in deepspec's)
        --taps K,K,..  hidden_states of the target to read (default of eagle3 and
          peagle: 2, half of its layers L, and L - 3; of others: as many as the
          drafter's layers)
        --draft-vocab N  draft tokens: the most frequent of the rollouts (default: 32000
          in dialects with a draft vocabulary, midlayer and speculators, otherwise all)
        --width N  of an EAGLE-3 head, which then has an embedding of its own (default:
          the target's)
        --target-head  the output projection of an EAGLE-3 head is the target's rows of
          the draft vocabulary, neither trained nor exported
        --mlp N  width of the drafter's MLP (default: the target's)
        --window N  keys that a row of the drafter sees in every layer, the last ones;
          long texts then cost no more, and no more is kept (default: all)
        --block N=7  rows of a block, of dflash, dflash2, dspark, and so the following
        --layers N=2  of the drafter, also of peagle
        --mask-token ID=0  what a block's rows read but the first; also of peagle
        --causal  a block's rows see none after them, as JetSpec's (default: they see
          the whole block)
        --head HEAD  sequential head (default: vanilla), of dspark, and so the following
        --rank N=64  of the head, also of dflash2
        --no-confidence  leave out the confidence head
        --no-copies  export no copies of the target's embedding and output projection,
          which deepspec has; spec_jax reads them from the target
    [training]
        --steps N=1000  optimiser steps
        --batch N=16  sequences of an optimiser step
        --part N=2  of them, how many have their gradients at a time
        --devices N=1  over which a batch is spread, --part sequences of it on each
        --learning-rate RATE=0.02  of the matrices, by Muon; all others have 0.15 of it
        --compute DTYPE  of the products (default: the target's); float32 is the faster
          one on a CPU without instructions for bfloat16
        --ttt-steps N=7  drafting steps that are trained, of eagle3; drafts of a pass,
          of peagle
        --first-alone N  optimiser steps, at the beginning, that train the first draft
          alone, and take less time
        --anchors N=32  blocks, or masks of peagle, of a sequence that a step trains
        --decay RATE=4.0  drafts after which one counts 1/e of the first in the loss: 4
            is for a block of 7; 5 and 7 were published for 10 and 16
        --no-tv  train by cross-entropy in the place of total variation
        --eval-every N=50  steps between measurements of the held-out texts
        --save-every N=25  steps between checkpoints
    """
KINDS: dict[str, Any] = {
    "FOLDER": pathlib.Path,
    "FILE": str,
    "K,K,..": cli.names(int),
    "ID": int,
    "HEAD": ("none", *block_params.DSPARK_HEADS),
    "WHERE": TARGETS,
    "DTYPE": ("bfloat16", "float32"),
    "DIALECT": sorted({*eagle3_files.DIALECTS, *block_dialects.DIALECTS}),
}


def check(parser: cli.Parser, args: argparse.Namespace) -> None:
    """Refuses a cluster for other stages than it is for, and notes what was given."""
    if args.ray is not None and args.stage not in ("prompts", "rollouts"):
        parser.error("--ray is of --stage prompts and rollouts: leave it out")
    names = families.deciding(args.family)
    args.given = set(flags.given(parser, args, names))
    args.dialect = args.dialect or families.FAMILIES[args.family].dialect


STAGES = {
    "prompts": write_prompts,
    "rollouts": roll_out,
    "cache": jobs.cache,
    "train": jobs.train,
    "export": export.export,
}
KINDS |= {"FAMILY": families.FAMILIES, "STAGE": STAGES}
parse_args = flags.parser(__doc__, FLAGS, kinds=KINDS, check=check)


def run(args: argparse.Namespace) -> None:
    """Runs one stage."""
    families.check_flags(args)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.stage not in ("prompts", "export"):
        families.plan(args, families.target_config(args))
    if args.length <= args.prefix:
        raise ValueError(
            f"--length {args.length} leaves nothing to write after --prefix "
            f"{args.prefix}"
        )
    found = STAGES[args.stage](args)
    if found:
        print(
            f"held-out loss {found['held_out_loss']:.4f} nats, accepted length "
            f"{found['held_out_accepted_length']:.2f} of rounds of greedy decoding"
        )


KEPT = "the same command goes on from what is in {work}"
main = cli.script("train_drafter.py", parse_args, run, kept=KEPT)
