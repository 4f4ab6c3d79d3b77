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

from experiments.ablations import verify_paths
from experiments.lib import flags, records, terminal
from experiments.support import (
    batched_runs,
    drafters,
    mismatches,
    model_pair,
    paired_runs,
    policies,
    prompt_files,
    prompt_runs,
    report,
    sample_text,
    sweep_report,
)
from spec_jax.analysis import metrics
from spec_jax.drafters import draft_model
from spec_jax.model import row_model
from spec_jax.ops import dispatch


MATCHED, NOT_MATCHED = 0, 2


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; `argparse` itself exits with status 1 on unknown ones."""
    parser = cli.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_models(parser.add_argument_group("models"))
    _add_run_flags(parser.add_argument_group("runs"))
    policies.add_policy(parser.add_argument_group("adaptive gamma"))
    flags.add_sampling(parser.add_argument_group("sampling"))
    parser.set_defaults(temperature=None)  # To tell 0 from no temperature at all.
    _add_design_flags(parser.add_argument_group("verification and caches"))
    flags.add_out(parser, rows="one per prompt as it finishes, then one summary")
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    flags.check_sampling(parser, args)
    args.draws_sample = args.temperature is None
    args.temperature = args.temperature or 0.0
    if args.dump_verify_mismatches and args.temperature:
        parser.error("--dump-verify-mismatches compares argmaxes: use --temperature 0")
    if args.batch is not None:
        _check_batch(parser, args)
    if args.acceptance == "decode" and args.gamma_policy != "fixed":
        parser.error(
            "--acceptance decode has no adaptive gamma: use --gamma-policy fixed"
        )
    return args


def _check_batch(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with a usage error for what a batch does not have."""
    only = {
        "verify_path": "paged-decode",
        "acceptance": "verify",
        "draft_cache": "persistent",
        "confidence": 0.0,
        "dump_verify_mismatches": None,
    }
    for name, value in only.items():
        if getattr(args, name) != value:
            parser.error(
                f"--batch does not go together with {cli.flag_of(name)}: leave one out"
            )


def _add_run_flags(runs: argparse._ArgumentGroup) -> None:
    flags.add_rounds(runs)
    runs.add_argument(
        "--drafter",
        choices=tuple(drafters.DRAFTERS),
        default="draft-model",
        help="what proposes tokens: a draft model; prompt lookup (ngram); what mostly "
        "followed in the text (suffix); that where it is sure, otherwise the draft "
        "model (hybrid); plain decoding's own text, for a ceiling (oracle) "
        "(default: %(default)s)",
    )
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
    runs.add_argument(
        "--ignore-stop",
        action="store_true",
        help="do not end at stop tokens: every prompt yields --gen-tokens",
    )
    runs.add_argument(
        "--raw", action="store_true", help="do not apply the model's chat template"
    )


def _add_design_flags(design: argparse._ArgumentGroup) -> None:
    design.add_argument(
        "--verify-path",
        choices=tuple(verify_paths.PATHS),
        default="paged-decode",
        help="what verifies a window: rows, equal to decoding (paged-decode); the "
        "same one by one (row-loop); the batched path of prefill (flash); rows "
        "through the library's products (library-rows) (default: %(default)s)",
    )
    design.add_argument(
        "--acceptance",
        choices=paired_runs.ACCEPTANCES,
        default="verify",
        help="what decides tokens: verification, whose K/V is kept, or decoding on "
        "caches of its own (default: %(default)s)",
    )
    design.add_argument(
        "--dump-verify-mismatches",
        type=cli.output,
        metavar="FILE",
        help="JSON lines: every verified position at which decoding chooses another "
        "token, with both top 5 logits; experiments/parity.py takes one up",
    )
    design.add_argument(
        "--cache",
        choices=row_model.CACHE_KINDS,
        default="paged",
        help="pages, or one contiguous block per sequence (default: %(default)s)",
    )
    design.add_argument(
        "--draft-cache",
        choices=draft_model.DRAFT_CACHES,
        default="persistent",
        help="the draft's K/V is kept over rounds, or built again in each "
        "(default: %(default)s)",
    )


def make_settings(
    args: argparse.Namespace,
    pair: model_pair.ModelPair,
    *,
    capacity: int,
) -> paired_runs.Settings:
    """The settings of all runs."""
    return paired_runs.Settings(
        gamma=args.gamma,
        gen_tokens=args.gen_tokens,
        capacity=capacity,
        page_size=args.page_size,
        stop_ids=() if args.ignore_stop else pair.tokenizer.stop_ids,
        prefill_by_rows=(
            args.prefill == "rows" if args.prefill else pair.target.prefills_by_rows
        ),
        acceptance=args.acceptance,
        sampling=flags.sampling_settings(args),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Runs that are finished: what they show, and what they were made with."""

    summary: metrics.Metrics
    categories: dict[str, metrics.Metrics]
    results: list[prompt_runs.PromptResult]
    pair: model_pair.ModelPair
    settings: paired_runs.Settings


def run_all(
    args: argparse.Namespace,
    out: records.JsonLines,
    mismatch_lines: records.JsonLines,
    console: rich_console.Console,
) -> Measured:
    """Loads, runs every prompt, and writes its line, and the summary's."""
    prompts = prompt_files.parse(args.prompts, default_file=prompt_files.BUNDLED)
    pair = model_pair.load_pair(
        args.target or model_pair.EMBEDDED_TARGET,
        args.draft or model_pair.EMBEDDED_DRAFT,
        gamma_max=args.gamma,
        slab=args.gamma + 1,
        dtype=args.dtype,
        impl=args.impl,
        verify_path=args.verify_path,
        cache=args.cache,
        draft_cache=args.draft_cache,
        drafter=args.drafter,
        min_confidence=args.confidence,
        sampling_settings=flags.sampling_settings(args),
    )
    prepared = prompt_runs.prepare(
        pair,
        prompts,
        raw=args.raw,
        gen_tokens=args.gen_tokens,
        page_size=args.page_size,
        sampling=flags.sampling_settings(args),
    )
    prompts, ids = prepared.prompts, prepared.ids
    settings = policies.with_policy(
        args.gamma_policy,
        pair,
        make_settings(args, pair, capacity=prepared.capacity),
        ids[0],
    )
    if args.batch is not None and args.batch > len(prompts):
        args.batch = len(prompts)
        console.print(f"--batch: {args.batch} slots, as many as there are prompts")
    console.print(
        f"{len(prompts)} prompts x {args.gen_tokens} tokens, gamma {args.gamma}, "
        f"{pair.target.config.dtype}, impl {pair.target.impl}; compiling ..."
    )
    if args.batch is None:
        compile_s, results = _run_in_turn(args, pair, settings, prompts, ids, out)
    else:
        compile_s, results = _run_in_batches(args, pair, settings, prompts, ids, out)
    summary = prompt_runs.summarise(results)
    if args.batch is not None:
        summary = batched_runs.without_decode_times(summary)
    categories = {
        name: report.to_row(of_one)
        for name, of_one in prompt_runs.by_category(results).items()
    }
    out.write(
        {"kind": "summary", **report.to_row(summary), "compile_s": compile_s}
        | {"by_category": categories}
        | _description(args, pair, settings)
        | records.provenance()
    )
    if args.dump_verify_mismatches:
        _dump_mismatches(args, pair, settings, results, mismatch_lines, console)
    return Measured(
        summary=summary,
        categories=categories,
        results=results,
        pair=pair,
        settings=settings,
    )


def _run_in_turn(args, pair, settings, prompts, ids, out):
    """Prompt by prompt: the seconds of compilation, and the results."""
    compile_s = paired_runs.warm_up(pair, settings, ids)
    results = []
    with terminal.progress() as progress:
        task = progress.add_task("prompts", total=len(prompts))
        for prompt, prompt_ids in zip(prompts, ids, strict=True):
            result = prompt_runs.run_prompt(
                pair, settings, prompt, prompt_ids, repeats=args.repeats
            )
            out.write(result.row())
            results.append(result)
            progress.advance(task)
            # What a policy learnt from one prompt it knows in the next.
            settings = dataclasses.replace(
                settings, policy_state=result.spec[-1].policy_state
            )
    return compile_s, results


def _run_in_batches(args, pair, settings, prompts, ids, out):
    """As `_run_in_turn`, several prompts at once."""
    slots = {"num_slots": args.batch}
    compile_s = batched_runs.warm_up(pair, settings, ids, **slots)
    with terminal.progress() as progress:
        task = progress.add_task("prompts", total=args.repeats * len(prompts))
        results = batched_runs.run_prompts(
            pair,
            settings,
            prompts,
            ids,
            repeats=args.repeats,
            after_prompt=lambda: progress.advance(task),
            **slots,
        )
    for result in results:
        out.write(result.row())
    return compile_s, results


def _dump_mismatches(args, pair, settings, results, lines, console) -> None:
    """Runs the prompts that mismatched again, and writes a line for each mismatch."""
    counted = sum(result.mismatches for result in results)
    written = 0
    for result in results:
        if not result.mismatches:
            continue
        for row in mismatches.find(
            pair,
            settings,
            result.prompt_ids,
            name=result.prompt.id,
            verify_path=args.verify_path,
        ):
            lines.write(row)
            written += 1
    console.print(
        f"{written} of {counted} mismatches met again and written to "
        f"{args.dump_verify_mismatches}"
    )


def _description(args, pair, settings) -> dict:
    """What was run, for the summary line."""
    return {
        "target": str(args.target or "embedded"),
        "draft": str(args.draft or "embedded"),
        "drafter": args.drafter,
        "dtype": pair.target.config.dtype,
        "impl": pair.target.impl,
        "native_isa": dispatch.instruction_set(pair.target.impl),
        "slab": pair.target.slab,
        "verify_path": args.verify_path,
        "acceptance": args.acceptance,
        "cache": args.cache,
        "draft_cache": args.draft_cache,
        "prompt_source": args.prompts,
        "gen_tokens": args.gen_tokens,
        "gamma": args.gamma,
        "batch": args.batch,
        "gamma_policy": args.gamma_policy,
        "confidence": args.confidence,
        "page_size": settings.page_size,
        "capacity": settings.capacity,
        "prefill": "rows" if settings.prefill_by_rows else "batched",
        "repeats": args.repeats,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "seed": args.seed,
        "ignore_stop": args.ignore_stop,
        "raw": args.raw,
    }


def make_sample(args: argparse.Namespace, measured: Measured) -> sample_text.Sample:
    """The text that is shown: of the settings that were asked for, or drawn apart."""
    first = measured.results[0]
    if args.draws_sample:
        return sample_text.draw(measured.pair, measured.settings, first, seed=args.seed)
    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    how = sample_text.describe(**{name: getattr(args, name) for name in names})
    return sample_text.of_measured(first, how=how)


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    console = terminal.console()
    with (
        records.JsonLines(args.out) as out,
        records.JsonLines(args.dump_verify_mismatches) as mismatch_lines,
    ):
        measured = run_all(args, out, mismatch_lines, console)
    try:
        sample = make_sample(args, measured)
        console.print()
        sample_text.show(sample, measured.pair, console)
    finally:  # The measured numbers, also where the text is interrupted.
        console.print()
        report.print_table(measured.summary, console)
        if measured.categories:
            console.print()
            sweep_report.print_categories(measured.categories, console)
    matched = measured.summary["matched"] and sample.matched
    return MATCHED if matched else NOT_MATCHED


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns the exit status."""
    return cli.run("spec_round.py", lambda: parse_args(argv), run)


if __name__ == "__main__":
    cli.end(main)
