"""Does speculative decoding commit the target's own tokens, and how fast is it?

Runs every prompt plain and speculatively, interleaved in one process, and compares
all tokens; then replays the committed text through plain decoding and counts the
verified positions whose argmax differs. Without --temperature these runs are greedy,
and the text that is shown is drawn apart (temperature 0.7, top-p 0.8, top-k 20). Exit
status: 0 matched, 2 not matched, or with logits that are not finite, 1 the input was
unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
from collections.abc import Sequence

from rich import console as rich_console

from experiments.ablations import designs, round_local
from experiments.lib import (
    flags,
    models,
    policies,
    records,
    results as results_lib,
    samples,
    tables,
    terminal,
)


MATCHED, NOT_MATCHED = 0, 2


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; `argparse` itself exits with status 1 on unknown ones."""
    parser = cli.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_models(parser.add_argument_group("models"))
    runs = parser.add_argument_group("runs")
    flags.add_rounds(runs)
    flags.add_drafter(runs)
    flags.add_rule(runs)
    flags.add_prompts(runs, default="10")
    flags.add_gen_tokens(runs, default=64)
    runs.add_argument(
        "--prefill",
        choices=("batched", "rows"),
        help="how prompts enter the cache; rows makes even their K/V bit-identical "
        "to decoding (default: the faster, rows with native kernels, else batched)",
    )
    flags.add_repeats(runs)
    runs.add_argument(
        "--batch",
        type=cli.positive,
        metavar="SLOTS",
        help="run so many prompts at once, refilled as they end, against each one "
        "plain and alone (default: one after the other)",
    )
    flags.add_text(runs)
    policies.add_policy(parser.add_argument_group("adaptive gamma"))
    flags.add_sampling(parser.add_argument_group("sampling"))
    parser.set_defaults(temperature=None)  # To tell 0 from no temperature at all.
    design = parser.add_argument_group("verification and caches")
    designs.add_flags(design)
    design.add_argument(
        "--dump-verify-mismatches",
        type=cli.output,
        metavar="FILE",
        help="JSON lines: every verified position at which decoding chooses another "
        "token, with both top 5 logits; experiments/parity.py takes one up",
    )
    flags.add_out(parser, rows="one per prompt as it finishes, then one summary")
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    flags.check_sampling(parser, args)
    args.draws_sample = args.temperature is None
    args.temperature = args.temperature or 0.0
    _check(parser, args)
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with a usage error for flags that do not go together."""
    if args.dump_verify_mismatches and args.temperature:
        parser.error("--dump-verify-mismatches compares argmaxes: use --temperature 0")
    if args.batch is not None:
        for name in ("verify_path", "acceptance", "dump_verify_mismatches"):
            if getattr(args, name) != parser.get_default(name):
                parser.error(
                    f"--batch does not go together with {cli.flag_of(name)}: leave "
                    "one out"
                )


def load(args: argparse.Namespace) -> models.Subject:
    """Models, prompts and the settings of all runs.

    Raises:
      ValueError: what cannot be used, or does not fit together.
    """
    sampling = flags.sampling_settings(args)
    lm = models.load(
        args,
        drafter=args.drafter,
        gamma_max=args.gamma,
        confidence=args.confidence,
        cache=args.cache,
    )
    if args.draft_cache == "round":
        lm = dataclasses.replace(lm, drafter=round_local.of(lm.drafter))
    subject = models.prepare(
        args,
        lm,
        args.prompts,
        stop_ids=() if args.ignore_stop else lm.stop_ids,
        prefill_by_rows=(
            args.prefill == "rows" if args.prefill else lm.target.prefills_by_rows
        ),
        rule=args.rule,
        sampling=sampling,
    )
    settings = policies.with_policy(
        args.gamma_policy, lm, subject.settings, subject.ids[0]
    )
    settings = dataclasses.replace(
        settings,
        num_slots=min(args.batch or 1, len(subject.prompts)),
        verifier=designs.verifier(
            lm, path=args.verify_path, acceptance=args.acceptance, sampling=sampling
        ),
    )
    return dataclasses.replace(subject, settings=settings)


def measure(
    args: argparse.Namespace, out: records.JsonLines, console: rich_console.Console
) -> tuple[models.Subject, list[results_lib.PromptResult]]:
    """Loads, runs every prompt, and writes its line, and the summary's."""
    subject = load(args)
    lm, settings, prompts = subject.lm, subject.settings, subject.prompts
    if args.batch is not None and args.batch > len(prompts):
        args.batch = len(prompts)
        console.print(f"--batch: {args.batch} slots, as many as there are prompts")
    console.print(
        f"{len(prompts)} prompts x {args.gen_tokens} tokens, gamma {args.gamma}, "
        f"{lm.target.config.dtype}, impl {lm.target.impl}; compiling ..."
    )
    design = results_lib.Design(lm=lm, settings=settings)
    compile_s = results_lib.warm_up([design], subject.ids)
    results = []
    turns = args.repeats if settings.num_slots > 1 else 1
    with terminal.counted("prompts", total=turns * len(prompts)) as advance:
        for result in results_lib.run_prompts(
            lm,
            settings,
            prompts,
            subject.ids,
            repeats=args.repeats,
            after_prompt=advance,
        ):
            out.write(result.row())
            results.append(result)
    summary, by_category = summarise(args, results)
    out.write(
        {"kind": "summary", **summary, "compile_s": compile_s}
        | {"by_category": by_category}
        | describe(args, subject)
        | records.provenance()
    )
    return subject, results


def summarise(
    args: argparse.Namespace, results: Sequence[results_lib.PromptResult]
) -> tuple[dict, dict[str, dict]]:
    """The metrics of all prompts, and of each category, as rows."""
    summary = results_lib.summarise(results)
    if args.batch is not None:
        summary = results_lib.without_decode_times(summary)
    categories = results_lib.by_category(results)
    rows = {name: tables.to_row(of_one) for name, of_one in categories.items()}
    return tables.to_row(summary), rows


def describe(args: argparse.Namespace, subject: models.Subject) -> dict:
    """What was run, for the summary line."""
    names = ("drafter", "verify_path", "acceptance", "cache", "draft_cache")
    names += ("gamma", "batch", "gamma_policy", "confidence")
    return (
        models.describe(args, subject.lm)
        | {name: getattr(args, name) for name in names}
        | {
            "prompt_source": args.prompts,
            "capacity": subject.settings.capacity,
            "prefill": "rows" if subject.settings.prefill_by_rows else "batched",
        }
    )


def dump_mismatches(
    args: argparse.Namespace,
    subject: models.Subject,
    results: Sequence[results_lib.PromptResult],
    lines: records.JsonLines,
) -> str:
    """Runs the prompts that mismatched again, and writes a line for each mismatch."""
    from experiments.lib import mismatches

    written = 0
    for result in results:
        if not result.mismatches:
            continue
        for row in mismatches.find(
            subject.lm,
            subject.settings,
            result.prompt_ids,
            name=result.prompt.id,
            verify_path=args.verify_path,
            acceptance=args.acceptance,
        ):
            lines.write(row)
            written += 1
    counted = sum(result.mismatches for result in results)
    return (
        f"{written} of {counted} mismatches met again and written to "
        f"{args.dump_verify_mismatches}"
    )


def make_sample(
    args: argparse.Namespace, subject: models.Subject, first: results_lib.PromptResult
) -> samples.Sample:
    """The text that is shown: of the settings that were asked for, or drawn apart."""
    if args.draws_sample:
        return samples.draw(subject.lm, subject.settings, first, seed=args.seed)
    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    how = samples.describe(**{name: getattr(args, name) for name in names})
    return samples.of_measured(first, how=how)


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    console = terminal.console()
    with (
        records.JsonLines(args.out) as out,
        records.JsonLines(args.dump_verify_mismatches) as lines,
    ):
        subject, results = measure(args, out, console)
        if args.dump_verify_mismatches:
            console.print(dump_mismatches(args, subject, results, lines))
    summary, by_category = summarise(args, results)
    try:
        sample = make_sample(args, subject, results[0])
        console.print()
        samples.show(sample, subject.lm, console)
    finally:  # The measured numbers, also where the text is interrupted.
        console.print()
        tables.print_table(summary, console)
        tables.print_categories(by_category, console)
    is_wrong = False in (summary["matched"], sample.matched)
    return NOT_MATCHED if is_wrong else MATCHED


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns the exit status."""
    return cli.run("spec_round.py", lambda: parse_args(argv), run)


if __name__ == "__main__":
    cli.end(main)
