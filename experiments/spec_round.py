"""Does speculative decoding commit the target's own tokens, and how fast is it?

Runs every prompt by autoregressive decoding and speculatively, interleaved in one
process, and compares all tokens; then replays the committed text through autoregressive
decoding and counts the verified positions whose argmax differs. With a --target and
without --gamma, a policy drafts up to 7 tokens where that pays (--gamma-policy budget);
else always --gamma, or 4. Exit status: 0 matched, 2 not matched, or with logits that
are not finite, 1 the input was unusable.
"""

import argparse
import dataclasses

from experiments.lib import (
    cli,
    flags,
    models,
    policies,
    records,
    results as results_lib,
    samples,
    tables,
    terminal,
)
from spec_jax.model import row_model


FLAGS = """
    [models] models mesh
    [runs] gamma page-size tree drafter rule
        prompts=10 gen-tokens repeats ignore-stop raw
        --prefill HOW  how prompts enter the cache; rows makes even their K/V
            bit-identical to decoding (default: the faster, rows with native kernels,
            else batched)
        --batch N  run so many prompts at once, refilled as they end, and compare each
            with autoregressive decoding alone (default: one after the other)
        --cache KIND=paged  pages, or one contiguous block per sequence
    [adaptive gamma] policy
    [sampling] temperature noise processor
    [out] one per prompt as it finishes, then one summary
    """


def check(parser: cli.Parser, args: argparse.Namespace) -> None:
    """Chooses gamma and its policy, and refuses policies that do not fit trees."""
    of_chains: tuple[str, ...] = ("schedule",)
    _choose_gamma(args)
    # Only these policies fit trees; goodput and leader count the nodes by rank.
    if args.gamma_policy not in ("fixed", "goodput", "leader", policies.BUDGET):
        of_chains += ("gamma_policy",)
    flags.check_tree(parser, args, *of_chains)


parse_args = flags.parser(
    __doc__,
    FLAGS,
    kinds={"HOW": ("batched", "rows"), "KIND": row_model.CACHE_KINDS},
    defaults={"gamma": None, "gamma_policy": None},  # None: the flag was not given.
    check=check,
)


def _choose_gamma(args: argparse.Namespace) -> None:
    """Fills in flags that were not given: the budget policy up to 7 where `generate`
    has it by default, else always 4.

    The policy is not for the embedded pair, whose counts must be the same in every run,
    nor for runs with a gamma, tree, schedule or rule of their own.
    """
    if args.gamma_policy is None:
        is_default = (args.gamma, args.tree, args.schedule) == (None, None, None)
        is_default &= args.target is not None and args.rule == "coupled"
        args.gamma_policy = policies.BUDGET if is_default else "fixed"
    if args.gamma is None:
        args.gamma = 7 if args.gamma_policy == policies.BUDGET else 4


def load(args: argparse.Namespace) -> models.Subject:
    """Loads models and prompts, and makes the settings of all runs."""
    sampling = flags.sampling_settings(args)
    how = {"gamma_max": args.gamma, "cache": args.cache}
    lm = models.load(args, drafter=args.drafter, **how)
    by_rows = lm.target.prefills_by_rows
    if args.prefill:
        by_rows = args.prefill == "rows"
    changes = {"prefill_by_rows": by_rows, "sampling": sampling}
    subject = models.prepare(args, lm, args.prompts, **changes)
    num_slots = min(args.batch or 1, len(subject.prompts))
    settings = dataclasses.replace(subject.settings, num_slots=num_slots)
    how = {"name": args.gamma_policy, "schedule": args.schedule}
    settings = policies.of_run(args, settings, subject.prompts, **how)
    return dataclasses.replace(subject, settings=settings)


def describe(args: argparse.Namespace, subject: models.Subject) -> dict:
    """Returns the fields of the summary row beside its numbers."""
    settings, names = subject.settings, ("drafter", "cache", "batch", "gamma_policy")
    return {
        **models.common(args, settings.lm, *names),
        **({"schedule": args.schedule.name} if args.schedule else {}),
        "gamma": settings.gamma,
        "tree": args.tree and str(args.tree),
        "capacity": settings.capacity,
        "prefill": "rows" if settings.prefill_by_rows else "batched",
    }


def run(args: argparse.Namespace, out: records.JsonLines) -> bool:
    """Runs every prompt, writes and shows the rows; returns whether all is well."""
    subject = load(args)
    settings, prompts = subject.settings, subject.prompts
    if args.batch is not None and args.batch > len(prompts):
        args.batch = len(prompts)
        terminal.show(f"--batch: {args.batch} slots, as many as there are prompts")
    drafted = f"tree {args.tree}" if args.tree else f"gamma {settings.gamma}"
    models.announce(args, subject, drafted)
    compile_s = results_lib.warm_up([settings], prompts)
    results, turns = [], args.repeats if settings.num_slots > 1 else 1
    with terminal.counted("prompts", total=turns * len(prompts)) as advance:
        how = {"repeats": args.repeats, "after_prompt": advance}
        found = results_lib.run_prompts(settings, prompts, **how)
        for result in found:
            out.write(result.row())
            results.append(result)
    summary, by_category = results_lib.rows_of(results, is_batch=args.batch is not None)
    out.common = describe(args, subject)
    out.write({"kind": "summary", **summary, "by_category": by_category}
              | {"compile_s": compile_s})  # fmt: skip
    names = flags.DRAWS if args.temperature else ()
    drawn = ", ".join(f"{name} {getattr(args, name)}" for name in names) or "greedy"
    terminal.show()
    samples.show(results[0], settings.lm, how=drawn)
    terminal.show()
    tables.print_table(summary)
    if by_category:
        rows = [{"category": name} | row for name, row in by_category.items()]
        terminal.show()
        tables.print_cells(rows, title="by category")
        tables.print_note(tables.CELLS_NOTE)
    return summary["matched"] is not False


main = records.script("spec_round.py", parse_args, run)
