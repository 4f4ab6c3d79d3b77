"""Are rollouts exactly on-policy, and how much sooner are they there with speculation?

Draws several samples of each prompt in batches, in turn in one process: plainly, by the
default policy, which drafts where that pays, and always drafting, chains and trees.
Each prompt is prefilled once, and its samples share its pages. Then decoding writes
every sample alone, and the texts are scored anew, as a learner would. Tokens and
log-probabilities are compared as integers: where they are equal, the ratio of learner
and sampler, by which their losses are weighted, is exactly one. Times are from the
first prefill to the last token, log-probabilities not included.

--steps N goes on as a learner does: N steps of REINFORCE on a toy reward, the share of
tokens that hold a blank, each on new samples of the newest weights. The drafter stays
as it is, and what of its drafts is kept drifts: plot.py draws it.

Exit status: 0 all equal; 2 some differ; 1 the input was unusable.
"""

import argparse
import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import spec_jax as sj
from experiments.lib import (
    bench,
    cli,
    flags,
    models,
    processing,
    records,
    tables,
)
from spec_jax import testing
from spec_jax.engine import protocols


FLAGS = """
    [models] models
    [rollouts] drafter prompts=4 raw gen-tokens page-size repeats=3
        --samples N=4  of each prompt, all from one seed
        --batch N=8  samples at once
        --gamma N=7  drafts of a round, at most
    [sampling] temperature=1.0 noise processor
    [learning]
        --steps I=0  steps of REINFORCE after the comparison
        --learning-rate RATE=0.0003  of Adam
    [out] one per sample, one per way, then one per step
    """


def check(parser: cli.Parser, args: argparse.Namespace) -> None:
    """Refuses samples that are one text, and learning by other draws."""
    if args.samples > 1 and not args.temperature:
        parser.error(
            f"--samples {args.samples} of --temperature 0 are one text: give a "
            "temperature above 0, or --samples 1"
        )
    if args.steps and flags.given(parser, args, (*flags.NOISE, "processor")):
        parser.error(
            "--steps are of what the model itself draws: leave filters out, and "
            "processors"
        )
    if args.steps:
        cli.require("train")


parse_args = flags.parser(__doc__, FLAGS, check=check)


def ways(args: argparse.Namespace, lm: sj.LanguageModel) -> dict[str, Any]:
    """Returns the argument `gamma` of `generate` by way: 0; None, its default policy;
    always all drafts of a chain; and, if the drafter drafts trees, a tree with two
    children a node."""
    found: dict[str, Any] = {"plain": 0, "default": None, "chain": args.gamma}
    if protocols.has_own(lm.drafter, "for_tree"):
        found["tree"] = sj.Tree.parse(f"2x{args.gamma}:{args.gamma}")
    return found


def roll_out(
    lm: sj.LanguageModel,
    ids: Sequence[list[int]],
    gammas: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    repeats: int,
) -> tuple[dict[str, list[sj.Generation]], Mapping[Any, Sequence[float]]]:
    """Returns the texts of each way, and its seconds of each repeat.

    A first run, which is not counted, compiles and measures the costs of rounds.
    """
    texts: dict[str, list[sj.Generation]] = {}

    def draw(way: str) -> float:
        started = time.perf_counter()
        found = sj.generate(lm, ids, gamma=gammas[way], **settings)
        seconds = time.perf_counter() - started
        texts[way] = list(itertools.chain.from_iterable(found))
        return seconds

    cases = {way: functools.partial(functools.partial, draw, way) for way in gammas}
    return texts, bench.run(cases, repeats=repeats).seconds


def compare(
    lm: sj.LanguageModel,
    texts: Mapping[str, Sequence[sj.Generation]],
    sampling: sj.Sampling,
    processor: sj.processors.Processor | None,
) -> Iterator[dict[str, Any]]:
    """Yields a row for each sample: what is equal, and the ratio furthest from one.

    The sampler is plain decoding of the sample alone, one row at a time, after its own
    prefill of the prompt; the learner scores the text, a slab of rows at a time.
    """
    for each in zip(*texts.values(), strict=True):
        first = each[0]
        seed = first.provenance.get("seed", sampling.seed)
        drawn = dataclasses.replace(sampling, seed=seed)
        how = {"sampling": drawn, "processors": processor}
        learner = sj.score(lm, first.prompt_tokens, each[-1].tokens, **how)
        sampler = sj.decode(
            lm,
            first.prompt_tokens,
            max_tokens=len(first.tokens),
            ignore_eos=True,
            log_probs=True,
            **how,
        )
        same = {
            f"{name}_equal": np.array_equal(
                testing.bits(getattr(learner, name)),
                testing.bits(getattr(sampler, name)),
            )
            for name in ("log_probs", "drawn_log_probs")
        }
        is_text = all(one.tokens == sampler.tokens for one in each)
        yield {
            **{"kind": "rollout", "tokens": len(first.tokens), "seed": seed},
            **{"tokens_equal": is_text, **same},
            "ratio": worst_ratio(learner, sampler) if is_text else None,
            "prompt_tokens": len(first.prompt_tokens),
            "shared_prompt_tokens": first.metrics.get("shared_prompt_tokens", 0),
        }


def worst_ratio(learner: Any, sampler: Any) -> float:
    """Returns the importance ratio furthest from one, over all tokens."""
    apart = learner.drawn_log_probs - sampler.drawn_log_probs
    ratios = np.exp(apart.astype(np.float64)).tolist()
    return max(ratios, key=lambda x: abs(x - 1), default=1.0)


def run(args: argparse.Namespace, out: records.JsonLines) -> bool:
    """Draws, scores and compares, then learns; returns whether all is well."""
    sampling = flags.drawn(args)
    lm = models.load(args, drafter=args.drafter, gamma_max=args.gamma)
    ids = [one.ids for one in models.prepare(args, lm, args.prompts).prompts]
    gammas = ways(args, lm)
    settings = {"max_tokens": args.gen_tokens, "num_slots": args.batch}
    settings |= {"sampling": sampling, "page_size": args.page_size}
    processor = processing.of(args, lm)
    settings |= {"n": args.samples, "processors": processor}
    out.common = models.common(args, lm, "drafter", "samples", "batch")
    out.common |= {"prompts": len(ids)}
    texts, seconds = roll_out(lm, ids, gammas, settings, repeats=args.repeats)
    samples = out.write_all(compare(lm, texts, sampling, processor))
    rows = out.write_all(summaries(samples, seconds, texts))
    tables.print_rows([row | out.common for row in rows], COLUMNS)
    steps: list[dict[str, Any]] = []
    if args.steps:
        from experiments.lib import reinforce

        settings |= {"gamma": min(args.gamma, lm.gamma_max)}
        how = {"steps": args.steps, "learning_rate": args.learning_rate}
        how |= {"ratio": worst_ratio}
        steps = out.write_all(reinforce.learn(lm, ids, settings, **how))
        tables.print_rows([row | out.common for row in steps], STEPS)
    is_equal = rows[0]["equal"] == len(samples)
    return is_equal and all(row["ratio"] == 1 for row in steps)


def summaries(
    samples: Sequence[Mapping[str, Any]],
    seconds: Mapping[str, Sequence[float]],
    texts: Mapping[str, Sequence[sj.Generation]],
) -> list[dict[str, Any]]:
    """Returns a row for each way: its speed and drafts, the costs that its policy
    measured, and the totals over all samples."""
    total = lambda way, name: sum(one.metrics[name] for one in texts[way])
    tokens, prompt_tokens, shared = (
        sum(row[name] for row in samples)
        for name in ("tokens", "prompt_tokens", "shared_prompt_tokens")
    )
    names = ("tokens_equal", "log_probs_equal", "drawn_log_probs_equal")
    equal = [row for row in samples if all(map(row.get, names)) and row["ratio"] == 1]
    return [
        {"kind": "rollouts", "way": way, "rollouts": len(samples), "tokens": tokens}
        | {"equal": len(equal)}
        | {"prompt_tokens": prompt_tokens, "shared_prompt_tokens": shared}
        | {name: total(way, name) for name in ("rounds", "proposed", "accepted")}
        | {"round_costs": texts[way][0].provenance.get("round_costs")}
        | bench.spread_fields("tok_s", [tokens / s for s in seconds[way]])
        | bench.spread_fields("ratio", bench.ratios(seconds["plain"], seconds[way]))
        for way in seconds
    ]


def costs(row: Mapping[str, Any]) -> str:
    """Returns the times of rounds of 1, 2, .. drafts, in rounds without drafts."""
    first, *others = (row["round_costs"] or {"round_s": [1]})["round_s"]
    return " ".join(f"{one / first:.2f}" for one in others) or "-"


COLUMNS = {
    "way": "",
    "tokens/s": ("tok_s", ",.0f"),
    "x plain": ("ratio", ".2f"),
    "drafts a round": lambda row: f"{row['proposed'] / row['rounds']:.2f}",
    "rounds of 1, 2, .. cost": costs,
    "p10-p90": lambda row: f"{row['ratio_p10']:.2f}-{row['ratio_p90']:.2f}",
    "ratio exactly one": lambda row: f"{row['equal']}/{row['rollouts']}",
    "prefill saved": lambda row: (
        f"{row['shared_prompt_tokens']:,} of {row['prompt_tokens']:,} tokens"
    ),
}
"""The columns of the table, for `tables.print_rows`."""

STEPS = {
    "step": "",
    "reward": ("reward", ".3f"),
    "drafts kept": ("acceptance_rate", ".3f"),
    "tokens a round": ("mean_accepted_length", ".2f"),
    "ratio": ("ratio", ""),
}

main = records.script("rollouts.py", parse_args, run)
