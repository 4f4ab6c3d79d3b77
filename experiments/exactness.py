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

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.lib import (
    certificates,
    cli,
    exact_cells as cells_lib,
    fan_out,
    flags,
    records,
    suite,
    suite_plan as plans,
    tables,
    terminal,
)
from spec_jax import loading
from spec_jax.debug import evidence
from spec_jax.drafters import registry
from spec_jax.native import build


MOST_SHOWN = 10


def _axis_flags() -> tuple[str, dict[str, Any]]:
    """Returns a line for each axis, and the types of its values."""
    lines, kinds = [], dict[str, Any]()
    for name, axis in plans.AXES.items():
        listed, kind = "numbers", cli.positive
        if axis.kinds:
            listed = ", ".join(axis.kinds)
            kind = cli.one_of(axis.kinds, can_import=name == "drafter")
        default, values = plans.default_text(name), f"{name.upper()},.."
        about = f"{axis.what}: {listed} (default: {default})"
        lines.append(f"    {cli.flag_of(name)} {values}  {about}")
        kinds[values] = cli.names(kind)
    return "\n    ".join(lines), kinds


(_PROMPTS, _TOKENS), (_MOST, _LONGEST) = plans.BRIEF, plans.FULL
_AXES, _KINDS = _axis_flags()
FLAGS = f"""
    [models and prompts] target draft raw isa
        --head DIR  folder of the head that the drafter eagle3, dflash or dspark is
            (default: the one that is shipped for the target)
        --prompts N|FILE[:N]  prompts, as in spec_round.py (default: {_PROMPTS};
            {_MOST} with --full)
        --gen-tokens TOKENS  tokens to generate per prompt (default: {_TOKENS};
            {_LONGEST} with --full)
        --stop  end at stop tokens (default: every prompt yields --gen-tokens)
        --full  long texts, many prompts, and every axis but dtype, impl and slab: about
            an hour on two idle cores with native kernels
        --product  every combination of the axes' values
    [axes: lists, the base first] trees
    {_AXES}
    [certificates]
        --certificate FILE  JSON: versions, device, settings, and hashes of every
            result; of code whose commit it can name, or with --allow-dirty marked
        --verify CERTIFICATE  run a certificate's cells again, and say where they agree;
            axes and lengths are those of the certificate
        --limit N  with --verify: the first N prompts only, but no fewer than the
            largest batch of the certificate has
    [cells on a cluster] cluster
    [out] one per prompt and cell as it finishes, taken up again
    """


def check(parser: cli.Parser, args: argparse.Namespace) -> None:
    """Names the head that is shipped, and refuses flags that do not go together."""
    _name_head(args)
    if args.limit and not args.verify:
        parser.error("--limit goes with --verify; --prompts N runs N prompts")
    if args.verify and args.certificate:
        parser.error("--verify and --certificate: a certificate is of a run; give one")
    own = (*cells_lib.AXES, "gen_tokens", "full", "product", "stop")
    own += ("raw", "chat_option")
    if args.verify and any(getattr(args, name) for name in own):
        parser.error("--verify takes cells and lengths from the certificate alone")


KINDS = _KINDS | {"CERTIFICATE": pathlib.Path}
parse_args = flags.parser(__doc__, FLAGS, kinds=KINDS, check=check)


def _name_head(args: argparse.Namespace) -> None:
    """Fills in `--head` if a drafter is a head that is shipped for the target."""
    needed = [name for name in args.drafter or () if name in registry.NEED_TARGET]
    if args.head is None and needed:
        if len(needed) > 1:
            raise ValueError(
                f"--drafter: {len(needed)} heads are named: run each apart"
            )
        args.head = registry.shipped_head(needed[0], loading.heads_for(args.target))
    elif args.head is not None and not args.verify:
        kind = registry.kind_of(args.head)
        if needed != [kind]:
            raise ValueError(f"--head is the drafter {kind}'s: add that alone")


def run(args: argparse.Namespace, out: records.JsonLines) -> bool:
    """Runs the suite, or verifies a certificate; returns whether all is well."""
    if args.verify:
        return verify(args, out)
    if args.certificate and not args.allow_dirty:
        records.check_clean("a certificate")
    plan = plans.from_flags(args)
    kept = records.resume(out, {"kind": "header", **plan.header}, behind="prompt")
    rows, cells = _run_rows(args, plan, kept, out), plan.cells
    made = certificates.make(plan.header, cells, rows)
    out.write_all({"kind": "cell", **entry} for entry in made["cells"])
    print_cells(
        [
            {**one, "cell": cell, **one["equal"]}
            | {"accepted": one["accepted"] / max(one["proposed"], 1)}
            for cell, one in zip(cells, made["cells"], strict=True)
        ],
        {"prompts": ",d", "texts": ",d", "accepted": ".3f"},
    )
    for line in made["warnings"]:
        terminal.show(line, style="bold red")
    _print_differences(rows)
    if args.certificate:
        certificates.write(args.certificate, made)
        terminal.show(f"certificate {made['sha256'][:12]}: {args.certificate}")
    return made["exact"]


def _run_rows(
    args: argparse.Namespace,
    plan: suite.Plan,
    kept: Sequence[suite.Row],
    out: records.JsonLines,
) -> list[suite.Row]:
    """Returns all rows: the kept ones, and the others, which it runs and writes."""
    terminal.show(
        f"{len(plan.cells)} cells x {len(plan.prompts)} prompts x "
        f"{plan.gen_tokens} tokens"
        + (f"; {len(kept)} are there already" if kept else "")
    )
    terminal.show(f"base: {plan.cells[0].name}")
    rows, count = [*kept], len(plan.prompts)
    plan = dataclasses.replace(plan, done=frozenset(map(suite.key, kept)))
    rows_of = functools.partial(suite.rows_of, plan)
    # In one process cells share runs of decoding; on a cluster a task is one cell.
    parts = [tuple(plan.cells)] if args.ray is None else [(c,) for c in plan.cells]
    wanted = lambda part: {(cell.name, n) for cell in part for n in range(count)}
    tasks = [part for part in parts if not wanted(part) <= plan.done]
    total = len(plan.cells) * count - len(kept)
    with terminal.counted("prompts", total=total) as advance:
        for _, found in fan_out.each(args, tasks, rows_of, functools.partial, rows_of):
            for row in found:
                out.write(row)
                rows.append(row)
                advance()
    return rows


def verify(args: argparse.Namespace, out: records.JsonLines) -> bool:
    """Runs a certificate's cells again; returns whether all is well."""
    certificate = certificates.read(args.verify)
    if args.isa is None:
        _choose_isa_of(args.verify, certificate)
    plan = plans.from_certificate(args, certificate)
    rows = _run_rows(args, plan, [], out)
    made = certificates.make(plan.header, plan.cells, rows)
    agreement, count = certificates.agreement(certificate, made), len(plan.prompts)
    found = [
        {"cell": cell, "prompts": count, **equal}
        for cell, equal in zip(plan.cells, agreement, strict=True)
    ]
    print_cells(found, {"prompts": ",d"})
    lines = []
    if left_out := certificate["left_out"]:
        lines.append(f"{left_out} cells of superseded designs are left out")
    if certificate["environment"].get("git_dirty"):
        lines.append("made of changed code: its commit does not say which code it was")
    changes = certificates.changes(certificate, plan.header["environment"])
    lines += [f"{name}: {then}, now {now}" for name, then, now in changes]
    if not changes:
        lines.append("the environment is that of the certificate")
    wrong = [one for one in found if any(one[what] < count for what in evidence.WHATS)]
    is_elsewhere = any(name == "cpu" for name, *_ in changes)
    if is_elsewhere and any(one["cell"].uses_library for one in wrong):
        lines.append(
            "XLA's own products (impl xla, prefill batched) differ by processor: "
            "verify these cells on the one that the certificate names"
        )
    for line in lines:
        terminal.show(line)
    _print_differences(rows)
    for line in made["warnings"]:
        terminal.show(line, style="bold red")
    return not wrong and not any(one["nonfinite_logits"] for one in made["cells"])


def print_cells(
    rows: Sequence[dict[str, Any]], columns: Mapping[str, tables.Column]
) -> None:
    """Prints one row for each cell: how it differs from the first, the columns, and for
    each of `evidence.WHATS` "equal", or, in red, how many prompts differ."""

    def equal(row: tables.Row, what: str) -> tables.Cell:
        different = row["prompts"] - row[what]
        words = f"{different} differ" if different else "equal"
        return tables.wrong(words, different > 0)

    base = rows[0]["cell"]
    shown = [row | {"cell": cells_lib.label(row["cell"], base)} for row in rows]
    names = {"log_probs": "log-probs", "kv": "K/V"}
    compared = {
        names.get(what, what): lambda row, what=what: equal(row, what)
        for what in evidence.WHATS
    }
    tables.print_rows(shown, {"cell": "", **columns, **compared})


def _print_differences(rows: Sequence[suite.Row]) -> None:
    """Prints the first prompts that differ, and the script that looks closer."""
    found = [row for row in rows if row["differences"]]
    for row in found[:MOST_SHOWN]:
        lines = [f"{row['cell']}, prompt {row['id']!r}:"]
        lines += [f"  {evidence.describe(one)}" for one in row["differences"]]
        terminal.show("\n".join(lines))
    if len(found) > MOST_SHOWN:
        terminal.show(f"and {len(found) - MOST_SHOWN} prompts more")
    if found:
        terminal.show(
            "look closer: experiments/parity.py runs windows of a text with these "
            "--impl, --dtype, --slab and --gamma, and names the operation that differs"
        )


def _choose_isa_of(path: pathlib.Path, certificate: Mapping[str, Any]) -> None:
    """Chooses the native kernels of a certificate: others give other bits."""
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


main = records.script("exactness.py", parse_args, run)
