"""How fast is decoding compared with Hugging Face's, and are its tokens the same?

The same weights on both sides, in turns, in one process: autoregressive decoding,
drafts of the draft model, if there is one, and drafts looked up in the text. Exit
status: 0 every drafted token of ours is that of our decoding, and in float32 that is
Hugging Face's greedy one; 2 not; 1 the input was unusable.
"""

import argparse
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax

from experiments.lib import (
    bench,
    cli,
    compare,
    flags,
    hf,
    models as models_lib,
    prompts as prompts_lib,
    records,
    runs as runs_lib,
    summaries,
    tables,
    terminal,
)
from spec_jax import loading
from spec_jax.analysis import metrics
from spec_jax.drafters import ngram
from spec_jax.model import hub


IDENTICAL, NOT_IDENTICAL = 0, 2

EXACT_DTYPE = "float32"
"""The dtype with equal tokens: in bfloat16 two correct libraries round differently."""

THEIRS = "transformers"
THEIR_PLAIN = compare.Run(side=THEIRS, method=hf.PLAIN)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    models = parser.add_argument_group("models")
    flags.add(models, "target draft impl isa")
    text = f"--dtype TYPE={EXACT_DTYPE}  dtype of all models"
    cli.add(models, text, TYPE=("float32", "bfloat16"))
    parser.set_defaults(weights=None, draft_weights=None)
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
    return flags.parsed(parser, argv)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sides:
    """The same weights on both sides, and the settings of both."""

    lm: loading.LanguageModel  # `drafter` is None where there is no draft model
    hf: hf.Baseline
    settings: runs_lib.Settings

    def ways(self, gammas: Sequence[int]) -> list[compare.Run]:
        """Returns each run that the sides have models for, in the table's order."""
        methods = [hf.DRAFT_MODEL] * bool(self.lm.drafter) + [hf.PROMPT_LOOKUP]
        drafted = [(method, gamma) for method in methods for gamma in gammas]
        return [
            compare.Run(side=side, method=method, gamma=gamma)
            for side in (compare.OURS, THEIRS)
            for method, gamma in [(hf.PLAIN, None), *drafted]
        ]

    def generate(self, run: compare.Run, prompt: list[int]) -> compare.Generated:
        """Generates once from a prompt, in the way that `run` names."""
        lm, settings = self.lm, self.settings
        if run.side == THEIRS:
            how = {"method": run.method, "gamma": run.gamma}
            how |= {"max_tokens": settings.gen_tokens, "stop_ids": settings.stop_ids}
            started = time.perf_counter()
            tokens = hf.generate(self.hf, prompt, **how)
            seconds = time.perf_counter() - started
            return compare.Generated(count=len(tokens), ids=tokens, decode_s=seconds)
        if run.method == hf.PROMPT_LOOKUP:
            # This drafter makes the same drafts as Hugging Face's prompt lookup.
            sizes = {"gamma_max": settings.gamma, "n_max": hf.MATCHED_NGRAM}
            drafter = ngram.hugging_face(**sizes, stop_ids=settings.stop_ids)
            lm = lm.with_drafter(drafter)
        return compare.ours(lm, settings, prompt, gamma=run.gamma)


def load(args: argparse.Namespace) -> tuple[Sides, models_lib.Subject]:
    """Returns both sides, on one kind of device, and our side with the prompts of every
    class.

    Our side has no drafter if a target is named without a draft. All values of K share
    one slab, because gamma is data.
    """
    cli.require("oracle")
    is_alone = args.target is not None and args.draft is None
    name = "ngram" if is_alone else "draft-model"
    lm = models_lib.load(args, drafter=name, gamma_max=max(args.gammas))
    lengths = dict(zip(prompts_lib.LENGTHS, args.lengths, strict=True))
    how = {"lengths": lengths, "per_length": args.per_length}
    subject = models_lib.prepare(args, lm, args.prompts, **how)
    if is_alone:
        lm = dataclasses.replace(lm, drafter=None)
    draft = args.draft or loading.EMBEDDED_DRAFT if lm.drafter else None
    how = {"dtype": args.dtype, "backend": jax.default_backend()}
    with tempfile.TemporaryDirectory() as name:
        target = hub.locate(args.target or loading.EMBEDDED_TARGET)
        if not target.is_dir():  # `hf.load` reads folders, no files.
            target = pathlib.Path(name)
            lm.save(target)
        baseline = hf.load(target, draft, **how)
    return Sides(lm=lm, hf=baseline, settings=subject.settings), subject


def row_of(prompts: Sequence[compare.PromptRuns], run: compare.Run) -> dict[str, Any]:
    """Returns the row of a run, over the prompts of a class of lengths.

    `tok_s` is the tokens per second of all prompts of a repeat: the median over the
    repeats, with percentiles. `vs_hf` is how many times faster a token is than in
    Hugging Face's greedy decoding in the same turn; `vs_plain`, than in its side's own.
    """
    own, ratios = compare.per_token(prompts, run), {}
    for name, side in (("vs_plain", run.side), ("vs_hf", THEIRS)):
        plain = compare.Run(side=side, method=hf.PLAIN)
        found = bench.ratios(compare.per_token(prompts, plain), own)
        ratios |= bench.spread_fields(name, found)
    differences = [prompt.first_difference(run) for prompt in prompts]
    counters = compare.counted(prompts, run)
    names = ("rounds", "proposed", "accepted", "accepted_hist")
    rate = counters and metrics.ratio(counters.accepted, counters.proposed)
    return {
        "kind": "comparison",
        "length": prompts[0].prompt.category,
        "prompt_tokens": [len(one.prompt.ids) for one in prompts],
        **dataclasses.asdict(run),
        **bench.spread_fields("tok_s", [1 / seconds for seconds in own]),
        **ratios,
        # None for runs without drafts, and for theirs, whose drafts are not counted.
        **{name: counters and getattr(counters, name) for name in names},
        "acceptance_rate": rate,
        "repetition": summaries.mean_repetition([p.every[run][0].ids for p in prompts]),
        "identical": differences.count(None),
        "prompts": len(prompts),
        "n": len(own),
    }


COLUMNS = {
    "run": lambda row: f"{row['side']} {row['method']}",
    "K": ("gamma", "d"),
    "tok/s": ("tok_s", ",.1f"),
    "p10": ("tok_s_p10", ",.1f"),
    "p90": ("tok_s_p90", ",.1f"),
    "vs plain": ("vs_plain", ".2f"),
    "vs HF": ("vs_hf", ".2f"),
    "accepted": ("acceptance_rate", ".3f"),
    "rep": ("repetition", ".3f"),
    "same": ("identical", "d"),
}
"""The columns of the table, for `tables.print_rows`."""

NOTE = (
    "tok/s: prefill included, median and percentiles over the turns; vs plain, HF: "
    "times autoregressive decoding of that side, and Hugging Face's; accepted: of the "
    "proposed; rep: share of repeated 4-grams in the texts; same: prompts of which "
    "every token is that of Hugging Face's greedy decoding in this dtype"
)


def run(
    args: argparse.Namespace, out: records.JsonLines, console: terminal.Console
) -> int:
    """Loads models, measures, writes and prints rows; returns the exit status."""
    sides, subject = load(args)
    out.common = {
        **models_lib.describe(args, sides.lm),
        "prompt_source": args.prompts,
        "stop_ids": sides.settings.stop_ids,
        "matched_ngram": hf.MATCHED_NGRAM,
        "hf": sides.hf.description,
        **records.provenance(),
    }
    ways = sides.ways(args.gammas)
    how = {"reference": THEIR_PLAIN, "repeats": args.repeats}
    done = compare.run_prompts(sides.generate, ways, subject, out, **how)
    for length in dict.fromkeys(one.prompt.category for one in done):
        of_length = [one for one in done if one.prompt.category == length]
        compared = [row_of(of_length, way) for way in ways]
        out.write_all(compared)
        lengths = sorted({*compared[0]["prompt_tokens"]})
        tokens = " and ".join(map(str, lengths))
        title = f"{length}: {len(of_length)} x {tokens} tokens"
        tables.print_rows(compared, COLUMNS, console, title=title)
    tables.print_note(NOTE, console)
    same = [one.first_difference(compare.OUR_PLAIN) is None for one in done]
    matched = all(one.matched for one in done)
    out.write(
        {
            "kind": "summary",
            "prompts": len(done),
            "gen_tokens": args.gen_tokens,
            "compared_dtype": args.dtype,
            "greedy_identical": sum(same),
            "matched": matched,
            "nonfinite_logits": sum(one.nonfinite for one in done),
        }
    )
    console.print(
        f"{args.dtype}: {sum(same)} of {len(done)} prompts as Hugging Face's greedy "
        f"decoding; drafted as without drafts: {str(matched).lower()}",
        highlight=False,
    )
    is_same = matched and (all(same) or args.dtype != EXACT_DTYPE)
    return IDENTICAL if is_same else NOT_IDENTICAL


main = records.script("compare_hf.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
