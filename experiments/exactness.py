"""Are rounds exact: in tokens, log-probabilities, logits, and committed K/V pages?

Runs prompts x cells (gamma and its policy, tree, sampling, batch, page size, slab,
dtype, implementation, cache, drafter, prefill), and autoregressive
decoding of each prompt alone, on other pages, and compares everything as integers. One
row for each prompt and cell; a second run with the same settings and --out goes on
where the first one ended. A certificate holds the hashes of every result, and --verify
runs it again and says where it agrees. Exit status: 0 all equal, 2 not, or with logits
that are not finite, 1 the input was unusable.

By default the first value of every axis is the base, and each other value is run with
the rest of the base; --product runs every combination.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich import console as rich_console

from experiments.lib import (
    cell_runs,
    certificates,
    exact_cells as cells_lib,
    fan_out,
    flags,
    records,
    suite,
    suite_plan as plans,
    suite_tables as tables,
    terminal,
)
from spec_jax import loading
from spec_jax.debug import evidence
from spec_jax.drafters import registry
from spec_jax.model import config as config_lib, row_model
from spec_jax.native import build
from spec_jax.typing import IMPLS


EXACT, NOT_EXACT = 0, 2


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    _add_input_flags(parser.add_argument_group("models and prompts"))
    _add_axis_flags(parser.add_argument_group("axes: lists, the base first"))
    flags.add_out(parser, rows="one per prompt and cell as it finishes, taken up again")
    cli.add(
        parser,
        """
        --certificate FILE  JSON: versions, device, settings, and hashes of every
            result; of code whose commit it can name, or with --allow-dirty marked
        --verify CERTIFICATE  run a certificate's cells again, and say where they agree;
            axes and lengths are those of the certificate
        --limit N  with --verify: the first N prompts only, but no fewer than the
            largest batch of the certificate has
        """,
        CERTIFICATE=cli.source,
    )
    fan_out.add_flags(parser.add_argument_group("cells on a cluster"))
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    _name_heads(parser, args)
    if args.rule != "coupled":
        parser.error(
            f"--rule {args.rule} keeps the distribution of decoding, not its stream: "
            "bits can only be compared under coupled"
        )
    if args.limit and not args.verify:
        parser.error("--limit goes with --verify; --prompts N runs N prompts")
    if args.verify and args.certificate:
        parser.error("--verify and --certificate: a certificate is of a run; give one")
    own = (*cells_lib.AXES, "gen_tokens", "full", "product", "stop")
    own += ("raw", "chat_option")
    if args.verify and any(getattr(args, name) for name in own):
        parser.error("--verify takes cells and lengths from the certificate alone")
    return args


def _name_heads(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Names a head's folder as `--head`, and its drafter as certificates do."""
    drafters = args.drafter or ()
    try:
        kinds = {n: registry.kind_of(n) for n in drafters if registry.is_folder(n)}
        named = dict.fromkeys(kinds.get(n, n) for n in drafters)
        found = {*map(pathlib.Path, kinds), *([args.head] if args.head else [])}
        if not found:
            heads = loading.heads_for(args.target)
            needed = [name for name in named if name in registry.NEED_TARGET]
            found = {registry.shipped_head(name, heads) for name in needed}
        if len(found) > 1:
            raise ValueError(f"{len(found)} heads are named: run each apart")
        if found:
            (args.head,) = found
            kind = registry.kind_of(args.head)
            if not args.verify and kind not in named:
                raise ValueError(f"--head is the drafter {kind}'s: add that")
    except ValueError as error:
        parser.error(f"--drafter: {error}")
    args.drafter = tuple(named) or None


def _add_input_flags(group: argparse._ActionsContainer) -> None:
    brief, full = plans.BRIEF, plans.FULL
    flags.add_folders(group)
    cli.add(
        group,
        f"""
        --head DIR  folder of the head that the drafter eagle3, dflash or dspark is
            (default: the shipped one of the embedded target)
        --prompts N|FILE[:N]  the first N bundled prompts, and beginnings of them where
            N is more than there are, or a file as in spec_round.py (default:
            {brief.prompts}; {full.prompts} with --full)
        --gen-tokens TOKENS  tokens to generate per prompt (default:
            {brief.gen_tokens}; {full.gen_tokens} with --full)
        --stop  end at stop tokens (default: every prompt yields --gen-tokens)
        --full  long texts, many prompts, and every axis but dtype, impl and slab: about
            an hour on two idle cores with native kernels
        --product  every combination of the axes' values
        """,
        **{"N|FILE[:N]": cli.text_source},
    )
    flags.add_raw(group)
    flags.add_isa(group)


def _drafter(text: str) -> str:
    """The type of `--drafter`: as in other scripts, and those that know the text."""
    if registry.is_folder(text):
        return text
    return cli.one_of(cell_runs.drafter_names(), can_import=True)(text)


def _add_axis_flags(group: argparse._ActionsContainer) -> None:
    drafters = cell_runs.drafter_names()
    for axis, kinds, what in (
        ("dtype", config_lib.DTYPES, "of both models"),
        ("impl", IMPLS, "kernels"),
        ("slab", None, "rows of every call of the target"),
        ("page-size", None, "positions per page"),
        ("cache", row_model.CACHE_KINDS, "kind of cache"),
        ("prefill", cells_lib.PREFILLS, "how prompts enter the cache"),
        ("drafter", drafters, "what proposes tokens, a head, or package.module:Name"),
        ("gamma", None, "tokens drafted per round, or the most of them"),
        ("sampling", cells_lib.SAMPLINGS, "of tokens; how is in the certificate"),
        ("gamma-policy", cells_lib.GAMMA_POLICIES, "what chooses each round's gamma"),
        ("batch", None, "prompts that share a forward"),
    ):
        default = plans.default_text(axis.replace("-", "_"))
        listed = ", ".join(kinds) if kinds else "numbers"
        kind = cli.positive
        if axis == "drafter":
            kind = _drafter
        elif kinds:
            kind = cli.one_of(kinds)
        text = f"--{axis} A,B,..  {what}: {listed} (default: {default})"
        cli.add(group, text, **{"A,B,..": cli.names(kind)})
    flags.add_trees(group, default=None)
    flags.add_rule(group)


def act(args: argparse.Namespace) -> int:
    """Runs or verifies; returns the exit status."""
    return (verify if args.verify else run)(args, terminal.console())


def run(args: argparse.Namespace, console: rich_console.Console) -> int:
    """Runs the suite, and writes rows and certificate; returns the exit status."""
    if args.certificate and not args.allow_dirty:
        records.check_clean(what="a certificate", allow="--allow-dirty")
    with records.open_out(args) as out:
        planned = plans.from_flags(args)
        # The row of a window follows a prompt that differs; where an interrupt came
        # between the two, the prompt runs again.
        kept = records.resume_behind(
            out,
            {"kind": "header", **planned.header},
            ("prompt", "mismatch"),
            ends=lambda row: not row.get("differences"),
        )
        tables.print_plan(planned.plan, kept, console)
        rows = _run_rows(args, planned.plan, kept, out)
        cells, of_prompts = planned.plan.cells, suite.of_prompts(rows)
        summaries = [suite.summarise(cell, of_prompts) for cell in cells]
        for summary in summaries:
            out.write({"kind": "cell", **summary.to_row()})
    across = suite.across_pages(cells, of_prompts)
    tables.print_cells(summaries, console)
    tables.print_differences(rows, args.out, num_before=1, console=console)
    tables.print_across(across, console)
    if args.certificate:
        certificate = certificates.make(planned.header, cells, of_prompts)
        certificates.write(args.certificate, certificate)
        digest = certificate["sha256"][:12]
        console.print(f"certificate {digest}: {args.certificate}", soft_wrap=True)
    is_exact = all(summary.is_exact for summary in summaries) and not across
    return EXACT if is_exact else NOT_EXACT


def _run_rows(
    args: argparse.Namespace,
    plan: suite.Plan,
    kept: Sequence[suite.Row],
    out: records.JsonLines,
) -> list[suite.Row]:
    """All rows: those that were there, and the others as they finish."""
    rows = list(kept)
    done = {suite.key(row) for row in suite.of_prompts(rows)}
    total = len(plan.cells) * len(plan.prompts) - len(done)
    fan = fan_out.of(args, suite.Suite, plan, True)
    # Here, cells that share decoding share its runs; on a cluster a task is a cell.
    parts = [plan.cells] if args.ray is None else [[cell] for cell in plan.cells]
    tasks = [suite.Task.of(plan, cells, done) for cells in parts]
    with terminal.counted("prompts", total=total) as advance:
        for _, found in fan(suite.Suite(plan), [task for task in tasks if task]):
            for row in found:
                out.write(row)
                rows.append(row)
                if row["kind"] == "prompt":
                    advance()
    return rows


def verify(args: argparse.Namespace, console: rich_console.Console) -> int:
    """Runs a certificate's cells again; returns the exit status."""
    certificate = certificates.read(args.verify)
    if args.isa is None:
        _choose_isa_of(args.verify, certificate)
    with records.open_out(args) as out:
        planned = plans.from_certificate(args, certificate)
        plan = planned.plan
        tables.print_plan(plan, [], console)
        left_out = len(certificate["cells"]) - len(plan.cells)
        if left_out:
            console.print(f"{left_out} cells of superseded designs are left out")
        rows = _run_rows(args, plan, [], out)
    agreement = certificates.agreement(certificate, suite.of_prompts(rows))
    changes = certificates.changes(certificate, planned.header["environment"])
    tables.print_agreement(
        plan,
        agreement,
        changes,
        is_dirty=bool(certificate["environment"].get("git_dirty")),
        console=console,
    )
    tables.print_differences(rows, args.out, num_before=0, console=console)
    agrees = all(
        count in (len(plan.prompts), evidence.NOT_COMPARED)
        for counts in agreement.values()
        for count in counts.values()
    )
    summaries = [suite.summarise(cell, suite.of_prompts(rows)) for cell in plan.cells]
    tables.print_warnings(suite.warnings(summaries), console)
    is_finite = not any(summary.nonfinite_logits for summary in summaries)
    return EXACT if agrees and is_finite else NOT_EXACT


def _choose_isa_of(path: pathlib.Path, certificate: Mapping[str, Any]) -> None:
    """Native kernels as the certificate's: other instructions give other bits."""
    isa = certificate["environment"].get("instruction_set", {}).get("native")
    if isa is None:
        return
    try:
        build.choose(isa)
    except ValueError as error:
        raise ValueError(
            f"{path}: made with {isa} kernels; {error}. Verify it on a machine that "
            "has it, or give --isa to see where the bits of other kernels agree"
        ) from None


main = cli.script("exactness.py", parse_args, act)

if __name__ == "__main__":
    cli.end(main)
