"""How many tokens a second do batches give, with and without speculation?

Decodes the same prompts one by one, and then in batches of several sizes, without
drafts (gamma 0), with each gamma and by a schedule of what is verified, in turn in one
process. Every text is compared with that of its prompt alone; one of logits that are
not finite is equal to none. Times are from the first prefill to the last token.
Programs are of the largest gamma, in which a smaller one is data; a schedule goes with
the largest. With --adversarial no draft is ever kept: what is slower then than without
drafts is the price of trying.

Exit status: 0 all texts equal; 2 some differ, or have logits that are not finite; 1 the
input was unusable.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.lib import (
    bench,
    cli,
    flags,
    models,
    policies,
    records,
    runs,
    tables,
    terminal,
)


@dataclasses.dataclass(kw_only=True, eq=False)
class Way:
    """A way of running all prompts, and the rows of its turns."""

    settings: runs.Settings
    batch: int | None = None  # sequences at once; None: one by one, without rounds
    gamma: int = 0  # drafts of a round; 0: none
    tree: str | None = None  # the tree of the drafts; None: a chain
    scheduled: bool = False  # whether `--schedule` decides what is verified
    turns: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def to_row(self) -> dict[str, Any]:
        """Returns the fields of the way in a JSON row."""
        where = "one by one" if self.batch is None else f"batch {self.batch}"
        kind = f"gamma {self.gamma}" if self.gamma else "plain"
        row = {"batch": self.batch, "gamma": self.gamma}
        if self.tree is not None:
            kind, row["tree"] = f"tree {self.tree}", self.tree
        if self.scheduled:
            kind, row["scheduled"] = f"{kind} scheduled", True
        return {"way": f"{kind}, {where}", **row}


FLAGS = """
    [models] models mesh
    [runs] gammas=4 page-size tree drafter rule prompts=32 raw gen-tokens repeats=3
        --batch N,N,...=1,2,4,8,16  sequences at once
        --adversarial  let the drafter work as always, and have each of its drafts be
            wrong, however sure it is of it
    [adaptive gamma] policy
    [sampling] temperature noise processor
    [out] one per run as it finishes, then one per way
    """


def check(parser: cli.Parser, args: argparse.Namespace) -> None:
    """Refuses flags of chains beside a tree."""
    flags.check_tree(parser, args, "gamma_policy", "schedule", "adversarial")
    if args.tree is not None and len(args.gamma) > 1:
        parser.error("--tree has drafts of its own number: leave the list --gamma out")
    if args.adversarial and args.rule != "coupled":
        parser.error(
            f"--rule {args.rule} asks what drafts were drawn from, and those of "
            "--adversarial were not: leave one of them out"
        )


parse_args = flags.parser(__doc__, FLAGS, check=check)


def ways_of(args: argparse.Namespace, subject: models.Subject) -> list[Way]:
    """Returns the ways to run: first each prompt alone, then by batch and gamma.

    Policies have costs of as many slots, and are of the largest gamma, which `subject`
    has: all ways share programs.
    """
    prompts, most = subject.prompts, subject.settings.gamma
    tree = args.tree and str(args.tree)
    gammas = [most] if tree else [min(gamma, most) for gamma in args.gamma]
    ways = [Way(settings=subject.settings)]
    for batch in dict.fromkeys(min(each, len(prompts)) for each in args.batch):
        settings = dataclasses.replace(subject.settings, num_slots=batch)
        own, name = (args, settings, prompts), args.gamma_policy
        settings = policies.of_run(*own, name=name)
        for gamma in dict.fromkeys((0, *gammas)):
            how = {"batch": batch, "gamma": gamma, "tree": tree if gamma else None}
            made = dataclasses.replace(settings, gamma=gamma)
            ways.append(Way(settings=made, **how))
        if args.schedule:
            made = policies.of_run(*own, name=name, schedule=args.schedule)
            ways.append(Way(settings=made, batch=batch, gamma=most, scheduled=True))
    return ways


def row_of(way: Way, alone: Way) -> dict[str, Any]:
    """Returns the row of a way, after all repeats."""
    turns = way.turns
    seconds, tokens = [turn["seconds"] for turn in turns], turns[-1]["tokens"]
    ratios = bench.ratios([turn["seconds"] for turn in alone.turns], seconds)
    return {
        "kind": "throughput",
        **way.to_row(),
        "prompts_equal": min(turn["prompts_equal"] for turn in turns),
        "nonfinite_logits": max(turn["nonfinite_logits"] for turn in turns),
        "tokens": tokens,
        **bench.spread_fields("tok_s", [tokens / s for s in seconds]),
        **bench.spread_fields("ratio", ratios),
        "n": len(turns),
    }


def run_ways(
    ways: Sequence[Way], ids: Sequence[list[int]], *, repeats: int
) -> Iterator[dict[str, Any]]:
    """Runs all ways in turn, after a brief run of each that compiles; adds to their
    `turns`, and yields the row of each turn."""
    with terminal.counted("runs", total=(repeats + 1) * len(ways)) as advance:
        for way in ways:
            _once(way, dataclasses.replace(way.settings, gen_tokens=1), ids)
            advance()
        for repeat, way in itertools.product(range(repeats), ways):
            done = _once(way, way.settings, ids)
            if way is ways[0]:
                alone = done
            row = {"kind": "throughput_run", **way.to_row(), "repeat": repeat}
            row |= {
                # Texts equal to those of each prompt alone
                "prompts_equal": sum(map(runs.matches, done, alone)),
                "seconds": sum(run.e2e_s for run in done),
                "tokens": sum(len(run.tokens) for run in done),
                "nonfinite_logits": sum(run.nonfinite for run in done),
            }
            way.turns.append(row)
            yield row
            advance()


def _once(way: Way, settings: runs.Settings, ids) -> list[runs.Run]:
    """Runs all prompts once in a way."""
    if way.batch is None:
        return [runs.run_plain(settings, prompt) for prompt in ids]
    return runs.run_batch(settings, ids)


COLUMNS = {
    "way": "",
    "tokens/s": ("tok_s", ",.0f"),
    "x plain alone": ("ratio", ".2f"),
    "p10-p90": lambda row: f"{row['ratio_p10']:.2f}-{row['ratio_p90']:.2f}",
    "equal": lambda row: tables.wrong(
        f"{row['prompts_equal']}/{row['prompts']}", bool(row["nonfinite_logits"])
    ),
}
"""The columns of the table, for `tables.print_rows`."""


def run(args: argparse.Namespace, out: records.JsonLines) -> bool:
    """Loads, runs and compares; returns whether all is well."""
    lm = models.load(args, drafter=args.drafter, gamma_max=max(args.gamma))
    how = {"sampling": flags.sampling_settings(args)}
    how |= {"is_adversarial": args.adversarial}
    subject = models.prepare(args, lm, args.prompts, **how)
    ids = [one.ids for one in subject.prompts]
    if max(args.batch) > len(ids):
        terminal.show(f"--batch: at most {len(ids)} slots, as there are prompts")
    ways = ways_of(args, subject)
    models.announce(args, subject)
    out.common = models.common(args, lm, "drafter", "gamma_policy", "adversarial")
    schedule = args.schedule and args.schedule.name
    out.common |= {"prompts": len(ids), "schedule": schedule}
    out.write_all(run_ways(ways, ids, repeats=args.repeats))
    rows = out.write_all(row_of(way, ways[0]) for way in ways)
    tables.print_rows([row | out.common for row in rows], COLUMNS)
    is_equal = all(row["prompts_equal"] == len(ids) for row in rows)
    # A rule that keeps only the distribution gives other texts.
    is_equal |= not subject.settings.is_exact
    is_finite = not any(row["nonfinite_logits"] for row in rows)
    if not is_finite:
        terminal.show("logits hold NaN or infinity: equality means nothing there")
    return is_equal and is_finite


main = records.script("throughput.py", parse_args, run)
