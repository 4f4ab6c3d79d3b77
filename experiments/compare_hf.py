"""How fast is decoding compared with Hugging Face's, and are its tokens the same?

The same weights on both sides, in turns, in one process: autoregressive decoding,
drafts of the draft model, drafts looked up in the text. Exit status: 0 every token of
our decoding equals Hugging Face's greedy one in float32, and every drafted token that
of decoding; 2 not; 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
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
    subjects,
    terminal,
)
from spec_jax import loading
from spec_jax.paging import index
from spec_jax.typing import IMPLS


IDENTICAL, NOT_IDENTICAL = 0, 2

COMPARED_DTYPE = "float32"
"""In bfloat16 two libraries that are both right round to different tokens."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    models = parser.add_argument_group("models")
    flags.add_folders(models)
    subjects.add_presets(models)
    cli.add(
        models,
        f"""
        --impl IMPL=auto  kernels
        --dtype TYPE={COMPARED_DTYPE}  dtype of all models while they are timed; in
            bfloat16 the tokens are compared in float32 besides
        --no-hf  leave Hugging Face's side out
        """,
        IMPL=IMPLS,
        TYPE=("float32", "bfloat16"),
    )
    flags.add_isa(models)
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
    flags.add_raw(runs)
    flags.add_page_size(runs)
    flags.add_prompts(runs, default="50")
    flags.add_gen_tokens(runs, default=32)
    flags.add_repeats(runs, default=3)
    flags.add_device(parser)
    rows = "one per prompt as it finishes, one per way to generate, a summary"
    flags.add_out(parser, rows=rows)
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    subjects.check_presets(parser, args)
    return args


def load_sides(
    args: argparse.Namespace, lm: loading.LanguageModel, settings: runs_lib.Settings
) -> compare.Sides:
    """Both sides in our side's dtype, on the same kind of device."""
    baseline = None
    if args.preset and not args.no_hf:
        baseline = subjects.preset_hf(lm)
    elif not args.no_hf:
        baseline = hf.load(
            *subjects.folders(args),
            dtype=lm.target.config.dtype,
            backend=jax.default_backend(),
        )
    return compare.Sides(lm=lm, hf=baseline, settings=settings)


def load_lm(args: argparse.Namespace, *, dtype: str) -> loading.LanguageModel:
    """Our side; one slab for every K, because gamma is data."""
    most = max(args.gammas)
    lm = subjects.load(args, gamma_max=most, slab=most + 1, dtype=dtype)
    words = prompts_lib.with_options(args, lm.tokenizer)
    return dataclasses.replace(lm, tokenizer=words)


def make_prompts(
    args: argparse.Namespace, lm: loading.LanguageModel
) -> list[prompts_lib.LengthPrompt]:
    """The prompts of every class, checked."""
    lengths = dict(zip(prompts_lib.LENGTHS, args.lengths, strict=True))
    if args.preset:
        rng, vocab_size = np.random.default_rng(0), lm.target.config.vocab_size
        prompts = [
            prompts_lib.LengthPrompt(
                length=name,
                id=f"random {number}",
                tokens=rng.integers(vocab_size, size=size).tolist(),
            )
            for name, size in lengths.items()
            for number in range(args.per_length)
        ]
    else:
        prompts = prompts_lib.of_lengths(
            prompt_files.parse(args.prompts, default_file=prompt_files.BUNDLED),
            lm.tokenizer,
            lengths=lengths,
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


def greedy_rows(
    args: argparse.Namespace,
    sides: compare.Sides,
    runs: Sequence[compare.PromptRuns],
) -> list[dict[str, Any]]:
    """Our tokens and Hugging Face's, in the dtype in which they are compared.

    What was timed in another one is generated again, unless the weights are random.
    """
    if sides.hf is None:
        return []
    plain = (compare.OUR_PLAIN, compare.THEIR_PLAIN)
    texts = [[done.generated[run].tokens for run in plain] for done in runs]
    if args.dtype != COMPARED_DTYPE and not args.preset:
        lm = load_lm(args, dtype=COMPARED_DTYPE)
        sides = load_sides(args, lm, sides.settings)
        texts = [
            [sides.generate(run, done.prompt.tokens)[1].tokens for run in plain]
            for done in runs
        ]
    return [
        compare.greedy_row(sides, done.prompt, *both)
        for done, both in zip(runs, texts, strict=True)
    ]


def run_all(
    args: argparse.Namespace, out: records.JsonLines, console: rich_console.Console
) -> bool:
    """Loads, measures, writes, prints; returns whether all tokens are the same."""
    started = time.perf_counter()
    subjects.check_device(args.device)
    if not args.no_hf:
        hf.check_installed()
    lm = load_lm(args, dtype=args.dtype)
    prompts = make_prompts(args, lm)
    settings = make_settings(args, lm, prompts)
    sides = load_sides(args, lm, settings)
    out.common = describe(args, sides)
    loaded_s = time.perf_counter() - started

    runs, total = [], len(prompts) * (args.repeats + 1)
    with terminal.counted("runs", total=total) as advance:
        for prompt in prompts:
            done = compare.run_prompt(
                sides,
                prompt,
                runs=compare.all_runs(sides, args.gammas),
                repeats=args.repeats,
                after_turn=advance,
            )
            runs.append(done)
            out.write(compare.prompt_row(done))
    compared = compare.rows(runs)
    greedy = greedy_rows(args, sides, runs)
    out.write_all([*compared, *greedy])
    same_drafts = [compare.same_drafts(done) for done in runs]
    summary = {
        "prompts": len(prompts),
        "gen_tokens": args.gen_tokens,
        "compared_dtype": greedy[0]["compared_dtype"] if greedy else None,
        "greedy_identical": sum(row["first_difference"] is None for row in greedy),
        "matched": all(done.matched for done in runs),
        "nonfinite_logits": sum(done.nonfinite for done in runs),
        "same_drafts": sum(map(sum, same_drafts)),
        "drafted_runs": sum(map(len, same_drafts)),
        "load_s": loaded_s,
        "warm_up_s": sum(row["warm_up_s"] for row in compared),
        "total_s": time.perf_counter() - started,
    }
    out.write({"kind": "summary"} | summary)
    compare.print_all(console, compared, greedy, summary)
    is_compared = summary["compared_dtype"] == COMPARED_DTYPE
    same = summary["greedy_identical"] == len(prompts) or not is_compared
    return summary["matched"] and same


def describe(args: argparse.Namespace, sides: compare.Sides) -> dict[str, Any]:
    """What is measured and where, for every row."""
    return {
        **models_lib.describe(args, sides.lm),
        **subjects.names(args),
        "prompt_source": None if args.preset else args.prompts,
        "stop_ids": sides.settings.stop_ids,
        "matched_ngram": hf.MATCHED_NGRAM,
        "hf": sides.hf and sides.hf.description,
        **records.provenance(),
    }


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    with records.open_out(args) as out:
        same = run_all(args, out, terminal.console())
    return IDENTICAL if same else NOT_IDENTICAL


main = cli.script("compare_hf.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
