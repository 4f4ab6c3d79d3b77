"""How fast is each kernel, compared with XLA's dot and a plain read of the same bytes?

A decoding step reads weights and computes little, so a kernel is measured in bytes per
second, and by what more rows cost than one. All numbers of a shape are taken in turns,
in one process, many calls to an executable. With --check the kernels are not
timed, but their bits compared: a row's result may depend on no other row.
Exit status: 0 measured, 2 a kernel failed or a bit differs, 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich import console as rich_console

from experiments.lib import (
    flags,
    kernel_checks,
    kernel_costs,
    kernels,
    records,
    subjects,
    terminal,
    timing,
)
from spec_jax.native import build
from spec_jax.ops import dispatch
from spec_jax.typing import REMOVED_IMPLS


MEASURED, FAILED = 0, 2


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    flags.add_device(parser)
    flags.add_dtype(parser)
    flags.add_isa(parser)
    cli.add(
        parser,
        f"""
        --impls NAME,NAME,...  implementations (default: native,xla; on a GPU
            triton,xla)
        --shapes NAME|DIR={subjects.EMBEDDED}  the model whose shapes are measured:
            {subjects.EMBEDDED} (the target of the embedded pair),
            {", ".join(sorted(subjects.PRESETS))}, or a folder with a config.json
        --rows N,N,...=1,2,4,5,8,16  numbers of rows
        --contexts N,N,...  positions that attention reads (default: 256,1024,4096; on a
            GPU 128,1024,4096,16384,32768)
        --plans N=1  plans of each GPU kernel that are tried, its own the first
        --only PATTERN  kernels in whose names this regular expression is found, such as
            'head|context 1024' (default: all)
        --repeats N=20  timings of each number
        --check HOW  no times: call each of our kernels twice and hash the result
            (once), or compare each row's bits among others, alone, at other places too
            (rows)
        --resume  go on with --out where an earlier run with these flags ended
        """,
        HOW=("once", "rows"),
        **{"NAME,NAME,...": str, "NAME|DIR": cli.text_source},
    )
    flags.add_dry_run(parser)
    rows = "one per shape, implementation and number of rows"
    flags.add_out(parser, rows=rows)
    args = parser.parse_args(argv)
    flags.check_isa(parser, args)
    return args


def make_subjects(
    args: argparse.Namespace, platform: str
) -> tuple[list[kernels.Subject], tuple[str, ...]]:
    """The kernels that are asked for, and the implementations."""
    known = kernels.IMPLS[platform]
    impls = tuple(args.impls.split(",")) if args.impls else known
    for impl in set(impls) & set(REMOVED_IMPLS):
        raise ValueError(REMOVED_IMPLS[impl])
    if not set(impls) <= {*known, *(("interpret",) if platform == "cpu" else ())}:
        raise ValueError(f"--impls {args.impls} are not all of {','.join(known)}")
    contexts = args.contexts or kernels.CONTEXTS[platform]
    if max(args.rows) > min(contexts):
        raise ValueError(
            f"--rows: {max(args.rows)} rows do not fit a context of {min(contexts)}"
        )
    if not args.dry_run:
        for impl in impls:
            dispatch.resolve(impl)
    config = subjects.read_config(args.shapes, dtype=args.dtype)
    has_gpu_kernels = set(impls) & set(dispatch.PALLAS)
    made = kernels.all_subjects(
        config, contexts=contexts, platform="gpu" if has_gpu_kernels else platform
    )
    chosen = [s for s in made if args.only is None or args.only.search(s.name)]
    if not chosen:
        names = ", ".join(subject.name for subject in made)
        raise ValueError(f"--only {args.only.pattern} is found in none of {names}")
    if not args.dry_run:
        # Twice: what the kernels read, and as many bytes that are read plainly.
        needed = max(2 * s.copies * s.num_bytes + s.num_bytes for s in chosen)
        subjects.check_fits("the largest weights", needed)
    return chosen, impls


Work = tuple[str, Callable[[], list[dict[str, Any]]]]
"""What it is called, and what does it and returns rows."""


def jobs(
    args: argparse.Namespace, chosen: Sequence[kernels.Subject], impls: Sequence[str]
) -> Iterator[Work]:
    """What is asked for, subject by subject."""
    check_all = args.check == "rows" and not args.dry_run
    if check_all and set(impls) & set(dispatch.PALLAS):
        yield "control", lambda: [kernel_checks.control(impls[0])]
    for subject in chosen:
        if args.check and not args.dry_run:
            for impl in impls:
                if impl != "xla" and (not subject.only or impl in subject.only):
                    yield (
                        f"{subject.name}, {impl}",
                        lambda s=subject, impl=impl: check(s, impl, args.check),
                    )
            continue
        tried = kernel_costs.variants(subject, impls, args.rows, args.plans)
        if args.dry_run:
            bench = kernel_costs.Bench(subject, as_shapes=True)
            for variant in dict.fromkeys(
                v._replace(rows=max(args.rows)) for v in tried
            ):
                name = f"{subject.name}, {variant.impl}"
                row = {"kind": "compile", "program": name}
                yield name, lambda b=bench, v=variant, r=row: [r | b.lowered(v)]
        elif tried:
            yield subject.name, lambda s=subject, t=tried: measure(s, t, args.repeats)


def measure(
    subject: kernels.Subject, tried: Sequence[kernel_costs.Variant], repeats: int
) -> list[dict[str, Any]]:
    """The rows of a subject's variants."""
    with terminal.counted(subject.name, total=repeats + 1) as advance:
        return kernel_costs.measure(subject, tried, repeats=repeats, after_turn=advance)


def check(subject: kernels.Subject, impl: str, how: str) -> list[dict[str, Any]]:
    """The rows of a kernel's bits."""
    case = kernel_checks.case_of(subject, impl)
    expected, row = kernel_checks.reference(case)
    checks = kernel_checks.check(case, expected) if how == "rows" else ()
    return [made | {"impl": impl} for made in (row, *checks)]


def run_all(
    args: argparse.Namespace, out: records.JsonLines, console: rich_console.Console
) -> int:
    """Measures shape after shape; writes and prints each when it is known."""
    device = "auto" if args.dry_run else args.device
    platform = subjects.check_device(device)
    if args.dry_run and args.device == "gpu":
        platform = "gpu"
    chosen, impls = make_subjects(args, platform)
    out.common = description = {
        "device": platform,
        "shapes": args.shapes,
        "dtype": subjects.read_config(args.shapes, dtype=args.dtype).dtype,
        "repeats": args.repeats,
        "asked": {
            "impls": impls,
            "rows": args.rows,
            "plans": args.plans,
            "check": args.check,
            "dry_run": args.dry_run,
        },
        "native_isa": build.load() if "native" in impls else None,
        "last_level_cache_bytes": timing.cache_bytes(),
        **records.provenance(),
    }
    earlier = records.resume(out, description) if args.resume else []
    finished = {row["job"] for row in earlier if row["kind"] != "error"}
    console.print(_title(args, description), highlight=False)
    failed = any(records.is_failure(row) for row in earlier if row["job"] in finished)
    for name, work in jobs(args, chosen, impls):
        if name in finished:
            continue
        rows = [row | {"job": name} for row in records.guarded(name, work)]
        out.write_all(rows)
        failed |= any(records.is_failure(row) for row in rows)
        if rows[0]["kind"] == "kernel":
            kernel_costs.print_subject(rows, console)
        else:
            for row in rows:
                console.print(records.line(row), highlight=False, soft_wrap=True)
    return FAILED if failed else MEASURED


def _title(args: argparse.Namespace, description: dict[str, Any]) -> str:
    machine = description["device_kind"]
    if description["native_isa"]:
        machine = f"{description['cpu']}, native path {description['native_isa']}"
    line = f"{args.shapes} in {description['dtype']} on {machine}"
    if args.check or args.dry_run:
        return f"{line}, {'compiled only' if args.dry_run else 'bits compared'}\n"
    return f"{line}, {args.repeats} timings of each\n{kernel_costs.LEGEND}\n"


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    with records.open_out(args) as out:
        return run_all(args, out, terminal.console())


main = cli.script("kernels.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
