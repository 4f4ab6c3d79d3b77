"""Are rollouts exactly on-policy, and how much sooner are they there with speculation?

Draws several samples of each prompt in batches, plainly and speculatively, in turn in
one process, and scores the speculative texts anew, as a learner would. Tokens and
log-probabilities of all three are compared as integers: where they are equal, the ratio
of learner and sampler, by which their losses are weighted, is exactly one. Times are
from the first prefill to the last token, log-probabilities not included.

Exit status: 0 all equal; 2 some differ; 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import spec_jax as sj
from experiments.lib import (
    bench,
    flags,
    models,
    prompt_files,
    records,
    tables,
    terminal,
)
from spec_jax import testing


EQUAL, NOT_EQUAL = 0, 2

WAYS = {"plain": 0, "speculative": None}
"""What `generate` takes as gamma: none; what its default policy chooses."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    flags.add_models(parser.add_argument_group("models"), has_mesh=False)
    group = parser.add_argument_group("rollouts")
    flags.add_drafter(group)
    flags.add_prompts(group, default="4")
    flags.add_raw(group)
    flags.add_gen_tokens(group, default=64)
    flags.add_page_size(group)
    flags.add_repeats(group, default=3)
    cli.add(
        group,
        """
        --samples N=4  of each prompt, a seed each
        --batch N=8  samples at once
        --gamma N=7  drafts of a round, at most
        --temperature T=1.0  divides the logits; 0 is greedy
        """,
    )
    flags.add_noise(parser.add_argument_group("sampling"))
    flags.add_out(parser, rows="one per sample, then one per way")
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    flags.check_sampling(parser, args)
    return args


def samplings(args: argparse.Namespace) -> list[sj.Sampling]:
    """Returns the settings of one prompt's samples: they differ in the seed."""
    names = ("temperature", "top_k", "top_p", "min_p")
    given = {name: getattr(args, name) for name in names}
    return [sj.Sampling(**given, seed=args.seed + n) for n in range(args.samples)]


def roll_out(
    lm: sj.LanguageModel,
    ids: Sequence[list[int]],
    settings: Mapping[str, Any],
    *,
    repeats: int,
) -> tuple[dict[str, list[sj.Generation]], dict[str, list[float]]]:
    """Returns the texts of each way, and its seconds of each repeat.

    A run that does not count compiles, and measures what rounds cost.
    """
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    texts: dict[str, list[sj.Generation]] = {}
    with terminal.counted("runs", total=(repeats + 1) * len(WAYS)) as advance:
        for repeat, way in itertools.product(range(repeats + 1), WAYS):
            started = time.perf_counter()
            texts[way] = sj.generate(lm, ids, gamma=WAYS[way], **settings)
            if repeat:
                seconds[way].append(time.perf_counter() - started)
            advance()
    return texts, seconds


def compare(
    lm: sj.LanguageModel,
    texts: Mapping[str, Sequence[sj.Generation]],
    sampling: Sequence[sj.Sampling],
) -> list[dict[str, Any]]:
    """Returns a row of each sample: what is equal, and the ratio furthest from one.

    The learner scores the speculative text a slab of rows at a time, the sampler is
    plain decoding, a row at a time.
    """
    rows = []
    for plain, drafted, drawn in zip(*texts.values(), sampling, strict=True):
        learner = sj.score(lm, drafted.prompt_tokens, drafted.tokens, sampling=drawn)
        sampler = sj.decode(
            lm,
            plain.prompt_tokens,
            max_tokens=len(plain.tokens),
            sampling=drawn,
            ignore_eos=True,
            log_probs=True,
        )
        same = {
            name: np.array_equal(
                testing.bits(getattr(learner, name)),
                testing.bits(getattr(sampler, name)),
            )
            for name in ("log_probs", "drawn_log_probs")
        }
        is_text = plain.tokens == drafted.tokens == sampler.tokens
        ratio = [1.0]
        if is_text:
            apart = learner.drawn_log_probs - sampler.drawn_log_probs
            ratio = np.exp(apart.astype(np.float64)).tolist()
        rows.append(
            {"kind": "rollout", "tokens": len(drafted.tokens), "seed": drawn.seed}
            | {"tokens_equal": is_text}
            | {f"{name}_equal": found for name, found in same.items()}
            | {"ratio": max(ratio, key=lambda x: abs(x - 1))}
        )
    return rows


def run(args: argparse.Namespace) -> int:
    """Draws, scores and compares; returns the exit status."""
    console = terminal.console()
    with records.open_out(args) as out:
        lm = models.load(args, drafter=args.drafter, gamma_max=args.gamma)
        read = models.prepare(args, lm, args.prompts).ids
        each = samplings(args)
        ids = [prompt for prompt in read for _ in each]
        drawn = each * len(read)
        settings = {"max_tokens": args.gen_tokens, "num_slots": args.batch}
        settings |= {"sampling": drawn, "page_size": args.page_size}
        out.common = (
            models.describe(args, lm)
            | {"drafter": args.drafter, "samples": args.samples, "batch": args.batch}
            | {"prompt_source": prompt_files.without_folders(args.prompts)}
            | records.provenance()
        )
        texts, seconds = roll_out(lm, ids, settings, repeats=args.repeats)
        samples = compare(lm, texts, drawn)
        out.write_all(samples)
        tokens = sum(row["tokens"] for row in samples)
        equal = [
            row
            for row in samples
            if row["tokens_equal"] and row["log_probs_equal"] and row["ratio"] == 1
        ]
        rows = [
            {"kind": "rollouts", "way": way, "rollouts": len(samples), "tokens": tokens}
            | {"equal": len(equal)}
            | bench.spread_fields("tok_s", [tokens / s for s in seconds[way]])
            | bench.spread_fields("ratio", bench.ratios(seconds["plain"], seconds[way]))
            for way in WAYS
        ]
        out.write_all(rows)
    tables.print_rows([row | out.common for row in rows], COLUMNS, console)
    return EQUAL if len(equal) == len(samples) else NOT_EQUAL


COLUMNS = {
    "way": "",
    "tokens/s": ("tok_s", ",.0f"),
    "x plain": ("ratio", ".2f"),
    "p10-p90": lambda row: f"{row['ratio_p10']:.2f}-{row['ratio_p90']:.2f}",
    "ratio exactly one": lambda row: f"{row['equal']}/{row['rollouts']}",
}
"""Of the table, for `tables.print_rows`."""

main = cli.script("rollouts.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
