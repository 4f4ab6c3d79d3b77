"""Does a row of any kernel depend, in any bit, on the rows beside it?

The kernels of a model's step at its own shapes: each row's result among others, alone,
at other places, in other heights of a slab and on other pages, compared as integers. On
a GPU nothing else says so of what was compiled there. Exit status: 0 all equal, 2 a
kernel failed or a bit differs, 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
from collections.abc import Sequence

from experiments.lib import (
    flags,
    kernel_checks,
    kernels,
    records,
    subjects,
    terminal,
)
from spec_jax.native import build
from spec_jax.ops import dispatch
from spec_jax.typing import REMOVED_IMPLS


EQUAL, FAILED = 0, 2
IMPLS = {"cpu": ("native", "interpret"), "gpu": ("triton",)}
"""Implementations by the platform that they run on, the default first."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    flags.add_device(parser)
    flags.add_dtype(parser)
    flags.add_isa(parser)
    cli.add(
        parser,
        f"""
        --impl NAME  whose kernels (default: native, and on a GPU triton)
        --shapes NAME|DIR={subjects.EMBEDDED}  the model whose shapes are taken:
            {subjects.EMBEDDED} (the target of the embedded pair),
            {", ".join(sorted(subjects.PRESETS))}, or a folder with a config.json
        --contexts N,N,...=300,4096  positions that attention reads
        --only PATTERN  kernels in whose names this regular expression is found, such as
            'head|context 300' (default: all)
        """,
        **{"NAME": str, "NAME|DIR": cli.text_source},
    )
    flags.add_out(parser, rows="hashes, and one per kernel and what is varied")
    args = parser.parse_args(argv)
    flags.check_isa(parser, args)
    return args


def run(args: argparse.Namespace) -> int:
    """Checks kernel after kernel; writes and prints each when it is known."""
    console, platform = terminal.console(), subjects.check_device(args.device)
    known, impl = IMPLS[platform], args.impl or IMPLS[platform][0]
    if impl in REMOVED_IMPLS:
        raise ValueError(REMOVED_IMPLS[impl])
    if impl not in known:
        raise ValueError(f"--impl {impl} is not one of {', '.join(known)}")
    dispatch.resolve(impl)
    if min(args.contexts) < kernel_checks.HEIGHT:
        raise ValueError(
            f"--contexts {min(args.contexts)}: attention needs "
            f"{kernel_checks.HEIGHT} positions or more, of as many rows"
        )
    config = subjects.read_config(args.shapes, dtype=args.dtype)
    made = kernels.cases(config, impl, contexts=args.contexts)
    chosen = [name for name in made if args.only is None or args.only.search(name)]
    if not chosen:
        raise ValueError(
            f"--only {args.only.pattern} is found in none of {', '.join(made)}"
        )
    jobs = {
        name: lambda name=name: [*kernel_checks.check(name, made[name]())]
        for name in chosen
    }
    if impl in dispatch.PALLAS:
        jobs = {"control": lambda: [kernel_checks.control(impl)]} | jobs
    failed = False
    with records.open_out(args) as out:
        out.common = {
            "device": platform,
            "shapes": args.shapes,
            "dtype": config.dtype,
            "impl": impl,
            "native_isa": build.load() if impl == "native" else None,
            **records.provenance(),
        }
        for name, work in jobs.items():
            rows = records.guarded(name, work)
            out.write_all(rows)
            failed |= any(map(records.is_failure, rows))
            for row in rows:
                console.print(records.line(row), highlight=False, soft_wrap=True)
    return FAILED if failed else EQUAL


main = cli.script("kernels.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
