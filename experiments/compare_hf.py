"""How fast is decoding compared with Hugging Face's, and are its tokens the same?

The same weights on both sides, in turns, in one process: autoregressive decoding,
drafts of the draft model, if there is one, and drafts looked up in the text. Exit
status: 0 every drafted token of ours is that of our decoding, and in float32 that is
Hugging Face's greedy one; 2 not; 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Sequence

import jax
from rich import console as rich_console

from experiments.lib import (
    compare,
    flags,
    hf,
    models as models_lib,
    prompt_files,
    prompts as prompts_lib,
    records,
    runs as runs_lib,
    terminal,
)
from spec_jax import loading
from spec_jax.model import hub
from spec_jax.paging import index
from spec_jax.typing import IMPLS


IDENTICAL, NOT_IDENTICAL = 0, 2

EXACT_DTYPE = "float32"
"""In bfloat16 two libraries that are both right round to different tokens."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    models = parser.add_argument_group("models")
    flags.add(models, "target draft isa")
    cli.add(
        models,
        f"""
        --impl IMPL=auto  kernels
        --dtype TYPE={EXACT_DTYPE}  dtype of all models
        """,
        IMPL=IMPLS,
        TYPE=("float32", "bfloat16"),
    )
    runs = parser.add_argument_group("runs")
    runs.add_argument(
        "--lengths",
        type=cli.positive,
        nargs=len(prompts_lib.LENGTHS),
        default=[32, 128, 512],
        metavar=tuple(name.upper() for name in prompts_lib.LENGTHS),
        help="tokens of the prompts of each class (default: 32 128 512)",
    )
    cli.add(
        runs,
        """
        --gammas K,K,...=3,5,7,10  tokens drafted per round, K
        --per-length N=2  prompts of each class
        --ignore-stop  do not end at stop tokens, on either side
        """,
    )
    names = "raw page-size prompts gen-tokens repeats"
    flags.add(runs, names, prompts=50, gen_tokens=32, repeats=3)
    rows = "one per prompt as it finishes, one per way to generate, a summary"
    flags.add(parser, "out", out=rows)
    args = parser.parse_args(argv)
    flags.check_models(parser, args, needs_draft=False)
    return args


def load_lm(args: argparse.Namespace) -> loading.LanguageModel:
    """Our side, without a drafter where a target is named alone; one slab for every K,
    because gamma is data."""
    is_alone = args.target is not None and args.draft is None
    most = max(args.gammas)
    lm = loading.load(
        args.target,
        draft=args.draft,
        drafter="ngram" if is_alone else "draft-model",
        gamma_max=most,
        slab=most + 1,
        dtype=args.dtype,
        impl=args.impl,
    )
    words = prompts_lib.with_options(args, lm.tokenizer)
    lm = dataclasses.replace(lm, tokenizer=words)
    return dataclasses.replace(lm, drafter=None) if is_alone else lm


def load_hf(
    args: argparse.Namespace, lm: loading.LanguageModel, folder: pathlib.Path
) -> hf.Baseline:
    """Their side, on the same kind of device; `folder` is for a target of one file."""
    target = hub.locate(args.target or loading.EMBEDDED_TARGET)
    if not target.is_dir():
        lm.save(folder)
        target = folder
    draft = args.draft or loading.EMBEDDED_DRAFT if lm.drafter else None
    return hf.load(target, draft, dtype=args.dtype, backend=jax.default_backend())


def make_prompts(
    args: argparse.Namespace, lm: loading.LanguageModel
) -> list[prompts_lib.LengthPrompt]:
    """The prompts of every class, checked."""
    prompts = prompts_lib.of_lengths(
        prompt_files.parse(args.prompts, default_file=prompt_files.BUNDLED),
        lm.tokenizer,
        lengths=dict(zip(prompts_lib.LENGTHS, args.lengths, strict=True)),
        per_length=args.per_length,
        raw=args.raw,
    )
    prompts_lib.check_lengths(
        lm.target.config,
        [(f"{p.length} prompt {p.id!r}", p.tokens) for p in prompts],
        gen_tokens=args.gen_tokens,
        page_size=args.page_size,
    )
    return prompts


def make_settings(
    args: argparse.Namespace,
    lm: loading.LanguageModel,
    prompts: Sequence[prompts_lib.LengthPrompt],
) -> runs_lib.Settings:
    """The settings of our runs, with a cache that fits the longest prompt."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    pages = index.pages_for(longest + args.gen_tokens, args.page_size)
    return runs_lib.Settings(
        gamma=max(args.gammas),
        gen_tokens=args.gen_tokens,
        capacity=pages * args.page_size,
        page_size=args.page_size,
        stop_ids=() if args.ignore_stop else lm.stop_ids,
    )


def run_all(
    args: argparse.Namespace, out: records.JsonLines, console: rich_console.Console
) -> bool:
    """Loads, measures, writes, prints; returns whether all tokens are the same."""
    started = time.perf_counter()
    hf.check_installed()
    lm = load_lm(args)
    prompts = make_prompts(args, lm)
    settings = make_settings(args, lm, prompts)
    with tempfile.TemporaryDirectory() as folder:
        baseline = load_hf(args, lm, pathlib.Path(folder))
    sides = compare.Sides(lm=lm, hf=baseline, settings=settings)
    out.common = {
        **models_lib.describe(args, lm),
        "prompt_source": args.prompts,
        "stop_ids": settings.stop_ids,
        "matched_ngram": hf.MATCHED_NGRAM,
        "hf": baseline.description,
        **records.provenance(),
    }
    loaded_s = time.perf_counter() - started
    done, total = [], len(prompts) * (args.repeats + 1)
    with terminal.counted("runs", total=total) as advance:
        for prompt in prompts:
            runs = sides.runs(args.gammas)
            more = {"repeats": args.repeats, "after_turn": advance}
            done.append(compare.run_prompt(sides, prompt, runs=runs, **more))
            out.write(done[-1].row())
    compared = compare.rows(done)
    out.write_all(compared)
    same = [one.first_difference(compare.OUR_PLAIN) is None for one in done]
    summary = {
        "prompts": len(prompts),
        "gen_tokens": args.gen_tokens,
        "compared_dtype": args.dtype,
        "greedy_identical": sum(same),
        "matched": all(one.matched for one in done),
        "nonfinite_logits": sum(one.nonfinite for one in done),
        "load_s": loaded_s,
        "warm_up_s": sum(row["warm_up_s"] for row in compared),
        "total_s": time.perf_counter() - started,
    }
    out.write({"kind": "summary"} | summary)
    compare.print_all(console, compared, summary)
    return summary["matched"] and (all(same) or args.dtype != EXACT_DTYPE)


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    with records.open_out(args) as out:
        same = run_all(args, out, terminal.console())
    return IDENTICAL if same else NOT_IDENTICAL


main = cli.script("compare_hf.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
