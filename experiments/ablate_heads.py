"""What does each part of DSpark bring? Trains its variants, and evaluates them all.

The sequential head (none, vanilla, gated, rnn), total variation in the loss, and the
confidence head, each left out by itself; and DFlash, of equal blocks. All on the texts
of one `train_drafter.py --stage rollouts`, in `--work`. Each variant is trained as
`train_drafter.py` trains it, and exported to `--work`/NAME/head; `sweep.py` then runs
them all: rows, tables of the accepted length and of acceptance by position.
`--work`/ablations.jsonl has both in short, a row for each variant and temperature, for
`plot.py` to draw. The same command goes on where it was interrupted, in training and in
evaluation. What stands after `--` are flags of `train_drafter.py`, for all variants:

    ablate_heads.py --work drafter --out rows.jsonl -- --steps 500 --prompts my.jsonl

Exit status: 0 all matched, 2 not all matched, 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start("train")  # Before the imports, which take seconds.

import argparse
import filecmp
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import sweep, train_drafter
from experiments.lib import files, flags, records, sweep_cells, tables, terminal
from spec_jax.training import loop


VARIANTS: Mapping[str, tuple[str, ...]] = {
    "dflash": ("--family", "dflash"),
    "none": ("--family", "dspark", "--head", "none"),
    "vanilla": ("--family", "dspark"),
    "gated": ("--family", "dspark", "--head", "gated"),
    "rnn": ("--family", "dspark", "--head", "rnn"),
    "no-tv": ("--family", "dspark", "--no-tv"),
    "no-confidence": ("--family", "dspark", "--no-confidence"),
}
"""What `train_drafter.py` is told of each; "vanilla" is DSpark as it is published."""

DIALECT = "deepspec"
"""Of all exports: what a slot predicts is the same in all."""

TEXTS = "texts.npz"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    cli.add(
        parser,
        f"""
        --variants NAME,...={",".join(VARIANTS)}  what is trained and evaluated
        --work FOLDER=drafter  has the rollouts, and gets a folder for each variant
        --temperature T,...=0,1  of the evaluation; 0 is greedy
        """,
        **{"NAME,...": cli.names(cli.one_of(VARIANTS)), "T,...": flags.temperatures},
        FOLDER=pathlib.Path,
    )
    flags.add_prompts(parser, default="50")
    flags.add_gen_tokens(parser, default=64)
    flags.add_out(parser, rows="those of sweep.py, one per variant and temperature")
    parser.add_argument(
        "training",
        nargs="*",
        metavar="-- FLAG",
        help="flags of train_drafter.py, for all variants",
    )
    args = parser.parse_args(argv)
    if args.out is None:
        parser.error("--out is required: what it holds is not run again")
    return args


def training_of(
    args: argparse.Namespace, variant: str, stage: str
) -> argparse.Namespace:
    """Returns the flags of a stage of `train_drafter.py`, of a variant."""
    work = args.work / variant
    places = ("--work", str(work), "--out", str(work / "head"))
    own = ("--stage", stage, *VARIANTS[variant], *places, "--dialect", DIALECT)
    return train_drafter.parse_args([*args.training, *own])


def train(args: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Trains and exports a variant, or goes on; returns what it saw and measured."""
    trained = training_of(args, variant, "train")
    texts = args.work / TEXTS
    if not texts.exists():
        raise ValueError(
            f"{texts}: no such file; run train_drafter.py --stage rollouts"
        )
    trained.work.mkdir(parents=True, exist_ok=True)
    if not (trained.work / TEXTS).exists():
        whole = trained.work / f"whole_{TEXTS}"
        shutil.copy(texts, whole)
        whole.replace(trained.work / TEXTS)
    elif not filecmp.cmp(trained.work / TEXTS, texts, shallow=False):
        raise ValueError(f"{trained.work / TEXTS}: of other rollouts; delete {variant}")
    found = train_drafter.train(trained)
    files.check_folder(trained.out)
    train_drafter.export(training_of(args, variant, "export"))
    measured = {name: x for name, x in found.items() if name.startswith("held_out")}
    seen = {"steps": found["step"] + 1, "tokens_seen": loop.tokens_seen(trained.work)}
    return {"variant": variant, **seen, **measured}


def evaluate(args: argparse.Namespace) -> int:
    """Sweeps over the exported variants; returns the exit status."""
    target = training_of(args, args.variants[0], "train")
    heads = [training_of(args, variant, "export").out for variant in args.variants]
    told = {
        "--target": target.target,
        "--impl": target.impl,
        "--drafter": ",".join(map(str, heads)),
        "--gamma": target.block,
        "--temperature": ",".join(map(str, args.temperature)),
        "--prompts": args.prompts,
        "--gen-tokens": args.gen_tokens,
        "--out": args.out,
    }
    given = [text for flag, value in told.items() for text in (flag, str(value))]
    more = ["--allow-dirty"] * args.allow_dirty + ["--raw"] * target.raw
    return sweep.run(sweep.parse_args([*given, *more]))


EVALUATED = (
    *("temperature", "gamma", "prompts", "prompt_source", "gen_tokens", "impl"),
    *("mean_accepted_length", "conditional_acceptance", "accepted_hist", "matched"),
)
"""What a row in short has of those of `sweep.py`, besides where they come from."""


def rows_by_variant(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of `sweep.py`."""
    rows, found = [*files.read_rows(args.out).values()], {}
    for variant in args.variants:
        head = str(training_of(args, variant, "export").out)
        found[variant] = [row for row in rows if row["drafter"] == head]
    return found


def in_short(
    args: argparse.Namespace, trained: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns a row for each variant and temperature, of training and evaluation."""
    rows, short = rows_by_variant(args), []
    for of_variant in trained:
        own = rows[of_variant["variant"]]
        facts = {name: own[0].get(name) for name in (*EVALUATED, *records.provenance())}
        for total in sweep_cells.totals(own):
            found = {name: total.get(name, fact) for name, fact in facts.items()}
            short.append({"kind": "ablation", **of_variant, **found})
    return short


COLUMNS = {
    "variant": "",
    "temperature": "g",
    "held-out loss": ("held_out_loss", ".4f"),
    "accepted length there": ("held_out_accepted_length", ".3f"),
    "evaluated": ("mean_accepted_length", ".3f"),
}
"""Of the table, for `tables.print_rows`."""


def run(args: argparse.Namespace) -> int:
    """Trains what is not trained, evaluates, shows; returns the exit status."""
    for variant in args.variants:
        trained = training_of(args, variant, "train")
        train_drafter.families.check_flags(trained)
        train_drafter.check_export(trained)
    measured = [train(args, variant) for variant in args.variants]
    status = evaluate(args)
    rows = in_short(args, measured)
    with records.open_rows(args.work / "ablations.jsonl", allow_dirty=True) as out:
        out.write_all(rows)
    tables.print_rows(rows, COLUMNS, terminal.console())
    return status


main = cli.script(
    "ablate_heads.py",
    parse_args,
    run,
    kept=lambda args: f"the same command goes on from what is in {args.work}",
)

if __name__ == "__main__":
    cli.end(main)
